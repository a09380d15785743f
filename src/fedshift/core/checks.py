"""Checks of hyper-parameters that say what is wrong in the words of the TOML file."""

from __future__ import annotations

from fedshift.errors import UserError


def not_negative(what: str, **values: float | None) -> None:
    """Raise a sentence for the first value below zero (or NaN); None is no value.

    >>> not_negative("method 'fedprox'", mu=-1.0)
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: method 'fedprox': mu must not be negative, not -1.0
    """
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise UserError(f"{what}: {name.replace('_', '-')} must not be negative, not {value}")


def positive(what: str, **values: float | None) -> None:
    """Raise a sentence for the first value that is not above zero; None is no value.

    >>> positive("adapter 'memo'", views=0)
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: adapter 'memo': views must be positive, not 0
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise UserError(f"{what}: {name.replace('_', '-')} must be positive, not {value}")


def in_unit_interval(what: str, **values: float | None) -> None:
    """Raise a sentence for the first value outside [0, 1]; None is no value.

    >>> in_unit_interval("adapter 'the'", alpha=1.5)
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: adapter 'the': alpha must lie in [0, 1], not 1.5
    """
    for name, value in values.items():
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"{what}: {name.replace('_', '-')} must lie in [0, 1], not {value}")
