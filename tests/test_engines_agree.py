"""For every registered method, every engine ends in the same server and private states as the sequential one.

A new method joins by being registered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import cloudpickle
import pytest
import torch

from fedshift.core.compatibility import missing_for_method
from fedshift.core.context import Phase, RandomSpec
from fedshift.core.method import Method
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tree
from fedshift.engines.base import Compute, Engine
from fedshift.engines.cuda.convolutions import StackedConvolutions
from fedshift.engines.parallel import Parallel
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.experiment.schema import AdapterSpec, MethodSpec
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.state import State
from tests.conftest import ragged_task, some_with, tiny_arch, tiny_train

TASK = ragged_task()
DOUBLE = Compute(dtype=torch.float64)
CASES = some_with(METHODS, (False, True))


def make(name: str, norm: bool, **train: object) -> Method | None:
    cls = METHODS[name].make
    arch = cls.build(tiny_arch(norm=norm), {})
    if missing_for_method(name, cls.requires, arch):
        return None
    return cls(arch=arch, train=tiny_train(**train))


def federate(
    method: Method, engine: Engine, compute: Compute, rounds: int = 2, task=TASK, participation: float = 1.0
) -> tuple[State, dict, list]:
    setup = Setup(MethodSpec(name="x"), {"net": method}, method.train)
    federation = Session(setup, task, engine, compute, seed=3, rounds=rounds, participation=participation)
    state, losses = federation.start(), []
    for _ in range(rounds):
        state, report = federation.step(state)
        losses.append(report.loss)
    plain = {"net": setup.adapter(AdapterSpec(name="none"), method)}
    deployed = federation.deploy(state).trained()
    scores = federation.evaluate(plain, deployed, ["test"])
    return state, {**scores, "deployed": deployed}, losses


def gap(a: Tree, b: Tree) -> float:
    assert {s: set(leaves) for s, leaves in a.items()} == {s: set(leaves) for s, leaves in b.items()}
    gaps = [float((a[s][n].double() - b[s][n].double().cpu()).abs().max()) for s in a for n in a[s] if a[s][n].numel()]
    return max(gaps, default=0.0)


@pytest.fixture(scope="module")
def single_parallel():
    engine = Parallel(Compute(), workers=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def parallel():
    engine = Parallel(Compute(dtype=torch.float64), workers=2)
    yield engine
    engine.close()


def check_equal(reference: tuple, other: tuple, tolerance: float) -> None:
    state, scores, losses = reference
    assert gap(state.server, other[0].server) < tolerance
    assert set(state.locals) == set(other[0].locals)
    for name, tree in state.locals.items():
        assert gap(tree, other[0].locals[name]) < tolerance
    for name, tree in scores["deployed"].items():
        assert gap(tree, other[1]["deployed"][name]) < tolerance
    assert losses == pytest.approx(other[2], abs=tolerance)


@cache
def referenced(name: str, norm: bool) -> tuple[Method, tuple] | None:
    """A method and what the sequential engine makes of it in double precision; None where it cannot run."""
    method = make(name, norm)
    if method is None:
        assert METHODS[name].make.requires  # it says itself that it cannot run here
        return None
    return method, federate(method, Sequential(DOUBLE), DOUBLE)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_vmapped_equals_sequential(name: str, norm: bool) -> None:
    found = referenced(name, norm)
    if found is None:
        return
    method, reference = found
    check_equal(reference, federate(method, Vmapped(DOUBLE), DOUBLE), 1e-10)
    with StackedConvolutions():  # convolutions as products of matrices, which the engine does on a GPU only
        check_equal(reference, federate(method, Vmapped(DOUBLE), DOUBLE), 1e-9)


@pytest.mark.system
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_parallel_equals_sequential(name: str, norm: bool, parallel: Parallel) -> None:
    found = referenced(name, norm)
    if found is not None:
        check_equal(found[1], federate(found[0], parallel, DOUBLE), 1e-10)


def check_predictions(name: str, norm: bool, engine: Engine) -> None:
    """The sequential engine's answers in single precision."""
    method = make(name, norm)
    if method is None:
        assert METHODS[name].make.requires
        return
    compute = Compute()
    ends = [federate(method, worker, compute)[1] for worker in (Sequential(compute), engine)]
    for client in TASK.clients:
        x = TASK.images[client.test].float() / 255
        answers = [method.predict(scores["deployed"][client.name], x).logits.argmax(1) for scores in ends]
        assert torch.equal(answers[0], answers[1])


