"""Control variates: what cancels the drift of local steps towards a client's own optimum (SCAFFOLD, option II)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedshift.core.tree import Tensors, weighted_mean
from fedshift.errors import UserError


def check_optimiser(who: str, optimiser: str) -> None:
    """How far S steps go for a gradient is known of SGD alone.

    >>> check_optimiser("method 'scaffold'", "sgd")
    """
    if optimiser != "sgd":
        raise UserError(f"{who} is defined for optimiser sgd, not {optimiser}")


def corrected(grads: Tensors, own: Tensors, common: Tensors) -> Tensors:
    """``g - c_k + c``, where there are control variates; other gradients as they are.

    >>> one = {"w": torch.ones(1)}
    >>> corrected({"w": torch.zeros(1), "b": torch.zeros(1)}, one, {"w": 3 * torch.ones(1)})
    {'w': tensor([2.]), 'b': tensor([0.])}
    """
    return {name: grad - own[name] + common[name] if name in own else grad for name, grad in grads.items()}


def change_of(before: Tensors, after: Tensors, common: Tensors, now: Mapping[str, Tensor], momentum: float) -> Tensors:
    """``(w_t - y) / (S lr) - c``: what a client's control variate moves by after S steps from ``before`` to ``after``.

    With momentum m, S steps along one gradient go ``(S - m (1 - m^S) / (1 - m)) / (1 - m)`` times as far as ``lr``, so
    that is what the drift is divided by (S at m = 0). ``now`` has the client's true number of steps and the round's rate.
    """
    steps = now["steps"].clamp(min=1)
    way = now["lr"] * (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    scale = (way > 0) / way.clamp(min=1e-30)  # a rate of zero moves nothing
    moved = now["steps"].clamp(max=1)  # a client that took no step keeps its control variate
    return {name: moved * ((before[name] - after[name]) * scale - common[name]) for name in common}


def moved(common: Tensors, changes: Sequence[Tensors], clients: int) -> Tensors:
    """``c + (1/K) sum_k dc_k`` over all K clients: those who are absent have not moved.

    >>> moved({"w": torch.zeros(1)}, [{"w": torch.ones(1)}], 4)
    {'w': tensor([0.2500])}
    """
    change = weighted_mean(changes, torch.full((len(changes),), 1 / clients, dtype=torch.float64))
    return {name: common[name] + delta for name, delta in change.items()}
