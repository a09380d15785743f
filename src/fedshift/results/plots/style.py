"""What all pictures have in common: colours, markers, and how they are written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter

from fedshift.data.output import fresh
from fedshift.results.plain import plain

INK, SOFT = "#1f2430", "#8a90a0"
# ten, so that none comes twice before that
PALETTE = (
    *("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#718096"),
    *("#6b46c1", "#d69e2e", "#0bc5ea", "#c53030", "#5d4037"),
)
STROKES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")


def shades(count: int) -> np.ndarray[Any, Any]:
    """Colours [count, 4] that can be told apart while there are at most twenty."""
    if count <= 20:
        return np.array([mpl.colormaps["tab10" if count <= 10 else "tab20"](k) for k in range(count)])
    return np.asarray(mpl.colormaps["turbo"](np.linspace(0, 1, count)))


def save(figure: Figure, path: Path) -> None:
    """Write a figure, and the folder it goes into. Names in it are only text: a dollar is a dollar, no formula."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(plain(text.get_text()))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        named = axis.get_major_formatter()
        if isinstance(named, FixedFormatter):
            axis.set_major_formatter(FixedFormatter([plain(name) for name in named.seq]))
    with mpl.rc_context({"font.family": "DejaVu Sans"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box is drawn instead
        figure.savefig(fresh(path), dpi=130, metadata={"Software": "fedshift"})
