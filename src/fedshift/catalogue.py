"""Everything there is to choose from, as plain rows.

Making the rows imports torch and every plug-in. So they are also kept in a file of the package, which ``fedshift list``
reads; ``python docs/generate.py --text`` writes it anew, and a test compares.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.core.arch import Arch
    from fedshift.core.registry import Registry

Rows = list[dict[str, Any]]


def listed() -> dict[str, Rows]:
    """All rows by the name of their list, as they were when the package was made.

    >>> [row["venue"] for row in listed()["methods"] if row["name"] == "fedprox"]
    ['MLSys 2020']
    """
    found: dict[str, Rows] = json.loads((resources.files("fedshift") / "catalogue.json").read_text(encoding="utf-8"))
    return found


def rows_of(what: str) -> Rows:
    """The rows of one list: as they are now where registries are loaded, since a script's own plug-ins are among them."""
    if what not in CATALOGUE:
        raise UserError(f"there is no list of {what!r}; there are: {', '.join(CATALOGUE)}")
    return CATALOGUE[what]() if "fedshift.core.registry" in sys.modules else listed()[what]


def made() -> dict[str, Rows]:
    """All rows by the name of their list, from the registries as they are now."""
    return {name: rows() for name, rows in CATALOGUE.items()}


def as_text(lists: Mapping[str, Rows]) -> str:
    """The file's text: a line for each row, so that two changes of it seldom meet."""
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"
        for name, rows in lists.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _registered(registry: Registry[Any]) -> Rows:
    return [
        {
            "name": entry.name,
            "summary": entry.summary,
            "paper": entry.paper,
            "venue": f"{entry.venue} {entry.year}".strip() if entry.year else "",
            "options": {key: _shown(value) for key, value in entry.options.items()},
        }
        for entry in registry.values()
    ]


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def methods() -> Rows:
    """Training methods, with what they deploy and need, and the phases that ``[train] balance`` does not reach."""
    from fedshift.core.registry import METHODS
    from fedshift.engines.balance import own_ways

    rows, arch = _registered(METHODS), _network()
    for row in rows:
        cls = METHODS[row["name"]].make
        row |= {"deploys": sorted(cls.provides), "needs": sorted(cls.requires), "personal": cls.personal}
        row["own-balance"] = own_ways(cls(arch=cls.build(arch, {})), rounds=1)
    return rows


def adapters() -> Rows:
    """Test-time adapters, with what they need."""
    from fedshift.core.registry import ADAPTERS

    rows = _registered(ADAPTERS)
    for row in rows:
        cls = ADAPTERS[row["name"]].make
        row["needs"] = sorted(cls.requires | cls.requires_arch)
    return rows


def models() -> Rows:
    """Networks."""
    from fedshift.core.registry import MODELS

    return _registered(MODELS)


def _options(cls: type) -> dict[str, object]:
    fields = dataclasses.fields(cls)
    return {f.name.replace("_", "-"): None if f.default is dataclasses.MISSING else _shown(f.default) for f in fields}


def partitions() -> Rows:
    """Ways to give images to clients."""
    from fedshift.data.partition import PARTITIONS

    return [
        {"name": n, "summary": PARTITIONS[n].describe(), "options": _options(PARTITIONS[n])} for n in sorted(PARTITIONS)
    ]


def streams() -> Rows:
    """Kinds of test streams."""
    from fedshift.data.streams import STREAMS

    return [
        {"name": name, "summary": (cls.__doc__ or "").split("\n")[0].rstrip("."), "options": _options(cls)}
        for name, cls in sorted(STREAMS.items())
    ]


def presets() -> Rows:
    """Experiments that need no file."""
    from fedshift.experiment.files import presets as names
    from fedshift.experiment.schema import Experiment

    loaded = [(name, Experiment.load(name)) for name in names()]
    return [{"name": name, "title": e.title, "data": e.data.needs or e.data.source} for name, e in loaded]


def pairs() -> Rows:
    """Which adapter can follow which method, on a network with BatchNorm; 'yes' or '-'."""
    from fedshift.core.compatibility import missing_for_pair
    from fedshift.core.registry import ADAPTERS, METHODS

    arch = _network()
    rows: Rows = []
    for name, entry in METHODS.items():
        row: dict[str, Any] = {"name": name}
        method = entry.make(arch=entry.make.build(arch, {}))
        for other, cls in ADAPTERS.items():
            adapter = cls.make(arch=method.arch, predict_with=method.predict)
            row[other] = "yes" if missing_for_pair(name, method.provides, other, adapter) is None else "-"
        rows.append(row)
    return rows


def _network() -> Arch:
    """A small one with BatchNorm, on which every method can be made."""
    from torch import nn

    from fedshift.core.arch import Arch

    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2))
    return Arch.of(layers, (1, 2, 2))


CATALOGUE: Mapping[str, Callable[[], Rows]] = {
    "methods": methods,
    "adapters": adapters,
    "models": models,
    "partitions": partitions,
    "streams": streams,
    "presets": presets,
    "pairs": pairs,
}
