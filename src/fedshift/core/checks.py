"""Checks of hyper-parameters in the words of the TOML file; who they belong to is said by who makes the object."""

from __future__ import annotations

from fedshift.errors import UserError


def not_negative(**values: float | None) -> None:
    """Raise a sentence for the first value below zero (or NaN); None is no value.

    >>> not_negative(mu=-1.0)
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: mu must not be negative, not -1.0
    """
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise UserError(f"{name.replace('_', '-')} must not be negative, not {value}")


def positive(**values: float | None) -> None:
    """Raise a sentence for the first value that is not above zero; None is no value.

    >>> positive(views=0)
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: views must be positive, not 0
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise UserError(f"{name.replace('_', '-')} must be positive, not {value}")


def in_unit_interval(**values: float | None) -> None:
    """Raise a sentence for the first value outside [0, 1]; None is no value.

    >>> in_unit_interval(alpha=1.5)
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: alpha must lie in [0, 1], not 1.5
    """
    for name, value in values.items():
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"{name.replace('_', '-')} must lie in [0, 1], not {value}")
