"""Where images come from: a source string, or plain arrays, becomes a :class:`~fedshift.data.pool.Pool`.

====================  ==============================================================================================
source                is
====================  ==============================================================================================
``embedded:digits``   five digit domains that need no file (:mod:`fedshift.data.embedded`)
``parquet:PATH``      Parquet in the Hugging Face layout: a file, a glob, a folder, or several with commas between
``folder:PATH``       pictures in ``class/`` or ``domain/class/``, optionally below ``train/``, ``val/`` and ``test/``
``hub:OWNER/NAME``    a Hugging Face dataset, optionally ``hub:OWNER/NAME:config`` (needs the extra ``hub``)
====================  ==============================================================================================

Every scheme ends in the same three steps: say what each image is (:class:`_Rows`), decode the pictures in threads,
and keep the result in a cache whose key is the content of the files, so that it can never be stale.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fedshift.data.embedded import digits
from fedshift.data.pool import Pool
from fedshift.errors import UserError

_FORMAT = 1  # of a cache entry and of everything that decides its bytes: raise it when decoding changes
_THREADS = min(8, os.cpu_count() or 1)
_MODES = {1: "L", 3: "RGB"}  # channels -> Pillow's name
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
_SPLITS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
_CANDIDATES: dict[str, tuple[str, ...]] = {  # a role and the column names it is looked for under
    "image": ("image", "img"),
    "label": ("label", "labels", "fine_label", "character", "class", "target"),
    "client": ("domain",),
    "user": ("writer_id", "user_id"),
    "super": ("coarse_label",),
    "split": ("split",),
    "group": (),
}
_REQUIRED = ("image", "label")
_FIELDS: dict[str, tuple[str, str | None]] = {  # a role and where the pool keeps its codes and their names
    "client": ("domains", "domain_names"),
    "user": ("users", "user_names"),
    "super": ("supers", "super_names"),
    "group": ("groups", None),
    "split": ("splits", None),
}


@dataclass(frozen=True)
class _Request:
    source: str
    rest: str  # the source without its scheme
    columns: Mapping[str, str] | None
    size: int | None
    channels: int
    cache: Path | None

    def path(self, text: str) -> Path:
        """The path with ``~`` and environment variables replaced."""
        for bare, braced in re.findall(r"\$(?:(\w+)|\{(\w+)\})", text):
            if (bare or braced) not in os.environ:
                raise UserError(
                    f'the source "{self.source}" needs the environment variable {bare or braced}, which is not set'
                )
        return Path(os.path.expandvars(text)).expanduser()


@dataclass(frozen=True)
class _Rows:
    """Everything about the images but their pixels."""

    encoded: Sequence[Any]  # a picture file's bytes, or the path of one
    where: Callable[[int], str]  # names an image in an error
    labels: np.ndarray
    classes: tuple[str, ...]
    texts: Mapping[str, Sequence[str]]  # role -> one string per image: client, user, super, group, split


def load(
    source: str,
    columns: Mapping[str, str] | None = None,
    size: int | None = None,
    channels: int = 3,
    cache: Path | None = None,
) -> Pool:
    """Read a source as uint8 images of one size.

    ``columns`` says which column of a Parquet file or hub dataset plays which role: image, label, client (a domain),
    user, super (a superclass), split (train, val or test) and group (images that must stay on one side of a split).
    Without it the usual names are looked for; with it, optional roles that it does not name are left out. ``size``
    resizes to a square with Pillow's bicubic filter (other shapes are stretched), and is needed when sizes differ.
    ``cache`` is a folder that keeps decoded images; the embedded digits are made faster than a cache could be checked.

    >>> load("embedded:digits", size=16, channels=1).images.shape
    torch.Size([2247, 1, 16, 16])
    >>> load("ftp://host/x")
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: the source "ftp://host/x" must start with one of embedded:, parquet:, folder:, hub:
    """
    scheme, _, rest = source.partition(":")
    if scheme not in _SCHEMES:
        raise UserError(f'the source "{source}" must start with one of {", ".join(f"{name}:" for name in _SCHEMES)}')
    if not rest:
        raise UserError(f'the source "{source}" says nothing after "{scheme}:"')
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UserError(f"size must be a positive whole number of pixels, not {size!r}")
    if channels not in _MODES:
        raise UserError(f"channels must be 1 (grey) or 3 (RGB), not {channels!r}")
    if unknown := sorted(set(columns or ()) - set(_CANDIDATES)):
        raise UserError(f'columns has no key "{unknown[0]}"; its keys are {", ".join(_CANDIDATES)}')
    return _SCHEMES[scheme](_Request(source, rest, columns or None, size, channels, cache))


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
) -> Pool:
    """A pool of what is already in memory (copied).

    Images are uint8, or floats in [0, 1], as ``[N, H, W]``, ``[N, C, H, W]`` or ``[N, H, W, C]`` with 1 or 3 channels
    (the second is taken when both fit). Labels are integers or names; ``classes`` fixes the names and their order.
    ``splits`` holds train, val and test, or 0, 1 and 2.

    >>> pool = from_arrays(np.zeros((2, 8, 8)), ["cat", "dog"], domains=["day", "night"])
    >>> pool.images.shape, pool.classes, pool.domain_names
    (torch.Size([2, 1, 8, 8]), ('cat', 'dog'), ('day', 'night'))
    """
    pixels = _as_pixels(images)
    given = {"client": domains, "user": users, "super": supers, "group": groups, "split": splits}
    texts = {role: _as_texts(values, role, len(pixels)) for role, values in given.items() if values is not None}
    if "split" in texts:
        number = {"0": "train", "1": "val", "2": "test"}
        texts["split"] = [number.get(text, text) for text in texts["split"]]
    names = _as_texts(labels, "label", len(pixels))
    known = tuple(classes) if classes is not None else _class_names(names, "item {}".format)
    if len(set(known)) < len(known):
        raise UserError(f"classes must have different names, not {', '.join(known)}")
    if classes is not None and len(names) and not isinstance(labels[0], str):
        codes = np.array([int(name) for name in names], dtype=np.int64)  # positions; the pool checks their range
    else:
        codes = _codes(names, known, "item {}".format)
    rows = _Rows((), "item {}".format, codes, known, texts)
    digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).hexdigest()
    return _pool(rows, pixels, {"source": "arrays", "images": len(pixels), "digest": digest})


# --- schemes ----------------------------------------------------------------------------------------------------------


def _embedded(request: _Request) -> Pool:
    _refuse_columns(request)
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


def _parquet(request: _Request) -> Pool:
    paths = _parquet_files(request)
    digests = dict(zip(paths, _in_threads(_digest, list(paths.values())), strict=True))
    return _cached(request, digests, lambda: _read_parts(request, [_parquet_part(n, p) for n, p in paths.items()]))


def _hub(request: _Request) -> Pool:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f'the source "{request.source}" needs the datasets library: pip install "fedshift[hub]"'
        ) from None
    name, _, config = request.rest.partition(":")
    try:
        found = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises its own, its hub client's and its network stack's exceptions
        raise UserError(f'the source "{request.source}" could not be loaded: {_line(error)}') from error
    parts = [_hub_part(split, data) for split, data in found.items()]
    digests = {part.name: _table_digest(part.table(part.columns)) for part in parts}
    return _cached(request, digests, lambda: _read_parts(request, parts))


def _folder(request: _Request) -> Pool:
    _refuse_columns(request)
    root = request.path(request.rest)
    if not root.is_dir():
        raise UserError(f'the source "{request.source}" is not a folder')
    names, folders = _walk(root)
    levels = _levels(request, names, folders)
    digests = dict(zip(names, _in_threads(_digest, [root / name for name in names]), strict=True))

    def read() -> _Rows:
        texts = {level: [name.split("/")[i] for name in names] for i, level in enumerate(levels)}
        labels = texts.pop("class")
        classes = _ordered(labels)
        return _Rows([root / name for name in names], names.__getitem__, _codes(labels, classes, str), classes, texts)

    return _cached(request, digests, read)


_SCHEMES: dict[str, Callable[[_Request], Pool]] = {
    "embedded": _embedded,
    "parquet": _parquet,
    "folder": _folder,
    "hub": _hub,
}


def _refuse_columns(request: _Request) -> None:
    if request.columns is not None:
        raise UserError(f'the source "{request.source}" has no columns to name: leave columns out')


# --- tables: Parquet files and hub splits -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One Parquet file, or one split of a hub dataset."""

    name: str
    columns: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]  # column -> the names behind its integers (ClassLabel)
    table: Callable[[Sequence[str]], Any]  # reads some columns as a pyarrow table
    split: str | None  # what the part's own name says
    local_paths: bool = False  # whether a path without bytes may be opened


