"""Pictures of a task and of results, as PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fedshift.bench.results import Result, number_of, short_name
from fedshift.data.task import Task

INK, SOFT = "#1f2430", "#8a90a0"
PALETTE = ("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#718096", "#6b46c1")


def task_picture(task: Task, path: Path, examples: int = 8) -> None:
    """Who owns what: every client's class histogram, and some of its images in every stream.

    At most twelve clients are drawn, spread evenly over all of them.
    """
    everyone = [*task.clients, *task.unseen]
    step = max(1, -(-len(everyone) // 12))
    shown = everyone[::step]
    columns = [*task.streams] or ["train"]
    figure = Figure(figsize=(3.2 + 2.9 * len(columns), 0.9 + 0.62 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), 1 + len(columns), squeeze=False, width_ratios=[1, *[1.25] * len(columns)])
    for row, client in enumerate(shown):
        counts = np.bincount(
            task.labels[client.train if len(client.train) else client.test].cpu().numpy(), minlength=len(task.classes)
        )
        bars = axes[row, 0]
        bars.bar(range(len(counts)), counts, color=PALETTE[0] if len(client.train) else PALETTE[1], width=0.8)
        bars.set_ylabel(client.name, rotation=0, ha="right", va="center", color=INK, fontsize=9)
        bars.set_xticks([])
        bars.set_yticks([])
        bars.text(
            0.99, 0.92, f"{int(counts.sum())}", transform=bars.transAxes, ha="right", va="top", color=SOFT, fontsize=7
        )
        for side in ("top", "right", "left"):
            bars.spines[side].set_visible(False)
        for column, stream in enumerate(columns, start=1):
            samples = task.samples(client, stream)
            chosen = samples.images[samples.index[:examples]].permute(0, 2, 3, 1).cpu().numpy()
            strip = np.concatenate(list(chosen), axis=1) if len(chosen) else np.zeros((1, 1, 3), np.uint8)
            picture = axes[row, column]
            picture.imshow(strip if strip.shape[2] == 3 else strip[..., 0], cmap="gray", interpolation="nearest")
            picture.set_axis_off()
            if row == 0:
                picture.set_title(stream, color=INK, fontsize=10)
    axes[0, 0].set_title("training labels by class", color=INK, fontsize=10)
    more = f" ({len(shown)} of {len(everyone)} clients)" if len(shown) < len(everyone) else ""
    figure.suptitle(f"task {task.hash}{more}", color=SOFT, fontsize=8, x=0.99, ha="right")
    _save(figure, path)


def result_picture(result: Result, path: Path, rule: str = "best-val") -> None:
    """AVG accuracy of every method and adapter, one panel for each stream, with the worst tenth of clients marked."""
    metrics = result.metrics()
    labels = [row.method + ("" if row.adapter == "none" else f" + {row.adapter}") for row in result.rows]
    adapters = list(dict.fromkeys(row.adapter for row in result.rows))
    figure = Figure(figsize=(1.8 + 3.2 * len(metrics), 1.0 + 0.27 * len(labels)), layout="constrained")
    axes = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    places = np.arange(len(labels))[::-1]
    for panel, metric in zip(axes, metrics, strict=True):
        for place, row in zip(places, result.rows, strict=True):
            mean, worst = (number_of(row, metric, rule, part) for part in ("avg", "worst"))
            if mean is None or worst is None:
                continue
            colour = PALETTE[adapters.index(row.adapter) % len(PALETTE)]
            panel.barh(place, mean[0], xerr=mean[1] or None, color=colour, height=0.72, ecolor=INK)
            panel.plot([worst[0]], [place], marker="|", color="white", markersize=9, markeredgewidth=2)
            panel.text(1.5, place, f"{mean[0]:.1f}", va="center", ha="left", color="white", fontsize=8)
        panel.set_title(short_name(metric), color=INK, fontsize=11)
        panel.set_xlim(0, 100)
        panel.set_yticks(places, labels, fontsize=9, color=INK)
        panel.tick_params(length=0, labelcolor=INK)
        panel.set_xlabel("accuracy, % (mean over clients; | worst tenth)", fontsize=8, color=SOFT)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.family": "DejaVu Sans"}):
        figure.savefig(path, dpi=130, metadata={"Software": "fedshift"})
