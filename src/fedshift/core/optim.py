"""Optimisers as pure update rules on named tensors: ``(tensors, grads, memory) -> (tensors, memory)``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fedshift.core.options import BelowOne, Checked, NonNegative, Rule, options_of
from fedshift.core.tree import Tensors

Updated: TypeAlias = tuple[Tensors, Tensors]  # the tensors after a step, and the optimiser's memory


class Optim(Protocol):
    """What a phase trains with. ``lr`` is the rate before the run's decay; ``scale`` is that decay, a 0-d tensor."""

    @property
    def lr(self) -> float:
        """The learning rate of the first round."""

    def memory(self, tensors: Tensors) -> Tensors:
        """The optimiser's state at the start of a phase."""

    def update(self, tensors: Tensors, grads: Tensors, memory: Tensors, scale: Tensor | float) -> Updated:
        """One step; neither argument is changed."""


@dataclass(frozen=True)
class SGD(Checked):
    """Stochastic gradient descent with torch's conventions: coupled L2 weight decay, heavy-ball momentum.

    >>> rule = SGD(lr=0.5)
    >>> rule.update({"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}, {}, 1.0)[0]
    {'w': tensor(0.)}
    """

    lr: NonNegative = 0.01
    momentum: BelowOne = 0.0
    weight_decay: NonNegative = 0.0

    def memory(self, tensors: Tensors) -> Tensors:
        """Zero velocities where there is momentum, nothing otherwise."""
        heavy = tensors if self.momentum else {}
        return {f"velocity/{name}": torch.zeros_like(leaf) for name, leaf in heavy.items()}

    def update(self, tensors: Tensors, grads: Tensors, memory: Tensors, scale: Tensor | float) -> Updated:
        """``v <- momentum v + g + wd w``; ``w <- w - lr v`` (the first velocity is the gradient, as in torch)."""
        how = (self.lr * scale, self.momentum, self.weight_decay)
        pairs = {n: descended(leaf, grads[n], memory.get(f"velocity/{n}"), *how) for n, leaf in tensors.items()}
        kept = {f"velocity/{name}": step for name, (_, step) in pairs.items() if step is not None}
        return {name: moved for name, (moved, _) in pairs.items()}, kept


def descended(
    leaf: Tensor, grad: Tensor, velocity: Tensor | None, rate: Tensor | float, momentum: float, decay: float
) -> tuple[Tensor, Tensor | None]:
    """``leaf - rate step`` and the next velocity, if there is one: ``step = grad + decay leaf + momentum velocity``."""
    if has_torch_function((leaf, grad)):  # a mode sees it: an engine may do it in one pass
        return handle_torch_function(descended, (leaf, grad), leaf, grad, velocity, rate, momentum, decay)
    step = grad.add(leaf, alpha=decay) if decay else grad
    step = step if velocity is None else step.add(velocity, alpha=momentum)
    return leaf - step * rate, None if velocity is None else step


@dataclass(frozen=True)
class Adam(Checked):
    """Adam with torch's conventions (weight decay coupled as L2).

    >>> rule = Adam(lr=0.1)
    >>> w = {"w": torch.tensor(1.0)}
    >>> rule.update(w, {"w": torch.tensor(5.0)}, rule.memory(w), 1.0)[0]
    {'w': tensor(0.9000)}
    """

    lr: NonNegative = 1e-3
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0

    def memory(self, tensors: Tensors) -> Tensors:
        """Zero moments and a step counter."""
        memory = {f"{kind}/{name}": torch.zeros_like(leaf) for kind in ("m", "v") for name, leaf in tensors.items()}
        return {**memory, _counter(tensors): next(iter(tensors.values())).new_zeros(())}

    def update(self, tensors: Tensors, grads: Tensors, memory: Tensors, scale: Tensor | float) -> Updated:
        """One bias-corrected step."""
        count = memory[_counter(tensors)] + 1
        moved, kept = dict[str, Tensor](), {_counter(tensors): count}
        for name, leaf in tensors.items():
            grad = grads[name]
            if self.weight_decay:
                grad = grad.add(leaf, alpha=self.weight_decay)
            m = memory[f"m/{name}"] * self.beta1 + grad * (1 - self.beta1)
            v = memory[f"v/{name}"] * self.beta2 + grad.square() * (1 - self.beta2)
            kept[f"m/{name}"], kept[f"v/{name}"] = m, v
            m_hat, v_hat = m / (1 - self.beta1**count), v / (1 - self.beta2**count)
            moved[name] = leaf - m_hat / (v_hat.sqrt() + self.eps) * (self.lr * scale)
        return moved, kept


def _counter(tensors: Tensors) -> str:
    """The step counter's name: a phase may have several groups with Adam, and each counts for itself."""
    return f"t/{next(iter(tensors))}"


def clip_by_norm(grads: Tensors, limit: float) -> Tensors:
    """Scale all gradients together so that their joint norm is at most ``limit`` (torch's rule).

    >>> clip_by_norm({"w": torch.tensor([30.0, 40.0])}, 5.0)["w"].norm().round(decimals=3)
    tensor(5.)
    """
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    return {name: grad * factor for name, grad in grads.items()}


OPTIMISERS: Mapping[str, type[SGD] | type[Adam]] = {"sgd": SGD, "adam": Adam}
Optimiser = Annotated[str, Rule(lambda name: name in OPTIMISERS, "{name} must be one of sgd, adam, not {value!r}")]
for _made in OPTIMISERS.values():  # in every step, also of a compiled one, which cannot look at types
    options_of(_made)
