"""From the folder of an artefact to a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import to
from fedshift.engines.auto import device_for
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.runs.artefact import Artefact, Part, load, overlaid
from fedshift.runs.artefact_files import CONFIG
from fedshift.runs.setup import Network
from fedshift.runs.write_artefacts import folder_name
from fedshift.serve.service import Service, Settings, answered


def open_service(
    folder: str | Path,
    adapter: str = "",
    options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    *,
    device: str = "cpu",
    network: Network | None = None,
) -> Service:
    """What one client is served with.

    ``adapter`` is one of the artefact's own by its label or name, or any other by name; left out, it is the one in use, or
    the only one, or none. ``options`` change its settings.
    """
    artefact = placed(load(folder, network), device)
    service = service_of(artefact, adapter, options or {}, settings or Settings())
    nothing = torch.zeros(1, *artefact.method.arch.input_shape, dtype=torch.uint8)
    try:  # tensors of somebody else's may have any shape: better now than at the first request
        answered(service, service.begin(), nothing, torch.zeros(1, dtype=torch.int64))
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{folder} cannot be served with {service.label}: it does not answer an image ({why})"
        ) from None
    return service


def service_of(artefact: Artefact, adapter: str, options: Mapping[str, Any], settings: Settings) -> Service:
    """The service of an artefact in memory."""
    label = chosen(artefact, adapter)
    part = artefact.adapters.get(label, Part(AdapterSpec(name=ADAPTERS[label].name)))
    spec = AdapterSpec(**{**part.spec.model_dump(by_alias=True), **options})
    made = artefact.setup.adapter(spec, artefact.method)
    tree = overlaid(artefact.deployed, part.tensors)
    start = tree if label == artefact.using else made.init(tree)
    title = label if not options else f"{label} {' '.join(f'{key}={value}' for key, value in options.items())}"
    return Service(folder_name(str(artefact.config["client"])), artefact, title, made, start, settings)


def chosen(artefact: Artefact, name: str) -> str:
    """The label of an adapter of the artefact, or the name of another."""
    own = artefact.adapters
    if not name:
        if len(own) > 1 and not artefact.using:
            raise UserError(f"say with --adapter which to serve with; the artefact has: none, {', '.join(own)}")
        return artefact.using or next(iter(own), "none")
    if artefact.using in own and name != artefact.using and own[artefact.using].tensors:
        raise UserError(f"this artefact has adapted with {artefact.using!r}, so it is served with that")
    if name in own:
        return name
    labels = [label for label, part in own.items() if part.spec.name == name]
    if len(labels) > 1:
        raise UserError(f"the artefact has several adapters {name!r}, choose by label: {', '.join(labels)}")
    return labels[0] if labels else name


def placed(artefact: Artefact, device: str) -> Artefact:
    """The artefact on a device: ``auto``, ``cpu`` or ``cuda``."""
    where = device_for(device)
    if where.type == "cpu":
        return artefact
    parts = {label: replace(part, tensors=to(part.tensors, where)) for label, part in artefact.adapters.items()}
    return replace(artefact, deployed=to(artefact.deployed, where), adapters=parts)


def artefacts_in(paths: list[Path]) -> list[Path]:
    """Folders of artefacts: each is one itself, or holds some, as the folder ``artefacts`` of a run does."""
    found = []
    for path in paths:
        inside = sorted(child for child in path.glob("*") if (child / CONFIG).is_file()) if path.is_dir() else []
        own = [path] if (path / CONFIG).is_file() else inside
        if not own:
            raise UserError(
                f"{path} is neither an artefact nor a folder of artefacts (artefacts/CLIENT in a run folder)"
            )
        found += own
    return found
