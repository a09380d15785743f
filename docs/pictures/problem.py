"""The problem in one picture: clients train, the world moves, accuracies fall; the numbers are the demo's, in the README."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from fedshift.data.corruptions import corrupt
from fedshift.data.sources import load

README = Path(__file__).parents[2] / "README.md"
INK, PLAIN, CHOSEN = "#22303c", "#b9c4cd", "#3f6fb5"
ROWS = {"FedAvg": ("fedavg", "none"), "FedICON with its adapter": ("fedicon", "fedicon")}


def numbers() -> dict[str, list[float]]:
    """Accuracies of the demo by row: original, corrupted, unseen."""
    table = re.findall(r"(?m)^│(.+)│$", README.read_text(encoding="utf-8"))
    cells = [[cell.strip() for cell in line.split("│")] for line in table]
    found = {(row[0], row[1]): [float(row[i].rstrip(" ~")) for i in (2, 3, 4)] for row in cells if row[4] != "-"}
    return {title: found[row] for title, row in ROWS.items()}


def problem() -> Figure:
    """Who trains, what comes then, and what is left of the accuracy."""
    figure = Figure(figsize=(9, 3.9), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 900), ylim=(390, 0))
    axes.axis("off")
    digits = load("embedded:digits", size=32)
    shown = {name: digits.only(domains=[name]).images[4] for name in ("pen", "paper", "china", "font", "flower")}
    drifted = corrupt(shown["paper"][None], "gaussian-noise", 4, 0, torch.tensor([7]))[0]
    _say(axes, 150, 26, "Clients train, and share no data", 10.5, True)
    for number, name in enumerate(("pen", "paper", "china", "font")):
        _picture(axes, (60 + 60 * number, 84), shown[name])
        _say(axes, 60 + 60 * number, 124, f"client {number + 1}", 7.5)
    axes.add_patch(FancyArrowPatch((292, 84), (352, 84), arrowstyle="-|>", mutation_scale=14, color=INK))
    _say(axes, 610, 26, "Then the world moves", 10.5, True)
    panels = (
        (430, shown["paper"], "more of the same", "its own test images"),
        (610, drifted, "a client's data drift", "a new scanner, noise, weather"),
        (790, shown["flower"], "an unseen client arrives", "another kind of images, no labels"),
    )
    rows = numbers()
    for place, (x, image, title, words) in enumerate(panels):
        _picture(axes, (x, 84), image)
        _say(axes, x, 126, title, 8.6, True)
        _say(axes, x, 141, words, 7.5)
        for number, (row, values) in enumerate(rows.items()):
            _bar(axes, x - 44 + 52 * number, values[place], PLAIN if row == "FedAvg" else CHOSEN)
    for number, row in enumerate(rows):
        y = 230 + 24 * number
        axes.add_patch(Rectangle((60, y - 7), 14, 14, fc=PLAIN if row == "FedAvg" else CHOSEN))
        axes.text(82, y, row, fontsize=8.6, color=INK, va="center")
    _say(axes, 170, 190, "What is left of the accuracy, in %", 9, True)
    _say(
        axes,
        170,
        300,
        "Which way of training, with which way of adapting\nafterwards, still works? That is the question here.",
        8.6,
    )
    axes.plot([350, 880], [352, 352], color=INK, lw=0.8)
    return figure


def _picture(axes: Axes, place: tuple[float, float], image: Tensor) -> None:
    pixels = image.permute(1, 2, 0).numpy()
    axes.add_artist(
        AnnotationBbox(OffsetImage(pixels, zoom=1.25, interpolation="nearest"), place, frameon=False, pad=0)
    )


def _bar(axes: Axes, x: float, value: float, colour: str) -> None:
    height = value * 1.9
    axes.add_patch(Rectangle((x, 352 - height), 36, height, fc=colour))
    axes.text(x + 18, 346 - height, f"{value:.0f}", ha="center", va="bottom", fontsize=9, color=INK)


def _say(axes: Axes, x: float, y: float, text: str, size: float, bold: bool = False) -> None:
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=INK, fontweight=weight)
