"""What all pictures have in common: colours, markers, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

INK, SOFT = "#1f2430", "#8a90a0"
PALETTE = ("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#718096", "#6b46c1")
STROKES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")


def shades(count: int) -> np.ndarray[Any, Any]:
    """Colours [count, 4] that can be told apart while there are at most twenty."""
    if count <= 20:
        return np.array([mpl.colormaps["tab10" if count <= 10 else "tab20"](k) for k in range(count)])
    return np.asarray(mpl.colormaps["turbo"](np.linspace(0, 1, count)))


def save(figure: Figure, path: Path) -> None:
    """Write a figure, and the folder it goes into."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.family": "DejaVu Sans"}):
        figure.savefig(path, dpi=130, metadata={"Software": "fedshift"})
