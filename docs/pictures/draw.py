"""Draws the pictures of the design (the walk, and who may import whom, read from the test's rule) and of the home page.

python docs/pictures/draw.py            # writes walk.svg, imports.svg and problem.svg beside this file
python docs/pictures/draw.py --png DIR  # the same as PNG, to look at
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
matplotlib.rcParams.update({"svg.hashsalt": "fedshift", "font.family": "DejaVu Sans"})

INK, PAPER = "#22303c", "#ffffff"
NOUN, WORK, FILE, SOFT = "#dcebf7", "#f3f3f0", "#e6f2df", "#fbefd5"
Point = tuple[float, float]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A sheet measured in hundredths of an inch, with the origin at the upper left."""
    figure = Figure(figsize=(width / 100, height / 100), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, centre: Point, text: str, colour: str, width: float = 100, height: float = 40) -> None:
    """A box around its centre; the first line is bold."""
    x, y = centre
    style = "round,pad=0,rounding_size=6"
    axes.add_patch(
        FancyBboxPatch((x - width / 2, y - height / 2), width, height, style, fc=colour, ec=INK, lw=0.9, zorder=2)
    )
    head, *rest = text.split("\n")
    lines = len(rest) + 1
    for number, line in enumerate([head, *rest]):
        place = y + 12 * (number - (lines - 1) / 2)
        weight, size = ("bold", 8.6) if number == 0 else ("normal", 7.4)
        axes.text(x, place, line, ha="center", va="center", fontsize=size, fontweight=weight, color=INK, zorder=3)


def arrow(axes: Axes, start: Point, end: Point, dashed: bool = False, bend: float = 0.0) -> None:
    """An arrow between two points of the sheet."""
    line = FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=10)
    line.set(color=INK, linewidth=1.0, linestyle=(0, (3, 2)) if dashed else "solid", zorder=1)
    line.shrinkA = line.shrinkB = 0
    axes.add_patch(line)


def walk() -> Figure:
    """One way for everything."""
    figure, axes = canvas(800, 400)
    axes.add_patch(
        FancyBboxPatch((244, 22), 282, 96, "round,pad=0,rounding_size=8", fc="#f8fbfd", ec=INK, lw=0.9, zorder=0)
    )
    axes.text(385, 36, "Session: a run in memory", ha="center", va="center", fontsize=8, color=INK, fontweight="bold")
    top = 78
    box(axes, (66, top), "Experiment\na TOML file", NOUN, 104)
    box(axes, (184, top), "plan\njobs, checked", WORK, 88)
    for x, name in ((296, "rounds\nengine"), (386, "deploy\nlast phases"), (476, "evaluate\nadapters x\nstreams")):
        box(axes, (x, top), name, WORK, 76, 50)
    box(axes, (592, top), "score rows\nin the run folder", FILE, 104)
    box(axes, (724, top), "Results\ntables, plots,\npages, JSON", NOUN, 104, 50)
    for start, end in ((118, 140), (228, 258), (334, 348), (424, 438), (514, 540), (644, 672)):
        arrow(axes, (start, top), (end, top))
    box(axes, (386, 206), "Deployment\nmodels of one chosen round", NOUN, 176)
    arrow(axes, (386, 103), (386, 186))
    box(axes, (592, 206), "Artefact\nwhat one client serves with", FILE, 168)
    arrow(axes, (474, 206), (508, 206))
    box(axes, (724, 300), "fedshift.load\na function: images\nto logits", WORK, 112, 50)
    arrow(axes, (664, 226), (700, 275), bend=-0.2)
    box(axes, (742, 206), "export\nONNX, torch", WORK, 92)
    arrow(axes, (676, 206), (696, 206))
    box(axes, (96, 206), "run folder\nstates, snapshot, scores, done", FILE, 176)
    arrow(axes, (296, 103), (140, 186), bend=0.08)
    box(axes, (232, 300), "open_run(path)", WORK, 126, 30)
    arrow(axes, (110, 226), (169, 300), bend=0.2)
    arrow(axes, (295, 296), (350, 226), bend=0.15)
    box(axes, (386, 356), "inspect\nfeatures, distances, risks", WORK, 164)
    arrow(axes, (386, 226), (386, 336))
    box(axes, (592, 300), "join\nan unseen client", WORK, 116)
    arrow(axes, (450, 226), (534, 300), bend=0.15)
    arrow(axes, (592, 280), (592, 226))
    _legend(axes, 30, 372)
    return figure


def _legend(axes: Axes, x: float, y: float) -> None:
    for number, (colour, word) in enumerate(((NOUN, "noun"), (WORK, "work"), (FILE, "files"))):
        left = x + 66 * number
        axes.add_patch(FancyBboxPatch((left, y - 5), 14, 10, "round,pad=0,rounding_size=2", fc=colour, ec=INK, lw=0.7))
        axes.text(left + 20, y, word, va="center", fontsize=7.4, color=INK)


