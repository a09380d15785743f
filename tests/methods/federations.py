"""Tiny federations for the tests of methods: a network with awkward names, a few random images, a watchful engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch
from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.method import Batch, Method, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute, Reply, Score
from fedshift.engines.schedule import Plan
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import MethodSpec
from fedshift.runs.round import RoundReport
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.state import State

SHAPE = (1, 4, 4)
CLASSES = 3
DOUBLE = Compute(dtype=torch.float64)
SEED = 7
BATCH = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
NORM = {f"{layer}.{name}" for layer in ("foo", "downsample.1") for name in BATCH}
HEAD = {"out.weight", "out.bias"}


class Awkward(nn.Module):
    """BatchNorm under names that do not say so, and a convolution under a name that lies."""

    def __init__(self) -> None:
        super().__init__()
        self.bn_not = nn.Conv2d(1, 3, 3, stride=2, padding=1, bias=False)
        self.foo = nn.BatchNorm2d(3)
        self.downsample = nn.Sequential(nn.Conv2d(1, 3, 1, stride=2, bias=False), nn.BatchNorm2d(3))
        self.out = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out((self.foo(self.bn_not(x)) + self.downsample(x)).relu().flatten(1))
        return logits


class Plain(nn.Module):
    """No normalisation at all."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, 5)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.hidden(x.flatten(1)).tanh())
        return logits


AWKWARD = Arch.of(Awkward, SHAPE)
PLAIN = Arch.of(Plain, SHAPE)
TRAIN = Train(lr=0.05, batch_size=4, local_epochs=1)
CTX = Context(0, 1, 1)
NO_IDS = torch.zeros(0, dtype=torch.int64)  # of public images, where there are none


def make_task(sizes: Sequence[int] = (8, 8), names: str = "abcdefgh", unseen: int = 0) -> Task:
    """Clients a, b, ... with this many training images each; sample i has the id i."""
    count = sum(sizes) + 4 * unseen
    images = rng.integers(1, torch.arange(count), 256, SHAPE).to(torch.uint8)
    labels = rng.integers(2, torch.arange(count), CLASSES)
    parts = torch.arange(count).split([*sizes, *[4] * unseen])
    nothing = torch.zeros(0, dtype=torch.int64)
    clients = tuple(Client(name, part, part[:2], part[:2]) for name, part in zip(names, parts, strict=False))
    others = tuple(Client(f"new{i}", nothing, nothing, part) for i, part in enumerate(parts[len(sizes) :]))
    classes = tuple(str(c) for c in range(CLASSES))
    public = torch.arange(min(6, count))
    return Task(images, labels, torch.arange(count), classes, clients[: len(sizes)], others, public=public)


@dataclass
class Watch:
    """The sequential engine, with a memory of every message."""

    inner: Sequential = field(default_factory=lambda: Sequential(DOUBLE))
    downs: list[dict[str, Tree]] = field(default_factory=list)
    replies: list[dict[str, Reply]] = field(default_factory=list)

    def train(
        self, method: Method, downs: Mapping[str, Tree], locals: Mapping[str, Tree], task: Task, plan: Plan
    ) -> dict[str, Reply]:
        replies = self.inner.train(method, downs, locals, task, plan)
        self.downs.append(dict(downs))
        self.replies.append(replies)
        return replies

    def evaluate(
        self, adapter: Adapter, deployed: Mapping[str, Tree], task: Task, parts: Sequence[str], seed: int
    ) -> dict[tuple[str, str], Score]:
        return self.inner.evaluate(adapter, deployed, task, parts, seed)

    def close(self) -> None:
        """Nothing is held."""


def federation(
    method: str | type[Method],
    task: Task | None = None,
    train: Train = TRAIN,
    arch: Arch = AWKWARD,
    rounds: int = 3,
    participation: float = 1.0,
    **options: Any,
) -> tuple[Session, Watch]:
    """A federation in double precision and the engine it works with."""
    cls = METHODS[method].make if isinstance(method, str) else method
    made = cls(arch=cls.build(arch, options), train=train, **options)
    spec = MethodSpec(name=method if isinstance(method, str) else cls.__name__)
    engine = Watch()
    setup = Setup(spec, {made.arch.name: made}, train)
    return Session(setup, task or make_task(), engine, DOUBLE, SEED, rounds, participation), engine


def run(session: Session, rounds: int | None = None) -> tuple[State, list[RoundReport]]:
    """All rounds, or some."""
    state, reports = session.start(), []
    for _ in range(session.rounds if rounds is None else rounds):
        state, report = session.step(state)
        reports.append(report)
    return state, reports


def ran(method: str | type[Method], *args: Any, **how: Any) -> State:
    """The last state of a federation."""
    return run(federation(method, *args, **how)[0])[0]


def server_context(samples: Sequence[float] | Tensor, ctx: Context = CTX, seed: int = 0) -> ServerContext:
    """What the server knows of a round in which clients of these sizes sent messages."""
    sizes = torch.as_tensor(samples)
    return ServerContext(ctx.round, ctx.rounds, ctx.clients, ctx.stage, samples=sizes, seed=seed)


def watching(base: type[Method]) -> tuple[type[Method], list[tuple[Tree, Batch, Phase]]]:
    """A subclass that remembers the state, batch and phase of every step."""
    steps: list[tuple[Tree, Batch, Phase]] = []

    class Watching(base):  # type: ignore[valid-type,misc]
        def client_step(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
            steps.append((state, dict(batch), phase))
            after: Tree = super().client_step(state, batch, phase)
            return after

    return Watching, steps


def torch_training(
    module: nn.Module,
    batches: Sequence[Batch],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    clip: float | None = None,
    correct: Tensors | None = None,
) -> None:
    """Train a module on these batches as one does with torch; ``correct`` is added to the gradients."""
    optimiser = make(list(module.parameters()))
    module.train()
    for batch in batches:
        optimiser.zero_grad()
        F.cross_entropy(module((batch["x"] - 0.5) / 0.5), batch["y"]).backward()
        for name, leaf in module.named_parameters() if correct is not None else ():
            assert leaf.grad is not None
            leaf.grad += correct[name]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimiser.step()


def module_of(tensors: Tensors, kind: type[nn.Module] = Awkward) -> nn.Module:
    """A module in double precision with these weights."""
    module = kind().double()
    module.load_state_dict({name: leaf.clone() for name, leaf in tensors.items()})
    return module


def equal(a: Tensors, b: Tensors) -> bool:
    """Same names, types and bits."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def equal_trees(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(equal(a[slot], b[slot]) for slot in a)


def far(a: Tensors, b: Tensors) -> float:
    """The largest difference of any entry of the same name; the names must be the same."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def copied(tree: Tree) -> Tree:
    return {slot: {name: leaf.clone() for name, leaf in leaves.items()} for slot, leaves in tree.items()}
