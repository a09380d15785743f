"""Start a network from weights in a safetensors file, with a clear sentence when they do not fit."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedshift.errors import UserError


def load_pretrained(module: nn.Module, path: str | Path) -> list[str]:
    """Copy a file's tensors into a network and return the names that were skipped; an empty path loads nothing.

    The file's names and shapes must be the network's own (those of ``module.state_dict()``), with one exception: a head
    for another number of classes is skipped as a whole, so that it keeps its random start. Anything else that is missing,
    superfluous or of another shape is an error, and then the network is left as it was. Numbers are converted to the
    network's type.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> from fedshift.models.mlp import MLP
    >>> path = Path(tempfile.mkdtemp()) / "mlp.safetensors"
    >>> save_file(MLP().make((1, 4, 4), classes=10).state_dict(), path)
    >>> load_pretrained(MLP().make((1, 4, 4), classes=10), path)
    []
    >>> load_pretrained(MLP().make((1, 4, 4), classes=3), path)
    ['head.weight', 'head.bias']
    """
    if not str(path):
        return []
    given, own = _read(Path(os.path.expandvars(path)).expanduser()), module.state_dict()
    skipped = [name for name in own if name.startswith("head.")] if _other_classes(own, given) else []
    for name, leaf in own.items():
        if name in skipped:
            continue
        if name not in given:
            raise UserError(f"weights file {path} has no {name!r}; its names must be the network's own")
        if given[name].shape != leaf.shape:
            shapes = f"{list(given[name].shape)}, but the network needs {list(leaf.shape)}"
            raise UserError(f"weights file {path} has {name!r} of shape {shapes}")
    for name in given:
        if name not in own and not (skipped and name.startswith("head.")):
            raise UserError(f"weights file {path} has {name!r}, which the network does not have")
    with torch.no_grad():
        for name, leaf in own.items():
            if name not in skipped:
                leaf.copy_(given[name])
    return skipped


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"there is no weights file {path}")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"weights file {path} is not a safetensors file or is damaged ({error})") from None


def _other_classes(own: dict[str, Tensor], given: dict[str, Tensor]) -> bool:
    """The two heads read the same features and differ in the number of classes."""
    local, theirs = own.get("head.weight"), given.get("head.weight")
    if local is None or theirs is None:
        return False
    return local.shape[1:] == theirs.shape[1:] and len(local) != len(theirs)
