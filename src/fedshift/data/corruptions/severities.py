"""The constants of every corruption at every severity, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_SMALL_SIDE, _LARGE_SIDE = 64, 224


@dataclass(frozen=True)
class Severities:
    """A corruption's constants for severities 1 to 5, of small and of large images."""

    small: tuple[tuple[float, ...], ...]
    large: tuple[tuple[float, ...], ...]

    def constants(self, severity: int, side: int) -> tuple[float, ...]:
        """Those of a severity at an image side.

        >>> SEVERITIES["contrast"].constants(1, 32), SEVERITIES["contrast"].constants(1, 224)
        ((0.75,), (0.4,))
        """
        t = min(1.0, max(0.0, (side - _SMALL_SIDE) / (_LARGE_SIDE - _SMALL_SIDE)))
        pairs = zip(self.small[severity - 1], self.large[severity - 1], strict=True)
        return tuple(a * (1.0 - t) + b * t for a, b in pairs)


def _each(*values: float) -> tuple[tuple[float, ...], ...]:
    """Five severities of one constant."""
    return tuple((value,) for value in values)


SEVERITIES: Mapping[str, Severities] = MappingProxyType(
    {
        "gaussian-noise": Severities(_each(0.04, 0.06, 0.08, 0.09, 0.10), _each(0.08, 0.12, 0.18, 0.26, 0.38)),
        "shot-noise": Severities(_each(500, 250, 100, 75, 50), _each(60, 25, 12, 5, 3)),
        "impulse-noise": Severities(_each(0.01, 0.02, 0.03, 0.05, 0.07), _each(0.03, 0.06, 0.09, 0.17, 0.27)),
        "defocus-blur": Severities(
            ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
            ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        ),
        "glass-blur": Severities(
            ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
            ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        ),
        "motion-blur": Severities(
            ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
            ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        ),
        "zoom-blur": Severities(
            ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
            ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        ),
        "snow": Severities(
            (
                (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
                (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
                (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
                (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
                (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
            ),
            (
                (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
                (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
                (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
                (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
                (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
            ),
        ),
        "frost": Severities(
            ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
            ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        ),
        "fog": Severities(
            ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
            ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        ),
        "brightness": Severities(_each(0.05, 0.1, 0.15, 0.2, 0.3), _each(0.1, 0.2, 0.3, 0.4, 0.5)),
        "contrast": Severities(_each(0.75, 0.5, 0.4, 0.3, 0.15), _each(0.4, 0.3, 0.2, 0.1, 0.05)),
        "elastic": Severities(
            ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
            tuple((0.005 * scale, 0.01, 0.0) for scale in (12.5, 16.25, 21.25, 25, 30)),
        ),
        "pixelate": Severities(
            _each(*(1 / c for c in (0.95, 0.9, 0.85, 0.75, 0.65))),
            _each(*(1 / c for c in (0.6, 0.5, 0.4, 0.3, 0.25))),
        ),
        "jpeg": Severities(_each(80, 65, 58, 50, 40), _each(25, 18, 15, 10, 7)),
    }
)
