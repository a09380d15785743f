"""The embedded default: five domains of digits that need no file, no download and no network.

They are made from what installed packages already carry:

- scikit-learn's 1,797 handwritten digits (8x8, the test part of UCI's "Optical Recognition of Handwritten Digits" by
  E. Alpaydin and C. Kaynak); every one of them is used in exactly one domain;
- scikit-learn's two sample photographs, credited as its README.txt does. china.jpg: some rights reserved by
  danielbuechele (https://www.flickr.com/photos/danielbuechele/), from
  https://www.flickr.com/photos/danielbuechele/6061409035/sizes/z/in/photostream/. flower.jpg: the README says
  danielbuechele again but links to https://www.flickr.com/photos/vultilion/, from
  https://www.flickr.com/photos/vultilion/6056698931/sizes/z/in/photostream/. Both were retrieved 21st August, 2011 by
  Robert Layton under CC BY 2.0 (https://creativecommons.org/licenses/by/2.0/); here they are cropped, scaled, blended;
- the fonts matplotlib bundles (DejaVu, STIX, Computer Modern).

=========  ==============================================================================================
domain     what it looks like
=========  ==============================================================================================
pen        light grey strokes on black, as scanned
paper      coloured ink on light stained paper, a little turned, scaled and sheared
china      MNIST-M's recipe, absolute difference with a random crop, on the photograph of a Chinese temple
flower     the same recipe on the photograph of a flower
font       printed glyphs in eighteen faces, random colours, background gradient and affine map
=========  ==============================================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from fedshift.core import rng
from fedshift.data._room import check_room
from fedshift.data.pool import Pool
from fedshift.errors import UserError

_PER_FONT_CLASS = 45
_IMAGES = 2247
_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSansMono-Oblique"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)
_INKS = np.array(
    [[24, 40, 150], [150, 24, 40], [16, 104, 56], [32, 32, 40], [104, 32, 136], [152, 72, 8]], dtype=np.float64
)
_CANVAS = 128  # glyphs are drawn at this size, then reduced
_PHOTOGRAPHS = {
    "china.jpg": {
        "attribution": "Some rights reserved by danielbuechele (https://www.flickr.com/photos/danielbuechele/)",
        "from": "https://www.flickr.com/photos/danielbuechele/6061409035/sizes/z/in/photostream/",
        "licence": "CC BY 2.0, https://creativecommons.org/licenses/by/2.0/",
        "changes": "cropped, scaled, blended with digits",
    },
    "flower.jpg": {
        "attribution": "Some rights reserved by danielbuechele (https://www.flickr.com/photos/vultilion/)",
        "from": "https://www.flickr.com/photos/vultilion/6056698931/sizes/z/in/photostream/",
        "licence": "CC BY 2.0, https://creativecommons.org/licenses/by/2.0/",
        "changes": "cropped, scaled, blended with digits",
    },
}


def digits(size: int = 32, seed: int = 0) -> Pool:
    """Five digit domains (pen, paper, china, flower, font), about 450 RGB images each, in well under three seconds.

    The seed decides which handwritten digit lands in which domain and every random look; the result is a pure function
    of ``(size, seed)``. No handwritten digit is in two domains, so none can cross a split between them.

    >>> pool = digits(size=16)
    >>> tuple(pool.images.shape), pool.domain_names
    ((2247, 3, 16, 16), ('pen', 'paper', 'china', 'flower', 'font'))
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 8:
        raise UserError(f"embedded digits need a size of at least 8 pixels, not {size!r}")
    check_room(_IMAGES, (3, size, size))
    drawings, classes = _handwriting()
    shares = _deal(classes, len(_HANDWRITTEN), seed)
    looks = [look(drawings[ids], ids, size, seed) for look, ids in zip(_HANDWRITTEN.values(), shares, strict=True)]
    labels = [classes[ids] for ids in shares]
    printed = np.tile(np.arange(10), _PER_FONT_CLASS)
    images = np.concatenate([*looks, _font(printed, size, seed)])
    names = (*_HANDWRITTEN, "font")
    lengths = [*map(len, shares), len(printed)]
    return Pool(
        torch.from_numpy(images),
        torch.from_numpy(np.concatenate([*labels, printed])),
        tuple(str(digit) for digit in range(10)),
        domains=torch.from_numpy(np.repeat(np.arange(len(names)), lengths)),
        domain_names=names,
        provenance={
            "source": "embedded:digits",
            "size": size,
            "seed": seed,
            "counts": dict(zip(names, lengths, strict=True)),
            "handwriting": "scikit-learn load_digits (UCI optdigits, E. Alpaydin and C. Kaynak)",
            "photographs": {name: dict(facts) for name, facts in _PHOTOGRAPHS.items()},
            "fonts": list(_FONTS),
            "digest": hashlib.blake2b(images.tobytes(), digest_size=16).hexdigest(),
        },
    )


