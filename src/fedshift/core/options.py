"""What an option may be is said once, in its type: ``mu: NonNegative = 0.1``. Sentences use the words of the TOML file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedshift.errors import UserError


class Rule(NamedTuple):
    """A note in an annotated type: when a value will do, and what is said (with ``{name}`` and ``{value}``) if not."""

    holds: Callable[[Any], bool]
    words: str


def at_least(least: int, why: str = "") -> Rule:
    """A smallest value, and the reason for it."""
    return Rule(lambda v: v >= least, f"{{name}} must be at least {least}, not {{value}}{why and ': ' + why}")


_REAL = Rule(lambda v: isinstance(v, Real) and not isinstance(v, bool), "{name} must be a number, not {value!r}")
_WHOLE = Rule(lambda v: isinstance(v, Integral) and not isinstance(v, bool), "{name} must be an integer, not {value!r}")
_FINITE = Rule(math.isfinite, "{name} must be finite, not {value}")
_NOT_NEGATIVE = Rule(lambda v: v >= 0, "{name} must not be negative, not {value}")
_POSITIVE = Rule(lambda v: v > 0, "{name} must be positive, not {value}")

Finite = Annotated[float, _REAL, _FINITE]
NonNegative = Annotated[float, _REAL, _NOT_NEGATIVE, _FINITE]
Positive = Annotated[float, _REAL, _POSITIVE, _FINITE]
BelowOne = Annotated[NonNegative, Rule(lambda v: v < 1, "{name} must be below 1, not {value}")]
UnitInterval = Annotated[float, _REAL, Rule(lambda v: 0 <= v <= 1, "{name} must lie in [0, 1], not {value}")]
Share = Annotated[UnitInterval, _POSITIVE]
Factor = Annotated[float, _REAL, Rule(lambda v: 0 < v <= 1, "{name} must lie in (0, 1], not {value}")]
Whole = Annotated[int, _WHOLE]
NonNegativeInt = Annotated[Whole, _NOT_NEGATIVE]
Count = Annotated[Whole, _POSITIVE]

ALIASES = {"optimizer": "optimiser", "color": "colour", "newcomer-epochs": "unseen-epochs"}


class Option(NamedTuple):
    """A field's type, the rules in it, and whether it may be None instead."""

    hint: Any
    rules: tuple[Rule, ...]
    optional: bool

    def check(self, name: str, value: object) -> None:
        """Raise a sentence on the first rule that does not hold."""
        for rule in () if value is None and self.optional else self.rules:
            if not rule.holds(value):
                raise UserError(rule.words.format(name=name, value=value))


def options_of(cls: Any) -> dict[str, Option]:
    """A dataclass's options by field; they stay with it where it goes, also to a process without its module's names."""
    if "_options" not in vars(cls):
        hints = [(f.name, get_type_hints(cls, include_extras=True)[f.name]) for f in fields(cls)]
        notes = {
            name: [n for part in (t, *get_args(t)) for n in getattr(part, "__metadata__", ())] for name, t in hints
        }
        rules = {name: tuple(note for note in found if isinstance(note, Rule)) for name, found in notes.items()}
        cls._options = {name: Option(hint, rules[name], type(None) in get_args(hint)) for name, hint in hints}
    return cls._options  # type: ignore[no-any-return]


class Checked:
    """A base of dataclasses whose options are checked whenever one is made."""

    def __post_init__(self) -> None:
        """Check every option; what several must satisfy together is for an override that calls this one first."""
        for name, option in options_of(type(self)).items():
            option.check(name.replace("_", "-"), getattr(self, name))


def parse_options(cls: Any, what: str, options: Mapping[str, object], fixed: Collection[str] = ()) -> dict[str, Any]:
    """The values by field of kebab-case options, typed and checked; the ``fixed`` fields are no options.

    >>> from fedshift.core.method import Train
    >>> parse_options(Train, "[train]", {"optimizer": "adam", "batch-size": 8})
    {'optimiser': 'adam', 'batch_size': 8}
    """
    known = {name.replace("_", "-"): option for name, option in options_of(cls).items() if name not in fixed}
    values: dict[str, Any] = {}
    for given, value in options.items():
        key = given if given in known else ALIASES.get(given, given)
        if key not in known:
            close = difflib.get_close_matches(given, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(known) or 'no options'}"
            raise UserError(f"{what} has no option {given!r}; {hint}")
        if key != given and key in options:
            raise UserError(f"{what}: {given} is another name of {key}; give one of them")
        option, listed = known[key], tuple(value) if isinstance(value, list) else value
        try:
            if isinstance(value, bool):  # before it is taken for a number
                option.check(key, value)
            values[key.replace("-", "_")] = typed = TypeAdapter(option.hint).validate_python(listed, strict=True)
            option.check(key, typed)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise UserError(f"{what}: {key} = {value!r} is not valid: {message[0].lower()}{message[1:]}") from None
        except UserError as error:
            raise UserError(f"{what}: {error}") from None
    return values
