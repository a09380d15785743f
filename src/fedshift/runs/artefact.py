"""What one client serves with; on disk a folder that needs neither the run nor its data (``artefact_files.py``)."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

import fedshift
from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tree
from fedshift.data.pool import Pool
from fedshift.data.streams import Setting
from fedshift.data.task import Samples
from fedshift.data.windows import Window, window_of
from fedshift.engines.base import Compute
from fedshift.engines.reference import EVALUATION_CHUNK, as_floats, predictions
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, Experiment, MethodSpec
from fedshift.runs.answers import Answers
from fedshift.runs.artefact_files import CONFIG, KNOWN, MODEL, REMEDY, STATE, load_model, part_file, read_config, write
from fedshift.runs.known import Known
from fedshift.runs.own_network import headed
from fedshift.runs.pixel_network import PixelNetwork
from fedshift.runs.raw_images import RawImages, as_bytes
from fedshift.runs.setup import Network, Setup, make_setup, placeholder
from fedshift.store.files import Damaged, parsed
from fedshift.store.trees import load as load_trees

FORMAT = 2


@dataclass(frozen=True)
class Part:
    """An adapter of an artefact."""

    spec: AdapterSpec  # with all settings, as they are at the artefact's round
    tensors: Tree = field(default_factory=dict, repr=False)  # what differs from the deployed tree


@dataclass(frozen=True)
class Artefact:
    """A client's model: a function from images to logits, which can go on adapting.

    ``served(images)`` are logits, ``served.predict(images)`` labels and probabilities, both of the model as it is;
    ``served.adapt(images)`` answers and gives the artefact that has adapted to them. Images are raw: see
    :func:`fedshift.runs.raw_images.as_bytes` for what is taken.
    """

    setup: Setup
    deployed: Tree  # slot ``model``, and what else there is
    adapters: Mapping[str, Part]
    classes: tuple[str, ...]
    config: Mapping[str, Any]
    known: Known | None = field(default=None, repr=False)  # what its own images look like to the deployed model

    @property
    def method(self) -> Method:
        """The method on the client's network."""
        return self.setup.method

    @property
    def window(self) -> Window | None:
        """Centre and width, where the run was given one: how greys of more than eight bits become bytes."""
        return window_of(self.config["input"].get("window"))

    @property
    def using(self) -> str:
        """The label of the adapter whose state it predicts with; empty if it is as it was deployed."""
        return str(self.config.get("using", ""))

    @property
    def state(self) -> Tree:
        """The deployed tree, as the adapter in use has left it."""
        part = self.adapters.get(self.using)
        return self.deployed if part is None else overlaid(self.deployed, part.tensors)

    def adapter(self, label: str) -> tuple[Adapter, Tree]:
        """One of its adapters and the state to go on from; any other registered one starts from the deployed model."""
        part = self._own(label)
        adapter, tree = self.setup.adapter(part.spec, self.method), overlaid(self.deployed, part.tensors)
        return adapter, tree if label == self.using else adapter.init(tree)

    @torch.no_grad()
    def __call__(self, images: RawImages) -> Tensor:
        """Logits of raw images, or of floats in [0, 1] as [n, channels, height, width]; nothing is adapted."""
        state, chunks = self.state, self._pixels(images).split(EVALUATION_CHUNK)
        return torch.cat([self.method.predict(state, self._ready(chunk)).logits for chunk in chunks])

    def predict(self, images: RawImages) -> Answers:
        """Labels and probabilities of raw images; nothing is adapted."""
        return Answers.of(self(images), self.classes)

    def adapt(self, images: RawImages, adapter: str = "") -> tuple[Answers, Artefact]:
        """Answer with an adapter that goes along these images, and the artefact as it is after them.

        ``adapter`` is one of its own by label, or any other by name; left out, it is the one in use, or the only one there
        is. The artefact itself stays as it is. The answers are those of ``fedshift join`` to the same images in that order.
        """
        label = adapter or self._usual()
        if label != self.using and self.using in self.adapters and self.adapters[self.using].tensors:
            raise UserError(f"this artefact has adapted with {self.using!r}: load it anew to adapt with {label!r}")
        part, pixels = self._own(label), as_bytes(images, self.method.arch.input_shape, self.window)
        made, tree = self.setup.adapter(part.spec, self.method), overlaid(self.deployed, part.tensors)
        logits, state = answered(made, tree, pixels, self.seed, self.compute, tree if label == self.using else None)
        parts = {**self.adapters, label: Part(part.spec, difference(state, self.deployed))}
        listed = [{"label": name, **_settings(own.spec, self.setup, self.method)} for name, own in parts.items()]
        config = {**self.config, "format": FORMAT, "adapter": listed, "using": label}
        return Answers.of(logits, self.classes), replace(self, adapters=parts, config=config)

    def module(self) -> PixelNetwork:
        """The network alone, in inference mode: uint8 [n, height, width, channels] to logits, the normalisation inside.

        Refused where answers take more than one pass of the network: several models, a memory, draws of a representation.
        """
        if type(self.method).predict is not Method.predict:
            raise UserError(
                f"{self.setup.spec.title!r} answers with more than one pass of its network (several models, a memory or "
                "draws), which no network alone can: use the artefact itself (--format artefact, fedshift.load)"
            )
        return PixelNetwork(self.method.arch, self.state["model"])

    def save(self, folder: str | Path, like: Path | None = None) -> list[Path]:
        """Write it as a new folder, with the state of the adapter in use; the paths of its files.

        ``like`` is an artefact with the same model, whose file is shared where the disk can do that.
        """
        parts = {label: part.tensors for label, part in self.adapters.items() if part.tensors}
        known = None if self.known is None else self.known.tensors()
        return write(Path(folder), self.method.arch, self.deployed, self.config, parts, like=like, known=known)

    def _own(self, label: str) -> Part:
        return self.adapters[label] if label in self.adapters else Part(AdapterSpec(name=ADAPTERS[label].name))

    def _usual(self) -> str:
        if self.using or len(self.adapters) == 1:
            return self.using or next(iter(self.adapters))
        listed = ", ".join(self.adapters) or "none of its own, any of fedshift list adapters will do"
        raise UserError(f"say which adapter to adapt with; this artefact has: {listed}")

    @property
    def seed(self) -> int:
        """Of what its adapters draw."""
        return rng.seed_of(int(self.config["origin"]["seed"]), "adapter")

    @property
    def compute(self) -> Compute:
        """Where its tensors are, and their precision."""
        leaf = next(leaf for leaf in self.deployed["model"].values() if leaf.is_floating_point())
        return Compute(leaf.device, leaf.dtype)

    def _pixels(self, images: RawImages) -> Tensor:
        shape = self.method.arch.input_shape
        if not isinstance(images, Tensor) or not images.is_floating_point():
            return as_bytes(images, shape, self.window)
        if tuple(images.shape[1:]) != shape:
            wanted = ", ".join(map(str, shape))
            raise UserError(f"floats in [0, 1] must be [n, {wanted}], not {list(images.shape)}; bytes are resized")
        return images

    def _ready(self, x: Tensor) -> Tensor:
        compute = self.compute
        return (x if x.is_floating_point() else as_floats(x, compute.dtype)).to(compute.device, compute.dtype)


