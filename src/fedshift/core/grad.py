"""Gradients that work the same in a plain loop and under ``vmap``.

``torch.autograd.grad`` on leaves costs what a plain module costs but cannot run inside a function transform;
``torch.func.grad`` can, and is slower outside of one. Methods call :func:`gradient` and need not know which engine runs
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedshift.core.tree import Tensors

Aux = TypeVar("Aux")


def _inside_transform() -> bool:
    # only stacked steps are ever compiled, and the compiler cannot look into functorch's stack
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


def gradient(
    function: Callable[[Tensors], tuple[Tensor, Aux]], at: Tensors, differentiable: bool = False
) -> tuple[Tensors, Tensor, Aux]:
    """The gradient of ``function`` at ``at``, its value, and what it returned beside the value.

    ``differentiable=True`` keeps the result differentiable with respect to ``at`` and everything else, for losses that
    are taken *through* a step (meta-learning).

    >>> gradient(lambda t: (t["w"].square().sum(), None), {"w": torch.tensor([3.0])})[0]
    {'w': tensor([6.])}
    """
    if _inside_transform():

        def valued(tensors: Tensors) -> tuple[Tensor, tuple[Tensor, Aux | tuple[()]]]:
            value, aux = function(tensors)
            return value, (value, () if aux is None else aux)  # a transform returns tensors, not None

        grads, (value, aux) = torch.func.grad(valued, has_aux=True)(at)
        return grads, value, None if isinstance(aux, tuple) and not aux else aux  # type: ignore[return-value]
    with torch.enable_grad():
        live = {n: t if differentiable and t.requires_grad else t.detach().requires_grad_() for n, t in at.items()}
        value, aux = function(live)
        flat = torch.autograd.grad(value, list(live.values()), create_graph=differentiable, allow_unused=True)
    pairs = zip(live.items(), flat, strict=True)
    # a tensor the loss does not touch has gradient zero, as under torch.func
    grads = {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}
    return grads, value if differentiable else value.detach(), aux
