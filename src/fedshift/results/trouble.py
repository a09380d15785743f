"""What is wrong with numbers, in sentences: predictions that are not numbers, and clients whose training diverged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fedshift.results.result import Row
from fedshift.results.tables import short_name
from fedshift.store.lines import RoundLine

MOST = 3  # things that a sentence names


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
    lost = [line.round for line in rounds if line.participants and len(line.diverged) >= line.participants]
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