@pytest.mark.grid
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_predictions_agree_in_single_precision(name: str, norm: bool) -> None:
    check_predictions(name, norm, Vmapped(Compute()))


@pytest.mark.system
@pytest.mark.grid
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_predictions_of_worker_processes_agree_in_single_precision(
    name: str, norm: bool, single_parallel: Parallel
) -> None:
    check_predictions(name, norm, single_parallel)


def test_what_is_shipped_does_not_carry_the_data() -> None:
    """A method that holds on to the task's images would send them to every worker."""
    from fedshift.experiment.schema import Experiment
    from fedshift.runs.setup import make_setup, make_task

    experiment = Experiment.parse({"data": {"size": 16}, "model": {"name": "mlp", "hidden": [4]}})
    task = make_task(experiment, seed=0)
    setup = make_setup(experiment, MethodSpec(name="fedavg"), task)
    assert task.images.nbytes > 1_000_000
    assert len(cloudpickle.dumps(setup.method)) < 200_000
    assert len(cloudpickle.dumps(setup.plain)) < 200_000


@pytest.mark.parametrize(
    "changes",
    [
        {"local_steps": 5},
        {"last_batch": "drop"},
        {"last_batch": "wrap"},
        {"optimiser": "adam"},
        {"clip": 0.5},
        {"local_epochs": 0},
        {"batch_size": 1},
        {"lr_decay": 0.5},
        {"augment": "shift"},
        {"augment": "shift-flip"},
        {"augment": "flip"},
        {"balance": "weights"},
        {"balance": "sampler"},
        {"balance": "softmax"},
    ],
)
def test_agreement_for_all_training_settings(changes: dict) -> None:
    compute = Compute(dtype=torch.float64)
    method = make("fedavg", True, **changes)
    assert method is not None
    check_equal(federate(method, Sequential(compute), compute), federate(method, Vmapped(compute), compute), 1e-10)


def test_small_cohorts_equal_one_large_one() -> None:
    compute = Compute(dtype=torch.float64)
    method = make("scaffold", True)
    assert method is not None
    reference = federate(method, Vmapped(compute), compute)
    check_equal(reference, federate(method, Vmapped(compute, max_clients=2), compute), 1e-10)


@dataclass(frozen=True)
class Everything(Method):
    """Uses the hooks no shipped method uses yet: draws, a fold, cached features, two optimisers, validation data."""

    def phases(self, ctx):
        from fedshift.core.optim import SGD, Adam

        head = self.arch.head
        return (
            Phase(name="noisy", groups=((head, Adam(lr=0.01)),), optim=SGD(lr=0.1)),
            Phase(name="fold", kind="fold", data="val"),
            Phase(name="head", trainable=head, inputs="features", epochs=1, batch_stats=False),
        )

    def draws(self, phase):
        return (
            {"noise": RandomSpec("normal", (3, 8, 8)), "labels": RandomSpec("integers", high=4)}
            if phase.name == "noisy"
            else {}
        )

    def begin(self, down, local):
        return {**super().begin(down, local), "sum": {"features": torch.zeros(6, dtype=torch.float64)}}

    def loss(self, state, tensors, batch, phase):
        if phase.name != "noisy":
            return super().loss(state, tensors, batch, phase)
        noisy = {**batch, "x": batch["x"] + 0.1 * batch["noise"]}
        value, buffers = super().loss(state, tensors, noisy, phase)
        return value + (batch["labels"] * 0.01).sum() * tensors["head.bias"].sum(), buffers

    def fold(self, state, batch, phase):
        features, _, _ = self.arch.encode(state["model"], batch["x"])
        return {**state, "sum": {"features": state["sum"]["features"] + features.sum(0)}}

    def finish(self, state, down, local):
        up, kept = super().finish(state, down, local)
        return {**up, "sum": state["sum"]}, kept

    def aggregate(self, server, ups, ctx):
        total = torch.stack([up["sum"]["features"] for up in ups.values()]).sum(0)
        after, metrics = super().aggregate(server, ups, ctx)
        return {**after, "descriptor": {"h": total}}, metrics


@pytest.mark.system
def test_hooks_of_later_methods_agree(parallel: Parallel) -> None:
    compute = Compute(dtype=torch.float64)
    method = Everything(arch=tiny_arch(norm=True), train=tiny_train())
    reference = federate(method, Sequential(compute), compute)
    assert float(reference[0].server["descriptor"]["h"].abs().sum()) > 0
    check_equal(reference, federate(method, Vmapped(compute), compute), 1e-10)
    check_equal(reference, federate(method, parallel, compute), 1e-10)


