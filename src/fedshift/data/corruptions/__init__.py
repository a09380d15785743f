"""The fifteen common corruptions of Hendrycks and Dietterich, batched, on the CPU or a GPU, from uint8 to uint8.

Severity 1 to 5 picks the constants. Images whose shorter side is at most 64 pixels get the constants of CIFAR-C, from
224 pixels up those of ImageNet-C; in between every constant (blur radii, pixel sizes, noise levels, ...) is
interpolated linearly with the side, so that 144-pixel images get the midpoint.

Every draw is a function of (seed, sample id, corruption): a corrupted image never depends on the batch it came in, on
its place there or on how large batches are cut up, and the five severities of one image share their draws. Between a
CPU and a GPU a few values in a hundred thousand differ, by one level as a rule.

Where this departs from the reference implementation:

* values are rounded to the nearest integer at the end (the reference truncates, which darkens by half a level);
* frost is painted by a procedure instead of cropped from six photographs (see ``weather.py``);
* zooms (zoom blur, snow) are about the exact centre; the reference crops whole pixels first;
* the angle of motion blur and snow is one of 1024 equally spaced ones.

The reference has two slips, which are in the published CIFAR-C and ImageNet-C files. ``published = True`` repeats them:

* zoom blur takes 7 and 12 zooms instead of 6 and 11 at severities 1 and 2 of small images (and 12 at severity 1 of large
  ones), because a rounding error lets its range go one step too far;
* glass blur does not swap two pixels of a colour image but copies one over the other (both names are views of one
  array), and it never draws the neighbours at +d, so that it takes from one side.

The families are files (``noise``, ``blur``, ``weather``, ``digital``), the constants are a table (``severities``), what
they have in common is in ``filters`` and ``draws``; ``apply`` puts them together.
"""

from fedshift.data.corruptions.apply import NAMES, corrupt, corrupt_mixed, mixed_choice

__all__ = ["NAMES", "corrupt", "corrupt_mixed", "mixed_choice"]