def answered(
    adapter: Adapter, tree: Tree, pixels: Tensor, seed: int, compute: Compute, state: Tree | None = None
) -> tuple[Tensor, Tree]:
    """Logits of images (bytes) that an adapter is shown in their order, and its state after the last one.

    ``tree`` is the deployed one with what the adapter prepared; ``state`` is to go on from, None to start.
    """
    nothing = torch.zeros(len(pixels), dtype=torch.int64)
    samples = Samples(pixels, nothing, ids_of(pixels), torch.arange(len(pixels)))
    shown = list(predictions(adapter, tree, samples, Setting("stored"), seed, compute, state))
    return torch.cat([output.logits.cpu() for output, _, _ in shown]), shown[-1][2]


def ids_of(pixels: Tensor) -> Tensor:
    """The sample ids of images (bytes), as a task has them: fingerprints of their pixels."""
    return Pool(pixels, torch.zeros(len(pixels), dtype=torch.int64), ("",)).content()


def overlaid(tree: Tree, part: Tree) -> Tree:
    """A tree with some of its entries changed and others added.

    >>> overlaid({"model": {"w": torch.ones(1), "b": torch.ones(1)}}, {"model": {"w": torch.zeros(1)}, "new": {}})
    {'model': {'w': tensor([0.]), 'b': tensor([1.])}, 'new': {}}
    """
    return {slot: {**tree.get(slot, {}), **part.get(slot, {})} for slot in dict.fromkeys([*tree, *part])}


def difference(tree: Tree, base: Tree) -> Tree:
    """The entries of a tree that ``base`` does not have so: what :func:`overlaid` puts back.

    >>> base = {"model": {"w": torch.ones(1), "b": torch.ones(1)}}
    >>> difference({"model": {"w": torch.zeros(1), "b": torch.ones(1)}, "new": {}}, base)
    {'model': {'w': tensor([0.])}, 'new': {}}
    """

    def differs(slot: str, name: str, leaf: Tensor) -> bool:
        old = base.get(slot, {}).get(name)
        return old is None or (old is not leaf and not torch.equal(old, leaf))

    parts = {slot: {n: x for n, x in leaves.items() if differs(slot, n, x)} for slot, leaves in tree.items()}
    return {slot: leaves for slot, leaves in parts.items() if leaves or slot not in base}


