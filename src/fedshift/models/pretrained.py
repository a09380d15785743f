"""Start a network from weights: a safetensors file, here or on the hub, with a clear sentence when they do not fit.

``weights`` of a network is a path, or ``hub:OWNER/NAME`` (its ``model.safetensors``) or ``hub:OWNER/NAME/FILE``, perhaps
with a revision (``hub:OWNER/NAME@REVISION``). Behind ``#sha256=`` may stand the digest that the file must have, or how it
begins.
Only safetensors are read: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedshift.errors import UserError

HUB, DIGEST = "hub:", "#sha256="
LEAST = 16  # letters of a digest, so that it says something
_ID = re.compile(r"(?P<repository>[^/@#]+/[^/@#]+)(?:/(?P<file>[^@#]+))?(?:@(?P<revision>[^@#]+))?")


def load_pretrained(module: nn.Module, weights: str | Path) -> list[str]:
    """Copy a file's tensors into a network and return the names that were skipped; an empty text loads nothing.

    The file's names and shapes must be the network's own (those of ``module.state_dict()``), or torchvision's and timm's
    names of the same network, with one exception: a head for another number of classes is skipped as a whole, so that it
    keeps its random start. Anything else that is missing, superfluous or of another shape is an error, and then the network
    is left as it was. Numbers are converted to the network's type.

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
    if not str(weights):
        return []
    path, own = weights_file(str(weights)), module.state_dict()
    given = _own_names(_read(path), own)
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


def weights_file(weights: str) -> Path:
    """The file that is meant, on this disk, after its digest was looked at."""
    where, _, digest = weights.partition(DIGEST)
    path = _from_hub(where) if where.startswith(HUB) else Path(os.path.expandvars(where)).expanduser()
    if not path.is_file():
        raise UserError(f"there is no weights file {path}")
    if digest and not re.fullmatch(rf"[0-9a-f]{{{LEAST},64}}", digest):
        raise UserError(f"behind {DIGEST} stand {LEAST} to 64 letters of a digest (0-9, a-f), not {digest!r}")
    if digest and not (found := _digest(path)).startswith(digest):
        raise UserError(f"weights file {path} is not what was asked for: its digest is {found}, not {digest}")
    return path


@cache
def _from_hub(where: str) -> Path:
    meant = _ID.fullmatch(where.removeprefix(HUB))
    if meant is None:
        raise UserError(f'weights "{where}" must be hub:OWNER/NAME, hub:OWNER/NAME/FILE or either with @REVISION')
    file = meant["file"] or "model.safetensors"
    if not file.endswith(".safetensors"):
        raise UserError(f'weights "{where}": only safetensors files are read, not {file}')
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise UserError(f'weights "{where}" need the hub\'s library: pip install "fedshift[hub]"') from None
    try:
        return Path(hf_hub_download(meant["repository"], file, revision=meant["revision"]))
    except Exception as error:  # the library raises its own and its network stack's exceptions
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f'weights "{where}" could not be fetched: {first}') from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"weights file {path} is not a safetensors file or is damaged ({error})") from None


def _own_names(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Torchvision's and timm's names of a network as ours: ``body.`` before them, and ``head`` for ``fc``.

    >>> list(_own_names({"fc.bias": torch.ones(1), "conv1.weight": torch.ones(1)}, {"body.conv1.weight": torch.ones(1)}))
    ['head.bias', 'body.conv1.weight']
    """
    theirs = {name: f"head.{name.removeprefix('fc.')}" if name.startswith("fc.") else f"body.{name}" for name in given}
    fits = [name for name in theirs.values() if name in own]
    return {theirs[name]: leaf for name, leaf in given.items()} if fits and not set(given) & set(own) else dict(given)


def _other_classes(own: dict[str, Tensor], given: dict[str, Tensor]) -> bool:
    """The two heads read the same features and differ in the number of classes."""
    local, theirs = own.get("head.weight"), given.get("head.weight")
    if local is None or theirs is None:
        return False
    return local.shape[1:] == theirs.shape[1:] and len(local) != len(theirs)
