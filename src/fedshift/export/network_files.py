"""A client's network as one file that others read: raw pixels in, probabilities and logits out.

Every writer gets a :class:`PixelAnswers` and the facts that belong into the file; every reader answers raw images with what
the file holds, so that what was written can be compared with what was meant.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.runs.artefact_files import plain
from fedshift.runs.pixel_network import PixelNetwork

INPUT, OUTPUTS = "images", ("probabilities", "logits")
FACTS = "fedshift.json"  # in a file of torch.export


class PixelAnswers(nn.Module):
    """A :class:`PixelNetwork` in single precision, with both outputs by name."""

    def __init__(self, network: PixelNetwork) -> None:
        super().__init__()
        self.network = network.float().eval()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Probabilities and logits of uint8 [n, height, width, channels]."""
        logits = self.network(images)
        return {"probabilities": logits.softmax(1), "logits": logits}

    def example(self) -> Tensor:
        """Two images: of one alone a tracer would conclude that there is always one."""
        return torch.zeros(2, *self.network.image_shape, dtype=torch.uint8)


Read = Callable[[Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class NetworkFile:
    """A format of one file."""

    name: str
    write: Callable[[PixelAnswers, Mapping[str, str], Path], None]
    read: Callable[[Path, PixelAnswers], Read]
    use: str  # a line of Python that does something with FILE
    outputs: tuple[str, ...] = OUTPUTS
    needs: tuple[str, ...] = ()  # packages of the extra ``export``

    def check_installed(self) -> None:
        """Refuse before anything is read or made."""
        missing = [package for package in self.needs if find_spec(package) is None]
        if missing:
            packages = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
            raise UserError(f'{packages} must be installed to write {self.name}: pip install "fedshift[export]"')


# ---- ONNX ----------------------------------------------------------------------------------------------------------------
def _write_onnx(network: PixelAnswers, facts: Mapping[str, str], path: Path) -> None:
    with _quiet():
        program: Any = torch.onnx.export(
            network,
            (network.example(),),
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            dynamic_shapes={INPUT: {0: "batch"}},
            dynamo=True,
            verbose=False,
        )
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # where in whose files each operation comes from
    program.model.metadata_props.update(facts)
    program.save(str(path), external_data=False)


def _read_onnx(path: Path, _: PixelAnswers) -> Read:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def read(images: Tensor) -> dict[str, Tensor]:
        found = session.run(list(OUTPUTS), {INPUT: images.numpy()})
        return {name: torch.from_numpy(array) for name, array in zip(OUTPUTS, found, strict=True)}

    return read


# ---- torch.export ---------------------------------------------------------------------------------------------------------
def _write_exported(network: PixelAnswers, facts: Mapping[str, str], path: Path) -> None:
    with _quiet():
        shapes = {INPUT: {0: torch.export.Dim("batch", min=1)}}
        program = torch.export.export(network, (network.example(),), dynamic_shapes=shapes)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # where in whose files each operation comes from
        torch.export.save(program, path, extra_files={FACTS: json.dumps(dict(facts))})


def _read_exported(path: Path, _: PixelAnswers) -> Read:
    with _quiet():
        program: Read = torch.export.load(path).module()
    return program


# ---- safetensors ----------------------------------------------------------------------------------------------------------
def _write_tensors(network: PixelAnswers, facts: Mapping[str, str], path: Path) -> None:
    save_file(plain(network.network.state_dict()), path, metadata=dict(facts))


def _read_tensors(path: Path, network: PixelAnswers) -> Read:
    network.network.load_state_dict(load_file(path))
    return network


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn about packages nobody asked for, and print their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


NETWORK_FILES: Mapping[str, NetworkFile] = {
    "onnx": NetworkFile(
        "model.onnx",
        _write_onnx,
        _read_onnx,
        'onnxruntime.InferenceSession("FILE").run(["probabilities"], {"images": images})',
        needs=("onnx", "onnxscript", "onnxruntime"),
    ),
    "torch-export": NetworkFile(
        "model.pt2",
        _write_exported,
        _read_exported,
        'torch.export.load("FILE").module()(images)["probabilities"]',
    ),
    "safetensors": NetworkFile(
        "model.safetensors",
        _write_tensors,
        _read_tensors,
        'fedshift.load(ARTEFACT).module().load_state_dict(safetensors.torch.load_file("FILE"))',
        outputs=("logits",),
    ),
}
