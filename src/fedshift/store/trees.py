"""Trees in files: safetensors with a JSON header, so that nothing is ever unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from fedshift.core.tree import Tensors, Tree
from fedshift.errors import UserError


def write(path: Path, trees: Mapping[str, Tree], facts: Mapping[str, object] | None = None) -> None:
    """Write several named trees and some JSON facts to one safetensors file.

    The keys are ``owner/slot/name`` with owner and slot as numbers into the header's lists, so that any name will do and
    empty slots and empty trees survive.
    """
    tensors: Tensors = {}
    storages: set[int] = set()
    for i, tree in enumerate(trees.values()):
        for j, leaves in enumerate(tree.values()):
            for name, leaf in leaves.items():
                plain = leaf.detach().cpu().contiguous()
                # a file holds no two tensors of one memory, nor a part of a larger one
                shared = plain.untyped_storage().nbytes() != plain.nbytes or plain.data_ptr() in storages
                tensors[f"{i}/{j}/{name}"] = plain.clone() if shared else plain
                storages.add(plain.data_ptr())
    owners = [[owner, list(tree)] for owner, tree in trees.items()]
    described = {"owners": owners, "order": list(tensors), "facts": dict(facts or {})}
    header = {"fedshift": json.dumps(described)}
    save_file(tensors, path, metadata=header)


def save(path: Path, trees: Mapping[str, Tree], facts: Mapping[str, object] | None = None) -> None:
    """:func:`write`, all or nothing: the file appears under its name only when it is complete and on disk.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save(path, {"server": {"model": {"w": torch.ones(2)}, "nothing": {}}}, {"round": 3})
    >>> load(path)
    ({'server': {'model': {'w': tensor([1., 1.])}, 'nothing': {}}}, {'round': 3})
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary, trees, facts)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tree], dict[str, object]]:
    """Read what :func:`save` wrote: the trees by name, and the facts."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["fedshift"])
            trees: list[Tree] = [{slot: {} for slot in slots} for _, slots in header["owners"]]
            # as they were written: a sum over tensors in another order has other bits, and files sort their names
            for key in header["order"]:
                owner, slot, name = key.split("/", 2)
                trees[int(owner)][header["owners"][int(owner)][1][int(slot)]][name] = file.get_tensor(
                    key
                ).clone()  # aligned memory: same bits as before
            return {owner: tree for (owner, _), tree in zip(header["owners"], trees, strict=True)}, dict(
                header["facts"]
            )
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is not a fedshift state file or is damaged ({error})") from None
    except Exception as error:  # safetensors raises its own type, which it does not export everywhere
        if type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"{path} is not a fedshift state file or is damaged ({error})") from None
