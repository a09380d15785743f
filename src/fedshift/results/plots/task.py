"""A picture of a task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedshift.data.task import Task
from fedshift.results.plots.style import INK, PALETTE, SOFT, save


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
    save(figure, path)
