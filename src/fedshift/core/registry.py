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
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
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
        shared = {"arch", "train", "predict_with"}
        return {
            f.name.replace("_", "-"): None if f.default is dataclasses.MISSING else f.default
            for f in dataclasses.fields(self.make)
            if f.name not in shared
        }


class Registry(Mapping[str, Entry[T]]):
    """Names to entries; packages of plug-ins are imported the first time somebody looks."""

    def __init__(self, noun: str, *packages: str) -> None:
        self._noun, self._packages = noun, packages
        self._entries: dict[str, Entry[T]] = {}
        self._loaded = False

    def register(self, name: str, *, paper: str = "", venue: str = "", year: int = 0) -> Callable[[C], C]:
        """A decorator that puts a class into the catalogue."""

        def add(make: C) -> C:
            self._entries[name] = Entry(name, make, paper, venue, year)  # type: ignore[arg-type]
            return make

        return add

    def adopt(self, entry: Entry[T]) -> None:
        """Take over an entry of another process; there it may stand in for one of ours."""
        self._load()
        self._entries[entry.name] = entry

    def __getitem__(self, name: str) -> Entry[T]:
        self._load()
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(self._entries))}"
            raise UserError(f"there is no {self._noun} {name!r}; {hint}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._load()
        return len(self._entries)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for name in self._packages:
            package = importlib.import_module(name)
            for module in pkgutil.walk_packages(package.__path__, f"{name}."):
                importlib.import_module(module.name)


METHODS: Registry[type[Method]] = Registry("method", "fedshift.systems", "fedshift.methods")
ADAPTERS: Registry[type[Adapter]] = Registry("adapter", "fedshift.systems", "fedshift.adapters")
MODELS: Registry[Any] = Registry("model", "fedshift.models")

method = METHODS.register
adapter = ADAPTERS.register
model = MODELS.register


def with_options(make: type[T], what: str, options: Mapping[str, object], **fixed: object) -> T:
    """Construct a dataclass from kebab-case options, with a sentence for unknown or ill-typed ones.

    >>> from fedshift.core.optim import SGD
    >>> with_options(SGD, "optimiser sgd", {"weight-decay": 0.1})
    SGD(lr=0.01, momentum=0.0, weight_decay=0.1)
    """
    known = {f.name.replace("_", "-"): f for f in dataclasses.fields(make) if f.name not in fixed}  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(known) or 'no options'}"
            raise UserError(f"{what} has no option {key!r}; {hint}")
    hints = get_type_hints(make)
    values = {
        known[key].name: _typed(hints[known[key].name], value, f"{what}: {key}") for key, value in options.items()
    }
    try:
        return make(**fixed, **values)
    except TypeError as error:
        raise UserError(f"{what}: {error}") from None
    except UserError as error:  # a check of its values, which does not know what it is called
        text = str(error)
        raise UserError(text if text.startswith(what.split()[0]) else f"{what}: {text}") from None


def _typed(hint: Any, value: object, what: str) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UserError(f"{what} = {value!r} is not valid: {message[0].lower()}{message[1:]}") from None
