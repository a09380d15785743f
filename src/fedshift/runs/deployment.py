"""The models of one chosen round: of every client that trained, and of any unseen one.

A run keeps what unseen clients need of it in ``snapshot.safetensors``: the server of the round chosen by validation after
clients took their last phases and gave away what they give (which needs their data, so it cannot be made up for later),
and what the run's settings do not say: the classes, the shape of images, the names and shapes of the networks' entries. An
adapter that chose a round of its own has its own, ``snapshots/ADAPTER.safetensors``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedshift.blocks.calibration import SLOT as CALIBRATION
from fedshift.core.arch import Arch
from fedshift.core.context import Context, Phase
from fedshift.core.method import Method
from fedshift.core.tree import Tensors, Tree, to
from fedshift.data.task import Task
from fedshift.engines.base import Compute, Engine
from fedshift.engines.reference import first_local
from fedshift.engines.schedule import Plan
from fedshift.errors import UserError
from fedshift.runs.setup import Setup
from fedshift.store.files import parsed
from fedshift.store.folder import OLD_SNAPSHOT, SNAPSHOT, snapshot_file
from fedshift.store.trees import load, save


@dataclass(frozen=True)
class Deployment:
    """What one round's clients serve with. Opened from a snapshot it knows no local states, only unseen clients."""

    setup: Setup
    ctx: Context  # of the last phases
    seed: int
    server: Tree  # with what clients gave away
    locals: Mapping[str, Tree]  # after the last phases
    networks: Mapping[str, str]  # the architecture of each client; one not named here has the first
    given_bytes: int = 0

    def trained(self) -> dict[str, Tree]:
        """The model of every client that is known: what it would receive now and its local state."""
        broadcast = self.setup.method.broadcast
        return {
            name: self._counted(self._method(name).deployed(broadcast(self.server, name, self.ctx), local))
            for name, local in self.locals.items()
        }

    def admit(self, task: Task, engine: Engine, compute: Compute) -> tuple[dict[str, Tree], list[str]]:
        """Models of a task's unseen clients, after what they train without labels, and whose training failed.

        Empty if the method has nothing to offer them.
        """
        ctx, clients = replace(self.ctx, stage="unseen"), task.unseen
        server = to(self.server, compute.device)
        initial = self.setup.initial(self.seed, compute)
        trees: dict[str, Tree] = {}
        failed: list[str] = []
        for arch, method in self.setup.methods.items():
            members = [client for client in clients if self._network(client.name) == arch]
            downs = {client.name: self.setup.method.broadcast(server, client.name, ctx) for client in members}
            plan = Plan(unseen_phases(method, ctx), ctx, self.seed)
            made, lost = admitted(method, initial[arch], downs, task, engine, compute, plan)
            failed += lost
            if not all(offered(method, tree) for tree in made.values()):
                return {}, failed
            trees |= {name: self._counted(tree, "common") for name, tree in made.items()}
        return {client.name: trees[client.name] for client in clients}, failed

    def with_calibration(self, measured: Tensors, size: int) -> Deployment:
        """The same with what clients measured on validation images, for which ``size`` bytes went up."""
        return replace(self, server={**self.server, CALIBRATION: measured}, given_bytes=self.given_bytes + size)

    def _counted(self, tree: Tree, kinds: str = "") -> Tree:
        """Everybody has what was measured, if anything was: an unseen client of the ``common`` model alone."""
        found = self.server.get(CALIBRATION, {})
        own = {name: leaf for name, leaf in found.items() if name.startswith(kinds)}
        return {**tree, CALIBRATION: own} if own else tree

    def serving(self, network: str) -> Deployment:
        """The same for unseen clients who all have this network."""
        return replace(self, networks=_Always(network))

    def _network(self, client: str) -> str:
        return self.networks.get(client, next(iter(self.setup.methods)))

    def _method(self, client: str) -> Method:
        return self.setup.methods[self._network(client)]