ROW, TALL = 82, 56  # from one layer to the next, and a box
SHEET = 900


def layers(may: Mapping[str, set[str]]) -> list[list[str]]:
    """Packages from below: each above all that it may import; one that imports nothing just beneath those who use it.

    >>> layers({"core": set(), "toml": set(), "data": {"core"}, "runs": {"data", "toml"}})
    [['core'], ['data', 'toml'], ['runs']]
    """
    level = dict.fromkeys(may, 0)
    for _ in may:
        level = {name: 1 + max((level[used] for used in may[name]), default=-1) for name in may}
    users = {name: [level[user] for user in may if name in may[user]] for name in may}
    level |= {name: min(users[name]) - 1 for name in may if users[name] and not may[name]}
    return [[name for name in may if level[name] == row] for row in range(max(level.values()) + 1)]


def places(may: Mapping[str, set[str]]) -> dict[str, Point]:
    """Where the boxes stand: layer above layer, each box near those that it has arrows to and from."""
    rows = layers(may)
    edges = reduced(may)
    near = {name: [b if a == name else a for a, b in edges if name in (a, b)] for name in may}
    top = 66 + ROW * (len(rows) - 1)
    for _ in range(6):
        spots = {
            name: (SHEET * (number + 0.5) / len(row), float(top - ROW * level))
            for level, row in enumerate(rows)
            for number, name in enumerate(row)
        }
        rows = [
            sorted(row, key=lambda name: _middle([spots[n][0] for n in near[name]] or [spots[name][0]])) for row in rows
        ]
    return spots


def _middle(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def words(package: str) -> str:
    """What a package is: its own first sentence, as far as the first colon or semicolon."""
    text = (
        ast.get_docstring(
            ast.parse((HERE.parents[1] / "src" / "fedshift" / package / "__init__.py").read_text(encoding="utf-8"))
        )
        or ""
    )
    first = re.split(r"[:;.]( |$)", text.replace("``", "").replace("\n", " "))[0]
    return "\n".join(textwrap.wrap(first, 23, max_lines=3, placeholder=" ..."))


def reduced(may: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs (user, used) without those that follow from others."""
    below = {name: set(used) for name, used in may.items()}
    for _ in may:
        below = {name: used | {deep for near in used for deep in below[near]} for name, used in below.items()}
    return [
        (name, used)
        for name in may
        for used in sorted(may[name])
        if not any(used in below[other] for other in may[name] - {used})
    ]


def imports() -> Figure:
    """Who may import whom: the rule of ``tests/test_imports.py``."""
    from tests.test_imports import ALONE, MAY, PLUGINS, TOP

    spots = places(MAY)
    height = max(y for _, y in spots.values()) + 62
    figure, axes = canvas(SHEET, height)
    for user, used in reduced(MAY):
        (x0, y0), (x1, y1) = spots[user], spots[used]
        lean = max(-40.0, min(40.0, (x1 - x0) / 6))  # arrows of one box leave side by side
        arrow(axes, (x0 + lean, y0 + TALL / 2), (x1 - lean, y1 - TALL / 2))
    (x0, y0), (x1, y1) = spots["runs"], max(spots[name] for name in PLUGINS)
    arrow(axes, (x0 - 68, y0), (x1, y1 - TALL / 2), dashed=True, bend=0.15)
    note = "dashed: by name, through\nthe registries in core"
    axes.text(110, y0, note, fontsize=7.4, color=INK, ha="center", va="center")
    crowd = max(len(row) for row in layers(MAY))
    width = min(136.0, SHEET / crowd - 10)
    roof = set(layers(MAY)[-1])
    for name, spot in spots.items():
        colour = NOUN if name == "core" else SOFT if name in PLUGINS else FILE if name in roof else WORK
        box(axes, spot, f"{name}\n{words(name)}", colour, width, TALL)
    files = sorted(name for name in ALONE if name not in {"__init__.py", "errors.py"})
    note = f"{', '.join(f'{name}/' for name in sorted(TOP))}, {', '.join(files)} stand on top"
    axes.text(SHEET / 2, 22, note, fontsize=7.8, ha="center", va="center", color=INK)
    note = "An arrow goes from who imports to who is imported; what follows from other arrows is left out."
    axes.text(SHEET / 2, height - 16, note, fontsize=7.4, ha="center", va="center", color=INK)
    return figure


if __name__ == "__main__":
    from docs.pictures.problem import problem

    pictures = {"walk": walk(), "imports": imports(), "problem": problem()}
    if "--png" in sys.argv:
        target = Path(sys.argv[sys.argv.index("--png") + 1])
        for name, figure in pictures.items():
            figure.savefig(target / f"{name}.png", dpi=100)
    else:
        for name, figure in pictures.items():
            figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
