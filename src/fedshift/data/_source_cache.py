"""Decoded sources on disk, under keys that are the content of the files: an entry can never be stale."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift.data._pixels import MODES, decode
from fedshift.data._rows import Request, Rows, line, pool_of, with_hints
from fedshift.data.cache import SOURCES, making, used
from fedshift.data.pool import Column, Pool
from fedshift.data.windows import dark_hint
from fedshift.errors import UserError

_FORMAT = 4  # of a cache entry and of everything that decides its bytes: raise it when decoding changes
_CODE_FIELDS = ("labels", "domains", "users", "supers", "groups", "splits")
_NAME_FIELDS = ("classes", "domain_names", "user_names", "super_names", "group_names", "names")


def cached(request: Request, digests: Mapping[str, str], read: Callable[[], Rows]) -> Pool:
    """The pool of these files, from the cache when it is there."""
    scheme = request.source.partition(":")[0]
    content = text_digest([scheme, list(digests.items())])
    asked = [sorted((request.columns or {}).items()), list(request.attributes), request.size, request.channels]
    key = text_digest([_FORMAT, content, *asked, request.window])
    entry = None if request.cache is None else Path(request.cache) / SOURCES / key
    pool = None if entry is None else _recall(entry)
    if pool is None:
        rows = read()
        images, originals, dark = decode(rows, request.size, request.channels, request.window)
        how = "sizes kept" if request.size is None else "resized with Pillow bicubic where the size differed"
        facts: dict[str, object] = {
            "images": len(images),
            "classes": len(rows.classes),
            "digest": content,
            "files": dict(digests) if len(digests) <= 100 else len(digests),
            "original": dict(originals.most_common(12)),
            "conversion": f"{images.shape[3]}x{images.shape[2]} {MODES[request.channels]}, {how}",
        }
        hint = dark_hint(dark, len(images))
        pool = with_hints(pool_of(rows, images, facts), [hint] if hint else [])
        if entry is not None:
            _remember(entry, pool, request.source)
    # the string is the asker's, the rest the content's: the same bytes may be asked for under another path
    return replace(pool, provenance={"source": request.source, **pool.provenance})


def _remember(entry: Path, pool: Pool, source: str) -> None:
    """Write an entry so that other processes see all of it or nothing."""
    if entry.exists() and _recall(entry) is None:
        shutil.rmtree(entry, ignore_errors=True)
    with making(entry) as half:
        np.save(half / "images.npy", pool.images.numpy(), allow_pickle=False)
        codes = {name: getattr(pool, name) for name in _CODE_FIELDS}
        codes |= {f"attribute-{i}": column.codes for i, column in enumerate(pool.attributes.values())}
        np.savez(half / "codes.npz", **{name: code.numpy() for name, code in codes.items() if code is not None})
        names: dict[str, object] = {name: list(getattr(pool, name)) for name in _NAME_FIELDS}
        names["attributes"] = {name: list(column.values) for name, column in pool.attributes.items()}
        meta = {**names, "provenance": dict(pool.provenance), "images": file_digest(half / "images.npy")}
        (half / "meta.json").write_text(json.dumps({**meta, "source": source}), encoding="utf-8")


def _recall(entry: Path) -> Pool | None:
    """A whole and undamaged entry, mapped rather than read; None otherwise."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        if file_digest(entry / "images.npy") != meta["images"]:
            return None
        images = np.load(entry / "images.npy", mmap_mode="c", allow_pickle=False)
        with np.load(entry / "codes.npz", allow_pickle=False) as stored:
            fields: dict[str, Any] = {name: torch.from_numpy(stored[name]) for name in stored.files}
        fields.update({name: tuple(meta[name]) for name in _NAME_FIELDS})
        fields["attributes"] = {
            name: Column(fields.pop(f"attribute-{i}"), tuple(values))
            for i, (name, values) in enumerate(meta["attributes"].items())
        }
        pool = Pool(torch.from_numpy(images), **fields, provenance=meta["provenance"])
    except Exception:  # whatever is wrong with it, it can be made again
        return None
    used(entry)
    return pool


def file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f'"{path}" cannot be read: {line(error)}') from error


def text_digest(value: object) -> str:
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


def table_digest(table: Any) -> str:
    import pyarrow as pa

    sink = _HashFile()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as writer:
        writer.write_table(table)
    return sink.hash.hexdigest()
