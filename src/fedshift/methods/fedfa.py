"""FedFA: in training, feature maps take on the styles that other clients' images might have."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fedshift.core.arch import NORMS, Arch, Output
from fedshift.core.context import ClientInfo, Context, Phase, RandomSpec, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.options import UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop, pick

if TYPE_CHECKING:
    from fedshift.data.task import Task

STAGES, MOMENTUM, EPS = 5, 0.99, 1e-6
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh)
FOLLOWERS = (*NORMS, *ACTIVATIONS, nn.MaxPool2d, nn.AvgPool2d)  # what belongs to the convolution before it


@method("fedfa", paper="FedFA: Federated Feature Augmentation", venue="ICLR", year=2023)
@dataclass(frozen=True)
class FedFA(Method):
    """FedAvg with feature augmentation after each of the first five stages (Zhou and Konukoglu, not feature anchors).

    In a training step each stage is augmented with ``probability``: with mean mu and deviation sigma of every image and
    channel, ``x <- sigma' (x - mu) / sigma + mu'``, where ``mu' ~ N(mu, (gamma + 1) var(mu))`` and sigma' likewise with the
    variances within the batch. The server makes ``gamma = C g(v) / sum g(v)``, ``g(v) = 1 / (1 + 1 / v)``, of C channels by
    the variance v over clients of their running means (momentum 0.99) of mu and of sigma; at first gamma is 1. A stage is
    a convolution or a block of them and the normalisation, activation and pooling after it, in the outermost
    ``nn.Sequential``: all stages of AlexNet, the stem and layer1 to layer4 of a ResNet. ``probability = 0`` is FedAvg.

    ``shared_variance = "scalar"`` is the released code, which takes one variance over clients and channels together, so
    that gamma is always 1; ``"channel"`` is the paper. The running means stay with the client and go up with its model (the
    released code sends their average back), gamma comes down. As in that code they move only in steps that augment,
    sample variances have n - 1 (unless n is 1) and 1e-6 is added to every variance; v has n. A network without stages,
    such as a perceptron, is trained as by FedAvg, and a warning says so.
    """

    probability: UnitInterval = 0.5
    shared_variance: Literal["channel", "scalar"] = "channel"

    @classmethod
    def build(cls, backbone: Arch, options: Mapping[str, Any]) -> Arch:
        """A layer after each stage."""
        return with_styles(backbone)

    def prepare_task(self, task: Task) -> Task:
        """Say so where there is nothing to augment."""
        if not self.layers:
            text = f"model {self.arch.name!r} has no stages of feature maps: method 'fedfa' is fedavg on it"
            warnings.warn(text, stacklevel=2)
        return task

    @cached_property
    def layers(self) -> dict[str, int]:
        """The channels of every augmentation layer."""
        return {name: self.arch.init(0)[f"{name}.weight"].shape[1] for name in self.arch.layers(Augment)}

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """Noise for each image and channel, and a coin for each layer; a step uses the coins of its first image."""
        if not self.layers:
            return {}
        noise = RandomSpec("normal", (2, sum(self.layers.values())))
        return {"noise": noise, "coin": RandomSpec("uniform", (len(self.layers),))}

    def outputs(self, tensors: Tensors, batch: Batch, phase: Phase) -> Output:
        """Forward pass with this step's noise in place of the weights, which stay what they were."""
        if not self.layers:
            return super().outputs(tensors, batch, phase)
        parts = batch["noise"].split(list(self.layers.values()), dim=-1)
        coins = (batch["coin"][0] < self.probability).unbind()
        noise = {
            f"{layer}.weight": torch.where(on, (tensors[f"{layer}.weight"] + 1).sqrt() * part, 0)
            for layer, part, on in zip(self.layers, parts, coins, strict=True)
        }
        output = super().outputs({**tensors, **noise}, batch, phase)
        return output._replace(buffers=drop(output.buffers, noise))

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A client keeps its running means."""
        running = pick(model, self._names("running"))
        return {"model": running} if running and not info.unseen else {}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """Running means do not come down, except to unseen clients, who have none."""
        down = super().broadcast(server, client, ctx)
        return down if ctx.stage == "unseen" else {"model": drop(down["model"], self._names("running"))}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The model without the weights, and the running means."""
        up, kept = super().finish(state, down, local)
        model = drop(up["model"], self._names("weight"))
        return {"model": model, "running": pick(state["model"], self._names("running"))}, kept

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """FedAvg, and the weights of the next round."""
        after, metrics = super().aggregate(server, ups, ctx)
        running = {layer: [up["running"][f"{layer}.running"] for up in ups.values()] for layer in self.layers}
        weights = {f"{layer}.weight": self.gamma(torch.stack(parts)) for layer, parts in running.items()}
        return {**after, "model": {**after["model"], **weights}}, metrics

    def gamma(self, running: Tensor) -> Tensor:
        """``[clients, 2, channels] -> [2, channels]``: how much each channel's style differs between clients."""
        together = (0,) if self.shared_variance == "channel" else (0, 2)
        v = running.var(together, correction=0, keepdim=True)[0] + EPS
        g = (1 / (1 + 1 / v)).expand(running.shape[1:])
        gamma: Tensor = g / g.mean(1, keepdim=True)
        return gamma

    def _names(self, entry: str) -> frozenset[str]:
        return frozenset(f"{layer}.{entry}" for layer in self.layers)


# ---- layers that redraw the mean and deviation of every image's channels, and where they go ----
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
