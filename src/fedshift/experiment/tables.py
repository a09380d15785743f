"""What the tables of an experiment are made of: keys in kebab-case, names that can be folders, strict numbers."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, Strict, StrictInt


def kebab(name: str) -> str:
    """A key as files spell it.

    >>> kebab("checkpoint_every")
    'checkpoint-every'
    """
    return name.replace("_", "-")


def without_privacy(dumped: dict[str, Any]) -> dict[str, Any]:
    """As experiments were written down before there was any: what has none is the same run as ever.

    >>> without_privacy({"rounds": 3, "privacy": {}})
    {'rounds': 3}
    """
    return {key: value for key, value in dumped.items() if key != "privacy" or value}


class Table(BaseModel):
    """A TOML table: kebab-case keys, nothing unknown."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=kebab, populate_by_name=True, frozen=True, protected_namespaces=()
    )


class Named(BaseModel):
    """A table that names a registered thing; its other keys are that thing's options, checked when it is made."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def options(self) -> dict[str, Any]:
        """The other keys, kebab-case."""
        return {kebab(key): value for key, value in (self.model_extra or {}).items()}


# what lies beside the folders that labels name, and what marks a run folder
_TAKEN = frozenset({"artefacts", "adapters", "done", "exported", "inspect", "joined", "snapshots"})
_FILES = (".csv", ".html", ".json", ".jsonl", ".png", ".safetensors", ".toml")
_LONGEST = 100  # characters of four bytes, with an ending, are more than some disks take; nobody reads more either


def folder_name(value: str) -> str:
    """Labels and names are also names of folders and files."""
    if "/" in value or "\\" in value or value.startswith(".") or value != value.strip() or not value.isprintable():
        raise ValueError(f"{value!r} cannot name a folder: no slashes, no leading dot, no space around it")
    if value.lower() in _TAKEN or value.lower().endswith(_FILES):
        raise ValueError(f"{value!r} cannot name a folder: files of fedshift are called so")
    if len(value) > _LONGEST:
        raise ValueError(f"{value[:20] + '...'!r} cannot name a folder: it has more than {_LONGEST} characters")
    return value


def not_empty(value: str) -> str:
    """Refuse an empty name."""
    if not value:
        raise ValueError("it must have a name")
    return value


def no_flag(value: Any) -> Any:
    """Refuse true and false, which Python takes for numbers."""
    if isinstance(value, bool):
        raise ValueError(f"input should be a number, not {value!r}")
    return value


def _name_or_pair(value: Any) -> Any:
    """Refuse what is no window in one sentence, before a name and a pair are tried one after the other."""
    pair = isinstance(value, list | tuple) and len(value) == 2
    if (
        value is None
        or isinstance(value, str)
        or (pair and all(type(n) in (int, float) and isfinite(n) for n in value))
    ):
        return value
    raise ValueError(f"it must be a name, or centre and width, not {value!r}")


def _distinct_names(value: list[str]) -> list[str]:
    twice = next((name for name in value if value.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is named twice")
    return value


Label = Annotated[str, AfterValidator(folder_name)]
Name = Annotated[Label, AfterValidator(not_empty)]
Names = Annotated[list[str], AfterValidator(_distinct_names)]
Real = Annotated[float, Strict(), AllowInfNan(False)]
Window = Annotated[str | list[Real] | None, BeforeValidator(_name_or_pair)]
Seed = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
