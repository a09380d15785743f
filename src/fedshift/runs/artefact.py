"""What a newcomer leaves with: a folder with its model, how the model is to be used, and predictions."""

from __future__ import annotations

import copy
import csv
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedshift.core.arch import Arch
from fedshift.core.method import Method
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.join.trained import placeholder
from fedshift.runs.setup import Network, make_setup
from fedshift.store.folder import read_config
from fedshift.store.toml import toml_text
from fedshift.store.trees import load as load_trees
from fedshift.store.trees import save

FORMAT = 1
MODEL, CONFIG, PREDICTIONS, STATE = "model.safetensors", "config.toml", "predictions.csv", "state.safetensors"


@dataclass(frozen=True)
class Prediction:
    """One line of the predictions."""

    file: str
    label: str
    confidence: float


def check_free(folder: Path) -> None:
    """Refuse to write over something."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already; choose another folder with --out, or remove it")


def write(
    folder: Path, arch: Arch, state: Tree, config: Mapping[str, Any], predictions: Sequence[Prediction]
) -> list[Path]:
    """The whole folder or nothing of it; the paths of its files.

    The model's tensors have the names of its ``nn.Module``. What else an adapter works with (a second head, descriptors,
    prototypes, an optimiser's memory) is in ``state.safetensors``, as a tree, if there is anything.
    """
    check_free(folder)
    rest = {slot: leaves for slot, leaves in state.items() if slot != "model"}
    made = [parent for parent in folder.parents if not parent.exists()]
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        save_file(_plain(pick(state["model"], (*arch.parameters, *arch.buffers))), temporary / MODEL)
        if rest:
            save(temporary / STATE, {"state": rest})
        (temporary / CONFIG).write_text(toml_text(config), encoding="utf-8")
        _write_csv(temporary / PREDICTIONS, predictions)
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
    return [folder / name for name in (MODEL, CONFIG, PREDICTIONS, STATE) if (folder / name).is_file()]


def _plain(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors of their own memory, on the CPU."""
    return {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}


def _write_csv(path: Path, predictions: Sequence[Prediction]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("file", "label", "confidence"))
        lines.writerows((item.file, item.label, f"{item.confidence:.6f}") for item in predictions)


@dataclass(frozen=True)
class Artefact:
    """A newcomer's model read back: a function from images in [0, 1] to logits, without further adaptation."""

    method: Method
    state: Tree  # slot ``model``, and what else there is
    classes: tuple[str, ...]
    config: Mapping[str, Any]

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Logits of images [n, channels, height, width]; the normalisation is part of it."""
        dtype = next(leaf.dtype for leaf in self.state["model"].values() if leaf.is_floating_point())
        return self.method.forward(self.state, x.to(dtype)).logits

    def module(self) -> nn.Module:
        """The network alone, in inference mode; it wants normalised images: ``artefact.method.arch.normalise(x)``.

        Refused where predictions take more than the network: several heads or models, draws of a representation.
        """
        if type(self.method).forward is not Method.forward:
            raise UserError(
                f"{type(self.method).__name__} predicts with more than one pass of its network: call the artefact itself"
            )
        module = copy.deepcopy(self.method.arch.factory())
        module.load_state_dict(self.state["model"])
        return module.eval()


def load(folder: str | Path, network: Network | None = None) -> Artefact:
    """Read what ``fedshift join`` wrote; ``network`` is the user's own, if the run was trained with one."""
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
    except (LookupError, TypeError) as error:
        raise UserError(f"{path / CONFIG} was not written by fedshift join ({error!r})") from None
    experiment = Experiment.parse(table, str(path / CONFIG))
    setup = make_setup(experiment, experiment.method[0], placeholder(shape, classes), network)
    try:
        model = load_file(path / MODEL)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path / MODEL} cannot be read ({error})") from None
    rest = load_trees(path / STATE)[0]["state"] if (path / STATE).is_file() else {}
    return Artefact(setup.method, {"model": model, **rest}, classes, config)
