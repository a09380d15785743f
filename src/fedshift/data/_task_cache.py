"""Made tasks on disk: index arrays and shifted images. The source's own images are cached by the source."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.data.cache import making, used
from fedshift.data.pool import Pool
from fedshift.data.split import LeftOut, Split
from fedshift.data.streams import Setting, Stream


@dataclass(frozen=True)
class Stored:
    """What a task is beside its source's images."""

    hash: str
    clients: Mapping[str, Split]
    unseen: Mapping[str, Split]
    streams: Mapping[str, Stream]
    public: Tensor | None
    left_out: Sequence[LeftOut]
    provenance: Mapping[str, Any]


def save(folder: Path, task: Stored) -> None:
    """Write the task's folder: it is there whole or not at all."""
    with making(folder) as temporary:
        everyone = (*task.clients.values(), *task.unseen.values())
        arrays = _flat("clients", [part for parts in everyone for part in parts])
        arrays |= _flat("left-out", [left.rows for left in task.left_out])
        if task.public is not None:
            arrays["public"] = task.public.numpy()
        for s, stream in enumerate(task.streams.values()):
            arrays |= _flat(f"stream-{s}", list(stream.index.values()))
            if stream.images is not None:
                np.save(temporary / f"stream-{s}.npy", stream.images.numpy())
                arrays |= {f"stream-{s}/labels": stream.labels.numpy(), f"stream-{s}/ids": stream.ids.numpy()}
            if stream.rows is not None:
                arrays[f"stream-{s}/rows"] = stream.rows.numpy()
        np.savez(temporary / "arrays.npz", **arrays)  # type: ignore[arg-type]
        facts = {
            "hash": task.hash,
            "clients": list(task.clients),
            "unseen": list(task.unseen),
            "left-out": [[left.client, left.reason] for left in task.left_out],
            "streams": [
                {
                    "name": stream.name,
                    "kind": stream.kind,
                    "setting": asdict(stream.setting),
                    "clients": list(stream.index),
                    "shifted": stream.images is not None,
                }
                for stream in task.streams.values()
            ],
            "provenance": task.provenance,
        }
        (temporary / "task.json").write_text(json.dumps(facts, default=str))


def load(folder: Path, pool: Pool, content: Tensor) -> Stored | None:
    """The cached task, or None if it is not there or damaged (then it is made again)."""
    try:
        facts = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        with np.load(folder / "arrays.npz", allow_pickle=False) as file:
            arrays = {key: torch.from_numpy(file[key]) for key in file.files}
        streams = {
            fact["name"]: _load_stream(folder, s, fact, arrays, pool, content)
            for s, fact in enumerate(facts["streams"])
        }
        parts = _unflat("clients", arrays)
        names = [*facts["clients"], *facts["unseen"]]
        owners = {name: (parts[3 * i], parts[3 * i + 1], parts[3 * i + 2]) for i, name in enumerate(names)}
        used(folder)
        left = zip(facts["left-out"], _unflat("left-out", arrays), strict=True)
        return Stored(
            hash=facts["hash"],
            clients={name: owners[name] for name in facts["clients"]},
            unseen={name: owners[name] for name in facts["unseen"]},
            streams=streams,
            public=arrays.get("public"),
            left_out=tuple(LeftOut(client, reason, rows) for (client, reason), rows in left),
            provenance=facts["provenance"],
        )
    except (OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, zipfile.BadZipFile):
        forget(folder)
        return None


def forget(folder: Path) -> None:
    """Remove an entry that is damaged."""
    shutil.rmtree(folder, ignore_errors=True)


def _load_stream(
    folder: Path, s: int, fact: Mapping[str, Any], arrays: Mapping[str, Tensor], pool: Pool, content: Tensor
) -> Stream:
    shifted = fact["shifted"]
    return Stream(
        name=fact["name"],
        kind=fact["kind"],
        setting=Setting(**fact["setting"]),
        images=torch.from_numpy(np.load(folder / f"stream-{s}.npy", mmap_mode="c")) if shifted else None,
        labels=arrays[f"stream-{s}/labels"] if shifted else pool.labels,
        ids=arrays[f"stream-{s}/ids"] if shifted else content,
        index=dict(zip(fact["clients"], _unflat(f"stream-{s}", arrays), strict=True)),
        rows=arrays.get(f"stream-{s}/rows"),
    )


def _flat(name: str, parts: Sequence[Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Ten thousand clients' index arrays as two arrays."""
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    joined = torch.cat(list(parts)).numpy() if parts else np.zeros(0, dtype=np.int64)
    return {f"{name}/joined": joined, f"{name}/lengths": lengths}


def _unflat(name: str, arrays: Mapping[str, Tensor]) -> list[Tensor]:
    return list(arrays[f"{name}/joined"].split(arrays[f"{name}/lengths"].tolist()))