def described(
    client: str,
    setup: Setup,
    experiment: Experiment,
    network: str,
    ctx: Context,
    classes: Sequence[str],
    adapters: Sequence[AdapterSpec],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything one needs to use a model, or to find out where it came from; what only one writer knows is added."""
    spec, method = setup.spec, setup.methods[network]
    model, arch = experiment.models[list(setup.methods).index(network)], method.arch
    channels, height, width = arch.input_shape
    window = window_of(experiment.data.window)
    options = {key: value for key, value in {**model.options(), **spec.model}.items() if key != "weights"}
    return {
        "format": FORMAT,
        "client": client,
        "classes": list(classes),
        "input": {
            "channels": channels,
            "height": height,
            "width": width,
            "scale": "bytes / 255, then (x - mean) / std",
            "mean": list(arch.mean),
            "std": list(arch.std),
            **({"window": list(window)} if window is not None else {}),
        },
        "network": {"name": model.name, **options},
        "method": {"name": spec.name, **({"label": spec.label} if spec.label else {}), **spec.options()},
        "train": {**experiment.train, **spec.train},
        "adapter": [{"label": own.title, **_settings(own, setup, method, ctx)} for own in adapters],
        "origin": dict(origin),
        "versions": {
            "fedshift": fedshift.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _settings(spec: AdapterSpec, setup: Setup, method: Method, ctx: Context | None = None) -> dict[str, Any]:
    """An adapter's name and all of its settings, as they are at the round that serves."""
    return settings_of(setup.adapter(spec, method, ctx))


def settings_of(adapter: Adapter) -> dict[str, Any]:
    """A registered adapter's name and all of its settings, from which :class:`AdapterSpec` makes it anew."""
    kinds = type(adapter).__mro__  # one with views is made of one without
    name = next(name for kind in kinds for name in ADAPTERS if ADAPTERS[name].make is kind)
    own = [option.name for option in fields(adapter) if option.name not in ("arch", "predict_with")]
    options = {key.replace("_", "-"): getattr(adapter, key) for key in own}
    return {"name": name, **{key: value for key, value in options.items() if value is not None}}


# ---- reading -------------------------------------------------------------------------------------------------------------
def load(folder: str | Path, network: Network | None = None, head: str | None = None) -> Artefact:
    """Read an artefact; ``network`` is the user's own, if the run was trained with one, and ``head`` as it was then.

    Those that ``fedshift join`` of earlier versions wrote (format 1) are read too.
    """
    path = Path(folder)
    config = read_config(path)
    try:
        image, classes = config["input"], tuple(config["classes"])
        shape = (image["channels"], image["height"], image["width"])
        table = {
            "data": {key: image[key] for key in ("channels", "mean", "std")},
            "model": config["network"],
            "train": config.get("train", {}),
            "method": [config["method"]],
        }
        specs = [AdapterSpec(**entry) for entry in _entries(config)]
        _check(config, shape, specs)
    except (AttributeError, LookupError, TypeError, UserError, ValueError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{path / CONFIG} is not that of an artefact ({why})") from None
    experiment = Experiment.parse(table, str(path / CONFIG))
    spec: MethodSpec = experiment.method[0]
    setup = make_setup(experiment, spec, placeholder(shape, classes), headed(network, head))
    wanted = (*setup.method.arch.parameters, *setup.method.arch.buffers)
    model = load_model(path / MODEL, wanted)
    if missing := set(wanted) - set(model):
        raise Damaged(path / MODEL, f"it has no {min(missing)!r}", REMEDY)
    rest = _part(path / STATE)
    parts = {own.title: Part(own, _part(path / part_file(own.title))) for own in specs}
    known = _known(path / KNOWN, setup.method.arch.classes) if (path / KNOWN).exists() else None
    return Artefact(setup, {"model": model, **rest}, parts, classes, config, known)


def _check(config: Mapping[str, Any], shape: Sequence[object], specs: Sequence[AdapterSpec]) -> None:
    """Whether values are of the kind that they should be: artefacts come from others, and a seal is made by anybody."""
    using, seed = config.get("using", ""), config["origin"]["seed"]
    window_of(config["input"].get("window"))
    wrong = {
        "client": not isinstance(config["client"], str),
        "seed": type(seed) is not int,
        "classes": not config["classes"] or not all(isinstance(name, str) for name in config["classes"]),
        "input": not all(type(side) is int and side > 0 for side in shape),
        "using": config.get("format", 1) >= FORMAT and using not in ("", *(spec.title for spec in specs)),
    }
    if found := [name for name, is_so in wrong.items() if is_so]:
        raise ValueError(f"its {found[0]} cannot be")


def _known(path: Path, outputs: int) -> Known:
    tensors = load_model(path, ())
    known = parsed(path, lambda: Known.from_tensors(tensors), remedy=REMEDY)
    if len(known.answered) != outputs:
        raise Damaged(path, f"it is of {len(known.answered)} classes, not of {outputs}", REMEDY)
    return known


def _entries(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The adapters of an artefact; those of format 1 are in the state it was left in, and cannot start anew."""
    return config["adapter"] if config.get("format", 1) >= FORMAT else ()


def _part(path: Path) -> Tree:
    if not path.exists():
        return {}
    trees, _ = load_trees(path, remedy=REMEDY)
    return parsed(path, lambda: trees["state"], remedy=REMEDY)
