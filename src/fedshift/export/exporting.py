"""The model of one client, seen or unseen, in one of several formats."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedshift
from fedshift.core import rng
from fedshift.data._rows import line
from fedshift.data.output import within
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.export.adapters import artefact_adapter, refuse_adapting, run_adapter, with_adapter
from fedshift.export.network_files import INPUT, NETWORK_FILES, NetworkFile, PixelAnswers
from fedshift.export.whose import artefact_of_client, artefact_of_unseen, clients_of
from fedshift.runs.answers import names_of
from fedshift.runs.artefact import Artefact, load
from fedshift.runs.artefact_files import CONFIG, MODEL
from fedshift.runs.new_folder import check_free, files_in, new_folder
from fedshift.runs.open import OpenRun, choose_run, listed, open_run
from fedshift.runs.setup import Network
from fedshift.runs.write_artefacts import folder_name

ARTEFACT = "artefact"
FORMATS = (ARTEFACT, *NETWORK_FILES)
ENDINGS = {Path(file.name).suffix for file in NETWORK_FILES.values()}
COMPARED = 8  # images on which what was written is compared with what was meant
MOST_APART = 1e-4  # in a probability, or in a logit as a share of the largest


@dataclass(frozen=True)
class Exported:
    """What was written."""

    artefact: Artefact
    format: str
    files: tuple[Path, ...]
    apart: float | None = None  # the largest difference of a probability from the artefact's own

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.files[0].parent


def export(
    run: str | Path,
    client: str | None = None,
    *,
    unseen: bool = False,
    format: str = ARTEFACT,
    out: str | Path | None = None,
    method: str | None = None,
    seed: int | None = None,
    adapter: str | None = None,
    model: str | None = None,
    network: Network | None = None,
    device: str = "auto",
) -> Exported:
    """Write the model of one client into a new folder, or into a new file if ``out`` ends as the format's files do.

    ``run`` is a run folder or one above it (``method`` and ``seed`` choose among several), and ``client`` one of its
    clients, or ``unseen`` is true: the model any unseen client would get before it shows an image. Or ``run`` is the folder
    of an artefact, for instance of a client that has joined. ``adapter`` is a label of the run's own adapters: the artefact
    then has this one alone, of the round it chose if it chose its own; ``none`` leaves all out. ``model`` chooses among the
    networks that unseen clients of a mixed run may have; ``network`` is the user's own, if the run was trained with one.

    >>> import tempfile
    >>> from fedshift import Experiment, run
    >>> tiny = Experiment(rounds=1, baselines=False, data={"size": 8}, model={"name": "mlp", "hidden": [8]})
    >>> result = run(tiny, out=tempfile.mkdtemp(), engine="sequential")
    >>> exported = export(result.folders[0], "paper", format="safetensors")
    >>> [file.name for file in exported.files], exported.apart < 1e-5
    (['model.safetensors'], True)
    """
    if format not in FORMATS:
        raise UserError(f"there is no format {format!r}; there are: {', '.join(FORMATS)}")
    file = NETWORK_FILES.get(format)
    if file is not None:
        file.check_installed()
    path = Path(run)
    if (path / MODEL).is_file() and (path / CONFIG).is_file():
        whole, chosen = _of_artefact(path, client, unseen, adapter, network)
        near = path.parent
    else:
        opened = open_run(choose_run(path, method, seed), network)
        whole, chosen = _of_run(opened, client, unseen, adapter, model, device)
        near = within(opened.folder.path, "exported") if out is None else opened.folder.path
    artefact = with_adapter(whole, chosen)
    words = (folder_name(artefact.config["client"]), *([chosen.title] if chosen is not None else []), format)
    folder = Path(out) if out is not None else near / "-".join(words)
    if out is not None:
        _check_ending(folder, format, file)
    check_free(folder)
    if file is None:
        return Exported(artefact, format, tuple(artefact.save(folder)))
    refuse_adapting(artefact, chosen)
    if out is None or not folder.suffix or folder.suffix.lower() not in ENDINGS:
        apart = write_network(artefact, file, folder)
        return Exported(artefact, format, tuple(files_in(folder)), apart)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.whole")  # who says lima.onnx means a file
    try:
        apart = write_network(artefact, file, aside)
        check_free(folder)
        os.rename(aside / file.name, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(artefact, format, (folder,), apart)


def _check_ending(out: Path, format: str, file: NetworkFile | None) -> None:
    """Who names a file names one of the format's."""
    ending = out.suffix.lower()
    own = None if file is None else Path(file.name).suffix
    if ending in ENDINGS and ending != own:
        what = "writes a folder" if own is None else f"writes files that end in {own}"
        raise UserError(f"--out {out} looks like a file, and --format {format} {what}")


