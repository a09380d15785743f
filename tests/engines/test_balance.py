"""``[train] balance``: the arithmetic by hand, the order of batches, every method, every engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.arch import Arch
from fedshift.core.context import Balance, Context, Phase
from fedshift.core.method import Batch, Method, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree
from fedshift.data.task import Task
from fedshift.engines.balance import balanced_order, class_weights, log_prior, own_ways, untouched
from fedshift.engines.parallel import Parallel
from fedshift.engines.schedule import batches
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.experiment.schema import MethodSpec
from fedshift.methods.fedavg import FedAvg
from fedshift.runs.flops import count
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from tests.conftest import ragged_task, some_of, tiny_arch
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    PLAIN,
    TRAIN,
    Plain,
    equal_trees,
    far,
    federation,
    make_task,
    module_of,
    run,
    watching,
)
from tests.test_engines_agree import DOUBLE, check_equal, federate, make

WAYS = [way for way in get_args(Balance) if way != "none"]
COUNTS = (11, 2, 0)  # of client a, whose last class is absent


def skewed() -> Task:
    """Two clients: the first with eleven images of a class, two of another and none of the third."""
    task = make_task((sum(COUNTS), 9))
    own = torch.tensor([c for c, n in enumerate(COUNTS) for _ in range(n)])
    return replace(task, labels=torch.cat([own, task.labels[len(own) :]]))


SKEWED = skewed()


# --- the arithmetic, by hand ------------------------------------------------------------------------------------------


def by_hand(balance: str, logits: Tensor, labels: Tensor, counts: tuple[int, ...] = COUNTS) -> Tensor:
    """The loss of a batch, a sample at a time."""
    losses = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        raised = [float(n + 1) if balance == "softmax" else 1.0 for n in counts]
        chances = torch.stack([factor * row[c].exp() for c, factor in enumerate(raised)])
        weight = 1.0
        if balance == "weights":
            there = [n for n in counts if n]
            weight = (1 / counts[label]) / (sum(n * (1 / n) for n in there) / sum(there))  # 1/n over its mean
        losses.append(-weight * (chances[label] / chances.sum()).log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("balance", get_args(Balance))
def test_a_client_trains_as_plain_torch_does(balance: Balance) -> None:
    watched, steps = watching(FedAvg)
    train = replace(TRAIN, balance=balance, local_epochs=3, momentum=0.9)
    fed, watch = federation(watched, SKEWED, train, PLAIN, rounds=1)
    start = fed.start()
    fed.step(start)
    own = [batch for state, batch, _ in steps if int(state["now"]["samples"]) == sum(COUNTS)]
    assert [len(batch["y"]) for batch in own] == [4, 4, 4, 1] * 3  # as many steps, whatever the way
    module = module_of(start.server["model"], Plain)
    optimiser = torch.optim.SGD(module.parameters(), TRAIN.lr, 0.9)
    total = 0.0
    for batch in own:
        optimiser.zero_grad()
        loss = by_hand(balance, module((batch["x"] - 0.5) / 0.5), batch["y"])
        loss.backward()
        optimiser.step()
        total += float(loss.detach())
    reply = watch.replies[0]["a"]
    assert far(reply.up["model"], dict(module.state_dict())) < 1e-12
    assert reply.loss == pytest.approx(total / len(own), abs=1e-12)
    seen = torch.cat([batch["y"] for batch in own]).bincount(minlength=CLASSES).tolist()
    if balance == "sampler":
        assert sorted(seen) == [0, 19, 20]
    else:
        assert seen == [3 * n for n in COUNTS]


@pytest.mark.parametrize("counts", [COUNTS, (5, 5, 5), (1, 0, 0), (1000, 1, 10), (0, 0, 7, 7)])
def test_weights_fall_with_the_count_and_have_mean_one(counts: tuple[int, ...]) -> None:
    n = torch.tensor(counts, dtype=torch.float64)
    weights, prior = class_weights(n), log_prior(n)
    assert bool(weights.isfinite().all())
    assert bool(prior.isfinite().all())
    assert float((n * weights).sum() / n.sum()) == pytest.approx(1, abs=1e-15)
    there = n > 0
    assert torch.allclose((n * weights)[there], (n * weights)[there][0].expand(int(there.sum())))
    if len(set(counts)) == 1:
        assert weights.tolist() == [1.0] * len(counts)


def test_nothing_known_is_finite_too() -> None:
    assert class_weights(torch.zeros(3)).tolist() == [0.0] * 3
    assert log_prior(torch.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("balance", WAYS)
def test_a_network_may_know_more_classes_than_there_are(balance: Balance) -> None:
    wide = Arch.of(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 7)), (1, 4, 4))
    state, reports = run(federation("fedavg", SKEWED, replace(TRAIN, balance=balance), wide)[0])
    assert all(report.diverged == () for report in reports)
    assert state.server["model"]["1.bias"].shape == (7,)


@pytest.mark.parametrize("balance", WAYS)
def test_equal_classes_need_no_balance(balance: Balance) -> None:
    level = replace(SKEWED, labels=torch.arange(len(SKEWED.labels)) % CLASSES)
    level = replace(level, clients=tuple(replace(c, train=c.train[: len(c.train) // 3 * 3]) for c in level.clients))
    plain, other = (run(federation("fedavg", level, replace(TRAIN, balance=b))[0])[0] for b in ("none", balance))
    apart = far(plain.server["model"], other.server["model"])
    assert apart < 1e-12 if balance != "sampler" else apart > 0  # the sampler still has an order of its own


# --- the order of batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(11, 2, 0), (40, 1, 3, 0, 9), (1,), (6,), (3, 3)])
@pytest.mark.parametrize("draws", [0, 1, 2, 7, 16, 53, 200])
def test_classes_and_their_samples_take_turns(counts: tuple[int, ...], draws: int) -> None:
    labels = torch.tensor([c for c, n in enumerate(counts) for _ in range(n)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    order = balanced_order(labels, draws, seed=5)
    assert len(order) == draws
    assert order.dtype == torch.int64
    there = [c for c, n in enumerate(counts) if n]
    for upto in range(draws + 1):  # at any moment
        seen = labels[order[:upto]].bincount(minlength=len(counts))[there]
        assert int(seen.max() - seen.min()) <= 1
    for c in there:
        often = [Counter(order.tolist())[i] for i in (labels == c).nonzero()[:, 0].tolist()]
        assert max(often) - min(often) <= 1  # none again before all others
    assert torch.equal(order, balanced_order(labels, draws, seed=5))
    if draws > 16 and len(labels) > 6:
        assert not torch.equal(order, balanced_order(labels, draws, seed=6))


@pytest.mark.parametrize("rule", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("phase", [Phase(), Phase(epochs=3), Phase(steps=11), Phase(epochs=0)])
@pytest.mark.parametrize("alone", [False, True])
def test_a_balanced_plan_has_the_sizes_of_the_plain_one(rule: str, phase: Phase, alone: bool) -> None:
    labels = torch.tensor([0] * 20 + [1] * 4 + [3])
    train = Train(batch_size=8, local_epochs=2, last_batch=rule)  # type: ignore[arg-type]
    plain = batches(25, phase, train, 3, alone)
    order, sizes = batches(25, phase, train, 3, alone, labels)
    assert sizes == plain[1]
    assert len(order) == len(plain[0])
    seen = labels[order].bincount(minlength=4)[[0, 1, 3]]
    assert int(seen.max() - seen.min()) <= 1


def test_rare_samples_come_in_another_order_every_time() -> None:
    labels = torch.tensor([0] * 50 + [1] * 5)
    order = balanced_order(labels, 100, seed=0)
    rare = order[labels[order] == 1].reshape(10, 5).tolist()
    assert all(sorted(part) == [50, 51, 52, 53, 54] for part in rare)
    assert len({tuple(part) for part in rare}) > 5


# --- nothing changes where nobody asks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Before(FedAvg):
    """The loss as it was written before there was a choice."""

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        assert set(batch) == {"x", "y", "index"}
        output = self.outputs(tensors, batch, phase)
        return F.cross_entropy(output.logits, batch["y"]), output.buffers


def test_by_default_losses_and_states_are_what_they_were_to_the_bit() -> None:
    ends = [run(federation(method, SKEWED, TRAIN)[0]) for method in (Before, FedAvg)]
    assert equal_trees(ends[0][0].server, ends[1][0].server)
    assert [report.loss for report in ends[0][1]] == [report.loss for report in ends[1][1]]
    assert replace(TRAIN, balance="none") == TRAIN


# --- every method -----------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, object]] = {"fedadg": {"warm_up": 0}, "fedicon": {"head_rounds": 1}}
UNEVEN = ragged_task((24, 17, 9))
UNEVEN = replace(UNEVEN, labels=torch.where(torch.arange(len(UNEVEN.labels)) % 5 > 0, 1, UNEVEN.labels % 3))


def of_uneven(name: str, balance: Balance) -> Method:
    cls = METHODS[name].make
    plain = make(name, norm=True, balance=balance, momentum=0.0, local_epochs=1)
    assert plain is not None
    return cls(arch=plain.arch, train=plain.train, **OPTIONS.get(name, {}))


def taught(method: Method) -> set[str]:
    """The names of the phases that train on labels."""
    there = [Context(number, 2, 1) for number in range(2 + method.extra_rounds)]
    phases = [p for ctx in there for p in method.phases(ctx)] + [*method.last_phases(Context(2, 2, 1, "final"))]
    return {phase.name for phase in phases if phase.kind == "train" and phase.labelled}


@cache
def ends_of(name: str, balance: Balance) -> tuple[Tree, ...]:
    """The server and all deployed trees after training on uneven classes."""
    method = of_uneven(name, balance)
    state, found, losses = federate(method, Sequential(DOUBLE), DOUBLE, 2 + method.extra_rounds, UNEVEN)
    assert all(torch.tensor(losses).isfinite())
    return (state.server, *found["deployed"].values())


@pytest.mark.parametrize("balance", WAYS)
@pytest.mark.parametrize("name", some_of(METHODS))
def test_every_method_honours_it_or_says_that_it_does_not(name: str, balance: Balance) -> None:
    method = of_uneven(name, balance)
    plain, other = ends_of(name, "none"), ends_of(name, balance)
    same = all(equal_trees(a, b) for a, b in zip(plain, other, strict=True))
    said, own = untouched(method, 2), own_ways(method, 2)
    assert (said is None) == (not own)
    if said is not None:
        assert all(f"{phase!r} (always {way!r})" in said for phase, way in own.items())
    assert same == (taught(method) == set(own))  # where a phase is left to [train], it makes a difference
    assert untouched(of_uneven(name, "none"), 2) is None


@pytest.mark.parametrize("name", ["fedthe", "fedrod", "fedicon", "finetune"])
def test_a_way_of_its_own_is_in_the_docstring(name: str) -> None:
    assert "``[train] balance``" in " ".join((METHODS[name].make.__doc__ or "").split())


def test_options_decide_what_is_a_methods_own() -> None:
    arch = tiny_arch(norm=True)
    made = METHODS["finetune"].make
    assert own_ways(made(arch), 3) == {}
    assert own_ways(made(arch, balanced=True), 3) == {"train": "softmax"}  # type: ignore[call-arg]
    assert own_ways(made(arch, balanced_tuning=True), 3) == {"finetune": "softmax"}  # type: ignore[call-arg]
    assert own_ways(METHODS["fedthe"].make(arch, balanced=False), 3) == {"personal": "none"}  # type: ignore[call-arg]
    assert own_ways(METHODS["fedicon"].make(arch), 0) == {}  # nothing is contrasted in no rounds
    asked = METHODS["fedthe"].make(arch, Train(balance="weights"))
    assert untouched(asked, 3) == (
        "[train] balance has no say in its phases 'generic' (always 'softmax') and 'personal' (always 'none')"
    )


def test_finetunes_own_softmax_is_that_of_train() -> None:
    """Two ways to say the same thing end in the same bits."""
    own = run(federation("finetune", SKEWED, TRAIN, balanced=True)[0])[0]
    asked = run(federation("finetune", SKEWED, replace(TRAIN, balance="softmax"))[0])[0]
    assert equal_trees(own.server, asked.server)


def test_what_has_no_labels_is_not_balanced() -> None:
    """FedMD's digest is on public images; only its own images are balanced."""
    watched, steps = watching(METHODS["fedmd"].make)
    run(federation(watched, SKEWED, replace(TRAIN, balance="weights"), rounds=2)[0])
    added = {(phase.name, "class-weights" in batch) for _, batch, phase in steps}
    assert added == {("digest", False), ("train", True)}


