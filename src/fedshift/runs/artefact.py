"""What one client serves with: a folder of safetensors and TOML that needs neither the run nor its data.

``model.safetensors`` has the network's tensors under the names of its ``nn.Module``; ``state.safetensors`` what else the
deployed model works with (a second head, descriptors, a learnt loss), if there is anything; ``adapters/LABEL.safetensors``
what an adapter adds to it: what it made of the training data, or the state it had come to. ``config.toml`` says how to use
them and where they come from, with a digest of every file. A folder is written whole or not at all, and never changed.
"""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedshift
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, Experiment, MethodSpec
from fedshift.runs.setup import Network, Setup, make_setup, placeholder
from fedshift.store.folder import read_config
from fedshift.store.toml import toml_text
from fedshift.store.trees import load as load_trees
from fedshift.store.trees import write as write_trees

FORMAT = 2
MODEL, CONFIG, STATE = "model.safetensors", "config.toml", "state.safetensors"


@dataclass(frozen=True)
class Part:
    """An adapter of an artefact."""

    spec: AdapterSpec  # with all settings, as they are at the artefact's round
    tensors: Tree = field(default_factory=dict, repr=False)  # what differs from the deployed tree


@dataclass(frozen=True)
class Artefact:
    """A client's model read back: a function from images in [0, 1] to logits, without further adaptation."""

    setup: Setup
    deployed: Tree  # slot ``model``, and what else there is
    adapters: Mapping[str, Part]
    classes: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def method(self) -> Method:
        """The method on the client's network."""
        return self.setup.method

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
        if label in self.adapters:
            part = self.adapters[label]
            adapter = self.setup.adapter(part.spec, self.method)
            tree = overlaid(self.deployed, part.tensors)
            return adapter, tree if label == self.using else adapter.init(tree)
        adapter = self.setup.adapter(AdapterSpec(name=ADAPTERS[label].name), self.method)
        return adapter, adapter.init(self.deployed)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Logits of images [n, channels, height, width]; the normalisation is part of it."""
        dtype = next(leaf.dtype for leaf in self.deployed["model"].values() if leaf.is_floating_point())
        return self.method.predict(self.state, x.to(dtype)).logits

    def module(self) -> nn.Module:
        """The network alone, in inference mode; it wants normalised images: ``artefact.method.arch.normalise(x)``.

        Refused where predictions take more than the network: several heads or models, draws of a representation.
        """
        if type(self.method).predict is not Method.predict:
            raise UserError(
                f"{type(self.method).__name__} predicts with more than one pass of its network: call the artefact itself"
            )
        module = copy.deepcopy(self.method.arch.factory())
        module.load_state_dict(self.state["model"])
        return module.eval()


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


def _settings(spec: AdapterSpec, setup: Setup, method: Method, ctx: Context) -> dict[str, Any]:
    """An adapter's name and all of its settings, as they are at the round that serves."""
    made = setup.adapter(spec, method, ctx)
    return {"name": spec.name, **{key: getattr(made, key.replace("-", "_")) for key in ADAPTERS[spec.name].options}}


# ---- writing -------------------------------------------------------------------------------------------------------------
def check_free(folder: Path) -> None:
    """Refuse to write over something."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already; choose another folder with --out, or remove it")


def write(
    folder: Path,
    arch: Arch,
    deployed: Tree,
    config: Mapping[str, Any],
    parts: Mapping[str, Tree] | None = None,
    beside: Mapping[str, bytes] | None = None,
    like: Path | None = None,
) -> list[Path]:
    """The whole folder or nothing of it; the paths of its files.

    ``parts`` are what adapters add, by label; ``beside`` are more files by name. ``like`` is an artefact with the same
    model, whose file is shared where the disk can do that.
    """
    check_free(folder)
    made = [parent for parent in folder.parents if not parent.exists()]
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    rest = {slot: leaves for slot, leaves in deployed.items() if slot != "model"}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        if like is None or not _linked(like / MODEL, temporary / MODEL):
            save_file(_plain(pick(deployed["model"], (*arch.parameters, *arch.buffers))), temporary / MODEL)
        if rest:
            write_trees(temporary / STATE, {"state": rest})
        for label, tree in (parts or {}).items():
            (temporary / "adapters").mkdir(exist_ok=True)
            write_trees(temporary / part_file(label), {"state": tree})
        digests = {path.relative_to(temporary).as_posix(): digest_of(path) for path in _files(temporary)}
        (temporary / CONFIG).write_text(toml_text({**config, "files": digests}), encoding="utf-8")
        for name, content in (beside or {}).items():
            (temporary / name).write_bytes(content)
        for path in _files(temporary):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        os.rename(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError | SafetensorError):
            why = getattr(error, "strerror", None) or str(error)
            raise UserError(f"{folder} cannot be written ({why}); choose another with --out") from None
        raise
    return _files(folder)


def part_file(label: str) -> str:
    """Where what an adapter adds lies in an artefact."""
    return f"adapters/{label}.safetensors"


def _files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(files, key=lambda path: (len(path.parts), path))  # what lies in the folder itself comes first


def digest_of(path: Path) -> str:
    """Of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that has no links
        return False
    return True


def _plain(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors of their own memory, on the CPU."""
    return {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}


# ---- reading -------------------------------------------------------------------------------------------------------------
def load(folder: str | Path, network: Network | None = None) -> Artefact:
    """Read an artefact; ``network`` is the user's own, if the run was trained with one.

    Those that ``fedshift join`` of earlier versions wrote (format 1) are read too.
    """
    path = Path(folder)
    config = read_config(path, "an artefact")
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
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path / CONFIG} is not that of an artefact ({error!r})") from None
    for name, digest in config.get("files", {}).items():
        if not (path / name).is_file() or digest_of(path / name) != digest:
            raise UserError(f"{path / name} is damaged: it is not what {path / CONFIG} says was written")
    experiment = Experiment.parse(table, str(path / CONFIG))
    spec: MethodSpec = experiment.method[0]
    setup = make_setup(experiment, spec, placeholder(shape, classes), network)
    try:
        model = load_file(path / MODEL)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path / MODEL} cannot be read ({error})") from None
    rest = load_trees(path / STATE)[0]["state"] if (path / STATE).is_file() else {}
    parts = {own.title: Part(own, _part(path / part_file(own.title))) for own in specs}
    return Artefact(setup, {"model": model, **rest}, parts, classes, config)


def _entries(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The adapters of an artefact; those of format 1 are in the state it was left in, and cannot start anew."""
    return config["adapter"] if config.get("format", 1) >= FORMAT else ()


def _part(path: Path) -> Tree:
    return load_trees(path)[0]["state"] if path.is_file() else {}
