"""What is wrong with numbers, in sentences: what nobody should trust a row for, whatever its accuracy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from fedshift.measures.confusion import Confusion
from fedshift.measures.measurement import MEASURES
from fedshift.results.by_task import tasks_of
from fedshift.results.result import Row
from fedshift.results.stats import comparable, paired_difference, paired_differences, single
from fedshift.results.tables import short_name
from fedshift.store.lines import Evaluation, RoundLine
from fedshift.store.metric import Metric

MOST = 3  # things that a sentence names
GROWN, HOPELESS = 2.0, 20.0  # a training loss that doubled; a validation loss that no guess has, in nats
MOST_COMPARED = 60  # rows; beyond, nobody compares them by eye
BALANCED = "balanced-accuracy"
FLOOR = "majority"  # the method that every model must beat


def alarms(rows: Sequence[Row], measure: str) -> Iterator[str]:
    """What a table of these rows would hide."""
    plain = [row for row in rows if not row.bound]
    for row in (row for row in plain if row.method != FLOOR):  # which is meant to be so
        yield from collapsed_predictions(row)
    for row in plain:
        base = [other for other in plain if _same_model(row, other) and other.adapter == "none"]
        if base and row.adapter != "none":
            yield from harmful_adaptation(row, base[0])
    tasks, numbers = tasks_of(plain)
    for task in range(len(tasks)):
        same = [row for row, of in zip(plain, numbers, strict=True) if of == task]
        yield from close_calls(same, measure)
        yield from single_clients(same, measure)


def collapsed_predictions(row: Row) -> Iterator[str]:
    """Where (nearly) all of a client's predictions are one class, though its images are not."""
    for metric in (metric for rule, metric in row.values if rule == "best-val"):
        scores = row.scores(metric)
        clients = row.collapsed(metric)
        if not clients:
            continue
        counts = [own.confusion for score in scores for own in score.measured.values() if own.confusion.collapsed]
        whole = Confusion.summed(counts)
        tested = list(dict.fromkeys(name for score in scores for name in score.measured))
        who = "all clients" if len(clients) == len(tested) else _listed([repr(name) for name in clients])
        answer = scores[0].classes[whole.top_class]
        common = (
            f"{100 * whole.top_share:.0f} % of the predictions are {answer!r}"
            if _agree(counts)
            else ("each client's predictions are (nearly) all one class")
        )
        stream = short_name(metric).replace("\n", " ")
        yield (
            f"{_named(row)} has collapsed on {stream} ({who}): {common}, and the mean recall of classes is "
            f"{100 * whole.balanced_accuracy:.1f} %"
        )


def _agree(counts: Sequence[Confusion]) -> bool:
    return len({count.top_class for count in counts}) == 1


def harmful_adaptation(row: Row, base: Row) -> Iterator[str]:
    """Where adaptation lowers balanced accuracy on validation images under the same shift, by more than noise."""
    lowered = []
    for metric, twins in row.twins.items():
        without = base.twins.get(metric, [])
        pair = [[score.values(BALANCED) for score in scores] for scores in (twins, without)]
        if not comparable(*pair):
            continue
        found = paired_difference(*pair, seed=0)
        if found.mean < 0 and not found.noise:
            lowered.append(f"{short_name(metric)} by {-found.mean:.1f} points".replace("\n", " "))
    if lowered:
        yield f"{_named(row)}: adaptation lowers balanced accuracy on validation images: {_listed(lowered)}"


def close_calls(rows: Sequence[Row], measure: str) -> Iterator[str]:
    """Which rows cannot be told from the best one: they differ by less than clients and seeds do."""
    streams = _streams(rows)
    if not streams or len(rows) > MOST_COMPARED:
        return
    metric = streams[0]._replace(name=measure)
    found = {k: row.accuracies(metric) for k, row in enumerate(rows) if row.number(metric) and not row.broken(metric)}
    values = {k: own for k, own in found.items() if not single(own)}
    if len(values) < 2:
        return
    sign = 1 if MEASURES[measure].higher else -1
    best = max(values, key=lambda k: sign * _level(values[k]))
    others = [k for k in values if k != best and comparable(values[best], values[k])]
    differences = paired_differences(values[best], [values[k] for k in others], seed=0)
    alike = [k for k, difference in zip(others, differences, strict=True) if difference.noise]
    if alike:
        stream = short_name(metric).replace("\n", " ")
        them = _listed([_named(rows[k]) for k in alike])
        yield f"on {stream} the best row ({_named(rows[best])}) cannot be told from {them}: the difference is noise"


def single_clients(rows: Sequence[Row], measure: str) -> Iterator[str]:
    """Where every row has a number, and nobody knows what another client's would be."""
    found = {metric: [row.accuracies(metric._replace(name=measure)) for row in rows] for metric in _streams(rows)}
    alone = [m for m, own in found.items() if sum(map(any, own)) > 1 and all(map(single, filter(any, own)))]
    if alone:
        yield (
            f"{_listed([short_name(metric) for metric in alone])}: one client and one seed, so that no row can be told "
            "from another there"
        ).replace("\n", " ")


def _streams(rows: Sequence[Row]) -> list[Metric]:
    """What rows were tested on, before a local step."""
    metrics = [metric for row in rows for rule, metric in row.values if rule == "best-val" and not metric.is_validation]
    columns = list(dict.fromkeys(metric.column for metric in metrics if metric.model != "after-local"))
    return [metric for metric in columns if metric.stream != "mean"]


