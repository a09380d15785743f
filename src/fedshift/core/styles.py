"""Styles of feature maps: layers that redraw the mean and deviation of every image's channels, and where they go."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fedshift.core.arch import NORMS, Arch

STAGES, MOMENTUM, EPS = 5, 0.99, 1e-6
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh)
FOLLOWERS = (*NORMS, *ACTIVATIONS, nn.MaxPool2d, nn.AvgPool2d)  # what belongs to the convolution before it


class Augment(nn.Module):
    """Redraws mean and deviation of every image's channels; rows 0 and 1 of its entries belong to these two.

    ``running`` are running means over the client's images, ``weight`` the shared weights gamma. A training step puts its
    noise ``[images, 2, channels]``, scaled by ``sqrt(gamma + 1)``, in place of ``weight``: noise of zeros, or none, or
    inference mode, and the layer is the identity.
    """

    running: Tensor
    weight: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running", torch.stack([torch.zeros(channels), torch.ones(channels)]))
        self.register_buffer("weight", torch.ones(2, channels))

    def forward(self, x: Tensor) -> Tensor:
        """``sigma' (x - mu) / sigma + mu'``."""
        if not self.training or self.weight.dim() == 2:
            return x
        many, pixels = x.shape[0], x.shape[2] * x.shape[3]
        mean = x.mean((2, 3))
        deviation = (x.var((2, 3), correction=min(pixels - 1, 1)) + EPS).sqrt()
        own = torch.stack([mean, deviation], 1)
        new = own + self.weight * (own.var(0, correction=min(many - 1, 1)) + EPS).sqrt()
        (mu, sigma), (new_mu, new_sigma) = (part[..., None, None].unbind(1) for part in (own, new))
        on = self.weight.any()
        running = MOMENTUM * self.running + (1 - MOMENTUM) * own.detach().mean(0)
        self.running.copy_(torch.where(on, running, self.running))
        return torch.where(on, new_sigma * (x - mu) / sigma + new_mu, x)


def with_styles(backbone: Arch) -> Arch:
    """The backbone with an :class:`Augment` after each of its first five stages; the other entries keep their names.

    >>> net = lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> with_styles(Arch.of(net, (1, 2, 2))).layers(Augment)
    ('1_augment',)
    """

    def surgery(network: nn.Module) -> nn.Module:
        found = stages(network, backbone.input_shape)
        return inserted(network, {place: Augment(channels) for place, channels in found.items()})

    return backbone.changed(surgery)


def stages(network: nn.Module, shape: tuple[int, int, int]) -> dict[str, int]:
    """The children with which the first stages end, and their channels."""
    marks = {place: nn.Identity() for place in _ends(network)}
    sizes: dict[str, torch.Size] = {}
    for place, mark in marks.items():
        mark.register_forward_hook(lambda _m, _i, out, place=place: sizes.update({place: out.shape}))
    with torch.no_grad():
        inserted(network, marks).eval()(torch.zeros(2, *shape))
    return dict([(place, sizes[place][1]) for place in marks if len(sizes.get(place, ())) == 4][:STAGES])


def inserted(network: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the network with a layer after each of these children of an ``nn.Sequential``."""
    twin = copy.deepcopy(network)
    for path in {place.rpartition(".")[0] for place in layers}:
        sequence = twin.get_submodule(path)
        for name, child in list(sequence._modules.items()):
            delattr(sequence, name)
            sequence.add_module(name, child)  # at the end: the children keep their names and their order
            if (place := f"{path}.{name}".lstrip(".")) in layers:
                sequence.add_module(f"{name}_augment", layers[place])
    return twin


def _ends(network: nn.Module, path: str = "") -> Iterator[str]:
    """The last child of every stage in the outermost sequences."""
    if type(network) is not nn.Sequential:
        for name, child in network.named_children():
            yield from _ends(child, f"{path}{name}.")
        return
    stage: list[nn.Module] = []
    following = [*list(network)[1:], nn.Flatten()]
    for (name, child), after in zip(network._modules.items(), following, strict=True):
        stage = [*stage, child] if isinstance(child, FOLLOWERS) else [child]
        convolves = any(isinstance(layer, nn.Conv2d) for layer in stage[0].modules())
        whole = not isinstance(stage[0], nn.Conv2d) or any(isinstance(part, ACTIVATIONS) for part in stage)
        if convolves and whole and not isinstance(after, FOLLOWERS):
            yield f"{path}{name}"
