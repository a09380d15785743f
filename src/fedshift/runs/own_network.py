"""A network of the user's own, instead of one by name: what it must answer, and which layer gives its logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedshift.core.arch import Arch
from fedshift.errors import UserError


@dataclass(frozen=True)
class Headed:
    """A network, and the name of the linear layer that gives its logits."""

    network: nn.Module | Callable[[], nn.Module]
    head: str


Network: TypeAlias = nn.Module | Callable[[], nn.Module] | Headed


def headed(network: Network | None, head: str | None) -> Network | None:
    """A network with the layer that was named; without a name it is found.

    >>> headed(nn.Linear(2, 2), "fc").head
    'fc'
    """
    if head is None or isinstance(network, Headed):
        return network
    if network is None:
        raise UserError("head names a layer of your own network: give that too")
    return Headed(network, head)


def arch_of(network: Network, shape: Sequence[int], mean: Sequence[float], std: Sequence[float]) -> Arch:
    """The network described, after a look at what it returns."""
    given, head = (network.network, network.head) if isinstance(network, Headed) else (network, None)
    _check_answer(given, shape)
    return Arch.of(given, shape, head=head, mean=mean, std=std)


def _check_answer(network: nn.Module | Callable[[], nn.Module], shape: Sequence[int]) -> None:
    """Logits alone, or logits and a dictionary of inner activations; one sentence if it is anything else."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = copy.deepcopy(network if isinstance(network, nn.Module) else network()).cpu().float().eval()
        try:
            answer: Any = module(torch.zeros(2, *shape))
        except (RuntimeError, ValueError):  # said where the network is described
            return
    pair = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)
    if isinstance(answer[0] if pair else answer, Tensor):
        return
    inner = f" of {', '.join(type(part).__name__ for part in answer)}" if isinstance(answer, tuple | list) else ""
    raise UserError(
        f"network {type(module).__name__.lower()!r} returns a {type(answer).__name__}{inner}: it must return its logits, or "
        "its logits and a dictionary of inner activations"
    )


def surplus(arch: Arch, classes: int) -> str:
    """What is said of a network with more logits than there are classes; nothing if it has not."""
    if arch.classes <= classes:
        return ""
    return (
        f"network {arch.name!r} gives {arch.classes} logits, but the data have {classes} classes: an answer beyond them is "
        f"wrong; give its last layer {classes} outputs unless you mean it"
    )