def _level(values: Sequence[dict[str, float]]) -> float:
    return sum(math.fsum(own.values()) / max(len(own), 1) for own in values) / len(values)


def _same_model(row: Row, other: Row) -> bool:
    return (row.method, row.point, row.seeds) == (other.method, other.point, other.seeds)


def grown_loss(name: str, rounds: Sequence[RoundLine], evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """A training loss that grew, or a validation loss worse than any guess: training has diverged without a NaN.

    >>> lines = [RoundLine(1, loss=2.3), RoundLine(2, loss=4.0), RoundLine(3, loss=9.0)]
    >>> list(grown_loss("fedavg seed 0", lines, []))
    ['fedavg seed 0: the training loss grew from 2.3 to 9: training has diverged, try a lower [train] lr']
    """
    losses = [line.loss for line in rounds if line.loss is not None]
    if len(losses) > 1:
        tail = losses[-max(1, len(losses) // 10) :]
        last = math.fsum(tail) / len(tail)
        if last > GROWN * abs(losses[0]) + 0.5:
            yield (
                f"{name}: the training loss grew from {losses[0]:.3g} to {last:.3g}: training has diverged, try a lower "
                "[train] lr"
            )
            return
    found = [
        summary.loss for line in evaluations[-1:] for metric, summary in line.scores.items() if metric.is_validation
    ]
    if found and found[0] is not None and found[0] > HOPELESS:
        yield (
            f"{name}: the validation loss is {found[0]:.3g} nats, worse than any guess: training has diverged, try a "
            "lower [train] lr"
        )


def broken_predictions(row: Row) -> Iterator[str]:
    """Which of a row's predictions are not numbers, in the chosen round or else in the last one."""
    if row.bound:  # its members are named themselves
        return
    for rule, when in (("best-val", ""), ("last", " after the last round")):
        counts: list[str] = []
        for metric in (metric for selection, metric in row.values if selection == rule):
            scores = row.scores(metric, rule)
            broken = row.broken(metric, rule)
            if broken and not scores[0].of_streams:
                samples = sum(own.samples for score in scores for own in score.by_client.values())
                word = "" if counts else " predictions"
                stream = short_name(metric).replace("\n", " ")
                counts.append(f"{broken} of {samples}{word} on {stream}" if samples else f"{broken}{word} on {stream}")
        if counts:
            yield f"{_named(row)}: {_listed(counts)} are not numbers{when}"
            return


def diverged_training(name: str, rounds: Sequence[RoundLine], participation: float = 1.0) -> Iterator[str]:
    """Rounds in which nobody's update could be used, and clients whose update mostly could not.

    Files do not say who took part: where not all do, a client's own rounds are its share of them.

    >>> lines = [RoundLine(1, participants=2, diverged=("a", "b")), *(RoundLine(r, participants=2) for r in (2, 3))]
    >>> list(diverged_training("fedavg seed 0", lines))
    ['fedavg seed 0: all clients diverged in 1 of 3 rounds (first in round 1): nothing was learnt there']
    >>> list(diverged_training("fedavg seed 0", [RoundLine(1, participants=2, diverged=("a",))]))
    ["fedavg seed 0: client 'a' diverged in more than half of its rounds (1 of 1), its updates were left out"]
    """
    lost = _lost(rounds)
    if lost:
        first = f" (first in round {lost[0]})" if len(rounds) > 1 else ""
        yield f"{name}: all clients diverged in {len(lost)} of {len(rounds)} rounds{first}: nothing was learnt there"
    if 2 * len(lost) > len(rounds):  # that says it of everybody
        return
    own = participation * len(rounds)
    times = {c: n for c, n in Counter(c for line in rounds for c in line.diverged).items() if 2 * n > own}
    if times:
        about = "" if participation == 1 else "about "
        worst = f"{max(times.values())} of {about}{own:.0f}"
        who, whose = ("client", "its") if len(times) == 1 else ("clients", "their")
        most = worst if len(times) == 1 else f"up to {worst}"
        names = _listed([repr(client) for client in times])
        yield f"{name}: {who} {names} diverged in more than half of {whose} rounds ({most}), {whose} updates were left out"


def has_diverged(rounds: Sequence[RoundLine], evaluations: Sequence[Evaluation]) -> bool:
    """Whether training has: most rounds could use nobody's update, or the loss says so.

    >>> has_diverged([RoundLine(1, participants=2, diverged=("a", "b"))], []), has_diverged([RoundLine(1, loss=2.3)], [])
    (True, False)
    """
    return 2 * len(_lost(rounds)) > len(rounds) or any(grown_loss("", rounds, evaluations))


def _lost(rounds: Sequence[RoundLine]) -> list[int]:
    return [line.round for line in rounds if line.participants and len(line.diverged) >= line.participants]


def _named(row: Row) -> str:
    point = "".join(f", {key} = {value}" for key, value in row.point)
    return f"{row.method}{point}" + ("" if row.adapter == "none" else f" with adapter {row.adapter}")


def _listed(items: Sequence[str]) -> str:
    """Some of them by name.

    >>> _listed(["a", "b"]), _listed(["a", "b", "c", "d", "e"])
    ('a and b', 'a, b, c and 2 more')
    """
    more = len(items) - MOST
    shown = [*items[:MOST], f"{more} more"] if more > 0 else list(items)
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