@dataclass(frozen=True)
class LogitExchange(Method):
    """Clients of different architectures that share only logits on public data (a FedMD shape)."""

    def private(self, ctx):
        return self.arch.encoder | self.arch.head

    def init_server(self, models, clients, public):
        return {"consensus": {"logits": torch.zeros(6, 4, dtype=torch.float64)}}

    def broadcast(self, server, client, ctx):
        return {"model": {}, "consensus": server["consensus"]}

    def phases(self, ctx):
        return (Phase(), Phase(name="communicate", kind="fold", data="public"))

    def begin(self, down, local):
        return {**super().begin(down, local), "logits": {"public": torch.zeros(6, 4, dtype=torch.float64)}}

    def fold(self, state, batch, phase):
        return {**state, "logits": {"public": self.arch(state["model"], batch["x"]).logits}}

    def finish(self, state, down, local):
        return {"logits": state["logits"]}, super().finish(state, down, local)[1]

    def aggregate(self, server, ups, ctx):
        mean = torch.stack([up["logits"]["public"] for up in ups.values()]).mean(0)
        return {"consensus": {"logits": mean}}, {}


@pytest.mark.system
def test_several_architectures_in_one_round(parallel: Parallel) -> None:
    compute = Compute(dtype=torch.float64)
    task = replace(TASK, public=torch.arange(6))
    methods = {
        "small": LogitExchange(arch=tiny_arch("mlp"), train=tiny_train()),
        "large": LogitExchange(arch=tiny_arch("cnn", norm=True), train=tiny_train()),
    }
    setup = Setup(MethodSpec(name="x"), methods, methods["small"].train)
    ends = []
    for engine in (Sequential(compute), Vmapped(compute), parallel):
        federation = Session(setup, task, engine, compute, seed=0, rounds=2)
        state = federation.start()
        for _ in range(2):
            state, _ = federation.step(state)
        ends.append(state)
    shapes = {name: len(tree["model"]) for name, tree in ends[0].locals.items()}
    assert len(set(shapes.values())) == 2  # two architectures really were at work
    for other in ends[1:]:
        assert gap(ends[0].server, other.server) < 1e-10
        for name, tree in ends[0].locals.items():
            assert gap(tree, other.locals[name]) < 1e-10


def test_one_architecture_only_for_methods_that_average() -> None:
    from fedshift.errors import UserError

    with pytest.raises(UserError, match="one architecture"):
        make("fedavg", False).init_server({"a": {}, "b": {}}, (), torch.zeros(0, dtype=torch.int64))  # type: ignore[union-attr]


@pytest.mark.system
def test_parallel_from_a_script_without_a_main_guard(tmp_path) -> None:
    """Also the shape of a notebook: the method's class lives in __main__ and nowhere else."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        import torch
        from fedshift import Method
        from fedshift.engines.base import Compute
        from fedshift.engines.parallel import Parallel
        from fedshift.engines.sequential import Sequential
        from tests.conftest import tiny_arch, tiny_train
        from tests.test_engines_agree import federate, check_equal

        @dataclass(frozen=True)
        class Mine(Method):
            factor: float = 2.0
            def loss(self, state, tensors, batch, phase):
                value, buffers = super().loss(state, tensors, batch, phase)
                return self.factor * value, buffers

        compute = Compute(dtype=torch.float64)
        method = Mine(arch=tiny_arch(), train=tiny_train())
        engine = Parallel(compute, workers=2)
        check_equal(federate(method, Sequential(compute), compute), federate(method, engine, compute), 1e-10)
        engine.close()
        print("agreed")
    """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.stdout.strip() == "agreed", done.stderr


@dataclass(frozen=True)
class Unshippable(Method):
    handle: object = None


def test_parallel_falls_back_and_says_so() -> None:
    compute = Compute(dtype=torch.float64)
    method = Unshippable(arch=tiny_arch(), train=tiny_train(), handle=threading.Lock())
    engine = Parallel(compute, workers=2)
    with pytest.warns(UserWarning, match="cannot be sent to worker processes.*sequentially"):
        other = federate(method, engine, compute)
    engine.close()
    check_equal(federate(method, Sequential(compute), compute), other, 1e-12)
