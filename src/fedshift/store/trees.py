"""Trees in files: safetensors with a JSON header, so that nothing is ever unpickled, and a seal in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from fedshift.core.tree import Tensors, Tree
from fedshift.errors import number_in
from fedshift.store.files import GO_ON, Damaged, check_file, parsed, replace_with
from fedshift.store.seal import BROKEN, NONE, SEAL

HEADER = "fedshift"


# ---- named tensors -------------------------------------------------------------------------------------------------------
def write_tensors(path: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any], seal: bool = True) -> None:
    """Tensors on the CPU and a JSON header; the file is there even if it is not whole."""
    whole = {**described, SEAL: seal_of(tensors, described)} if seal else described
    header = {HEADER: json.dumps(whole)}
    try:
        save_file(dict(tensors), path, metadata=header)
    except SafetensorError as error:  # how it tells what the system said
        number = number_in(str(error))
        raise (OSError(number, str(error)) if number else error) from None


def read_tensors(path: Path, order: str = "", must: bool = False, remedy: str = "") -> tuple[Tensors, dict[str, Any]]:
    """What :func:`write_tensors` wrote; the entry ``order`` of the header, if there is one, says in which order."""
    check_file(path, remedy)
    try:
        with safe_open(path, framework="pt") as file:
            described = parsed(path, lambda: json.loads((file.metadata() or {})[HEADER]), remedy=remedy)
            keys = parsed(path, lambda: list(described.get(order) or file.keys()), remedy=remedy)
            # of their own, aligned memory: same bits in whatever is computed
            tensors = parsed(path, lambda: {key: file.get_tensor(key).clone() for key in keys}, remedy=remedy)
    except SafetensorError as error:
        raise Damaged(path, str(error), remedy) from None
    seal = described.pop(SEAL, None)
    if seal is not None and seal != seal_of(tensors, described):
        raise Damaged(path, BROKEN, remedy)
    if must and seal is None:
        raise Damaged(path, NONE, remedy)
    return tensors, described


def seal_of(tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> str:
    """A digest of everything a file holds, whatever the order."""
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=8)
    for name in sorted(tensors):
        leaf = tensors[name]
        digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}".encode())
        digest.update(leaf.contiguous().reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()


# ---- trees ---------------------------------------------------------------------------------------------------------------
def write(path: Path, trees: Mapping[str, Tree], facts: Mapping[str, object] | None = None, seal: bool = True) -> None:
    """Write several named trees and some JSON facts to one safetensors file; what is read at once needs no seal.

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
    write_tensors(path, tensors, {"owners": owners, "order": list(tensors), "facts": dict(facts or {})}, seal)


def save(path: Path, trees: Mapping[str, Tree], facts: Mapping[str, object] | None = None, hint: str = GO_ON) -> None:
    """:func:`write`, all or nothing: the file appears under its name only when it is complete and on disk.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save(path, {"server": {"model": {"w": torch.ones(2)}, "nothing": {}}}, {"round": 3})
    >>> load(path)
    ({'server': {'model': {'w': tensor([1., 1.])}, 'nothing': {}}}, {'round': 3})
    """
    replace_with(path, lambda temporary: write(temporary, trees, facts), hint)


def load(path: Path, must: bool = False, remedy: str = "") -> tuple[dict[str, Tree], dict[str, Any]]:
    """Read what :func:`save` wrote: the trees by name, and the facts; ``must`` it have a seal?"""
    # as they were written: a sum over tensors in another order has other bits, and files sort their names
    tensors, header = read_tensors(path, "order", must, remedy)
    return parsed(path, lambda: (_trees(tensors, header["owners"]), dict(header["facts"])), remedy=remedy)


def facts_of(path: Path, remedy: str = "") -> dict[str, Any]:
    """The facts alone, without the trees; the seal is not looked at."""
    check_file(path, remedy)
    try:
        with safe_open(path, framework="pt") as file:
            return parsed(path, lambda: dict(json.loads((file.metadata() or {})[HEADER])["facts"]), remedy=remedy)
    except (OSError, SafetensorError) as error:
        raise Damaged(path, str(error), remedy) from None


def _trees(tensors: Tensors, owners: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Tree]:
    trees: dict[str, Tree] = {owner: {slot: {} for slot in slots} for owner, slots in owners}
    for key, leaf in tensors.items():
        place, slot, name = key.split("/", 2)
        owner, slots = owners[int(place)]
        trees[owner][slots[int(slot)]][name] = leaf
    return trees