def _of_artefact(
    path: Path, client: str | None, unseen: bool, adapter: str | None, network: Network | None
) -> tuple[Artefact, AdapterSpec | None]:
    """An artefact by its folder, and the adapter that was asked for."""
    artefact = load(path, network)
    name = artefact.config["client"]
    if unseen or client not in (None, name):
        raise UserError(f"{path} is the artefact of {name!r} already; leave --client and --unseen out")
    return artefact, artefact_adapter(artefact, adapter)


def _of_run(
    opened: OpenRun, client: str | None, unseen: bool, adapter: str | None, model: str | None, device: str
) -> tuple[Artefact, AdapterSpec | None]:
    """The artefact of a run's client or of an unseen one, and the adapter that was asked for."""
    if unseen == (client is not None):
        raise UserError(f"say whose model: --unseen, or --client with one of {listed(clients_of(opened))}")
    chosen = run_adapter(opened, adapter)
    if client is None:
        return artefact_of_unseen(opened, chosen, model, device), chosen
    return artefact_of_client(opened, client, chosen, device), chosen


def write_network(artefact: Artefact, file: NetworkFile, folder: Path) -> float:
    """The artefact's network as one file in a new folder, and how far its probabilities are from the artefact's own.

    The file is read again and asked about some images, one alone and several together, before the folder is there.
    """
    network = PixelAnswers(artefact.module())
    shape = network.network.image_shape
    images = rng.integers(rng.seed_of("compared"), torch.arange(COMPARED), 256, shape).to(torch.uint8)
    wanted = artefact.predict(images.movedim(-1, 1))
    with new_folder(folder) as place:
        try:
            file.write(network, facts_of(artefact, file), place / file.name)
            read = file.read(place / file.name, network)
            with torch.no_grad():
                answers = [read(some) for some in (images[:1], images[1:])]
        except OSError:
            raise
        except Exception as error:  # a network of one's own may hold anything, and exporters raise whatever they like
            why = line(error.__cause__ or error)
            raise UserError(f"this network cannot be written as {file.name} ({why}); use --format artefact") from error
        found = {name: torch.cat([answer[name] for answer in answers]).double() for name in answers[0]}
        apart = float((found["probabilities"] - wanted.probabilities).abs().max())
        logits = wanted.logits.double()  # they still differ where probabilities are all 0 or 1
        relative = float((found["logits"] - logits).abs().max() / logits.abs().max().clamp(min=1))
        if not max(apart, relative) <= MOST_APART:  # NaN too
            raise UserError(
                f"{file.name} would give other answers than fedshift (probabilities {apart:.2g} apart, logits "
                f"{relative:.2g} of the largest): use --format artefact"
            )
    return apart


def facts_of(artefact: Artefact, file: NetworkFile) -> dict[str, str]:
    """What a file says about its network: how to use it, and where it comes from. Values that are no text are JSON."""
    config, arch = artefact.config, artefact.method.arch
    channels, height, width = arch.input_shape
    classes = names_of(artefact.classes, arch.classes)
    facts: dict[str, Any] = {
        "classes": list(classes),
        "input": f"{INPUT}, uint8 [batch, {height}, {width}, {channels}] (height, width, channels), 0 to 255",
        "outputs": f"{' and '.join(file.outputs)}, float32 [batch, {len(classes)}], in the order of the classes",
        "mean": list(arch.mean),
        "std": list(arch.std),
        "normalisation": "inside: pixels / 255, then (x - mean) / std",
        **{key: config[key] for key in ("client", "network", "method")},
        **{key: config["origin"][key] for key in ("seed", "round", "selection", "task-hash")},  # and no paths
        "fedshift": fedshift.__version__,
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
