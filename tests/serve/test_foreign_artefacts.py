"""An artefact of somebody else's that is sealed but not sound: one sentence, never a traceback, before anybody is served."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedshift import UserError
from fedshift.runs.artefact_files import CONFIG, KNOWN, MODEL
from fedshift.runs.new_folder import digest_of
from fedshift.serve.host import Host, Keeping
from fedshift.serve.opening import open_service
from fedshift.store.seal import toml_sealed
from fedshift.store.toml import toml_text
from tests.serve.conftest import World

Table = dict[str, Any]


def put(table: Table, *path: str, value: Any = None) -> None:
    """Set a value, or remove it."""
    *above, last = path
    for key in above:
        table = table[key]
    if value is None:
        del table[last]
    else:
        table[last] = value


CONFIGS: dict[str, Callable[[Table], None]] = {
    "no client": lambda config: put(config, "client"),
    "no origin": lambda config: put(config, "origin"),
    "an origin that is a word": lambda config: put(config, "origin", value="x"),
    "no seed": lambda config: put(config, "origin", "seed"),
    "a seed that is a word": lambda config: put(config, "origin", "seed", value="x"),
    "a seed that is a truth": lambda config: put(config, "origin", "seed", value=[1]),
    "in use is nobody": lambda config: put(config, "using", value="nobody"),
    "a window of one": lambda config: put(config, "input", "window", value=[1.0]),
    "a window of words": lambda config: put(config, "input", "window", value=["a", "b"]),
    "no input": lambda config: put(config, "input"),
    "an endless input": lambda config: put(config, "input", "height", value=10**9),
    "half an input": lambda config: put(config, "input", "height", value=8.5),
    "classes that are numbers": lambda config: put(config, "classes", value=[1, 2]),
    "no classes": lambda config: put(config, "classes", value=[]),
    "fewer classes than outputs": lambda config: put(config, "classes", value=["one", "two"]),
    "an adapter of another folder": lambda config: put(config, "adapter", value=[{"label": "../../x", "name": "t3a"}]),
}


def narrower(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: leaf[..., :1].contiguous() if leaf.dim() else leaf for name, leaf in tensors.items()}


FILES: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]] = {
    "knows nothing": (KNOWN, lambda _: {}),
    "knows half": (KNOWN, lambda known: {name: leaf for name, leaf in known.items() if name != "axes"}),
    "knows another shape": (KNOWN, narrower),
    "no weights": (MODEL, lambda _: {}),
    "weights of another shape": (MODEL, narrower),
}


@pytest.fixture
def artefact(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.folder("fedbn"), tmp_path / "artefact"))


def sealed_again(folder: Path, change: Callable[[Table], None] = lambda _: None) -> None:
    config = tomllib.loads((folder / CONFIG).read_text())
    change(config)
    config["files"] = {name: digest_of(folder / name) for name in config["files"]}
    (folder / CONFIG).write_text(toml_sealed(toml_text(config)))


@pytest.mark.parametrize("way", [*CONFIGS, *FILES])
def test_what_is_sealed_but_not_sound(way: str, artefact: Path, world: World, tmp_path: Path) -> None:
    if way in FILES:
        name, change = FILES[way]
        save_file(change(load_file(artefact / name)), artefact / name)
        sealed_again(artefact)
    else:
        sealed_again(artefact, CONFIGS[way])
    with pytest.raises(UserError) as refused:
        Host(open_service(artefact, "t3a"), tmp_path / "state", Keeping()).open()
    assert "\n" not in str(refused.value)
    assert str(artefact) in str(refused.value) or way == "an endless input"  # it has no memory, whoever asks
