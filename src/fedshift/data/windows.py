"""Greys of more than eight bits as bytes: by a window, or by the range of values that a picture really has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from fedshift.errors import UserError

Window: TypeAlias = tuple[float, float]  # centre and width
# the usual ones of computed tomography, in Hounsfield units
NAMED: dict[str, Window] = {
    "abdomen": (40.0, 400.0),
    "bone": (400.0, 1800.0),
    "brain": (40.0, 80.0),
    "liver": (60.0, 160.0),
    "lung": (-600.0, 1500.0),
    "mediastinum": (50.0, 350.0),
}
SIXTEEN_BITS = (0.0, 65535.0)
_DARK = 16  # of 255: who cannot see it does not learn from it


def window_of(value: str | Sequence[float] | None) -> Window | None:
    """The window that ``[data] window`` means: a name, or centre and width; None if it says nothing.

    >>> window_of("lung"), window_of([40, 400]), window_of(None)
    ((-600.0, 1500.0), (40.0, 400.0), None)
    >>> window_of("lnug")
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: there is no window 'lnug'; there are: abdomen, bone, brain, liver, lung, mediastinum
    """
    if value is None:
        return None
    if isinstance(value, str):
        if value not in NAMED:
            raise UserError(f"there is no window {value!r}; there are: {', '.join(NAMED)}")
        return NAMED[value]
    if len(value) != 2 or not value[1] > 0:
        raise UserError(f"a window is a name, or centre and width, which is positive, not {list(value)}")
    return float(value[0]), float(value[1])


def as_bytes(values: np.ndarray, window: Window | None, whole: tuple[float, float] = SIXTEEN_BITS) -> np.ndarray:
    """Numbers as shades from 0 to 255: inside the window, or else from the least to the greatest of them.

    Where all are the same there is no such range, and their place in the ``whole`` one of the format is taken.

    >>> as_bytes(np.array([0, 1000, 4000]), None).tolist(), as_bytes(np.array([0, 1000, 4000]), (1000, 100)).tolist()
    ([0, 64, 255], [0, 128, 255])
    >>> as_bytes(np.array([25700, 25700]), None).tolist()
    [100, 100]
    """
    numbers = values.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("some of its values are no numbers")
    if window is not None:
        low, high = window[0] - window[1] / 2, window[0] + window[1] / 2
    elif numbers.min() < numbers.max():
        low, high = float(numbers.min()), float(numbers.max())
    else:
        low, high = whole
    return between(numbers, low, high)


def between(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    """Shades of numbers, ``low`` and below black, ``high`` and above white."""
    share = (numbers.astype(np.float64) - low) / max(float(high) - float(low), 1e-12)
    shades: np.ndarray = np.rint(np.clip(share, 0.0, 1.0) * 255.0).astype(np.uint8)
    return shades


def is_dark(shades: np.ndarray) -> bool:
    """Whether nearly nothing can be seen: 99 % of the pixels are almost black.

    >>> is_dark(np.zeros(100)), is_dark(np.arange(100))
    (True, False)
    """
    return bool(np.count_nonzero(shades < _DARK) >= 0.99 * shades.size)


def dark_hint(dark: int, count: int) -> str:
    """What is said of greys that came out black; nothing if none did.

    >>> dark_hint(2, 10)[:63]
    '2 of 10 images of more than 8 bits are almost black: single bri'
    """
    if not dark:
        return ""
    return (
        f"{dark:,} of {count:,} images of more than 8 bits are almost black: single bright pixels stretch their range, or "
        "the window does not fit; set [data] window = [CENTRE, WIDTH] in the values of the files"
    )