class _Always(Mapping[str, str]):
    """One answer to every name."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def __getitem__(self, name: str) -> str:
        return self._answer

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def admitted(
    method: Method, model: Tensors, downs: Mapping[str, Tree], task: Task, engine: Engine, compute: Compute, plan: Plan
) -> tuple[dict[str, Tree], list[str]]:
    """Models of unseen clients that received ``downs``, after what they train without labels, and whose training failed."""
    born = {n: first_local(method, model, task, task.client(n), plan.seed, plan.ctx, unseen=True) for n in downs}
    own = {name: to(local, compute.device) for name, local in born.items()}
    replies = engine.train(method, downs, own, task, plan) if plan.phases and downs else {}
    kept = {**own, **{name: reply.local for name, reply in replies.items() if reply.finite}}
    trees = {name: method.deployed(downs[name], local) for name, local in kept.items()}
    return trees, [name for name, reply in replies.items() if not reply.finite]


def calibration_in(tree: Tree) -> Tree:
    """The slot with what clients measured on validation images; nothing if nobody did."""
    return {slot: leaves for slot, leaves in tree.items() if slot == CALIBRATION}


def offered(method: Method, tree: Tree) -> bool:
    """Whether this is a whole model: some methods have nothing for clients they have not seen."""
    return set(method.arch.parameters) <= set(tree.get("model", {}))


def unseen_phases(method: Method, ctx: Context) -> tuple[Phase, ...]:
    """What an unseen client trains: of the last phases those that need no labels."""
    return tuple(phase for phase in method.last_phases(replace(ctx, stage="unseen")) if not phase.labelled)


# ---- on disk -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Snapshot:
    """What a run folder keeps for unseen clients."""

    server: Tree
    public: Tensors  # ``images`` and ``ids`` everybody may see, where unseen clients learn from them; otherwise empty
    ctx: Context
    seed: int
    task_hash: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # of an image: channels, height, width
    networks: Mapping[str, Mapping[str, tuple[int, ...]]]  # the names and shapes of their entries

    @staticmethod
    def of(deployment: Deployment, task: Task) -> Snapshot:
        """What unseen clients need of a deployment."""
        methods = deployment.setup.methods
        return Snapshot(
            server=deployment.server,
            public=_public(methods.values(), task, deployment.ctx),
            ctx=deployment.ctx,
            seed=deployment.seed,
            task_hash=task.hash,
            classes=task.classes,
            shape=task.shape,
            networks={name: entries_of(method.arch) for name, method in methods.items()},
        )

    def deployment(self, setup: Setup) -> Deployment:
        """The deployment it was taken of, without the clients that trained."""
        return Deployment(setup, self.ctx, self.seed, self.server, {}, {})

    def save(self, folder: Path, adapter: str = "") -> None:
        """Into a run folder, all or nothing; ``adapter`` if it chose this round for itself."""
        target = folder / snapshot_file(adapter)
        target.parent.mkdir(exist_ok=True)
        facts = {
            "context": asdict(self.ctx),
            "seed": self.seed,
            "task-hash": self.task_hash,
            "classes": self.classes,
            "shape": self.shape,
            "networks": self.networks,
        }
        save(target, {"server": self.server, "public": {"public": self.public}}, facts)

    @staticmethod
    def load(folder: Path, adapter: str = "") -> Snapshot:
        """From a run folder, for this adapter if it chose its own round; those of older versions are read too."""
        names = (
            snapshot_file(adapter),
            SNAPSHOT,
            *((OLD_SNAPSHOT[1].format(adapter),) if adapter else ()),
            OLD_SNAPSHOT[0],
        )
        path = next((folder / name for name in names if (folder / name).exists()), None)
        if path is None:
            raise UserError(
                f"{folder} has no {SNAPSHOT}, which older versions did not write: repeat its fedshift run to add it, "
                "finished rounds are not run again"
            )
        return Snapshot.read(path)

    @staticmethod
    def read(path: Path) -> Snapshot:
        """From a file."""
        trees, facts = load(path)
        return parsed(path, lambda: _snapshot(trees, facts))


def _snapshot(trees: Mapping[str, Tree], facts: Mapping[str, Any]) -> Snapshot:
    channels, height, width = facts["shape"]
    return Snapshot(
        server=_renamed(trees["server"]),
        public=trees["public"]["public"],
        ctx=_context(facts),
        seed=facts["seed"],
        task_hash=facts["task-hash"],
        classes=tuple(facts["classes"]),
        shape=(channels, height, width),
        networks={
            network: {name: tuple(shape) for name, shape in entries.items()}
            for network, entries in facts["networks"].items()
        },
    )


def _context(facts: Mapping[str, Any]) -> Context:
    """Where in the run it was taken; older versions called it ``now``, with a flag ``final``."""
    if "context" in facts:
        return Context(**facts["context"])
    old = facts["now"]
    return Context(old["round"], old["rounds"], old["clients"], "final")


def _renamed(server: Tree) -> Tree:
    """Older versions called the slot of gifts ``newcomer``."""
    return {"gifts" if slot == "newcomer" else slot: leaves for slot, leaves in server.items()}


def entries_of(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a network: what must agree for weights to fit.

    >>> from torch import nn
    >>> entries_of(Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2)))
    {'1.weight': (2, 4), '1.bias': (2,)}
    """
    return {name: tuple(leaf.shape) for name, leaf in arch.init(0).items()}


def _public(methods: Iterable[Method], task: Task, ctx: Context) -> Tensors:
    read = any(phase.data == "public" for method in methods for phase in unseen_phases(method, ctx))
    if task.public is None or not read:
        return {}
    return {"images": task.images[task.public], "ids": task.ids[task.public]}
