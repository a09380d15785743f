"""What is known about the images of a source before their pixels are: a request, rows, and names as codes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift.data.pool import Column, Pool
from fedshift.data.windows import Window
from fedshift.errors import UserError

SPLITS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
_FIELDS: dict[str, tuple[str, str | None]] = {  # a role and where the pool keeps its codes and their names
    "client": ("domains", "domain_names"),
    "user": ("users", "user_names"),
    "super": ("supers", "super_names"),
    "group": ("groups", "group_names"),
    "split": ("splits", None),
}


@dataclass(frozen=True)
class Request:
    source: str
    rest: str  # the source without its scheme
    columns: Mapping[str, str] | None
    size: int | None
    channels: int
    cache: Path | None
    attributes: tuple[str, ...] = ()
    window: Window | None = None

    def path(self, text: str) -> Path:
        """The path with ``~`` and environment variables replaced."""
        for bare, braced in re.findall(r"\$(?:(\w+)|\{(\w+)\})", text):
            if (bare or braced) not in os.environ:
                raise UserError(
                    f'the source "{self.source}" needs the environment variable {bare or braced}, which is not set'
                )
        return Path(os.path.expandvars(text)).expanduser()


@dataclass(frozen=True)
class Rows:
    """Everything about the images but their pixels."""

    encoded: Sequence[Any]  # a picture file's bytes, or the path of one
    where: Callable[[int], str]  # names an image in an error
    labels: np.ndarray
    classes: tuple[str, ...]
    texts: Mapping[str, Sequence[str]]  # role -> one string per image: client, user, super, group, split
    names: Sequence[str] = ()  # of the images, for lists of them
    attributes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)  # for people: which column groups are from, hints


def refuse_columns(request: Request, why: str = "") -> None:
    """For sources that have no table: neither roles nor attributes can come from one."""
    if request.columns is not None:
        raise UserError(f'the source "{request.source}" has no columns to name: leave columns out{why}')
    for name in request.attributes:
        raise UserError(f'the source "{request.source}" has no column "{name}" (attributes): it has none at all{why}')


def facts_of(group: str | None, hints: Iterable[str]) -> dict[str, object]:
    """What people are told of a source's groups."""
    told = [hint for hint in hints if hint]
    return {**({"group": group} if group else {}), **({"hints": told} if told else {})}


def with_hints(pool: Pool, hints: Sequence[str]) -> Pool:
    """The pool, and more that people are told of its source."""
    if not hints:
        return pool
    before = pool.provenance.get("hints", [])
    assert isinstance(before, list)
    return replace(pool, provenance={**pool.provenance, "hints": [*hints, *before]})


def ordered(texts: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in a fixed order, numbers by value: "9" before "10"."""
    return tuple(sorted(set(texts), key=lambda text: (0, int(text), text) if text.isdecimal() else (1, 0, text)))


def class_names(labels: Sequence[str], where: Callable[[int], str]) -> tuple[str, ...]:
    """The classes of labels that come without a list of names."""
    for i, label in enumerate(labels):
        if re.fullmatch(r"-\d+", label):
            raise UserError(f"the label of {where(i)} is {label}, which is how data sets write an unknown one")
    return ordered(labels)


def as_codes(
    texts: Sequence[str], names: Sequence[str], where: Callable[[int], str], missing: bool = False
) -> np.ndarray:
    """Each text's position among the names; -1 for an empty one, if some may be ``missing``."""
    position = {name: i for i, name in enumerate(names)} | ({"": -1} if missing else {})
    strange = next((i for i, text in enumerate(texts) if text not in position), None)
    if strange is not None:
        raise UserError(f"{texts[strange]!r} in {where(strange)} is not one of {', '.join(names)[:200]}")
    return np.array([position[text] for text in texts], dtype=np.int64)


def pool_of(rows: Rows, images: np.ndarray, provenance: Mapping[str, object]) -> Pool:
    extra: dict[str, Any] = {}
    for role, texts in rows.texts.items():
        if role == "split":
            names: tuple[str, ...] = tuple(SPLITS)
            codes = np.array(list(SPLITS.values()))[as_codes([text.lower() for text in texts], names, rows.where)]
        else:
            names = ordered(text for text in texts if text)
            codes = as_codes(texts, names, rows.where, missing=role == "group")
        codes_field, names_field = _FIELDS[role]
        extra[codes_field] = torch.from_numpy(codes)
        if names_field is not None:
            extra[names_field] = names
    return Pool(
        torch.from_numpy(images),
        torch.from_numpy(rows.labels),
        rows.classes,
        names=tuple(rows.names),
        attributes={name: Column.of(texts) for name, texts in rows.attributes.items()},
        provenance={**provenance, **rows.facts},
        **extra,
    )


def line(error: BaseException) -> str:
    """An exception as part of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
