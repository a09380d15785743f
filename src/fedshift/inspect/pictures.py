"""Pictures of what was found in runs, as PNG: one panel, or one row, for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedshift.inspect.looking import Look, Part, evenly
from fedshift.results.plots.clouds import draw_clouds
from fedshift.results.plots.style import INK, PALETTE, SOFT, save

WRITTEN = 12  # clients, up to which numbers are written into a map, and classes, up to which they are named
SHOWN = 8  # clients in a row of confusion matrices
BARS = 40  # of one panel
LONG = 14  # characters of a name beside an axis
WIDEST = 12.6  # inches of a picture: a page shows it without making its letters too small
EMPTY = "#eef0f4"


def pad_picture(looks: Sequence[Look], path: Path) -> None:
    """PAD between clients, one map for each run; the last column is a client against the union of all."""
    drawn = [(look, look.distances) for look in looks if look.distances is not None]
    size = max(len(found.clients) for _, found in drawn)
    side = 1.2 + (0.46 if size <= WRITTEN else 0.16) * (size + 1)
    figure, axes = _panels(len(drawn), width=max(side, 3.0), height=max(side, 2.7))
    for panel, (look, found) in zip(axes, drawn, strict=True):
        rows = [[*own, found.union[name]] for name, own in zip(found.clients, found.pairs, strict=True)]
        values = np.array([[np.nan if value is None else value for value in row] for row in rows])
        np.fill_diagonal(values, np.nan)  # a client against itself says nothing
        panel.imshow(values, cmap="Blues", vmin=0, vmax=2, aspect="equal")
        panel.set_facecolor(EMPTY)
        if size <= WRITTEN:
            _write(panel, values)
        panel.axvline(len(found.clients) - 0.5, color="white", linewidth=3)
        names = [_named(part) for part in look.parts]
        panel.set_xticks(range(len(names) + 1), [*names, "union"], rotation=90, fontsize=8 if size <= WRITTEN else 5)
        panel.set_yticks(range(len(names)), names, fontsize=8 if size <= WRITTEN else 5)
        mean = "" if found.mean is None else f": mean {found.mean:.2f}"
        star = "" if found.mean_union is None else f", union {found.mean_union:.2f}"
        panel.set_title(f"{look.name}{mean}{star}", color=INK, fontsize=9)
        _plain(panel)
    _scale(figure, axes, Normalize(0, 2), "proxy A-distance")
    save(figure, path)


def risk_picture(looks: Sequence[Look], path: Path) -> None:
    """Every client's local risk, one panel for each run; the line is their mean."""
    most = min(BARS, max(len(look.risks) for look in looks))
    figure, axes = _panels(len(looks), width=3.1, height=0.8 + 0.26 * most)
    highest = max((risk for look in looks for risk in look.risks.values() if risk is not None), default=1.0)
    for panel, look in zip(axes, looks, strict=True):
        names = evenly(list(look.risks), BARS)
        places = np.arange(len(names))[::-1]
        risks = [look.risks[name] for name in names]
        panel.barh(places, [risk or 0.0 for risk in risks], color=PALETTE[0], height=0.7)
        for place, risk in zip(places, risks, strict=True):
            text = "not finite" if risk is None else f"{risk:.2f}"
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line of the mean
            panel.text((risk or 0) + 0.02 * highest, place, text, va="center", fontsize=8, color=INK, bbox=paper)
        mean = look.risk
        if mean is not None:
            panel.axvline(mean, color=PALETTE[1], linewidth=1.5, linestyle="--")
        panel.set_title(f"{look.name}" + ("" if mean is None else f": mean {mean:.2f}"), color=INK, fontsize=9)
        panel.set_yticks(places, [_short(name) for name in names], fontsize=8)
        panel.set_xlim(0, 1.18 * highest or 1.0)
        panel.set_ylim(-0.7, len(names) - 0.3)
        panel.tick_params(axis="x", labelsize=8)
        panel.set_xlabel("cross-entropy, nats", fontsize=8, color=SOFT)
        _plain(panel)
    save(figure, path)


