"""An unseen client's images: a folder, one picture or Parquet, in the size and colours a run was trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.data._columns import ROLES
from fedshift.data._encoded import paths_of, pictures_of
from fedshift.data._parts import Part, is_csv, table_part
from fedshift.data._pixels import decode_readable, undecodable
from fedshift.data._rows import Rows
from fedshift.data._walk import SUFFIXES, is_picture, others, walk
from fedshift.data.windows import Window, dark_hint
from fedshift.errors import UserError

MOST_NAMED = 10  # of pictures that cannot be read; all of them are in the report's file


@dataclass(frozen=True)
class Images:
    """What an unseen client brings."""

    names: tuple[str, ...]  # of the files
    pixels: Tensor  # uint8 [N, channels, height, width]
    truth: Tensor | None  # int64 [N], where the labels are known
    resized: int = 0
    converted: int = 0  # from grey to colour, or the other way round
    dark: int = 0  # of more than eight bits, and almost nothing can be seen
    left_out: tuple[str, ...] = ()  # files beside them that are no pictures
    broken: tuple[tuple[str, str], ...] = ()  # pictures that cannot be read: name, and what is wrong

    def notes(self) -> list[str]:
        """What was done to them, for people."""
        _, channels, height, width = self.pixels.shape
        colours = "grey" if channels == 1 else "colour"
        done = {f"resized to {width}x{height}": self.resized, f"converted to {colours}": self.converted}
        said = [f"{count} of {len(self.names)} images were {what}" for what, count in done.items() if count]
        said += [dark_hint(self.dark, len(self.names))] if self.dark else []
        said += [_skipped(self.broken, len(self.names) + len(self.broken))] if self.broken else []
        return said + ([_left_out(self.left_out)] if self.left_out else [])


@dataclass(frozen=True)
class _Found:
    """Pictures before they are decoded."""

    names: tuple[str, ...]
    encoded: Sequence[Any]
    labels: tuple[str, ...] | None
    left_out: tuple[str, ...] = ()


def read_images(
    path: Path,
    shape: tuple[int, int, int],
    classes: Sequence[str],
    columns: Mapping[str, str] | None = None,
    strict: bool = False,
    window: Window | None = None,
) -> Images:
    """Read pictures as the run's own were read: colours converted, other sizes resized with Pillow's bicubic filter.

    A folder has its pictures in it (no labels) or in folders named like classes. ``columns`` says which column of Parquet
    is the image and which the label, as in ``[data] columns``; the usual names are known. ``window`` is of greys of more
    than eight bits. A picture that cannot be read is
    skipped, or, with ``strict``, a mistake; none that can be read is always one.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> Image.new("L", (9, 5)).save(folder / "one.png")
    >>> images = read_images(folder, (3, 8, 8), ["cat", "dog"])
    >>> images.names, list(images.pixels.shape), images.notes()[0]
    (('one.png',), [1, 3, 8, 8], '1 of 1 images were resized to 8x8')
    """
    found = _found(path, columns or {})
    truth = None if found.labels is None else _codes(found, classes)
    channels, height, width = shape
    rows = Rows(found.encoded, found.names.__getitem__, np.zeros(0), (), {})
    read, broken = decode_readable(rows, (width, height), channels, window)
    empty = np.empty((0, channels, height, width), dtype=np.uint8)
    pixels = np.stack([image.pixels for image in read]) if read else empty
    kinds = Counter(image.kind for image in read)
    for i, why in broken.items():
        if strict or len(found.names) == 1:
            raise UserError(undecodable(found.names[i], why))
        if not len(pixels):
            raise UserError(f"none of the {len(found.names)} images can be read: {undecodable(found.names[i], why)}")
    kept = [i for i in range(len(found.names)) if i not in broken]
    other_size = {kind: n for kind, n in kinds.items() if not kind.startswith(f"{width}x{height} ")}
    grey = {
        kind: n for kind, n in kinds.items() if kind.split()[1].removesuffix("B") in ("1", "L", "LA", "I", "I;16", "F")
    }
    converted = sum(grey.values()) if channels == 3 else len(pixels) - sum(grey.values())
    return Images(
        names=tuple(found.names[i] for i in kept),
        pixels=torch.from_numpy(pixels),
        truth=None if truth is None else truth[kept],
        resized=sum(other_size.values()),
        converted=converted,
        left_out=found.left_out,
        dark=sum(image.dark for image in read),
        broken=tuple((found.names[i], why) for i, why in broken.items()),
    )


def _found(path: Path, columns: Mapping[str, str]) -> _Found:
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    if path.is_dir():
        names, _ = walk(path)
        if names:
            return replace(_in_folder(path, names), left_out=others(path))
        tables = sorted(path.rglob("*.parquet"))
        if not tables:
            raise UserError(f"there are no pictures in {path} ({_suffixes()}), and no Parquet files")
        return _in_tables({table.relative_to(path).as_posix(): table for table in tables}, columns)
    if path.suffix.lower() == ".parquet" or is_csv(path):
        return _in_tables({path.name: path}, columns)
    if is_picture(path):
        return _Found((path.name,), (path,), None)
    raise UserError(f"{path} is neither a folder nor a picture ({_suffixes()}) nor a Parquet or CSV file")


def _skipped(broken: Sequence[tuple[str, str]], count: int) -> str:
    """What is said of pictures that cannot be read.

    >>> _skipped([("a.png", "its format is not known")], 5)
    '1 of 5 images cannot be read and was skipped: a.png (its format is not known)'
    """
    shown = ", ".join(f"{name} ({why})" for name, why in broken[:MOST_NAMED])
    more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
    were = "was" if len(broken) == 1 else "were"
    return f"{len(broken)} of {count} images cannot be read and {were} skipped: {shown}{more}"


def _left_out(names: Sequence[str]) -> str:
    """What is said of files that are no pictures.

    >>> _left_out(["a.txt"])
    '1 file was left out, because it is no picture (bmp, dcm, dicom, ima, jpeg, jpg, png, tif, tiff, webp): a.txt'
    """
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    which = (
        "1 file was left out, because it is"
        if len(names) == 1
        else f"{len(names)} files were left out, because they are"
    )
    return f"{which} no picture ({_suffixes()}): {shown}"


def _suffixes() -> str:
    return ", ".join(sorted(suffix.removeprefix(".") for suffix in SUFFIXES))


def _in_folder(root: Path, names: Sequence[str]) -> _Found:
    depths = {name.count("/") for name in names}
    if depths not in ({0}, {1}):
        odd = next((name for name in names if name.count("/") not in (0, 1)), None)
        what = f"such as {odd} lie deeper" if odd else "lie in both"
        raise UserError(
            f"pictures of {root} must lie in it (without labels) or in folders named like classes, but some {what}"
        )
    labels = tuple(name.split("/")[0] for name in names) if depths == {1} else None
    return _Found(tuple(names), [root / name for name in names], labels)


def _in_tables(files: Mapping[str, Path], columns: Mapping[str, str]) -> _Found:
    parts = [table_part(name, file) for name, file in files.items()]
    labelled = [_column(part, "label", columns) is not None for part in parts]
    if any(labelled) and not all(labelled):
        raise UserError(
            f"{parts[labelled.index(True)].name} has labels, but {parts[labelled.index(False)].name} has none"
        )
    names: list[str] = []
    pictures: list[Any] = []
    labels: list[str | None] = []
    for part in parts:
        column = _column(part, "image", columns)
        if column is None:
            raise UserError(f"{part.name} has no column of pictures that is known by name: {', '.join(part.columns)}")
        label = _column(part, "label", columns)
        table = part.table([column, *([label] if label else [])])
        names += _names(part, table.column(column))
        pictures += pictures_of(part, column, table)
        labels += _labels(part, label, table.column(label).to_pylist()) if label else [None] * table.num_rows
    if not pictures:
        raise UserError(f"{', '.join(files)} holds no images")
    return _Found(tuple(names), pictures, _known(labels, names))


def _column(part: Part, role: str, columns: Mapping[str, str]) -> str | None:
    """The column of a role: the run's own if it is there, or one of the usual names."""
    return next((name for name in (columns.get(role), *ROLES[role]) if name in part.columns), None)