def _parquet_files(request: _Request) -> dict[str, Path]:
    """Name -> file, in a fixed order; names leave out the part of the path that differs between machines."""
    found: dict[Path, str] = {}
    for item in filter(None, (text.strip() for text in request.rest.split(","))):
        path = request.path(item)
        root, hits = path.parent, [path]
        if path.is_dir():
            root, hits = path, sorted(path.rglob("*.parquet"))
        elif not path.exists():
            hits = sorted(map(Path, glob.glob(str(path), recursive=True)))
            while set(str(root)) & set("*?["):
                root = root.parent
        files = [hit for hit in hits if hit.is_file()]
        if not files:
            raise UserError(f'no Parquet file matches "{item}" in the source "{request.source}"')
        for file in files:
            found.setdefault(file, file.relative_to(root).as_posix())
    names = Counter(found.values())
    numbered = (name if names[name] == 1 else f"{name}#{i}" for i, name in enumerate(found.values()))
    return dict(zip(numbered, found, strict=True))


def _parquet_part(name: str, path: Path) -> _Part:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def read(columns: Sequence[str]) -> Any:
        try:
            return pq.read_table(path, columns=list(columns), partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f'"{name}" cannot be read as Parquet: {_line(error)}') from error

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f'"{name}" cannot be read as Parquet: {_line(error)}') from error
    word = re.match(r"[a-z]+(?=$|[-_.])", Path(name).stem)
    split = word.group() if word and word.group() in _SPLITS else None
    return _Part(name, tuple(schema.names), _class_labels(schema.metadata or {}), read, split)


