"""``fedshift deploy init``: everything a federation needs, a folder for the server and one for each party."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image

import fedshift
from fedshift.data.embedded import digits
from fedshift.data.pool import Pool
from fedshift.deploy.federation import EXPERIMENT, FEDERATION, PUBLIC, Federation, FederationSpec, PartySpec
from fedshift.deploy.keys import make_ca, make_node_key, make_server, write_certificate, write_secret
from fedshift.deploy.kit import PARTY
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.runs.new_folder import new_folder
from fedshift.runs.private import check_counted
from fedshift.runs.setup import make_task
from fedshift.runs.write_artefacts import folder_name
from fedshift.store.toml import toml_text
from fedshift.store.trees import write as write_trees

DEMO_PARTIES = 3


@dataclass(frozen=True)
class Agreed:
    """What the parties' data look like."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    public: Mapping[str, torch.Tensor]


def init(
    folder: Path,
    experiment: Experiment,
    parties: Sequence[str],
    address: str,
    *,
    method: str | None = None,
    seed: int = 0,
    classes: Sequence[str] = (),
    insecure: bool = False,
    demo: bool = False,
    **terms: Any,
) -> Federation:
    """Write a federation's folders, whole or not at all; the federation.

    ``demo`` also writes pictures of embedded digits for every party into ``data/``.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"the server's address must be HOST:PORT, not {address!r}")
    agreed = _agreed(experiment, seed, classes)
    pictures = _demo_pictures(parties, agreed.shape[1]) if demo else None
    keys = {name: make_node_key() for name in parties}
    spec = FederationSpec(
        name=experiment.name or folder.name,
        address=address,
        method=method or experiment.method[0].title,
        seed=seed,
        classes=list(agreed.classes),
        shape=list(agreed.shape),
        insecure=insecure,
        party=[PartySpec(name=name, key="" if insecure else keys[name][1]) for name in parties],
        **terms,
    )
    with new_folder(folder) as place:
        kits = [place / "server", *(place / "parties" / folder_name(name) for name in parties)]
        for kit in kits:
            kit.mkdir(parents=True)
            (kit / FEDERATION).write_text(toml_text(_table(spec)), encoding="utf-8")
            (kit / EXPERIMENT).write_text(toml_text(_settings(experiment)), encoding="utf-8")
            if agreed.public:
                write_trees(kit / PUBLIC, {"public": {"public": dict(agreed.public)}})
        federation = Federation.load(kits[0])  # what was written can be read, and trained
        setup = federation.setup(federation.roster({}))
        check_counted(setup.privacy, setup.method, federation.experiment, federation.method.title)
        _write_app(kits[0] / "app")
        if not insecure:
            _write_secrets(place, spec.name, host, {kits[i + 1]: keys[name][0] for i, name in enumerate(parties)}, keys)
        for kit, name in zip(kits[1:], parties, strict=True):
            (kit / PARTY).write_text(toml_text({"name": name}), encoding="utf-8")
        _write_words(place, federation, port, dict(zip(parties, kits[1:], strict=True)))
    if pictures is not None:
        _write_demo(folder / "data", pictures, parties)
    return federation


def demo_experiment() -> Experiment:
    """A small one on embedded digits, which ends in minutes on one machine."""
    return Experiment.parse(
        {
            "name": "digits",
            "title": "Three kinds of digits on one machine",
            "rounds": 3,
            "data": {"size": 16},
            "model": {"name": "cnn", "width": 8, "hidden": 32, "norm": True},
            "train": {"lr": 0.05, "batch-size": 16},
            "method": [{"name": "fedbn", "adapters": ["none", "tent"]}, {"name": "fedavg"}, {"name": "scaffold"}],
            "evaluate": {"every": 0},
        }
    )


def demo_parties() -> tuple[str, ...]:
    """The owners of the demo's pictures."""
    return digits(size=16).domain_names[:DEMO_PARTIES]


# ---- inner ---------------------------------------------------------------------------------------------------------------
def _agreed(experiment: Experiment, seed: int, classes: Sequence[str]) -> Agreed:
    """From the settings where they say it, otherwise from the experiment's own data."""
    named, size = tuple(classes) or tuple(experiment.data.classes), experiment.data.size
    if named and size and not experiment.split.get("public"):
        return Agreed(named, (experiment.data.channels, size, size), {})
    try:
        task = make_task(experiment, seed)
    except UserError as error:
        raise UserError(
            f"the experiment's own data cannot be read ({error}): say what parties' data look like with --classes and "
            "[data] size"
        ) from None
    public = {} if task.public is None else {"images": task.images[task.public], "ids": task.ids[task.public]}
    return Agreed(named or task.classes, task.shape, public)


