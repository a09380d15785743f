"""A picture of a task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedshift.data.audit import groups_line
from fedshift.data.task import Task
from fedshift.results.plots.style import INK, PALETTE, SOFT, save

NAMED = 30  # classes, up to which all are named below the bars


def task_picture(task: Task, path: Path, examples: int = 8) -> None:
    """Who owns what: every client's class histogram, and some of its images in every stream.

    At most twelve clients are drawn, spread evenly over all of them.
    """
    everyone = [*task.clients, *task.unseen]
    step = max(1, -(-len(everyone) // 12))
    shown = everyone[::step]
    columns = [*task.streams] or ["train"]
    named = len(task.classes) <= NAMED
    figure = Figure(
        figsize=(3.2 + 2.9 * len(columns), (1.5 if named else 1.1) + 0.62 * len(shown)), layout="constrained"
    )
    axes = figure.subplots(len(shown), 1 + len(columns), squeeze=False, width_ratios=[1, *[1.25] * len(columns)])
    for row, client in enumerate(shown):
        counts = np.bincount(
            task.labels[client.train if len(client.train) else client.test].cpu().numpy(), minlength=len(task.classes)
        )
        bars = axes[row, 0]
        bars.bar(range(len(counts)), counts, color=PALETTE[0] if len(client.train) else PALETTE[1], width=0.8)
        bars.set_ylabel(client.name, rotation=0, ha="right", va="center", color=INK, fontsize=9)
        last = row == len(shown) - 1
        names = [_short(name) for name in task.classes] if named and last else []
        turned = 90 if max(map(len, names), default=0) > 2 else 0
        bars.set_xticks(range(len(names)), names, rotation=turned, fontsize=7 if len(names) <= 12 else 5, color=INK)
        bars.tick_params(length=0)
        bars.set_yticks([])
        bars.set_ylim(0, 1.3 * max(int(counts.max()), 1))  # room for the number
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
            picture.set(xticks=[], yticks=[])  # or all of those that nobody sees would be made
            picture.set_axis_off()
            width = int(samples.images.shape[3])
            for place, label in enumerate(samples.labels[samples.index[:examples]].tolist()):
                middle = (place + 0.5) * width
                picture.text(
                    middle, -0.06 * width, _short(task.classes[label], 9), ha="center", fontsize=4.5, color=SOFT
                )
            if row == 0:
                picture.set_title(stream, color=INK, fontsize=10, pad=10)
    axes[0, 0].set_title("training labels by class", color=INK, fontsize=10, pad=10)
    if not named:
        axes[-1, 0].set_xlabel(f"{task.classes[0]} ... {task.classes[-1]}", color=INK, fontsize=7)
    more = f" ({len(shown)} of {len(everyone)} clients)" if len(shown) < len(everyone) else ""
    figure.suptitle(f"task {task.hash}{more}; {groups_line(task)}", color=SOFT, fontsize=8, x=0.99, ha="right")
    save(figure, path)


def _short(name: str, most: int = 14) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
