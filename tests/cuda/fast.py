"""How far fast single precision may be from slow double precision, and how that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from fedshift.core.arch import Arch
from fedshift.core.compatibility import missing_for_method
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tree
from fedshift.engines.base import Compute, Engine
from fedshift.engines.cuda.convolutions import implicit_pays, pair, shape_of
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import MethodSpec
from fedshift.models.cnn import CNN
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.state import State
from tests.conftest import ragged_task, tiny_train

SIDE = 12  # both convolutions are padded here and have more positions than FEW_POSITIONS: kernels of our own take them
TASK = ragged_task((24, 24, 17, 24, 9), side=SIDE)
GPU = torch.device("cuda")
DOUBLE = Compute(dtype=torch.float64)
ROUNDS = 2
STILL = 1e-5  # of its length: who went no further is measured by it, because single precision rounds


@dataclass(frozen=True)
class Trained:
    """A federation's trees before and after training, by owner."""

    before: dict[str, Tree]
    after: dict[str, Tree]
    losses: tuple[float, ...]


def made(name: str, norm: bool) -> Method | None:
    """The method on a network for kernels of our own; small steps, so that rounding does not grow."""
    cls, shape = METHODS[name].make, (3, SIDE, SIDE)
    network = Arch.of(lambda: CNN(width=32, hidden=6, norm=norm).make(shape, 4), shape, "cnn")
    arch = cls.build(network, {})
    if missing_for_method(name, cls.requires, arch):
        return None
    return cls(arch=arch, train=tiny_train(lr=0.01, local_epochs=1))


def trained(method: Method, engine: Engine, compute: Compute) -> Trained:
    """Two rounds."""
    setup = Setup(MethodSpec(name="x"), {"net": method}, method.train)
    federation = Session(setup, TASK, engine, compute, seed=3, rounds=ROUNDS)
    state = start = federation.start()
    ctx, losses = federation.context(0), []
    for _ in range(ROUNDS):
        state, report = federation.step(state)
        assert report.diverged == ()
        losses.append(report.loss)
    first = {client.name: federation.first_errand(client, ctx)[2] for client in federation.training.clients}
    before = State(0, start.server, first).trees()
    return Trained(before, state.trees(), tuple(losses))


@cache
def reference(name: str, norm: bool) -> Trained:
    """What the loop on a CPU comes to."""
    method = made(name, norm)
    assert method is not None
    return trained(method, Sequential(DOUBLE), DOUBLE)


def off_by(found: Trained, expected: Trained) -> dict[str, float]:
    """How far convolutions' weights and the rest are from where they should be, as a share of the way they went.

    A share of their length would say little: few steps hardly change it. Counts and statistics go much further than the
    weights of convolutions, which would be lost among them.
    """
    assert set(found.after) == set(expected.after)
    return {kind: _off_by(found, expected, convolutions=kind == "convolutions") for kind in ("convolutions", "rest")}


def _off_by(found: Trained, expected: Trained, convolutions: bool) -> float:
    wrong = way = length = 0.0
    for owner, tree in expected.after.items():
        own, before = found.after[owner], expected.before[owner]
        assert {s: set(leaves) for s, leaves in own.items()} == {s: set(leaves) for s, leaves in tree.items()}
        for slot, name in ((s, n) for s in tree for n in tree[s] if (tree[s][n].dim() == 4) == convolutions):
            leaf, other = tree[slot][name].double(), own[slot][name].cpu().double()
            start = before.get(slot, {}).get(name)
            origin = torch.zeros_like(leaf) if start is None or start.shape != leaf.shape else start.double()
            known = leaf.isfinite()
            assert torch.equal(known, other.isfinite()), (owner, slot, name)  # some methods say "not yet" by NaN
            wrong += float((other - leaf)[known].square().sum())
            way += float((leaf - origin.nan_to_num())[known].square().sum())
            length += float(leaf[known].square().sum())
    return float((wrong / max(way, STILL**2 * length, 1e-30)) ** 0.5)


def for_our_kernels(method: Method) -> bool:
    """Whether some convolution of this method's stacked clients is for kernels of our own."""
    layers = [layer for layer in method.arch.convolutions() if layer.groups == 1]
    pays = any(implicit_pays(shape_of(layer.weight), pair(layer.stride)) for layer in layers)
    trains = bool(method.phases(Context(0, 1, len(TASK.clients))))  # the floor does not
    return pays and trains and len(method.prepare_task(TASK).clients) > 1
