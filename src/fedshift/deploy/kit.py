"""The folders that ``fedshift deploy init`` writes, as their owners use them: the server's, and one for each party."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedshift.deploy.data import own_task
from fedshift.deploy.federation import Federation
from fedshift.deploy.memory import Memory
from fedshift.deploy.party import Party
from fedshift.engines.auto import compute_for
from fedshift.errors import UserError

PARTY = "party.toml"


@dataclass(frozen=True)
class ServerKit:
    """What the server has."""

    folder: Path

    @cached_property
    def federation(self) -> Federation:
        """What was agreed on."""
        return Federation.load(self.folder)

    @property
    def runs(self) -> Path:
        """Where its run folders go."""
        return self.folder / "runs"

    @property
    def log(self) -> Path:
        """What the runs told."""
        return self.folder / "federation.log"

    @property
    def offer(self) -> Path:
        """What an unseen party needs to join."""
        return self.folder / "for-unseen"

    @property
    def app(self) -> Path:
        """The thin Flower app."""
        return self.folder / "app"

    @property
    def home(self) -> Path:
        """What Flower keeps for itself: its settings, its database, its apps."""
        return self.folder / "flower"

    @property
    def nodes(self) -> Path:
        """Which of Flower's nodes is which party."""
        return self.home / "nodes.json"

    def secret(self, name: str) -> Path:
        """A certificate or key, which must be there."""
        return _there(self.folder / name)


@dataclass(frozen=True)
class PartyKit:
    """What a party has."""

    folder: Path

    @cached_property
    def federation(self) -> Federation:
        """What was agreed on."""
        return Federation.load(self.folder)

    @cached_property
    def name(self) -> str:
        """Who it is."""
        path = self.folder / PARTY
        try:
            return str(tomllib.loads(path.read_text(encoding="utf-8"))["name"])
        except (OSError, LookupError, ValueError) as error:
            raise UserError(f"{self.folder} is no folder of a party: {path} cannot be read ({error})") from None

    @property
    def kept(self) -> Path:
        """Where its local states and its artefacts are, under the federation's id."""
        return self.folder / "kept" / self.federation.id

    @property
    def home(self) -> Path:
        """What Flower keeps for itself."""
        return self.folder / "flower"

    def secret(self, name: str) -> Path:
        """A certificate or key, which must be there."""
        return _there(self.folder / name)

    def party(self, data: Path, device: str = "auto", shares: bool = True) -> Party:
        """The party with its data, checked against the experiment."""
        federation = self.federation
        task = own_task(federation, self.name, data)
        return Party(
            federation=federation.id,
            experiment=federation.experiment,
            setup=federation.setup(task),
            task=task,
            seed=federation.spec.seed,
            memory=Memory(self.kept),
            artefacts=self.kept,
            compute=compute_for(device, federation.experiment.precision),
            shares=shares,
        )


def party_of(settings: Mapping[str, Any]) -> Party:
    """The party of a node whose settings these are."""
    kit = PartyKit(Path(str(settings["folder"])))
    return kit.party(
        Path(str(settings["data"])), str(settings.get("device", "auto")), bool(settings.get("shares", True))
    )


def _there(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path} is not there; fedshift deploy init writes it")
    return path
