"""Where images come from: a source string, or plain arrays, becomes a :class:`~fedshift.data.pool.Pool`.

====================  ==============================================================================================
source                is
====================  ==============================================================================================
``embedded:digits``   five digit domains that need no file (:mod:`fedshift.data.embedded`)
``parquet:PATH``      Parquet in the Hugging Face layout: a file, a glob, a folder, or several with commas between
``csv:PATH``          CSV files, one column of which has paths of pictures (so may a text column of Parquet)
``folder:PATH``       pictures in ``class/`` or ``domain/class/``, optionally below ``train/``, ``val/`` and ``test/``
``hub:OWNER/NAME``    a Hugging Face dataset, optionally ``hub:OWNER/NAME:config`` (needs the extra ``hub``)
====================  ==============================================================================================

Every scheme ends in the same three steps: say what each image is (:mod:`fedshift.data._rows`), decode the pictures in
threads, and keep the result in a cache whose key is the content of the files, so that it can never be stale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.data._columns import ROLES, text_of
from fedshift.data._folders import folder
from fedshift.data._pixels import MODES, as_pixels
from fedshift.data._rows import Request, Rows, as_codes, class_names, pool_of, refuse_columns
from fedshift.data._tables import comma_separated, hub, parquet
from fedshift.data.embedded import digits
from fedshift.data.pool import Pool
from fedshift.data.windows import window_of
from fedshift.errors import UserError


def load(
    source: str,
    columns: Mapping[str, str] | None = None,
    size: int | None = None,
    channels: int = 3,
    cache: Path | None = None,
    attributes: Sequence[str] = (),
    window: str | Sequence[float] | None = None,
) -> Pool:
    """Read a source as uint8 images of one size.

    ``columns`` says which column of a Parquet file, a hub dataset or the CSV file of a folder plays which role: image,
    label, client (a domain), user, super (a superclass), split (train, val or test) and group (images that must stay on
    one side of a split). Without it the usual names are looked for; with it, optional roles that it does not name are
    left out, but for the group: a column called patient, lesion_id or the like is one unless ``group = ""`` says that
    there is none. In a table a group may also be ``"image.path"`` (the picture's path in its column) or
    ``"image.path~REGEX"`` (the first part of the path that the regular expression matches; a path in which it matches
    nothing is a group of its own): crops of one photograph whose paths are ``svhn/train/457_100.png`` and
    ``svhn/train/457_123.png`` are kept together by ``group = "image.path~^svhn/[a-z]+/[0-9]+"``.

    ``attributes`` are further columns that the pool carries, so that results can be told apart by them.

    ``window`` is of greys of more than eight bits, in the values of the files (Hounsfield units, for CT): centre and
    width, or a name of :data:`fedshift.data.windows.NAMED`. Left out, a DICOM file's own window holds, and what has none
    is spread from its least to its greatest value.

    ``size`` resizes to a square with Pillow's bicubic filter (other shapes are stretched), and is needed when sizes
    differ. ``cache`` is a folder that keeps decoded images; the embedded digits are made faster than a cache could be
    checked.

    >>> load("embedded:digits", size=16, channels=1).images.shape
    torch.Size([2247, 1, 16, 16])
    >>> load("ftp://host/x")
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: the source "ftp://host/x" must start with one of embedded:, parquet:, csv:, folder:, hub:
    """
    scheme, _, rest = source.partition(":")
    if scheme not in _SCHEMES:
        raise UserError(f'the source "{source}" must start with one of {", ".join(f"{name}:" for name in _SCHEMES)}')
    if not rest:
        raise UserError(f'the source "{source}" says nothing after "{scheme}:"')
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UserError(f"size must be a positive whole number of pixels, not {size!r}")
    if channels not in MODES:
        raise UserError(f"channels must be 1 (grey) or 3 (RGB), not {channels!r}")
    if unknown := sorted(set(columns or ()) - set(ROLES)):
        raise UserError(f'columns has no key "{unknown[0]}"; its keys are {", ".join(ROLES)}')
    request = Request(source, rest, columns or None, size, channels, cache, tuple(attributes), window_of(window))
    return _SCHEMES[scheme](request)


def from_arrays(
    images: np.ndarray | Tensor,
    labels: Sequence[Any] | np.ndarray | Tensor,
    *,
    domains: Sequence[Any] | np.ndarray | Tensor | None = None,
    users: Sequence[Any] | np.ndarray | Tensor | None = None,
    supers: Sequence[Any] | np.ndarray | Tensor | None = None,
    groups: Sequence[Any] | np.ndarray | Tensor | None = None,
    splits: Sequence[Any] | np.ndarray | Tensor | None = None,
    classes: Sequence[str] | None = None,
    attributes: Mapping[str, Sequence[Any] | np.ndarray | Tensor] | None = None,
) -> Pool:
    """A pool of what is already in memory (copied).

    Images are uint8, or floats in [0, 1], as ``[N, H, W]``, ``[N, C, H, W]`` or ``[N, H, W, C]`` with 1 or 3 channels
    (the second is taken when both fit). Labels are integers or names; ``classes`` fixes the names and their order.
    ``splits`` holds train, val and test, or 0, 1 and 2; a group that is not known is None or "". ``attributes`` are
    further columns that results can be told apart by.

    >>> pool = from_arrays(np.zeros((2, 8, 8)), ["cat", "dog"], domains=["day", "night"])
    >>> pool.images.shape, pool.classes, pool.domain_names
    (torch.Size([2, 1, 8, 8]), ('cat', 'dog'), ('day', 'night'))
    """
    pixels = as_pixels(images)
    given = {"client": domains, "user": users, "super": supers, "group": groups, "split": splits}
    texts = {role: _as_texts(values, role, len(pixels)) for role, values in given.items() if values is not None}
    more = {
        name: [text_of(value) for value in _listed(values, name, len(pixels))]
        for name, values in (attributes or {}).items()
    }
    if "split" in texts:
        number = {"0": "train", "1": "val", "2": "test"}
        texts["split"] = [number.get(text, text) for text in texts["split"]]
    names = _as_texts(labels, "label", len(pixels))
    known = tuple(classes) if classes is not None else class_names(names, "item {}".format)
    if len(set(known)) < len(known):
        raise UserError(f"classes must have different names, not {', '.join(known)}")
    if classes is not None and len(names) and not isinstance(labels[0], str):
        codes = np.array([int(name) for name in names], dtype=np.int64)  # positions; the pool checks their range
    else:
        codes = as_codes(names, known, "item {}".format)
    rows = Rows((), "item {}".format, codes, known, texts, attributes=more)
    digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).hexdigest()
    return pool_of(rows, pixels, {"source": "arrays", "images": len(pixels), "digest": digest})


def _as_texts(values: Any, role: str, count: int) -> list[str]:
    listed = _listed(values, role, count)
    if role == "group":
        listed = ["" if value is None else value for value in listed]
    for i, value in enumerate(listed):
        if role == "group" and value == "":
            continue
        if not isinstance(value, str | int | np.integer) or value == "":
            raise UserError(f"the {role} of item {i} must be a string or an integer, not {value!r}")
    return [value if isinstance(value, str) else str(int(value)) for value in listed]


def _listed(values: Any, what: str, count: int) -> list[Any]:
    listed = values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values)
    if len(listed) != count:
        raise UserError(f"{count} images need as many {what} entries, not {len(listed)}")
    return listed


def _embedded(request: Request) -> Pool:
    refuse_columns(request)
    makers = {"digits": digits}
    if request.rest not in makers:
        raise UserError(f'there is no "{request.source}"; embedded sources are {", ".join(makers)}')
    pool = makers[request.rest](size=32 if request.size is None else request.size)
    if request.channels == 3:
        return pool
    # Pillow's own integer weights for RGB to L, so that grey means the same for every source
    red, green, blue = pool.images.to(torch.int32).unbind(1)
    grey = ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]
    return replace(pool, images=grey, provenance={**pool.provenance, "channels": 1})


_SCHEMES: dict[str, Callable[[Request], Pool]] = {
    "embedded": _embedded,
    "parquet": parquet,
    "csv": comma_separated,
    "folder": folder,
    "hub": hub,
}