@lru_cache(maxsize=1)
def _handwriting() -> tuple[np.ndarray, np.ndarray]:
    """The 8x8 drawings as uint8 with a margin of two, so that interpolation fades into an empty border, and classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    drawings = np.rint(found.images * (255.0 / 16.0)).astype(np.uint8)
    return np.pad(drawings, ((0, 0), (2, 2), (2, 2))), found.target.astype(np.int64)


@lru_cache(maxsize=2)
def _photograph(name: str) -> Image.Image:
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(name))


def _deal(classes: np.ndarray, hands: int, seed: int) -> list[np.ndarray]:
    """Deal the drawings like cards, class by class: disjoint hands, each as balanced as the whole."""
    decks = [np.flatnonzero(classes == c) for c in range(10)]
    seeds = [rng.seed_of(seed, "embedded:digits", "deal", c) for c in range(10)]
    order = np.concatenate([deck[rng.permutation(s, len(deck)).numpy()] for deck, s in zip(decks, seeds, strict=True)])
    return [np.sort(order[hand::hands]) for hand in range(hands)]


def _draw(seed: int, look: str, ids: np.ndarray, count: int) -> np.ndarray:
    """Uniform numbers [len(ids), count] that depend on an image's own id only."""
    key = rng.seed_of(seed, "embedded:digits", look)
    return np.asarray(rng.uniform(key, torch.from_numpy(ids), (count,)), dtype=np.float64)


def _warp(picture: Image.Image, size: int, zoom: float, jitter: Iterable[float] = (0.5,) * 6) -> np.ndarray:
    """The picture centred on ``size`` x ``size`` pixels, ``zoom`` output pixels per input pixel, under an affine map.

    ``jitter`` holds turn, shear, two stretches and two shifts; 0.5 is neutral. The map's entries are drawn directly
    (a small turn is an antisymmetric part), because sines differ in the last bit between machines.
    """
    turn, shear, wide, high, right, down = (2.0 * j - 1.0 for j in jitter)
    a, e = (1.0 + 0.12 * wide) / zoom, (1.0 + 0.12 * high) / zoom
    b, d = (0.22 * turn + 0.12 * shear) / zoom, -0.22 * turn / zoom
    x, y = size * (0.5 + 0.06 * right), size * (0.5 + 0.06 * down)
    middle = picture.width / 2.0
    coefficients = (a, b, middle - a * x - b * y, d, e, middle - d * x - e * y)
    warped = picture.transform((size, size), Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC)
    return np.asarray(warped, dtype=np.float64) / 255.0


def _masks(drawings: np.ndarray, size: int, jitter: np.ndarray | None = None, crisp: float = 1.0) -> np.ndarray:
    """Stroke masks in [0, 1], [n, size, size]; ``crisp`` steepens the soft edges that enlarging 8x8 pixels leaves."""
    zoom = size / 9.5  # the eight pixels of a drawing fill 84 % of the picture
    rows: Iterable[Iterable[float]] = [(0.5,) * 6] * len(drawings) if jitter is None else jitter.tolist()
    soft = np.stack([_warp(Image.fromarray(d), size, zoom, row) for d, row in zip(drawings, rows, strict=True)])
    return np.asarray(np.clip((soft - 0.5) * crisp + 0.5, 0.0, 1.0))