def _names(part: Part, values: Any) -> list[str]:
    """The pictures' paths where every row has one of its own, otherwise numbers of rows."""
    paths = [path for path in paths_of(values) or [] if path]
    return paths if len(set(paths)) == len(values) else _numbered(part.name, len(values))


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}#{i}" for i in range(count)]


def _labels(part: Part, column: str, values: Iterable[Any]) -> list[str | None]:
    """Labels by name, None where they are not known (empty, or negative as data sets write it)."""
    names = part.names.get(column)
    found: list[str | None] = []
    for i, value in enumerate(values):
        if value is None or value == "" or (isinstance(value, int) and value < 0):
            found.append(None)
        elif isinstance(value, int) and names is not None:
            if value >= len(names):
                raise UserError(
                    f"the label of {part.name}#{i} is {value}, but the file names {len(names)} classes only"
                )
            found.append(names[value])
        elif isinstance(value, str | int):
            found.append(str(value))
        else:
            raise UserError(f"the label of {part.name}#{i} must be a string or an integer, not {value!r}")
    return found


def _known(labels: Sequence[str | None], names: Sequence[str]) -> tuple[str, ...] | None:
    """All labels, or None if there is none; some of them are a mistake."""
    known = tuple(label for label in labels if label is not None)
    if known and len(known) < len(labels):
        missing = names[labels.index(None)]
        raise UserError(f"{missing} has no label, but others have: give all of them or none")
    return known or None


def _codes(found: _Found, classes: Sequence[str]) -> Tensor:
    """Labels as positions among the run's classes."""
    labels = found.labels or ()
    strange = Counter(label for label in labels if label not in set(classes))
    if strange:
        first = next(iter(strange))
        listed = ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
        raise UserError(
            f"the label {first!r} of {found.names[labels.index(first)]} is none of the run's classes ({listed}); "
            "images without labels lie in one folder, or in Parquet without a label column"
        )
    return torch.tensor([classes.index(label) for label in labels])
