"""The catalogue: methods, adapters and models by name, with where they come from.

>>> from fedshift.core.registry import METHODS
>>> METHODS["fedprox"].year
2020
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
from fedshift.core.options import parse_options
from fedshift.errors import UserError

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing and its provenance."""

    name: str
    make: T
    paper: str
    venue: str
    year: int

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (self.make.__doc__ or "").strip().split("\n")[0].rstrip(".")

    @property
    def options(self) -> dict[str, object]:
        """Hyper-parameters and their defaults, by kebab-case name."""
        if not dataclasses.is_dataclass(self.make):
            return {}
        own = [f for f in dataclasses.fields(self.make) if f.name not in ("arch", "train", "predict_with")]
        return {f.name.replace("_", "-"): None if f.default is dataclasses.MISSING else f.default for f in own}


class Registry(Mapping[str, Entry[T]]):
    """Names to entries; packages of plug-ins are imported the first time somebody looks."""

    def __init__(self, noun: str, *packages: str) -> None:
        self._noun, self._packages = noun, packages
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, *, paper: str = "", venue: str = "", year: int = 0) -> Callable[[C], C]:
        """A decorator that puts a class into the catalogue."""

        def add(make: C) -> C:
            self._entries[name] = Entry(name, make, paper, venue, year)  # type: ignore[arg-type]
            return make

        return add

    def adopt(self, entry: Entry[T]) -> None:
        """Take over an entry of another process; there it may stand in for one of ours."""
        self._all()  # ours are there first
        self._entries[entry.name] = entry

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self:
            close = difflib.get_close_matches(name, self, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(self)}"
            raise UserError(f"there is no {self._noun} {name!r}; {hint}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> Mapping[str, Entry[T]]:
        packages, self._packages = self._packages, ()  # a plug-in may look here while it is imported
        for name in packages:
            for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
                importlib.import_module(module.name)
        return self._entries


METHODS: Registry[type[Method]] = Registry("method", "fedshift.systems", "fedshift.methods")
ADAPTERS: Registry[type[Adapter]] = Registry("adapter", "fedshift.systems", "fedshift.adapters")
MODELS: Registry[Any] = Registry("model", "fedshift.models")

method = METHODS.register
adapter = ADAPTERS.register
model = MODELS.register


def with_options(make: type[T], what: str, options: Mapping[str, object], **fixed: object) -> T:
    """Construct a dataclass from kebab-case options, with a sentence for those that are unknown or not valid."""
    return construct(make, what, **fixed, **parse_options(make, what, options, fixed))


def construct(make: type[T], what: str, **values: Any) -> T:
    """Construct a dataclass of parsed options; what it says against them is said with its name."""
    try:
        return make(**values)
    except TypeError as error:
        raise UserError(f"{what}: {error}") from None
    except UserError as error:  # a check of its values, which does not know what it is called
        text = str(error)
        raise UserError(text if text.startswith(what.split()[0]) else f"{what}: {text}") from None
