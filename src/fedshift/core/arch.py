"""A network as a pure function of its tensors, with every entry known by its role.

An :class:`Arch` splits a module into an encoder and a linear head, and knows which entries belong to normalisation
layers *by module type*: a BatchNorm inside ``downsample.1`` is found although its name does not say so, and its running
statistics count as part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.core.tree import Tensors
from fedshift.errors import UserError

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

BatchStats: TypeAlias = bool | frozenset[str]
"""Which normalisation layers use the batch's own statistics: all, none, or those with one of these entries."""


class Output(NamedTuple):
    """What a forward pass gives: logits, the head's input, named inner activations, and refreshed buffers."""

    logits: Tensor
    features: Tensor
    aux: dict[str, Tensor]
    buffers: Tensors


@dataclass(frozen=True, eq=False)
class Arch:
    """A network whose tensors live outside of it. Make one with :meth:`of`.

    ``parameters`` and ``buffers`` are all names in the module's order; ``head``, ``encoder`` and ``norm`` are the names
    by role (``norm`` with running statistics). Inputs are images in [0, 1]; the fixed normalisation is part of the
    network, so augmentations, adapters and a serving process all see plain pixels.
    """

    name: str
    input_shape: tuple[int, int, int]
    classes: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    head: frozenset[str]
    encoder: frozenset[str]
    norm: frozenset[str]
    has_batch_norm: bool
    is_random: bool  # contains layers that draw random numbers themselves (dropout)
    has_convolution: bool
    exposed: tuple[str, ...]  # buffers that layers declare as ``exposed``: a refreshing pass gives them with gradient
    capabilities: frozenset[str]  # what its layers declare as ``capability``; adapters and methods may require them
    mean: tuple[float, ...]
    std: tuple[float, ...]
    factory: Callable[[], nn.Module] = field(repr=False)
    _training: nn.Module = field(repr=False)
    _inference: nn.Module = field(repr=False)
    _head: nn.Linear = field(repr=False)
    _head_name: str = ""

    @staticmethod
    def of(
        network: nn.Module | Callable[[], nn.Module],
        input_shape: Sequence[int],
        name: str = "",
        head: str | None = None,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
    ) -> Arch:
        """Describe a network.

        ``network`` is a module (its weights are every seed's start) or a function that makes one (called anew for each
        seed). ``head`` names the last linear layer; left out, it is the attribute ``head`` or the last ``nn.Linear``.

        >>> net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
        >>> arch = Arch.of(net, (1, 2, 2))
        >>> sorted(arch.head), sorted(arch.norm)[:2]
        (['4.bias', '4.weight'], ['2.bias', '2.num_batches_tracked'])
        >>> arch(arch.init(seed=0), torch.rand(5, 1, 2, 2)).logits.shape
        torch.Size([5, 2])
        """
        given = network if isinstance(network, nn.Module) else None
        factory: Callable[[], nn.Module] = (lambda: given) if given is not None else network
        with torch.random.fork_rng(devices=[]):
            module = copy.deepcopy(factory()).cpu().float()
        label = name or type(module).__name__.lower()
        head_name = head if head is not None else _find_head(module, label)
        try:
            head_module = module.get_submodule(head_name)
        except AttributeError:
            raise UserError(f"network {label!r} has no layer called {head_name!r}") from None
        if not isinstance(head_module, nn.Linear):
            kind = type(head_module).__name__
            raise UserError(f"the head of network {label!r} must be nn.Linear, but {head_name!r} is {kind}")
        encoder = _without(module, head_name)
        shape = (int(input_shape[0]), int(input_shape[1]), int(input_shape[2]))
        logits = _check_split(module, encoder, head_module, shape, label, head_name)
        head_names = frozenset(f"{head_name}.{n}" for n, _ in _entries(head_module))
        layers = list(module.named_modules())
        return Arch(
            name=label,
            input_shape=shape,
            classes=logits.shape[1],
            parameters=tuple(n for n, _ in module.named_parameters()),
            buffers=tuple(n for n, _ in module.named_buffers()),
            head=head_names,
            encoder=frozenset(n for n, _ in _entries(module)) - head_names,
            norm=frozenset(f"{at}.{n}".lstrip(".") for at, m in layers if isinstance(m, NORMS) for n, _ in _entries(m)),
            has_batch_norm=any(isinstance(m, BATCH_NORMS) for _, m in layers),
            is_random=_is_random(encoder, shape),
            has_convolution=any(isinstance(m, nn.modules.conv._ConvNd) for _, m in layers),
            exposed=tuple(f"{at}.{entry}".lstrip(".") for at, m in layers for entry in getattr(m, "exposed", ())),
            capabilities=frozenset(word for _, m in layers if isinstance(word := getattr(m, "capability", 0), str)),
            mean=tuple(mean),
            std=tuple(std),
            factory=factory,
            _training=_sharing_copy(encoder).train(),
            _inference=_sharing_copy(encoder).eval(),
            _head=head_module,
            _head_name=head_name,
        )

    def changed(self, surgery: Callable[[nn.Module], nn.Module], head: str | None = None) -> Arch:
        """This network after ``surgery`` on a copy of it; ``head`` names the last layer if it has another name now.

        >>> arch = Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2)), (1, 2, 2))
        >>> sorted(arch.changed(lambda net: nn.Sequential(*net[:2], nn.LayerNorm(3), net[2]), head="3").norm)
        ['2.bias', '2.weight']
        """
        make = self.factory  # the function below must not hold on to the whole description
        last = self._head_name if head is None else head
        return Arch.of(lambda: surgery(copy.deepcopy(make())), self.input_shape, self.name, last, self.mean, self.std)

    def layers(self, kind: type[nn.Module]) -> tuple[str, ...]:
        """The names of the encoder's layers of one type, in its order.

        >>> Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2)), (1, 2, 2)).layers(nn.Linear)
        ('1',)
        """
        return tuple(name for name, layer in self._training.named_modules() if isinstance(layer, kind))

    def convolutions(self) -> Iterator[nn.Conv2d]:
        """The encoder's 2d convolutions, to ask for their settings; their tensors are nobody's state.

        >>> arch = Arch.of(lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 2)), (1, 2, 2))
        >>> [layer.kernel_size for layer in arch.convolutions()]
        [(2, 2)]
        """
        return (layer for layer in self._training.modules() if isinstance(layer, nn.Conv2d))

    def init(self, seed: int) -> Tensors:
        """The tensors a run with this seed starts from: parameters and buffers.

        >>> arch = Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2))
        >>> torch.equal(arch.init(1)["1.weight"], arch.init(1)["1.weight"])
        True
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.factory()
        return {name: leaf.detach().cpu().clone() for name, leaf in _entries(module)}

    def encode(self, tensors: Tensors, x: Tensor, batch_stats: BatchStats = False) -> tuple[Tensor, Tensors, Tensors]:
        """Features of images in [0, 1], inner activations the network chose to return, and refreshed buffers.

        With ``batch_stats`` normalisation layers use this batch's statistics and the refreshed running ones are
        returned; names of entries limit this to their layers. The given tensors are never changed.
        """
        own = {name: leaf for name, leaf in tensors.items() if name in self.encoder}
        if len(own) < len(self.encoder):
            raise KeyError(f"these tensors lack parts of the encoder: {sorted(self.encoder - set(tensors))[:3]}")
        refreshed = {name: own[name].clone() for name in self._refreshed(batch_stats) if name in own}
        features = functional_call(self._mode(batch_stats), {**own, **refreshed}, (self.normalise(x),))
        features, aux = features if isinstance(features, tuple) else (features, {})
        exposed = {name: refreshed[name] for name in self.exposed if name in refreshed}
        return features, {**aux, **exposed}, {name: leaf.detach() for name, leaf in refreshed.items()}

    def _refreshed(self, batch_stats: BatchStats) -> tuple[str, ...]:
        """The buffers of the layers that use the batch's statistics, whichever of their entries were named."""
        if isinstance(batch_stats, bool):
            return self.buffers if batch_stats else ()
        layers = {_layer_of(entry) for entry in batch_stats}
        return tuple(name for name in self.buffers if _layer_of(name) in layers)

    def _mode(self, batch_stats: BatchStats) -> nn.Module:
        if isinstance(batch_stats, frozenset) and batch_stats:
            return _partly_training(self._inference, batch_stats)
        return self._training if batch_stats else self._inference

    def classify(self, tensors: Tensors, features: Tensor) -> Tensor:
        """The head alone: logits of features."""
        cut = len(self._head_name) + 1
        own = {name[cut:]: leaf for name, leaf in tensors.items() if name in self.head}
        if len(own) < len(self.head):  # the module's own tensors would silently take their place
            raise KeyError(f"these tensors have no head: {sorted(self.head - set(tensors))}")
        logits: Tensor = functional_call(self._head, own, (features,))
        return logits

    def __call__(self, tensors: Tensors, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """Encoder and head."""
        features, aux, buffers = self.encode(tensors, x, batch_stats)
        return Output(self.classify(tensors, features), features, aux, buffers)

    def normalise(self, x: Tensor) -> Tensor:
        """The fixed input normalisation."""
        if len(set(self.mean)) == 1 and len(set(self.std)) == 1:  # scalars need no tensor on the device
            return x if (self.mean[0], self.std[0]) == (0.0, 1.0) else (x - self.mean[0]) / self.std[0]
        # filled on the device: copying from the host is not possible while a CUDA graph is captured
        mean, std = (
            torch.stack([torch.full((1, 1), value, dtype=x.dtype, device=x.device) for value in values])
            for values in (self.mean, self.std)
        )
        return (x - mean) / std

    @property
    def feature_size(self) -> int:
        """How many numbers the head reads."""
        return int(self._head.in_features)

    @property
    def trainable(self) -> frozenset[str]:
        """The names an optimiser may touch."""
        return frozenset(self.parameters)


def _entries(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _find_head(module: nn.Module, label: str) -> str:
    if isinstance(getattr(module, "head", None), nn.Linear):
        return "head"
    linear: list[str] = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise UserError(f"network {label!r} has no nn.Linear to be its head; name the last layer with head=...")
    return linear[-1]


def _without(module: nn.Module, head_name: str) -> nn.Module:
    """The same module (sharing its tensors) with the head replaced by the identity."""
    twin = _sharing_copy(module)
    parent, _, leaf = head_name.rpartition(".")
    setattr(twin.get_submodule(parent), leaf, nn.Identity())
    return twin


def _sharing_copy(module: nn.Module) -> nn.Module:
    """A copy of the module objects that shares parameters and buffers, so train and eval mode cost no memory."""
    return copy.deepcopy(module, {id(leaf): leaf for _, leaf in _entries(module)})


@lru_cache(maxsize=16)
def _partly_training(inference: nn.Module, entries: frozenset[str]) -> nn.Module:
    """A copy whose layers are in inference mode, except for the layers that have one of these entries."""
    twin = _sharing_copy(inference)
    for layer in {_layer_of(entry) for entry in entries}:
        twin.get_submodule(layer).training = True  # this one, not what lies inside it
    return twin


def _layer_of(entry: str) -> str:
    return entry.rpartition(".")[0]


def _probe(shape: tuple[int, int, int]) -> Tensor:
    return torch.linspace(0, 1, 2 * shape[0] * shape[1] * shape[2]).reshape(2, *shape)


def _check_split(
    module: nn.Module, encoder: nn.Module, head: nn.Module, shape: tuple[int, int, int], label: str, head_name: str
) -> Tensor:
    """Run once: the input must fit, and the head must really be the last operation."""
    modules = [_sharing_copy(m).eval() for m in (module, encoder, head)]
    with torch.no_grad():
        try:
            whole = modules[0](_probe(shape))
        except (RuntimeError, ValueError) as error:
            raise UserError(f"network {label!r} does not take images of shape {list(shape)} ({error})") from None
        whole = whole[0] if isinstance(whole, tuple) else whole
        try:
            features = modules[1](_probe(shape))
            logits: Tensor = modules[2](features[0] if isinstance(features, tuple) else features)
        except (RuntimeError, ValueError, IndexError, TypeError):
            logits = torch.zeros(0)
    if logits.shape != whole.shape or not torch.allclose(logits, whole, atol=1e-5):
        raise UserError(
            f"layer {head_name!r} is not the last operation of network {label!r}; name the layer that gives the logits "
            "with head=..., and return logits, not probabilities"
        )
    return logits


def _is_random(encoder: nn.Module, shape: tuple[int, int, int]) -> bool:
    """Whether training draws random numbers inside the network (dropout, as a layer or a function)."""
    training = _sharing_copy(encoder).train()
    results = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            own = {name: leaf.clone() for name, leaf in training.named_buffers()}
            try:
                result = functional_call(training, own, (2 * _probe(shape) - 1,))  # both signs
            except (RuntimeError, ValueError):  # two samples are too few for some BatchNorm; training will say so
                return False
            results.append(result[0] if isinstance(result, tuple) else result)
    return any(not torch.equal(results[0], other) for other in results[1:])
