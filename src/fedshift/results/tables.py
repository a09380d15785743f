"""Results as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from fedshift.errors import UserError
from fedshift.measures.confusion import Confusion
from fedshift.measures.measurement import MEASURES
from fedshift.results.cost_table import costs_table
from fedshift.results.plain import Sheet
from fedshift.store.metric import RULES, Metric, Part
from fedshift.store.rows import ScoreRow
from fedshift.store.summary import known, mean_and_std

if TYPE_CHECKING:
    from fedshift.results.result import Result, Row

BROKEN = "!"  # beside a score whose predictions are not all numbers; a note says how many
COLLAPSED = "~"  # beside one where some client's predictions are (nearly) all one class; a note says whose
MOST_COLUMNS = 4  # of streams in the table of selection rules
MOST_CLASSES = 20  # in a table
MOST_CLIENTS = 12  # beside one another
DIGITS = {"loss": 3}  # behind the point; of the others one
HEADS: dict[Part, str] = {"client_mean": "mean", "pooled": "pooled", "worst10": "worst 10 %"}


def headline_table(result: Result, rule: str, measure: str) -> Sheet:
    """One measure by method and adapter: all of :data:`HEADS` where there is room, or else the client mean."""
    if rule not in RULES:
        raise UserError(f"there is no selection rule {rule!r}; there are: {', '.join(RULES)}")
    metrics = [metric._replace(name=measure) for metric in result.metrics()]
    mean: tuple[Part, ...] = ("client_mean",)
    whole: tuple[Part, ...] = tuple(HEADS) if len(metrics) <= 2 else mean
    columns = [(metric, part) for metric in metrics for part in (mean if metric.is_validation else whole)]
    seeds = max((len(row.seeds) for row in result.rows), default=0)
    named = capitalised(MEASURES[measure].title) + ("" if measure == "loss" else " in %")
    title = f"{named} at {result.choice(rule)}, {seeds} seed{'s' if seeds != 1 else ''}"
    table = Sheet(title=title, title_justify="left")
    sweep = _sweep(result)
    for column in ("method", "adapter", *sweep):
        table.add_column(column, no_wrap=True)
    papers = {metric: [row.paper(metric, rule) for row in result.rows] for metric in metrics}
    for metric, part in columns:
        beside = " (paper)" if part in mean and any(number is not None for number in papers[metric]) else ""
        table.add_column(f"{short_name(metric)}\n{HEADS[part]}{beside}", justify="right", overflow="fold")
    table.add_column("kB up\nclient", justify="right")
    table.add_column("kB down\nclient", justify="right")
    table.add_column("s\nround", justify="right")
    best = {(metric, part): _best(result, metric, part, rule) for metric, part in columns}
    for number, row in enumerate(result.rows):
        cells = [
            _cell(
                row.number(metric, rule, part),
                None if row.bound else best[metric, part],
                papers[metric][number] if part in mean else None,
                mark=_mark(row, metric, rule),
                digits=DIGITS.get(measure, 1),
            )
            for metric, part in columns
        ]
        table.add_row(*_named(row, sweep), *cells, *_cost_cells(row.cost))
    return table


def check_room(clients: int) -> None:
    """One sentence where clients are too many to stand side by side."""
    if clients > MOST_CLIENTS:
        raise UserError(
            f"there are {clients} clients, and a table has room for {MOST_CLIENTS}: fedshift show --by client, or "
            "to_pandas() in Python, has all of them"
        )


def clients_table(result: Result, rule: str, measure: str) -> Sheet:
    """One measure of every client, a column each, beside their mean: a line for every row and stream."""
    metrics = [metric._replace(name=measure) for metric in result.metrics() if not metric.is_validation]
    found = [(row, metric, row.accuracies(metric, rule)) for row in result.rows for metric in metrics]
    names = list(dict.fromkeys(name for _, _, seeds in found for own in seeds for name in own))
    check_room(len(names))
    named = capitalised(MEASURES[measure].title) + ("" if measure == "loss" else " in %")
    table = Sheet(title=f"{named} of every client at {result.choice(rule)}", title_justify="left")
    sweep, digits = _sweep(result), DIGITS.get(measure, 1)
    for column in ("method", "adapter", *sweep, "stream"):
        table.add_column(column, no_wrap=True)
    for name in ("mean", *names):
        table.add_column(name, justify="right", overflow="fold", min_width=5)
    best = {metric: _best(result, metric, "client_mean", rule) for metric in metrics}
    for row, metric, seeds in found:
        if any(seeds):
            mean = _cell(row.number(metric, rule), best[metric], mark=_mark(row, metric, rule), digits=digits)
            cells = [_spread([own[name] for own in seeds if name in own], digits) for name in names]
            table.add_row(*_named(row, sweep), short_name(metric).replace("\n", " "), mean, *cells)
    return table


def measures_table(result: Result, rule: str) -> Sheet | None:
    """All measures side by side, as client means, of every stream if they are few, or else of the mean or the first."""
    every = [metric for metric in result.metrics() if not metric.is_validation]
    means = [metric for metric in every if not metric.model and metric.stream == "mean"]
    metrics = every if len(every) <= 2 else means or every[:1]
    if not any(
        row.scores(metric, rule) and row.scores(metric, rule)[0].measures for row in result.rows for metric in every
    ):
        return None
    table = Sheet(title=f"Other measures in %, means over clients, at {result.choice(rule)}", title_justify="left")
    sweep = _sweep(result)
    for column in ("method", "adapter", *sweep, "stream"):
        table.add_column(column, no_wrap=True)
    others = [name for name in MEASURES if name != result.measure]
    for name in others:
        unit = " (nats)" if name == "loss" else ""
        table.add_column(f"{MEASURES[name].title}{unit}".replace(" ", "\n"), justify="right")
    for row in result.rows:
        for metric in metrics:
            cells = [
                _cell(row.number(metric._replace(name=name), rule), None, digits=DIGITS.get(name, 1)) for name in others
            ]
            if any(cell != "-" for cell in cells):
                marked = f"{short_name(metric)} {_mark(row, metric, rule)}".replace("\n", " ").strip()
                table.add_row(*_named(row, sweep), marked, *cells)
    return table


def classes_table(result: Result, rule: str) -> Sheet | None:
    """Recall and precision of every class over all clients' samples and seeds, a line for each row and stream."""
    found = {
        (k, metric): _pooled_classes(row.scores(metric, rule))
        for k, row in enumerate(result.rows)
        for metric in result.metrics()
        if not metric.is_validation
    }
    names = list(dict.fromkeys(name for classes in found.values() for name in classes))
    if not names or len(names) > MOST_CLASSES:
        return None
    table = Sheet(title=f"Recall / precision of every class in %, at {result.choice(rule)}", title_justify="left")
    sweep = _sweep(result)
    for column in ("method", "adapter", *sweep, "stream"):
        table.add_column(column, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for (k, metric), classes in found.items():
        if classes:
            stream = short_name(metric).replace("\n", " ")
            table.add_row(*_named(result.rows[k], sweep), stream, *(classes.get(name, "-") for name in names))
    return table


def _pooled_classes(scores: Sequence[ScoreRow]) -> dict[str, str]:
    """``recall / precision`` by class, of all seeds together."""
    measured = [score.whole for score in scores if score.whole is not None]
    if not measured:
        return {}
    count = Confusion.summed(own.confusion for own in measured)
    shares = zip(count.recall(), count.precision(), strict=True)
    texts = [" / ".join("-" if math.isnan(share) else f"{100 * share:.0f}" for share in pair) for pair in shares]
    return dict(zip(scores[0].classes, texts, strict=True))


def rules_table(result: Result) -> Sheet:
    """The client mean under the three selection rules; the oracle only where streams were scored during training.

    Of many streams the mean is shown, or else the first few: a terminal is not wider.
    """
    every = result.metrics()
    means = [metric for metric in every if not metric.model and metric.stream == "mean"]
    few = every if len(every) <= MOST_COLUMNS else means or every[:MOST_COLUMNS]
    metrics = [metric._replace(name=result.measure) for metric in few]
    shown = {rule for row in result.rows for rule, _ in row.values} - ({"best-val"} if not result.validated else set())
    rules = [rule for rule in RULES if rule in shown]
    known = [
        (metric, rule)
        for metric in metrics
        for rule in rules
        if any(row.number(metric, rule) is not None for row in result.rows)
    ]
    table = Sheet(title="The same client mean under the selection rules", title_justify="left")
    sweep = _sweep(result)
    for column in ("method", "adapter", *sweep):
        table.add_column(column, no_wrap=True)
    for metric, rule in known:
        table.add_column(f"{short_name(metric)}\n{rule}", justify="right")
    for row in result.rows:
        cells = [_cell(row.number(metric, rule), None, mark=_mark(row, metric, rule)) for metric, rule in known]
        table.add_row(*_named(row, sweep), *cells)
    return table


def telemetry_table(result: Result, rule: str) -> Sheet | None:
    """What adapters tell about themselves, as means over samples, clients and seeds; None if none tells anything."""
    metrics = list(dict.fromkeys(metric for row in result.rows for metric in row.telemetry(rule)))
    if not metrics:
        return None
    table = Sheet(title=f"What adapters tell, means at {result.choice(rule)}", title_justify="left")
    sweep = _sweep(result)
    for column in ("method", "adapter", *sweep, "name"):
        table.add_column(column, no_wrap=True)
    for metric in metrics:
        table.add_column(short_name(metric), justify="right")
    for row in result.rows:
        found = row.telemetry(rule)
        for name in dict.fromkeys(name for by_name in found.values() for name in by_name):
            seeds = [[told.mean for told in found.get(metric, {}).get(name, [])] for metric in metrics]
            table.add_row(*_named(row, sweep), name, *(_spread(values, 3) for values in seeds))
    return table


def method_costs_table(result: Result) -> Sheet:
    """What every method costs, with the definitions beneath; a method's adapters share its row."""
    sweep = _sweep(result)
    first = {(row.method, row.point): row for row in reversed(result.rows)}
    rows = [row for row in result.rows if first[row.method, row.point] is row]
    return costs_table([((row.method, *_values(row, sweep)), row.cost) for row in rows], ("method", *sweep))


def _sweep(result: Result) -> list[str]:
    """The keys that tell runs of one method apart."""
    return list(dict.fromkeys(key for row in result.rows for key, _ in row.point))


def _named(row: Row, sweep: Sequence[str]) -> list[str]:
    return [row.method, row.adapter, *_values(row, sweep)]


def _values(row: Row, sweep: Sequence[str]) -> list[str]:
    return [_text(dict(row.point).get(key, "")) for key in sweep]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _best(result: Result, metric: Metric, part: Part, rule: str) -> float | None:
    """The best of several; one that is marked is beaten by any other."""
    plain = [row for row in result.rows if not row.bound]
    found = {k: number[0] for k, row in enumerate(plain) if (number := row.number(metric, rule, part)) is not None}
    fine = [number for k, number in found.items() if not _mark(plain[k], metric, rule)]
    return (max(fine) if MEASURES[metric.name].higher else min(fine)) if fine and len(found) > 1 else None


def _mark(row: Row, metric: Metric, rule: str) -> str:
    """What is wrong with a score, if anything."""
    if row.broken(metric, rule):
        return BROKEN
    return COLLAPSED if row.collapsed(metric, rule) else ""


def _cell(
    number: tuple[float, float] | None,
    best: float | None,
    paper: float | None = None,
    mark: str = "",
    digits: int = 1,
) -> Text:
    """A number, bold if it is the best; one that something is wrong with is marked instead."""
    beside = Text("" if paper is None else f" ({paper:.2f})", "dim")
    if number is None:
        return Text.assemble("-", beside)
    mean, deviation = number
    text = f"{mean:.{digits}f}" + (f" ±{deviation:.{digits}f}" if deviation else "")
    first = not mark and best is not None and abs(mean - best) <= 0.5 * 10**-digits
    return Text.assemble((f"{text} {mark}" if mark else text, "bold" if first else ""), beside)


def capitalised(text: str) -> str:
    """With a large first letter, the others as they are.

    >>> capitalised("balanced accuracy"), capitalised("AUROC")
    ('Balanced accuracy', 'AUROC')
    """
    return text[:1].upper() + text[1:]


def _spread(values: Sequence[float | None], digits: int) -> str:
    numbers = known(values)
    if not numbers:
        return "-"
    mean, deviation = mean_and_std(numbers)
    return f"{mean:.{digits}f}" + (f" ±{deviation:.{digits}f}" if deviation else "")


def _cost_cells(cost: Mapping[str, float]) -> tuple[str, str, str]:
    """Bytes per round and client, seconds per round; empty before the first round."""
    up, down = (f"{cost[key] / 1000:.0f}" if key in cost else "" for key in ("bytes-up", "bytes-down"))
    return up, down, f"{cost['seconds-per-round']:.2f}" if "seconds-per-round" in cost else ""


def short_name(metric: Metric) -> str:
    """A metric as a column's head.

    >>> short_name(Metric("global", "original")), short_name(Metric("", "mean", "unseen")), short_name(Metric("", "val"))
    ('original', 'mean (unseen)', 'validation')
    """
    if metric.model == "after-local":
        return f"{short_name(metric._replace(model=''))}\nafter local"
    if metric.is_validation:
        return "validation"
    return metric.stream if metric.population == "clients" else f"{metric.stream} ({metric.population})"
