"""Which paper, table or figure a preset is for, which folder a paper has, and which page says what we measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import fedshift
from fedshift.core.registry import ADAPTERS, METHODS, Entry
from fedshift.experiment import files

PLACE = re.compile(r"(?:Tables?|Figures?)\s[A-Z]?\d+\w?(?:(?:, | and |, and )(?:(?:Tables?|Figures?)\s)?[A-Z]?\d+\w?)*")


class Preset(NamedTuple):
    """A preset, and what it is for."""

    name: str
    title: str
    paper: str  # the system's name; empty for none
    place: str  # tables and figures
    methods: tuple[str, ...]
    adapters: tuple[str, ...]
    needs: str


class System(NamedTuple):
    """One of the five: its folder, what it registers, and the page of its results."""

    folder: str
    methods: tuple[str, ...]
    adapters: tuple[str, ...]
    results: str


def _folder(entry: Entry[type]) -> str:
    parts = entry.make.__module__.split(".")
    return parts[2] if parts[1] == "systems" else ""


def _system(folder: str, results: str) -> System:
    methods, adapters = (
        [n for n, entry in registry.items() if _folder(entry) == folder] for registry in (METHODS, ADAPTERS)
    )
    first = sorted(methods, key=lambda name: name != folder)  # the method that the folder is called after
    return System(folder, tuple(first), tuple(adapters), results)


SYSTEMS: Mapping[str, System] = {
    name: _system(name.lower(), "brfl.md" if name == "FedTHE" else f"{name.lower()}.md")
    for name in ("FedTHE", "FedICON", "FedCiR", "FedTTA", "FDSE")
}


def _preset(name: str) -> Preset:
    experiment = fedshift.Experiment.load(name)
    text = (Path(files.__file__).parent / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    head = " ".join(line.removeprefix("#").strip() for line in text.split("\n")[:3] if line.startswith("#"))
    papers = re.findall("|".join(SYSTEMS), head) if name != "default" else []
    places = PLACE.findall(head)
    return Preset(
        name,
        re.sub(r"^[A-Z]\d: ", "", experiment.title),
        papers[0] if papers else "",
        places[0] if places and papers else "",
        tuple(dict.fromkeys(spec.name for spec in experiment.method)),
        tuple(dict.fromkeys(adapter.name for spec in experiment.method for adapter in spec.adapters)),
        " ".join((experiment.data.needs or experiment.data.source).split()),
    )


PRESETS: Mapping[str, Preset] = {name: _preset(name) for name in files.presets()}
