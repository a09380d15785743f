"""Features in the plane: the colour is the class, the marker the client or its domain, one legend for all panels."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedshift.results.plots.style import INK, MARKERS, SOFT, shades

MOST = 20  # entries of a legend


def draw_clouds(
    figure: Figure,
    panels: Sequence[Axes],
    placed: Sequence[Mapping[str, Any]],
    unseen: Sequence[Collection[str]],
    size: float,
) -> None:
    """Points that ``tsne.places`` has placed, a panel for each run; ``unseen`` are its unseen clients."""
    stand_for = [marked(place["clients"], own) for place, own in zip(placed, unseen, strict=True)]
    names = list(dict.fromkeys(name for own in stand_for for name in own))
    markers = {name: MARKERS[k % len(MARKERS)] for k, name in enumerate(names)}
    for panel, place, own_names in zip(panels, placed, stand_for, strict=True):
        x, y, label, client = (np.array(place[key]) for key in ("x", "y", "label", "client"))
        tones = shades(len(place["classes"]))
        for number, name in enumerate(own_names):
            own = client == number
            panel.scatter(x[own], y[own], c=tones[label[own]], marker=markers[name], s=size, alpha=0.8, linewidths=0)
        panel.set_xticks([])
        panel.set_yticks([])
        for spine in panel.spines.values():
            spine.set_color(SOFT)
    classes = placed[0]["classes"]
    colours = [Line2D([], [], color=shade, marker="o", linestyle="") for shade in shades(len(classes))]
    shapes = [Line2D([], [], color=INK, marker=marker, linestyle="") for marker in markers.values()]
    columns = max(1, int(figure.get_figwidth() / (0.55 + 0.085 * max(map(len, names)))))
    figure.legend(*few(colours, classes), loc="outside right upper", fontsize=9, frameon=False)
    figure.legend(*few(shapes, names), loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def marked(clients: Sequence[str], unseen: Collection[str] = ()) -> list[str]:
    """What a client's marker stands for: its domain, where several clients share one and are numbered, or itself.

    >>> marked(["pen-0", "pen-1", "font-0"], ["pen-1"]), marked(["pen", "font"]), marked(["client-0", "client-1"])
    (['pen', 'pen (unseen)', 'font'], ['pen', 'font'], ['client-0', 'client-1'])
    """
    domains = [re.sub(r"-\d+$", "", name) for name in clients]
    shared = 1 < len(set(domains)) < len(clients)
    return [
        (domain if shared else name) + (" (unseen)" if name in unseen else "")
        for name, domain in zip(clients, domains, strict=True)
    ]


def few(handles: Sequence[Line2D], names: Sequence[str]) -> tuple[list[Line2D], list[str]]:
    """Not too many entries of a legend."""
    more = len(names) - MOST
    if more <= 0:
        return list(handles), list(names)
    return [*handles[:MOST], Line2D([], [], linestyle="")], [*names[:MOST], f"and {more} more"]