def _table(spec: FederationSpec) -> dict[str, Any]:
    return spec.model_dump(by_alias=True)


def _settings(experiment: Experiment) -> dict[str, Any]:
    """The whole experiment, nothing left to defaults of a preset; where a party's data are is its own matter."""
    table = experiment.model_dump(by_alias=True, exclude={"name", "sweep"})
    data = {key: value for key, value in table["data"].items() if key not in ("source", "needs", "domains", "limit")}
    split = {"stratify": False, **table["split"]}
    return {**table, "data": data, "split": split, "partition": {}}


def _write_app(folder: Path) -> None:
    package = folder / "fedshift_federation"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_template("app.pyproject.toml").render(), encoding="utf-8")
    (package / "__init__.py").write_text('"""A thin app: its code is the installed fedshift."""\n')
    for side, module, made in (("server", "flower", "server_app"), ("client", "node", "node_app")):
        text = f'"""The {side}\'s app."""\n\nfrom fedshift.deploy.{module} import {made}\n\napp = {made}()\n'
        (package / f"{side}.py").write_text(text)


def _write_secrets(
    place: Path, name: str, host: str, owners: Mapping[Path, Any], keys: Mapping[str, tuple[Any, str]]
) -> None:
    """The CA stays apart; every machine gets its own key and nobody else's."""
    ca_key, ca = make_ca(name)
    server_key, certificate = make_server(host, ca_key, ca)
    (place / "ca").mkdir(mode=0o700)
    write_secret(place / "ca" / "ca.key", ca_key)
    write_certificate(place / "ca" / "ca.crt", ca)
    server = place / "server"
    write_certificate(server / "ca.crt", ca)
    write_certificate(server / "server.crt", certificate)
    write_secret(server / "server.key", server_key)
    (server / "keys").mkdir()
    for party, (_, line) in keys.items():
        (server / "keys" / f"{folder_name(party)}.pub").write_text(f"{line}\n")
    for kit, key in owners.items():
        write_certificate(kit / "ca.crt", ca)
        write_secret(kit / "node.key", key, openssh=True)


def _write_words(place: Path, federation: Federation, port: str, kits: Mapping[str, Path]) -> None:
    spec = federation.spec
    facts = {
        "name": spec.name,
        "id": federation.id,
        "address": spec.address,
        "port": port,
        "method": spec.method,
        "rounds": federation.experiment.rounds,
        "classes": spec.classes,
        "insecure": spec.insecure,
        "parties": [kit.name for kit in kits.values()],
        "unit": re.sub(r"[^a-z0-9-]+", "-", spec.name.lower()).strip("-") or "federation",
        "version": fedshift.__version__,
        "flag": " --insecure" if spec.insecure else "",
    }
    texts = {"server.README.md": "README.md", "fedshift-server.service": "", "server.Dockerfile": "Dockerfile"}
    (place / "README.md").write_text(_template("README.md").render(**facts), encoding="utf-8")
    for template, name in texts.items():
        (place / "server" / (name or template)).write_text(_template(template).render(**facts), encoding="utf-8")
    texts = {"party.README.md": "README.md", "fedshift-node.service": "", "party.Dockerfile": "Dockerfile"}
    for party, kit in kits.items():
        own = {**facts, "party": party, "party_folder": kit.name}
        for template, name in texts.items():
            (kit / (name or template)).write_text(_template(template).render(**own), encoding="utf-8")


def _template(name: str) -> jinja2.Template:
    text = resources.files("fedshift.deploy").joinpath("templates", f"{name}.j2").read_text(encoding="utf-8")
    return jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(text)


def _demo_pictures(parties: Sequence[str], size: int) -> Pool:
    pool = digits(size=size)
    for name in (name for name in parties if name not in pool.domain_names):
        raise UserError(f"the demo has no data for {name!r}; its parties are {', '.join(pool.domain_names)}")
    return pool


def _write_demo(folder: Path, pool: Pool, parties: Sequence[str]) -> None:
    """Pictures of embedded digits, a folder for each class."""
    assert pool.domains is not None
    for name in parties:
        for row in (pool.domains == pool.domain_names.index(name)).nonzero().flatten().tolist():
            target = folder / name / pool.classes[int(pool.labels[row])]
            target.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pool.images[row].permute(1, 2, 0).numpy()).save(target / f"{row:05d}.png")
