"""Pictures of a task and of results, as PNG."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.projections.polar import PolarAxes

from fedshift.data.output import fresh
from fedshift.errors import UserError
from fedshift.results.plots.clouds import draw_clouds
from fedshift.results.plots.price import price_picture
from fedshift.results.plots.style import INK, MARKERS, PALETTE, SOFT, STROKES, save
from fedshift.results.plots.tsne import places, with_features
from fedshift.results.result import Result, Row
from fedshift.results.tables import BROKEN, short_name
from fedshift.store.features import Features
from fedshift.store.folder import FEATURES
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow

FEWEST, MOST = 3, 20  # clients a radar needs, and names it writes around itself
AXES = {  # what some adapters tell, in words
    "e": "e, weight of the global head (0: all personal, 1: all global)",
    "uncertainty": "entropy of a prediction (0: sure, 1: a guess)",
}


def result_picture(result: Result, path: Path, rule: str = "best-val") -> None:
    """The client mean of every method and adapter, one panel for each stream, with the worst 10 % of clients marked.

    A published number is a ring; what was chosen by test labels is hollow, and so is what has predictions that are not
    numbers, which says so.
    """
    metrics = result.metrics()
    labels = [_name(row) for row in result.rows]
    adapters = list(dict.fromkeys(row.adapter for row in result.rows))
    figure, panels = _panels(len(metrics), width=3.2, height=0.7 + 0.27 * len(labels), sharey=True)
    places = np.arange(len(labels))[::-1]
    published = [[row.paper(metric, rule) for metric in metrics] for row in result.rows]
    ring = "; ○ paper" if any(number is not None for numbers in published for number in numbers) else ""
    for column, (panel, metric) in enumerate(zip(panels, metrics, strict=True)):
        for index, (place, row) in enumerate(zip(places, result.rows, strict=True)):
            mean, worst = row.number(metric, rule), row.number(metric, rule, "worst10")
            if mean is None or worst is None:
                continue
            colour = PALETTE[adapters.index(row.adapter) % len(PALETTE)]
            broken = row.broken(metric, rule) > 0
            fill, ink = ("white", colour) if row.bound or broken else (colour, "white")
            panel.barh(place, mean[0], xerr=mean[1] or None, color=fill, edgecolor=colour, height=0.72, ecolor=INK)
            panel.plot([worst[0]], [place], marker="|", color=ink, markersize=9, markeredgewidth=2)
            text = f"{mean[0]:.1f} {BROKEN} not all are numbers" if broken else f"{mean[0]:.1f}"
            panel.text(1.5, place, text, va="center", ha="left", color=ink, fontsize=8)
            paper = published[index][column]
            if paper is not None:
                panel.plot([paper], [place], marker="o", color=INK, markerfacecolor="none", markersize=6)
        panel.set_title(short_name(metric), color=INK, fontsize=11)
        panel.set_xlim(0, 100)
        panel.set_yticks(places, labels, fontsize=9, color=INK)
        panel.tick_params(length=0, labelcolor=INK)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    figure.supxlabel(f"accuracy, % (client mean; | worst 10 %{ring})", fontsize=8, color=SOFT)
    save(figure, path)


def density_picture(result: Result, path: Path, rule: str = "best-val") -> None:
    """How what adapters tell is spread over [0, 1], one panel for each stream, one line for each row.

    Counts of all seeds are added up; the area under a line is 1.
    """
    found = {row: told for row in range(len(result.rows)) if (told := result.rows[row].telemetry(rule))}
    told_of = {(name, metric) for told in found.values() for metric in told for name in told[metric]}
    if not told_of:
        raise UserError("no adapter of these runs tells anything to draw")
    metrics = list(dict.fromkeys(metric for told in found.values() for metric in told))
    wanted = [(name, metric) for name in sorted({name for name, _ in told_of}) for metric in metrics]
    wanted = [key for key in wanted if key in told_of]
    figure, panels = _panels(len(wanted), width=3.2, height=2.3, sharey=False)
    lines: dict[int, Line2D] = {}
    for panel, (name, metric) in zip(panels, wanted, strict=True):
        for order, (row, told) in enumerate(found.items()):
            counts = np.array([seed.counts for seed in told.get(metric, {}).get(name, [])])
            if not counts.size:
                continue
            bins = counts.shape[1]
            density = counts.sum(0) * bins / max(counts.sum(), 1)
            edges, heights = np.linspace(0, 1, bins + 1), [*density, density[-1]]
            colour, stroke = PALETTE[order % len(PALETTE)], STROKES[order // len(PALETTE) % len(STROKES)]
            (lines[row],) = panel.step(edges, heights, where="post", linewidth=1.5, color=colour, linestyle=stroke)
            if len(found) == 1:
                panel.fill_between(edges, heights, step="post", color=PALETTE[0], alpha=0.15)
        panel.set_title(short_name(metric), color=INK, fontsize=11)
        panel.set_xlim(0, 1)
        panel.set_ylim(bottom=0)
        panel.set_xlabel(AXES.get(name, name), fontsize=8, color=SOFT)
        panel.set_ylabel("density", fontsize=8, color=SOFT)
        panel.tick_params(length=2, labelsize=8, labelcolor=INK)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    labels = [_name(result.rows[row]) for row in lines]
    across = min(3, len(panels))
    figure.legend(list(lines.values()), labels, loc="outside lower center", ncols=across, fontsize=8, frameon=False)
    save(figure, path)


def option_map(result: Result) -> tuple[str, str, list[Row]] | None:
    """Two numbers that adapters of one method were tried with, in every combination, and the rows; or None."""
    groups: dict[tuple[str, object, str], list[Row]] = {}
    for row in result.rows:
        if row.values and not row.bound:
            groups.setdefault((row.method, row.point, _first(row).adapter), []).append(row)
    for rows in groups.values():
        options = [_options(row) for row in rows]
        numbers = sorted(key for key in options[0] if all(isinstance(o.get(key), int | float) for o in options))
        varied = [key for key in numbers if len({o[key] for o in options}) > 1]
        sizes = [len({o[key] for o in options}) for key in varied]
        whole = len(varied) == 2 and len({(o[varied[0]], o[varied[1]]) for o in options}) == sizes[0] * sizes[1]
        if whole and len(rows) == sizes[0] * sizes[1]:
            return varied[0], varied[1], rows
    return None


def map_picture(result: Result, path: Path, rule: str = "best-val") -> None:
    """The client mean over two options of an adapter, one panel for each stream, the best one in bold."""
    found = option_map(result)
    if found is None:
        raise UserError("no two options of an adapter were tried in every combination")
    down, across, rows = found
    metrics = [metric for metric in result.metrics() if rows[0].number(metric, rule) is not None]
    ys, xs = (sorted({_options(row)[key] for row in rows}) for key in (down, across))
    figure, panels = _panels(len(metrics), width=0.5 + 0.55 * len(xs), height=0.8 + 0.42 * len(ys), sharey=False)
    for panel, metric in zip(panels, metrics, strict=True):
        values = np.full((len(ys), len(xs)), np.nan)
        for row in (
            row for row in rows if not row.broken(metric, rule)
        ):  # one whose predictions are not numbers: a gap
            number = row.number(metric, rule)
            if number is not None:
                values[ys.index(_options(row)[down]), xs.index(_options(row)[across])] = number[0]
        panel.imshow(values, cmap="Blues", aspect="auto")
        numbers = values[np.isfinite(values)]
        low, high = (numbers.min(), numbers.max()) if numbers.size else (0, 0)
        middle = (low + high) / 2
        for (y, x), value in np.ndenumerate(values):
            best = value == high
            ink = "white" if value > middle else INK
            panel.text(
                x,
                y,
                f"{value:.1f}" if np.isfinite(value) else BROKEN,
                ha="center",
                va="center",
                fontsize=8,
                color=ink,
                weight="bold" if best else None,
            )
        panel.set_title(short_name(metric), color=INK, fontsize=10)
        panel.set_xticks(range(len(xs)), map(str, xs), fontsize=8)
        panel.set_yticks(range(len(ys)), map(str, ys), fontsize=8)
        panel.set_xlabel(across, fontsize=8, color=SOFT)
        panel.set_ylabel(down, fontsize=8, color=SOFT)
        panel.tick_params(length=0, labelcolor=INK)
    save(figure, path)


def radar_numbers(result: Result, rule: str = "best-val") -> dict[Metric, dict[int, dict[str, float]]]:
    """Accuracy in percent by client, for every metric with at least three clients, by the number of the row."""
    every = {
        m: {i: own for i, row in enumerate(result.rows) if (own := row.by_client(m, rule))} for m in result.metrics()
    }
    most = max((len(own) for rows in every.values() for own in rows.values()), default=0)
    if most == 0:
        raise UserError(f"these runs have no accuracies by client under selection rule {rule!r}")
    if most < FEWEST:
        raise UserError(f"a radar needs at least {FEWEST} clients tested on one stream; these runs have {most}")
    return {metric: rows for metric, rows in every.items() if any(len(own) >= FEWEST for own in rows.values())}


def radar_picture(result: Result, path: Path, rule: str = "best-val") -> None:
    """Accuracy by client, an axis for each, one panel for each stream, one line for each method and adapter.

    The numbers lie beside it as JSON. The centre need not be zero: it is named below.
    """
    numbers = radar_numbers(result, rule)
    drawn = {_name(result.rows[i]): result.rows[i] for rows in numbers.values() for i in rows}
    looks = _looks(list(drawn.values()))
    figure, wheels, columns = _wheels(len(numbers), list(drawn))
    for wheel, (metric, rows) in zip(wheels, numbers.items(), strict=True):
        clients = list(dict.fromkeys(name for own in rows.values() for name in own))
        angles = np.linspace(0, 2 * np.pi, len(clients), endpoint=False)
        for i, own in rows.items():
            values = [own.get(client, np.nan) for client in clients]
            wheel.plot([*angles, angles[0]], [*values, values[0]], alpha=0.9, **looks[_name(result.rows[i])])
        _web(wheel, clients, angles, [value for own in rows.values() for value in own.values()])
        wheel.set_title(short_name(metric), color=INK, fontsize=11, y=1.11)
    handles = [Line2D([], [], **looks[name]) for name in drawn]
    figure.legend(handles, list(drawn), loc="lower center", ncols=columns, fontsize=9, frameon=False, handlelength=3.2)
    save(figure, path)
    by_metric = {str(metric): _radar_rows(result, rows) for metric, rows in numbers.items()}
    _write_json(path, {"selection": rule, "metrics": by_metric})


def _wheels(count: int, names: Sequence[str]) -> tuple[Figure, list[PolarAxes], int]:
    """A figure with so many radars, room below for a legend of these names, and its columns; all sizes in inches."""
    across = min(count, 4)
    width, height, side = 4.8 * across, 4.7, 3.3
    columns = min(len(names), max(1, int(width / (0.8 + 0.078 * max(map(len, names))))))
    room = 0.25 + 0.2 * -(-len(names) // columns)
    down = -(-count // across)
    whole = height * down + room
    figure = Figure(figsize=(width, whole))
    corners = [(4.8 * (k % across) + 0.75, room + height * (down - 1 - k // across) + 0.55) for k in range(count)]
    boxes = [(x / width, y / whole, side / width, side / whole) for x, y in corners]
    return figure, [cast(PolarAxes, figure.add_axes(box, projection="polar")) for box in boxes], columns


def _looks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """How lines look, by name: a colour and marker for each method, a pattern for each adapter, no two alike."""
    methods = list(dict.fromkeys((row.method, row.point) for row in rows))
    adapters = list(dict.fromkeys(row.adapter for row in rows))
    looks: dict[str, dict[str, Any]] = {}
    for row in rows:
        method, adapter = methods.index((row.method, row.point)), adapters.index(row.adapter)
        again = method // len(PALETTE)  # how often its colour was used before
        marker = again + adapter // len(STROKES) * -(-len(methods) // len(PALETTE))
        looks[_name(row)] = {
            "color": PALETTE[method % len(PALETTE)],
            "marker": MARKERS[marker % len(MARKERS)],
            "linestyle": STROKES[(adapter if len(adapters) > 1 else again) % len(STROKES)],
            "linewidth": 1.5,
            "markersize": 4,
        }
    return looks


def _radar_rows(result: Result, rows: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    named = [(result.rows[i], own) for i, own in rows.items()]
    return [
        {"method": row.method, "adapter": row.adapter, **dict(row.point), "seeds": list(row.seeds), "accuracy": own}
        for row, own in named
    ]


def _web(panel: PolarAxes, clients: list[str], angles: np.ndarray[Any, Any], values: list[float]) -> None:
    """Spokes with clients' names, and rings at round numbers between the lowest and the highest value."""
    step = next(s for s in (1, 2, 5, 10, 20) if s == 20 or (max(values) - min(values)) / s <= 5)
    low, high = step * np.floor(min(values) / step - 0.5), step * np.ceil(max(values) / step)
    rings = np.arange(max(low, 0), high + step / 2, step)
    every = -(-len(clients) // MOST)
    panel.set_rlim(rings[0], rings[-1] if len(rings) > 1 else rings[0] + step)
    panel.set_rgrids(
        rings[1:],
        [f"{ring:.0f}" for ring in rings[1:]],
        angle=180 / len(clients),
        fontsize=8,
        color=INK,
        zorder=3,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
    )
    panel.set_axisbelow(False)  # numbers stay legible over lines
    panel.set_xlabel(f"accuracy, %; centre: {rings[0]:.0f}", fontsize=8, color=SOFT)
    panel.set_theta_offset(np.pi / 2)
    panel.set_xticks(angles[::every], clients[::every], fontsize=9, color=INK)
    panel.tick_params(axis="x", pad=6)
    panel.grid(color=SOFT, alpha=0.35, linewidth=0.6)
    panel.spines["polar"].set_color(SOFT)
    panel.spines["polar"].set_alpha(0.5)


def tsne_picture(folder: Path, path: Path) -> None:
    """t-SNE of the features saved with one run; the coordinates lie beside it as JSON."""
    made = Features.load(folder / FEATURES)
    placed = places(made)
    figure = Figure(figsize=(7.4, 6.2), layout="constrained")
    panel = figure.subplots()
    draw_clouds(figure, [panel], [placed], [made.unseen], size=20)
    moment = f"seed {made.wanted.seed}, round {made.round}, stream {made.wanted.stream}"
    panel.set_title(f"{folder.parent.name}: features by t-SNE ({moment})", color=INK, fontsize=10)
    save(figure, path)
    _write_json(path, placed)


# ---- by name -------------------------------------------------------------------------------------------------------------
def draw(name: str, result: Result, folder: Path, rule: str = "best-val") -> list[Path]:
    """Draw a picture of some runs by its name, into a folder; ``tsne`` goes into the folder of each run with features."""
    of_results: dict[str, Callable[[Result, Path, str], None]] = {
        "results": result_picture,
        "densities": density_picture,
        "map": map_picture,
        "radar": radar_picture,
        "privacy": price_picture,
    }
    if name == "tsne":
        made = [run / "tsne.png" for run in with_features(result.folders)]
        for path in made:
            tsne_picture(path.parent, path)
        return made
    if name not in of_results:
        raise UserError(f"there is no picture {name!r}; there are: {', '.join([*of_results, 'tsne'])}")
    of_results[name](result, folder / f"{name}.png", rule)
    return [folder / f"{name}.png"]


def _write_json(path: Path, content: Any) -> None:
    fresh(path.with_suffix(".json")).write_text(json.dumps(content, indent=1) + "\n")


def _options(row: Row) -> dict[str, float]:
    return dict(_first(row).options)


def _first(row: Row) -> ScoreRow:
    return next(iter(row.values.values()))[0]


def _panels(count: int, width: float, height: float, sharey: bool) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, at most four side by side; none is left empty."""
    across = min(count, 4)
    down = -(-count // across)
    figure = Figure(figsize=(1.8 + width * across, 0.3 + height * down), layout="constrained")
    axes = list(figure.subplots(down, across, sharey=sharey, squeeze=False).flat)
    for panel in axes[count:]:
        panel.set_axis_off()
    return figure, axes[:count]


def _name(row: Row) -> str:
    """Method and adapter, and where in a sweep."""
    pair = row.method + ("" if row.adapter == "none" else f" + {row.adapter}")
    return ", ".join([pair, *(f"{key} = {value}" for key, value in row.point)])