def _class_labels(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Column -> class names, from the features that Hugging Face writes into a schema; odd metadata name nothing."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        found = {column: feature["names"] for column, feature in features.items() if "names" in feature}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {column: tuple(map(str, names)) for column, names in found.items() if isinstance(names, list)}


def _hub_part(split: str, data: Any) -> _Part:
    named = {column: getattr(feature, "names", None) for column, feature in data.features.items()}
    names = {column: tuple(map(str, found)) for column, found in named.items() if isinstance(found, list | tuple)}
    table = data.with_format("arrow")  # pictures stay encoded: we decode them as we decode every other source's
    return _Part(split, tuple(data.features), names, lambda columns: table[:].select(list(columns)), split, True)


def _roles(part: _Part, columns: Mapping[str, str] | None) -> dict[str, str]:
    """Role -> column of this part."""
    there = ", ".join(part.columns)
    for role, column in (columns or {}).items():
        if column not in part.columns:
            raise UserError(f'"{part.name}" has no column "{column}" ({role}); its columns are {there}')
    roles = dict(columns or {})
    for role, names in _CANDIDATES.items():
        found = next((name for name in names if name in part.columns), None)
        if role not in roles and found is not None and (columns is None or role in _REQUIRED):
            roles[role] = found
        if role in _REQUIRED and role not in roles:
            raise UserError(f'"{part.name}" has no {role} column that is known by name; name it in columns: {there}')
    return roles


def _read_parts(request: _Request, parts: Sequence[_Part]) -> _Rows:
    roles = [_roles(part, request.columns) for part in parts]
    for part, found in zip(parts, roles, strict=True):
        if odd := sorted(set(found) ^ set(roles[0])):
            raise UserError(f'"{parts[0].name}" and "{part.name}" do not both have a column for {odd[0]}')
    tables = [part.table(sorted(set(found.values()))) for part, found in zip(parts, roles, strict=True)]
    if not any(table.num_rows for table in tables):
        raise UserError(f'the source "{request.source}" holds no images')
    triples = list(zip(parts, roles, tables, strict=True))
    starts = np.cumsum([0, *(table.num_rows for table in tables)])

    def where(i: int) -> str:
        at = int(np.searchsorted(starts, i, side="right")) - 1
        return f'"{parts[at].name}", row {i - int(starts[at])}'

    texts = {
        role: [text for part, found, table in triples for text in _texts(part, found[role], table)]
        for role in roles[0]
        if role != "image"
    }
    labels = texts.pop("label")
    named = _agreed_classes(parts, roles, tables)
    classes = named or _class_names(labels, where)
    codes = _codes(labels, classes, where)
    present = set(labels)
    if missing := [name for name in classes if name not in present]:
        more = f" (and {len(missing) - 1} more classes have none)" if len(missing) > 1 else ""
        raise UserError(f"class {missing[0]!r} has no samples in {request.source}{more}")
    if "split" not in texts and (hints := _split_hints(parts, tables)) is not None:
        texts["split"] = hints
    encoded = [item for part, found, table in triples for item in _encoded(part, found["image"], table)]
    return _Rows(encoded, where, codes, classes, texts)


def _texts(part: _Part, column: str, table: Any) -> list[str]:
    """A column as strings, its integers replaced by their names where the schema has them."""
    values = table.column(column).to_pylist()
    for i, value in enumerate(values):
        if value is None or (isinstance(value, str) and not value.strip()):
            raise UserError(f'column "{column}" is empty in "{part.name}", row {i}')
        if not isinstance(value, str | int):
            raise UserError(
                f'column "{column}" of "{part.name}" must hold strings or integers, not {table.column(column).type}'
            )
    names = part.names.get(column)
    if names is None or not values or isinstance(values[0], str):
        return [str(value) for value in values]
    strange = next((i for i, value in enumerate(values) if not 0 <= value < len(names)), None)
    if strange is not None:
        raise UserError(
            f'column "{column}" is {values[strange]} in "{part.name}", row {strange}, '
            f"but there are names for 0..{len(names) - 1} only"
        )
    return [names[value] for value in values]


def _agreed_classes(
    parts: Sequence[_Part], roles: Sequence[Mapping[str, str]], tables: Sequence[Any]
) -> tuple[str, ...] | None:
    """The class names of the schemas, None where there are none; parts that differ cannot be one data set."""
    kinds: list[tuple[str, ...] | str] = []
    for part, found, table in zip(parts, roles, tables, strict=True):
        column = found["label"]
        text = "string" in str(table.schema.field(column).type)
        kinds.append(part.names.get(column) or ("names in the label column" if text else "integers without names"))
        if kinds[-1] != kinds[0]:
            first, other = (k if isinstance(k, str) else ", ".join(k) for k in (kinds[0], kinds[-1]))
            raise UserError(
                f'"{parts[0].name}" and "{part.name}" do not agree on the classes: {first[:200]} against {other[:200]}'
            )
    return kinds[0] if isinstance(kinds[0], tuple) else None


def _split_hints(parts: Sequence[_Part], tables: Sequence[Any]) -> list[str] | None:
    """The split of every row as the parts' names say it; None when they say nothing.

    A lone "train" says nothing: it is what the hub calls a data set that was never split.
    """
    said = [part for part in parts if part.split is not None]
    if not said or {part.split for part in parts} == {"train"}:
        return None
    for part in parts:
        if part.split is None:
            raise UserError(
                f'the name of "{said[0].name}" says its split but that of "{part.name}" does not: rename or drop it'
            )
    return [str(part.split) for part, table in zip(parts, tables, strict=True) for _ in range(table.num_rows)]


def _encoded(part: _Part, column: str, table: Any) -> list[Any]:
    """The encoded pictures of a column, without a copy."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = table.column(column)
    paths: list[str | None] = [None] * len(values)
    if pa.types.is_struct(values.type):
        fields = {values.type.field(i).name for i in range(values.type.num_fields)}
        if part.local_paths and "path" in fields:
            paths = pc.struct_field(values, "path").to_pylist()
        values = pc.struct_field(values, "bytes") if "bytes" in fields else values
    if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
        raise UserError(f'column "{column}" of "{part.name}" holds no encoded pictures but {values.type}')
    found: list[Any] = [value.as_buffer() for chunk in values.chunks for value in chunk]
    for i, (data, path) in enumerate(zip(found, paths, strict=True)):
        if data is None and path is None:
            raise UserError(f'there is no picture in column "{column}" of "{part.name}", row {i}')
        found[i] = Path(path) if data is None and path is not None else data
    return found


# --- folders ----------------------------------------------------------------------------------------------------------


def _walk(root: Path) -> tuple[list[str], list[str]]:
    """Pictures and folders below root as sorted relative names; hidden ones are no data."""
    names: list[str] = []
    folders: list[str] = []
    for place, below, files in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith((".", "__MACOSX")))
        here = Path(place).relative_to(root)
        folders += [(here / name).as_posix() for name in below]
        pictures = [name for name in files if not name.startswith(".") and Path(name).suffix.lower() in _SUFFIXES]
        names += [(here / name).as_posix() for name in pictures]
    return sorted(names), folders


_LAYOUTS = {  # (is the outermost level a split?, number of levels) -> what the levels are
    (False, 1): ("class",),
    (False, 2): ("client", "class"),
    (True, 2): ("split", "class"),
    (True, 3): ("split", "client", "class"),
}


def _levels(request: _Request, names: Sequence[str], folders: Sequence[str]) -> tuple[str, ...]:
    """What the folder levels mean, outermost first: some of split, client and class."""
    if not names:
        raise UserError(f'there are no pictures in the source "{request.source}"')
    depth = names[0].count("/")
    odd = next((name for name in names if name.count("/") != depth), None)
    if odd is not None:
        raise UserError(f'pictures lie at different depths in the source "{request.source}": {names[0]} and {odd}')
    filled = {"/".join(name.split("/")[:level]) for name in names for level in range(1, depth + 1)}
    hollow = next((folder for folder in folders if folder.count("/") < depth and folder not in filled), None)
    if hollow is not None:
        raise UserError(f'the folder "{hollow}" of the source "{request.source}" holds no pictures')
    outer = {name.split("/")[0] for name in names} if depth else set()
    splits = outer & set(_SPLITS)
    if splits and splits != outer and depth > 1:
        raise UserError(
            f'the source "{request.source}" mixes split folders with others at its top: '
            f"{min(splits)} and {min(outer - splits)}"
        )
    levels = _LAYOUTS.get((bool(splits) and splits == outer, depth))
    if levels is None:
        raise UserError(
            f'pictures of the source "{request.source}" must lie in class/ or domain/class/, optionally below train/, '
            f"val/ and test/, unlike {names[0]}"
        )
    return levels


# --- pixels -----------------------------------------------------------------------------------------------------------


def _decode(rows: _Rows, size: int | None, channels: int) -> tuple[np.ndarray, dict[str, int]]:
    """All images as uint8 [N, channels, height, width], and how many had which size and mode."""
    first, _ = _picture(rows, 0, size, channels)
    shape = first.shape
    images = np.empty((len(rows.encoded), *shape), dtype=np.uint8)

    def some(start: int) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for i in range(start, min(start + 128, len(images))):
            pixels, kind = _picture(rows, i, size, channels)
            if pixels.shape != shape:
                raise UserError(
                    f"images differ in size, so a size is needed: {shape[2]}x{shape[1]} in {rows.where(0)} but "
                    f"{pixels.shape[2]}x{pixels.shape[1]} in {rows.where(i)}"
                )
            images[i] = pixels
            kinds[kind] += 1
        return kinds

    total: Counter[str] = sum(_in_threads(some, range(0, len(images), 128)), Counter())
    return images, dict(total.most_common(12))


def _picture(rows: _Rows, i: int, size: int | None, channels: int) -> tuple[np.ndarray, str]:
    """One image as [channels, height, width], and what it was."""
    item = rows.encoded[i]
    try:
        with Image.open(item if isinstance(item, Path) else io.BytesIO(item)) as opened:
            kind = f"{opened.width}x{opened.height} {opened.mode}"
            picture = _eight_bit(ImageOps.exif_transpose(opened)).convert(_MODES[channels])
    except Exception as error:  # Pillow's readers raise whatever their parsers stumble over
        why = "its format is not known" if isinstance(error, UnidentifiedImageError) else _line(error)
        raise UserError(f"the image in {rows.where(i)} cannot be decoded: {why}") from error
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BICUBIC)
    pixels = np.asarray(picture)
    return (pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]), kind


def _eight_bit(picture: Image.Image) -> Image.Image:
    """Mend modes whose plain conversion is wrong: Pillow clips 16-bit grey to white, and palettes with alpha warn."""
    if picture.mode.startswith("I"):
        wide = np.clip(np.asarray(picture, dtype=np.int64), 0, 65535)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if picture.mode == "F":
        raise ValueError("pictures of floating-point numbers are not supported")
    return picture.convert("RGBA") if picture.mode in ("P", "PA") else picture


def _as_pixels(images: np.ndarray | Tensor) -> np.ndarray:
    """Arrays in any of the accepted layouts as uint8 [N, C, H, W]."""
    if isinstance(images, Tensor):  # numpy has no bfloat16
        images = (images.float() if images.is_floating_point() else images).detach().cpu().numpy()
    array = np.asarray(images)
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3):
        raise UserError(
            f"images must be [N, H, W], [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, not {list(images.shape)}"
        )
    if np.issubdtype(array.dtype, np.floating):
        # `not (...)` rather than `... < 0 or ... > 1`: it also catches NaN
        if array.size and not (array.min() >= 0.0 and array.max() <= 1.0):
            raise UserError(f"float images must lie in [0, 1], found {array.min():g}..{array.max():g}")
        return np.rint(array * 255.0).astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"images must be uint8 or floats in [0, 1], not {array.dtype}")
    return np.array(array, order="C")


# --- names and codes --------------------------------------------------------------------------------------------------


def _as_texts(values: Any, role: str, count: int) -> list[str]:
    listed = values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values)
    if len(listed) != count:
        raise UserError(f"{count} images need as many {role} entries, not {len(listed)}")
    for i, value in enumerate(listed):
        if not isinstance(value, str | int | np.integer) or value == "":
            raise UserError(f"the {role} of item {i} must be a string or an integer, not {value!r}")
    return [value if isinstance(value, str) else str(int(value)) for value in listed]


def _ordered(texts: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in a fixed order, numbers by value: "9" before "10"."""
    return tuple(sorted(set(texts), key=lambda text: (0, int(text), text) if text.isdecimal() else (1, 0, text)))


def _class_names(labels: Sequence[str], where: Callable[[int], str]) -> tuple[str, ...]:
    """The classes of labels that come without a list of names."""
    for i, label in enumerate(labels):
        if re.fullmatch(r"-\d+", label):
            raise UserError(f"the label of {where(i)} is {label}, which is how data sets write an unknown one")
    return _ordered(labels)


def _codes(texts: Sequence[str], names: Sequence[str], where: Callable[[int], str]) -> np.ndarray:
    """Each text's position among the names."""
    position = {name: i for i, name in enumerate(names)}
    strange = next((i for i, text in enumerate(texts) if text not in position), None)
    if strange is not None:
        raise UserError(f"{texts[strange]!r} in {where(strange)} is not one of {', '.join(names)[:200]}")
    return np.array([position[text] for text in texts], dtype=np.int64)


def _pool(rows: _Rows, images: np.ndarray, provenance: Mapping[str, object]) -> Pool:
    extra: dict[str, Any] = {}
    for role, texts in rows.texts.items():
        if role == "split":
            names: tuple[str, ...] = tuple(_SPLITS)
            codes = np.array(list(_SPLITS.values()))[_codes([text.lower() for text in texts], names, rows.where)]
        else:
            names = _ordered(texts)
            codes = _codes(texts, names, rows.where)
        codes_field, names_field = _FIELDS[role]
        extra[codes_field] = torch.from_numpy(codes)
        if names_field is not None:
            extra[names_field] = names
    return Pool(torch.from_numpy(images), torch.from_numpy(rows.labels), rows.classes, provenance=provenance, **extra)


# --- cache ------------------------------------------------------------------------------------------------------------

_CODE_FIELDS = ("labels", "domains", "users", "supers", "groups", "splits")
_NAME_FIELDS = ("classes", "domain_names", "user_names", "super_names")


def _cached(request: _Request, digests: Mapping[str, str], read: Callable[[], _Rows]) -> Pool:
    """The pool of these files, from the cache when it is there."""
    scheme = request.source.partition(":")[0]
    content = _text_digest([scheme, list(digests.items())])
    key = _text_digest([_FORMAT, content, sorted((request.columns or {}).items()), request.size, request.channels])
    entry = None if request.cache is None else Path(request.cache) / "sources" / key
    pool = None if entry is None else _recall(entry)
    if pool is None:
        rows = read()
        images, originals = _decode(rows, request.size, request.channels)
        how = "sizes kept" if request.size is None else "resized with Pillow bicubic where the size differed"
        facts: dict[str, object] = {
            "images": len(images),
            "classes": len(rows.classes),
            "digest": content,
            "files": dict(digests) if len(digests) <= 100 else len(digests),
            "original": originals,
            "conversion": f"{images.shape[3]}x{images.shape[2]} {_MODES[request.channels]}, {how}",
        }
        pool = _pool(rows, images, facts)
        if entry is not None:
            _remember(entry, pool)
    # the string is the asker's, the rest the content's: the same bytes may be asked for under another path
    return replace(pool, provenance={"source": request.source, **pool.provenance})


def _remember(entry: Path, pool: Pool) -> None:
    """Write an entry so that other processes see all of it or nothing."""
    half = entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")
    try:
        half.mkdir(parents=True)
        np.save(half / "images.npy", pool.images.numpy(), allow_pickle=False)
        codes = {name: getattr(pool, name) for name in _CODE_FIELDS}
        np.savez(half / "codes.npz", **{name: code.numpy() for name, code in codes.items() if code is not None})
        names: dict[str, object] = {name: list(getattr(pool, name)) for name in _NAME_FIELDS}
        meta = {**names, "provenance": dict(pool.provenance), "images": _digest(half / "images.npy")}
        (half / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        if entry.exists() and _recall(entry) is None:
            shutil.rmtree(entry, ignore_errors=True)
        if not entry.exists():  # else another process was faster, with the same content
            os.replace(half, entry)
    except OSError as error:
        if _recall(entry) is None:
            raise UserError(f'the cache cannot be written in "{entry.parent}": {_line(error)}') from error
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _recall(entry: Path) -> Pool | None:
    """A whole and undamaged entry, mapped rather than read; None otherwise."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        if _digest(entry / "images.npy") != meta["images"]:
            return None
        images = np.load(entry / "images.npy", mmap_mode="c", allow_pickle=False)
        with np.load(entry / "codes.npz", allow_pickle=False) as stored:
            fields: dict[str, Any] = {name: torch.from_numpy(stored[name]) for name in stored.files}
        fields.update({name: tuple(meta[name]) for name in _NAME_FIELDS})
        return Pool(torch.from_numpy(images), **fields, provenance=meta["provenance"])
    except Exception:  # whatever is wrong with it, it can be made again
        return None


def _in_threads(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, items))


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f'"{path}" cannot be read: {_line(error)}') from error


def _text_digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


class _HashFile(io.RawIOBase):
    """A file that only remembers the digest of what was written."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


def _table_digest(table: Any) -> str:
    import pyarrow as pa

    sink = _HashFile()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as writer:
        writer.write_table(table)
    return sink.hash.hexdigest()


def _line(error: BaseException) -> str:
    """An exception as part of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
