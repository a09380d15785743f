"""Tuning a model for one sample and forgetting it again: what MEMO, LP-FT and FedTHE+ share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fedshift.blocks import augmix
from fedshift.blocks.losses import marginal_entropy
from fedshift.core.batching import at_once
from fedshift.core.grad import gradient
from fedshift.core.tree import Tensors, pick

Logits = Callable[[Tensors, Tensor, Tensor], Tensor]
"""``(tensors, images, condition) -> logits``; the condition is a sample's own number (FedTHE's ensemble weight)."""


def tuned_logits(
    logits: Logits,
    tensors: Tensors,
    x: Tensor,
    views: Tensor,
    condition: Tensor,
    *,
    steps: Sequence[frozenset[str]],
    lr: float,
    together: bool,
) -> Tensor:
    """Logits of every image after gradient steps of its own on the marginal entropy of its views.

    ``views`` is ``[n, steps, views, ...]``; ``steps`` names what each step trains; ``condition`` is ``[n]``. Every sample
    starts from the same ``tensors``, which are never changed. ``together`` stacks the samples with ``vmap`` (a GPU gains
    much, a CPU with convolutions loses); otherwise they come one by one. Both give the same numbers.

    >>> linear = lambda t, images, _: images.flatten(1) @ t["w"]
    >>> start = {"w": torch.tensor([[1.0, 0.0]])}
    >>> x = torch.ones(1, 1, 1, 1)
    >>> once = [frozenset({"w"})]
    >>> after = tuned_logits(linear, start, x, x[None, None], x[:, 0, 0, 0], steps=once, lr=1.0, together=False)
    >>> after.softmax(-1).max() > linear(start, x, None).softmax(-1).max()
    tensor(True)
    """

    def one(image: Tensor, own: Tensor, e: Tensor) -> Tensor:
        live = tensors
        for step, names in enumerate(steps):
            batch = own[step]

            def loss(part: Tensors, rest: Tensors = live, batch: Tensor = batch) -> tuple[Tensor, None]:
                return marginal_entropy(logits({**rest, **part}, batch, e)), None

            grads, _, _ = gradient(loss, pick(live, names))
            live = {**live, **{name: live[name] - lr * grad for name, grad in grads.items()}}
        return logits(live, image[None], e)[0]

    if together:
        return vmap(one)(x, views, condition)
    return torch.stack([one(*sample) for sample in zip(x, views, condition, strict=True)])


def tuned_on_views(
    logits: Logits,
    tensors: Tensors,
    x: Tensor,
    numbers: Tensor,
    condition: Tensor,
    *,
    steps: Sequence[frozenset[str]],
    lr: float,
    flip: bool,
    convolutional: bool,
) -> Tensor:
    """:func:`tuned_logits` on AugMix views made from random numbers ``[n, steps, views, NUMBERS]``, in blocks.

    As many samples are tuned together as fit into a few gigabytes, or an eighth of a GPU; on a CPU stacked convolutions are
    slower than a loop.
    """
    size, together = at_once(tensors, x, numbers.shape[2], _room(x)), x.is_cuda or not convolutional
    results = []
    for images, own, e in zip(x.split(size), numbers.split(size), condition.split(size), strict=True):
        views = augmix.views(images, own.flatten(1, 2), flip=flip).unflatten(1, own.shape[1:3])
        results.append(tuned_logits(logits, tensors, images, views, e, steps=steps, lr=lr, together=together))
    return torch.cat(results)


def _room(x: Tensor) -> int:
    """Bytes for tuned samples: of what a GPU has, not of what happens to be free, so that a resumed run does the same."""
    least = 1 << 32
    return max(least, torch.cuda.get_device_properties(x.device).total_memory // 8) if x.is_cuda else least