def confusion_picture(looks: Sequence[Look], path: Path) -> None:
    """What is taken for what, a row for each run and a column for each client; shades are shares of the true class."""
    rows = [evenly(look.parts, SHOWN) for look in looks]
    across, classes = max(map(len, rows)), len(looks[0].job.task.classes)
    figure = Figure(figsize=(1.5 + 1.5 * across, 0.9 + 1.65 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), across, squeeze=False)
    for row, (look, parts) in enumerate(zip(looks, rows, strict=True)):
        for panel, part in zip(grid[row], parts, strict=False):
            _confused(panel, part, look.job.task.classes, first=part is parts[0], last=row == len(rows) - 1)
        grid[row, 0].set_ylabel(f"{look.name}\ntrue class", fontsize=8, color=INK)
        for panel in grid[row, len(parts) :]:
            panel.set_axis_off()
    if any(len(parts) < len(look.confusions) for look, parts in zip(looks, rows, strict=True)):
        most = max(len(look.confusions) for look in looks)
        figure.suptitle(f"{across} of {most} clients, spread evenly; the numbers have all", fontsize=8, color=SOFT)
    figure.supxlabel(
        "predicted class" if classes <= WRITTEN else "predicted class, in the order of the data", fontsize=8
    )
    _scale(figure, list(grid.flat), Normalize(0, 100), "% of the true class")
    save(figure, path)


def tsne_picture(looks: Sequence[Look], placed: Sequence[Mapping[str, Any]], path: Path) -> None:
    """t-SNE of the features, one panel for each run."""
    side = 6.0 if len(looks) == 1 else 4.2
    figure, axes = _panels(len(looks), width=side, height=side)
    unseen = [{part.client for part in look.parts if part.unseen} for look in looks]
    draw_clouds(figure, axes, placed, unseen, size=14)
    for panel, look in zip(axes, looks, strict=True):
        panel.set_title(look.name, color=INK, fontsize=10)
    save(figure, path)


def curve_picture(looks: Sequence[Look], path: Path) -> None:
    """What adaptation on a learnt loss does, step by step: loss, entropy and accuracy, a line for each run."""
    drawn = [(look, look.curve) for look in looks if look.curve is not None]
    figure, axes = _panels(3, width=3.6, height=3.0)
    units = {"loss": "learnt loss", "entropy": "entropy, nats", "accuracy": "accuracy, %"}
    for panel, (key, title) in zip(axes, units.items(), strict=True):
        for number, (look, found) in enumerate(drawn):
            values = [point[key] * (100 if key == "accuracy" else 1) for point in found.points]
            label = f"{look.name} with {found.adapter}, round {found.round}, {found.clients} clients"
            panel.plot(values, color=PALETTE[number % len(PALETTE)], label=label, linewidth=1.6)
        panel.set_title(title, color=INK, fontsize=9)
        panel.set_xlabel("steps", fontsize=8, color=SOFT)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.tick_params(labelsize=8)
        panel.grid(color=SOFT, alpha=0.25, linewidth=0.6)
        _plain(panel)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save(figure, path)


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, not more side by side than a page is wide."""
    down = -(-count // max(1, int(WIDEST / width)))
    across = -(-count // down)
    figure = Figure(figsize=(0.9 + width * across, 0.3 + height * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for panel in axes[count:]:
        panel.set_axis_off()
    return figure, axes[:count]


def _confused(panel: Axes, part: Part, classes: Sequence[str], first: bool, last: bool) -> None:
    """One client's matrix."""
    counts = part.confusion.double().numpy()
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    panel.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    panel.set_title(f"{_named(part)}: {part.accuracy:.0f} %", fontsize=8, color=INK)
    named = [_short(name, 6) for name in classes] if len(classes) <= WRITTEN else []
    panel.set_xticks(range(len(named)) if last else [], named if last else [], rotation=90, fontsize=6)
    panel.set_yticks(range(len(named)) if first else [], named if first else [], fontsize=6)
    _plain(panel)


def _write(panel: Axes, values: np.ndarray[Any, Any]) -> None:
    """Numbers into a map."""
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            ink = "white" if value > 1.2 else INK
            panel.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=7, color=ink)


def _scale(figure: Figure, axes: Sequence[Axes], norm: Normalize, label: str) -> None:
    """The colour bar of all panels."""
    bar = figure.colorbar(ScalarMappable(norm, "Blues"), ax=list(axes), shrink=0.8, aspect=30, pad=0.02)
    bar.set_label(label, fontsize=8, color=SOFT)
    bar.ax.tick_params(labelsize=8, length=2, labelcolor=INK)
    bar.outline.set_visible(False)


def _plain(panel: Axes) -> None:
    panel.tick_params(length=0, labelcolor=INK)
    for side in ("top", "right", "left", "bottom"):
        panel.spines[side].set_visible(False)


def _short(name: str, most: int = LONG) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _named(part: Part) -> str:
    return _short(part.client) + (" (unseen)" if part.unseen else "")
