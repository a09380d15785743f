"""What all parties of a federation agree on: ``federation.toml`` and ``experiment.toml``, the same for everybody."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from fedshift.data.streams import Setting, Stream
from fedshift.data.task import Client, Task
from fedshift.deploy.engine import Terms
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment, MethodSpec
from fedshift.experiment.tables import Label, Table
from fedshift.runs.setup import Setup, make_setup, streams_of
from fedshift.store.trees import load

FEDERATION, EXPERIMENT, PUBLIC = "federation.toml", "experiment.toml", "public.safetensors"


class PartySpec(Table):
    """``[[party]]``: one owner of data."""

    name: Label
    key: str = ""  # its public key, by which the server knows it


class FederationSpec(Table):
    """``federation.toml``: who takes part, on what terms, and what their data must look like."""

    name: Label
    address: str  # of the server, host:port
    method: str  # of the experiment's methods, the one that is trained
    seed: int = 0
    classes: Annotated[list[str], Field(min_length=2)]
    shape: Annotated[list[int], Field(min_length=3, max_length=3)]  # channels, height, width
    insecure: bool = False  # no TLS and no keys: for a single machine
    least: Annotated[int, Field(ge=1)] = 1  # a round needs so many sound replies
    wait: Annotated[float, Field(ge=0)] = 120  # seconds to wait for all parties before starting with fewer
    deadline: Annotated[float, Field(gt=0)] = 3600  # seconds that a party has for a round
    attempts: Annotated[int, Field(ge=1)] = 3  # a round with too few replies is asked for again
    norm_factor: Annotated[float, Field(gt=1)] = 100.0  # a reply with a norm so many times the usual is left out
    party: Annotated[list[PartySpec], Field(min_length=1)]

    @model_validator(mode="after")
    def _sound(self) -> FederationSpec:
        names = [party.name for party in self.party]
        keys = [party.key for party in self.party if party.key]
        for what, all_of in (("parties are called", names), ("parties have the key", keys)):
            if twice := sorted({one for one in all_of if all_of.count(one) > 1}):
                raise ValueError(f"two {what} {twice[0]!r}")
        if self.least > len(names):
            raise ValueError(f"a round needs {self.least} replies, but there are {len(names)} parties")
        if not self.insecure and len(keys) < len(names):
            raise ValueError("every party needs a key, unless insecure = true")
        return self


@dataclass(frozen=True)
class Federation:
    """A federation as everybody reads it from disk."""

    spec: FederationSpec
    experiment: Experiment  # of one method and one seed
    public: Mapping[str, Tensor]  # ``images`` and ``ids`` that everybody holds, if the method learns from them

    @staticmethod
    def load(folder: Path) -> Federation:
        """From a folder with ``federation.toml`` and ``experiment.toml``."""
        path = folder / FEDERATION
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
            spec = FederationSpec.model_validate(table)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{folder} is no folder of a federation: {path} cannot be read ({error})") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from None
        public = load(folder / PUBLIC)[0]["public"]["public"] if (folder / PUBLIC).is_file() else {}
        return Federation(spec, chosen(Experiment.load(folder / EXPERIMENT), spec.method, spec.seed), public)

    @cached_property
    def id(self) -> str:
        """A digest of what is trained by whom: what parties keep is kept under it, and other packets are refused."""
        who = [(party.name, party.key) for party in self.spec.party]
        what = self.experiment.model_dump(by_alias=True, exclude={"title", "notes"})
        agreed = [self.spec.name, who, self.spec.classes, self.spec.shape, self.spec.seed, what]
        return hashlib.sha256(json.dumps(agreed, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def terms(self) -> Terms:
        """On which replies are used."""
        return Terms(self.id, self.spec.least, self.spec.attempts, self.spec.norm_factor)

    @property
    def names(self) -> tuple[str, ...]:
        """The parties, in the order in which they count."""
        return tuple(party.name for party in self.spec.party)

    @property
    def method(self) -> MethodSpec:
        """What is trained."""
        return self.experiment.method[0]

    def roster(self, sizes: Mapping[str, int]) -> Task:
        """The task as the server knows it: names and sizes, and one blank image in place of everybody's."""
        blank = torch.zeros(1, *self.spec.shape, dtype=torch.uint8)
        nothing, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        clients = tuple(
            Client(name, torch.zeros(sizes.get(name, 1), dtype=torch.int64), one, one) for name in self.names
        )
        streams = {
            name: Stream(
                name,
                kind.kind,
                Setting(kind.order, kind.reset, kind.passes, kind.chunk),
                None,
                one,
                one,
                {client.name: nothing for client in clients},
            )
            for name, kind in streams_of(self.experiment).items()
        }
        task = Task(blank, one, one, tuple(self.spec.classes), clients, streams=streams, hash=self.id)
        return with_public(task, self.public)

    def setup(self, task: Task) -> Setup:
        """The method on its networks; a sentence if no federation can train it."""
        setup = make_setup(self.experiment, self.method, task, clients=len(self.names))
        if setup.privacy is not None and setup.privacy.sums and setup.method.gives:
            raise UserError(
                f"{self.method.title!r} gives something away after the last round, which [privacy] hides in simulation only"
            )
        if setup.method.prepare_task(task) is not task:
            raise UserError(f"{self.method.title!r} moves all data to one place, which no federation can")
        return setup


def chosen(experiment: Experiment, method: str, seed: int) -> Experiment:
    """The experiment with one method and one seed, and what only a machine with all data can do switched off."""
    found = [spec for spec in experiment.method if spec.title == method]
    if not found:
        there = ", ".join(spec.title for spec in experiment.method)
        raise UserError(f"the experiment has no method {method!r}; it has: {there}")
    if experiment.sweep:
        raise UserError("a federation trains one thing: the experiment must have no [sweep]")
    off = {"artefacts": False, "predictions": False, "advice": False, "features": 0, "after_local": False}
    evaluate = experiment.evaluate.model_copy(update={**off, "oracle": False})
    changes: dict[str, Any] = {"method": found, "seeds": [seed], "baselines": False, "evaluate": evaluate}
    # a server that goes back by one round finds its parties' states: they keep two
    return experiment.model_copy(update={**changes, "checkpoint_every": 1})


def with_public(task: Task, public: Mapping[str, Tensor]) -> Task:
    """The task with images that everybody holds behind its own."""
    if not public:
        return task
    count, labels = len(task.images), torch.zeros(len(public["ids"]), dtype=torch.int64)
    return replace(
        task,
        images=torch.cat([task.images, public["images"]]),
        labels=torch.cat([task.labels, labels]),
        ids=torch.cat([task.ids, public["ids"]]),
        public=torch.arange(count, count + len(labels)),
    )
