"""What privacy and small uploads cost: accuracy against epsilon, and against the bytes of an upload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fedshift.errors import UserError
from fedshift.results.plots.style import INK, PALETTE, SOFT, save
from fedshift.results.result import Result, Row


class Point(NamedTuple):
    """A row in a picture: what it paid, what it got, how far seeds are apart, and its name."""

    price: float
    accuracy: float
    spread: float
    name: str


def price_picture(result: Result, path: Path, rule: str = "best-val") -> None:
    """Pooled accuracy on the first stream of every row that sent something, or noise in the name of nobody.

    Against epsilon, where noise was counted; rows without noise are a line, with no end to their epsilon. Against the bytes
    of an upload, for rows without noise: what compression alone costs.
    """
    rows = [row for row in result.rows if row.cost.get("bytes-up") or "epsilon" in row.cost]
    noisy = [row for row in rows if "epsilon" in row.cost]
    quiet = [row for row in rows if "epsilon" not in row.cost]
    if not noisy and len({row.cost["bytes-up"] for row in rows}) < 2:
        raise UserError(
            "these runs have no [privacy] that a picture could compare: no epsilon, and uploads of one size"
        )
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, _points(result, noisy, "epsilon", 1.0, rule), PALETTE[0])
    open_ = _points(result, quiet, "bytes-up", 1e3, rule)
    best = max(open_, key=lambda point: point.accuracy, default=None)
    if best is not None:
        left.axhline(best.accuracy, color=SOFT, linestyle="--", linewidth=1)
        text = f"best without noise: {best.name}"
        place = (0.02, best.accuracy)
        left.annotate(text, place, xycoords=("axes fraction", "data"), fontsize=8, color=SOFT, va="bottom")
    _draw(right, open_, PALETTE[1])
    left.set_xlabel("epsilon of all rounds, for a whole client", color=INK)
    right.set_xlabel("kB that a client sends in a round", color=INK)
    left.set_ylabel("accuracy, % (pooled; bars: deviation over seeds)", color=INK)
    save(figure, path)


def _points(result: Result, rows: Sequence[Row], key: str, unit: float, rule: str) -> list[Point]:
    metric = result.metrics()[0]
    found = []
    for row in rows:
        number = row.number(metric, rule, "pooled")
        if number is not None:
            adapted = "" if row.adapter == "none" else f" + {row.adapter}"
            at = "".join(f", {name} = {value}" for name, value in row.point)
            found.append(Point(row.cost[key] / unit, number[0], number[1] or 0.0, f"{row.method}{adapted}{at}"))
    return sorted(found)


def _draw(panel: Axes, points: Sequence[Point], colour: str) -> None:
    for number, point in enumerate(points):
        panel.errorbar(
            point.price, point.accuracy, yerr=point.spread or None, fmt="o", color=colour, ecolor=SOFT, capsize=3
        )
        place = (6, 7) if number % 2 else (6, -13)  # names of neighbours do not meet
        panel.annotate(
            point.name, (point.price, point.accuracy), xytext=place, textcoords="offset points", fontsize=8, color=INK
        )
    if points:
        panel.set_xscale("log")
        panel.margins(x=0.2)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_ylim(0, 100)
    panel.tick_params(labelcolor=INK)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