def test_terms_beside_the_cross_entropy_stay_as_they_are() -> None:
    """FedProx's penalty is not weighed: weights act on the gradient of the cross-entropy alone."""
    train, start = replace(TRAIN, balance="weights", local_steps=1), AWKWARD.init(0)
    ends = {}
    for name, mu in (("fedavg", None), ("fedprox", 0.5)):
        fed, _ = federation(name, SKEWED, train, rounds=1, **({} if mu is None else {"mu": mu}))
        ends[name] = run(fed)[0].server["model"]
    assert far(ends["fedavg"], ends["fedprox"]) < 1e-15  # in the first step nothing has moved yet
    assert far(ends["fedavg"], {n: t.double() for n, t in start.items()}) > 1e-4


# --- every engine -----------------------------------------------------------------------------------------------------

ENGINES = [
    "fedavg",
    "scaffold",
    "finetune",
    "fedthe",
    "fedrod",
    "fedicon",
    "fedtta",
    "partialfed",
    "fedmd",
    "centralised",
]


@pytest.mark.grid
@pytest.mark.parametrize("balance", WAYS)
@pytest.mark.parametrize(
    "name", [name if name in ENGINES else pytest.param(name, marks=pytest.mark.grid) for name in METHODS]
)
def test_stacked_clients_end_where_the_loop_does(name: str, balance: Balance) -> None:
    method = of_uneven(name, balance)
    rounds = 2 + method.extra_rounds
    reference = federate(method, Sequential(DOUBLE), DOUBLE, rounds, UNEVEN)
    check_equal(reference, federate(method, Vmapped(DOUBLE), DOUBLE, rounds, UNEVEN), 1e-10)


@pytest.mark.system
def test_worker_processes_end_where_the_loop_does() -> None:
    engine = Parallel(DOUBLE, workers=2)
    for balance in WAYS:
        method = of_uneven("finetune", balance)
        reference = federate(method, Sequential(DOUBLE), DOUBLE, 2, UNEVEN)
        check_equal(reference, federate(method, engine, DOUBLE, 2, UNEVEN), 1e-10)
    engine.close()


@pytest.mark.parametrize("balance", WAYS)
def test_steps_are_counted_without_training(balance: Balance) -> None:
    costs = []
    for way in ("none", balance):
        method = of_uneven("fedavg", way)  # type: ignore[arg-type]
        setup = Setup(MethodSpec(name="fedavg"), {"net": method}, method.train)
        costs.append(count(Session(setup, UNEVEN, Sequential(DOUBLE), DOUBLE, seed=0, rounds=2), 2))
    assert costs[0].flops_round == costs[1].flops_round is not None
    assert costs[1].notes == ()
