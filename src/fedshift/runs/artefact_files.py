"""The folder of an artefact, as files.

``model.safetensors`` has the network's tensors under the names of its ``nn.Module``; ``state.safetensors`` what else the
deployed model works with (a second head, descriptors, a learnt loss), if there is anything; ``adapters/LABEL.safetensors``
what an adapter adds to it: what it made of the training data, or the state it had come to; ``known.safetensors`` what the
client's own images look like to the model, where it had some. ``config.toml`` says how to use them and where they come
from, with a digest of every file. A folder is written whole or not at all, and never changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedshift.core.arch import Arch
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.errors import UserError
from fedshift.runs.new_folder import digest_of, files_in, new_folder
from fedshift.store.files import Damaged, check_file, parsed
from fedshift.store.seal import read_toml, toml_sealed
from fedshift.store.toml import toml_text
from fedshift.store.trees import write as write_trees

REMEDY = (
    "put it back from a copy, or make it again (fedshift run does that for a run's own, join and export for theirs)"
)
MODEL, CONFIG, STATE, KNOWN = "model.safetensors", "config.toml", "state.safetensors", "known.safetensors"


def write(
    folder: Path,
    arch: Arch,
    deployed: Tree,
    config: Mapping[str, Any],
    parts: Mapping[str, Tree] | None = None,
    beside: Mapping[str, bytes] | None = None,
    like: Path | None = None,
    known: Tensors | None = None,
) -> list[Path]:
    """The whole folder or nothing of it; the paths of its files.

    ``parts`` are what adapters add, by label; ``beside`` are more files by name. ``like`` is an artefact with the same
    model, whose file is shared where the disk can do that; ``known`` is of :class:`fedshift.runs.known.Known`.
    """
    rest = {slot: leaves for slot, leaves in deployed.items() if slot != "model"}
    with new_folder(folder) as place:
        if like is None or not _linked(like / MODEL, place / MODEL):
            save_model(place / MODEL, pick(deployed["model"], (*arch.parameters, *arch.buffers)))
        if rest:
            write_trees(place / STATE, {"state": rest})
        for label, tree in (parts or {}).items():
            (place / "adapters").mkdir(exist_ok=True)
            write_trees(place / part_file(label), {"state": tree})
        if known is not None:
            save_file(plain(known), place / KNOWN)
        digests = {path.relative_to(place).as_posix(): digest_of(path) for path in files_in(place)}
        (place / CONFIG).write_text(toml_sealed(toml_text({**config, "files": digests})), encoding="utf-8")
        for name, content in (beside or {}).items():
            (place / name).write_bytes(content)
    return files_in(folder)


def read_config(folder: Path, must: bool = False) -> dict[str, Any]:
    """What an artefact says of itself, once its files are seen to be what was written; ``must`` it have a seal?"""
    if not (folder / CONFIG).exists() and not (folder / MODEL).exists():
        raise UserError(f"{folder} is not an artefact: it has no {CONFIG}")
    config = read_toml(folder / CONFIG, must, REMEDY)
    listed = parsed(folder / CONFIG, lambda: dict(config.get("files", {})), remedy=REMEDY)
    for path, digest in ((folder / name, digest) for name, digest in listed.items()):
        check_file(path, REMEDY)
        if digest_of(path) != digest:
            raise Damaged(path, f"it is not what {CONFIG} says was written", REMEDY)
    return config


def save_model(path: Path, tensors: Tensors) -> None:
    """A plain file for anybody's loader; files sort names, so their order is in the header."""
    save_file(plain(tensors), path, metadata={"order": json.dumps(list(tensors))})


def load_model(path: Path, usual: Iterable[str]) -> Tensors:
    """The tensors in the order in which they were; ``usual`` if the file does not say.

    An adapter's optimiser calls its memory by the first tensor's name, so another order would not find it again.
    """
    check_file(path, REMEDY)
    try:
        with safe_open(path, framework="pt") as file:
            order = json.loads((file.metadata() or {}).get("order", "null"))
        found = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise Damaged(path, str(error), REMEDY) from None
    names = parsed(path, lambda: list(dict.fromkeys([*(order or usual), *found])), remedy=REMEDY)
    return {name: found[name] for name in names if name in found}


def part_file(label: str) -> str:
    """Where what an adapter adds lies in an artefact."""
    return f"adapters/{label}.safetensors"


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that has no links
        return False
    return True


def plain(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors of their own memory, on the CPU."""
    return {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}