def _blend(below: np.ndarray, above: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """``above`` where the mask is 1, as uint8 [n, 3, size, size]; colours are 0..255 and broadcast."""
    return np.asarray(np.rint(np.clip(below + (above - below) * mask, 0.0, 255.0)), dtype=np.uint8)


def _pen(drawings: np.ndarray, ids: np.ndarray, size: int, seed: int) -> np.ndarray:
    light = 190.0 + 65.0 * _draw(seed, "pen", ids, 1)[:, :, None, None]
    return np.repeat(_blend(np.zeros(1), light, _masks(drawings, size, crisp=1.3)[:, None]), 3, axis=1)


def _paper(drawings: np.ndarray, ids: np.ndarray, size: int, seed: int) -> np.ndarray:
    u = _draw(seed, "paper", ids, 13 + 25)
    masks = _masks(drawings, size, u[:, :6], crisp=1.8)[:, None]
    ink = _INKS[(u[:, 6] * len(_INKS)).astype(np.int64)] + 60.0 * (u[:, 7:10] - 0.3)
    sheet = 205.0 + 50.0 * u[:, 10:13]
    blots = (255.0 * u[:, 13:].reshape(-1, 5, 5)).astype(np.uint8)
    stains = np.stack([_warp(Image.fromarray(b), size, size / 3.0) for b in blots])[:, None]
    return _blend(sheet[:, :, None, None] - 45.0 * stains, ink[:, :, None, None], masks)


def _photo(name: str) -> Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]:
    """MNIST-M's recipe on one photograph."""

    def look(drawings: np.ndarray, ids: np.ndarray, size: int, seed: int) -> np.ndarray:
        photo = _photograph(name)
        crops = []
        for where in _draw(seed, name, ids, 3).tolist():
            side = 48.0 + 80.0 * where[0]
            left, top = where[1] * (photo.width - side), where[2] * (photo.height - side)
            box = (left, top, left + side, top + side)
            crops.append(np.asarray(photo.resize((size, size), Image.Resampling.BICUBIC, box=box), dtype=np.float64))
        backs = np.stack(crops).transpose(0, 3, 1, 2)
        masks = _masks(drawings, size, crisp=2.5)[:, None]
        return np.rint(np.abs(backs - 255.0 * masks)).astype(np.uint8)

    return look


def _font(labels: np.ndarray, size: int, seed: int) -> np.ndarray:
    ids = np.arange(len(labels), dtype=np.int64)
    u = _draw(seed, "font", ids, 16)
    # the faces take turns within a class, from a random start: 45 glyphs a class meet every face at least twice
    start = rng.permutations(rng.seed_of(seed, "embedded:digits", "faces"), 10, len(_FONTS)).numpy()
    faces = start[labels, (ids // 10) % len(_FONTS)]
    masks = []
    for label, face, row in zip(labels.tolist(), faces.tolist(), u[:, :7].tolist(), strict=True):
        big = _warp(_glyph(face, label), _CANVAS, 0.85 + 0.3 * row[6], row[:6])
        small = Image.fromarray(np.rint(255.0 * big).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
        masks.append(np.asarray(small, dtype=np.float64) / 255.0)
    back = 255.0 * u[:, 7:10]
    fade = 0.4 * u[:, 10:13]
    bright = (back @ np.array([0.3, 0.6, 0.1]) > 127.0)[:, None]
    # ink is darker than a bright background and brighter than a dark one, so every glyph can be read
    ink = np.where(bright, back * fade, 255.0 - (255.0 - back) * fade)
    ramp = np.arange(size) / max(1, size - 1) - 0.5
    slope = 90.0 * (u[:, 13:15] - 0.5)
    shade = slope[:, 0, None, None] * ramp[:, None] + slope[:, 1, None, None] * ramp[None, :]
    return _blend(back[:, :, None, None] + shade[:, None], ink[:, :, None, None], np.stack(masks)[:, None])


@lru_cache(maxsize=len(_FONTS) * 10)
def _glyph(face: int, digit: int) -> Image.Image:
    """A digit of a face, white on black, its box centred and as high as 70 % of the canvas."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", _FONTS[face] + ".ttf")
    font = ImageFont.truetype(str(path), _CANVAS, layout_engine=ImageFont.Layout.BASIC)
    left, top, right, bottom = font.getbbox(str(digit))
    font = font.font_variant(size=round(_CANVAS * 0.7 * _CANVAS / (bottom - top)))
    left, top, right, bottom = font.getbbox(str(digit))
    picture = Image.new("L", (_CANVAS, _CANVAS))
    corner = ((_CANVAS - left - right) / 2.0, (_CANVAS - top - bottom) / 2.0)
    ImageDraw.Draw(picture).text(corner, str(digit), fill=255, font=font)
    return picture


_HANDWRITTEN: dict[str, Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]] = {
    "pen": _pen,
    "paper": _paper,
    "china": _photo("china.jpg"),
    "flower": _photo("flower.jpg"),
}
