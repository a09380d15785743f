"""The contract of a method's hooks for every registered method, and what the engine and the session owe them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.core.context import ClientInfo, Context, Phase, ServerContext
from fedshift.core.method import Batch, Method, Train
from fedshift.core.optim import SGD, Adam
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.engines.reference import now_of, schedule_of, work
from fedshift.engines.schedule import Plan
from fedshift.errors import UserError
from fedshift.methods.ditto import Ditto
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedbn import FedBN
from fedshift.methods.local import Local
from fedshift.methods.scaffold import Scaffold
from fedshift.runs.session import Session
from fedshift.store.state import State
from fedshift.store.trees import load, save
from tests.conftest import some_of
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    HEAD,
    NO_IDS,
    NORM,
    PLAIN,
    SEED,
    SHAPE,
    TRAIN,
    Plain,
    copied,
    equal,
    equal_trees,
    far,
    federation,
    make_task,
    module_of,
    ran,
    run,
    server_context,
    torch_training,
    watching,
)

ENTRIES = set(AWKWARD.parameters) | set(AWKWARD.buffers)
PARAMETERS = set(AWKWARD.parameters)
SIZED = make_task((5, 9, 12))


# --- every method -----------------------------------------------------------------------------------------------------


class Frozen:
    """Trees and copies of them: whether anybody changed one in place."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tree, Tree]] = []

    def __call__(self, tree: Tree) -> Tree:
        self._pairs.append((tree, copied(tree)))
        return tree

    def whole(self) -> bool:
        return all(equal_trees(tree, copy) for tree, copy in self._pairs)


def one_step_of(method: str) -> tuple[Session, Method, State, Context]:
    """A federation after a round, so that memories are not zero."""
    fed, _ = federation(method, SIZED, replace(TRAIN, momentum=0.5))
    state, _ = run(fed, 1)
    return fed, fed.setup.method, state, fed.context(state.round)


@pytest.mark.parametrize("name", some_of(METHODS))
def test_hooks_change_none_of_their_arguments(name: str) -> None:
    fed, method, state, ctx = one_step_of(name)
    frozen = Frozen()
    frozen(state.server)
    ups: dict[str, Tree] = {}
    plan = Plan(method.phases(ctx), ctx, SEED)
    for client in fed.training.clients:
        down = frozen(method.broadcast(state.server, client.name, ctx))
        local = frozen(fed._local(state, client, ctx))
        reply = work(method, down, local, client, fed.training, plan, DOUBLE)
        ups[client.name] = frozen(reply.up)
        frozen(method.deployed(down, reply.local))
    sizes = [float(len(client.train)) for client in fed.training.clients]
    frozen(method.aggregate(state.server, ups, server_context(sizes, ctx, seed=1))[0])
    final, unseen = replace(ctx, stage="final"), replace(ctx, stage="unseen")
    last = Plan(method.last_phases(final), final, SEED)
    gifts: dict[str, Tree] = {}
    for client in fed.task.clients:
        down = frozen(method.broadcast(state.server, client.name, final))
        local = frozen(fed._local(state, client, final))
        gift, kept = method.settle(None, down, local, final)  # without last phases, or when they fail
        frozen(method.deployed(down, frozen(kept)))
        if last.phases:
            reply = work(method, down, local, client, fed.task, last, DOUBLE)
            gift = reply.up
            frozen(method.deployed(down, frozen(reply.local)))
        if client.name in state.locals and gift:
            gifts[client.name] = frozen(gift)
    served = frozen(method.take_gifts(state.server, gifts))
    for server in (state.server, served):
        frozen(method.broadcast(server, "new", unseen))
    assert frozen.whole()


@pytest.mark.parametrize("name", some_of(METHODS))
def test_a_step_keeps_the_form_of_the_state(name: str) -> None:
    """Slots, names, shapes and types stay, or clients could not be stacked."""
    watched, steps = watching(METHODS[name].make)
    run(federation(watched, SIZED, replace(TRAIN, local_epochs=2))[0], 2)
    forms: dict[tuple[int, str], Any] = {}
    for before, _, phase in steps:
        form = {slot: {n: (t.shape, t.dtype) for n, t in leaves.items()} for slot, leaves in before.items()}
        assert forms.setdefault((len(before["optim"]), phase.name + phase.slot), form) == form


@pytest.mark.parametrize("name", some_of(METHODS))
def test_server_and_private_memory_keep_their_form(name: str) -> None:
    fed, _ = federation(name, SIZED)

    def form(tree: Tree) -> Any:
        return {slot: {n: (t.shape, t.dtype) for n, t in leaves.items()} for slot, leaves in tree.items()}

    start = fed.start()
    first = {c.name: form(fed._local(start, c, fed.context(start.round))) for c in fed.training.clients}
    state, _ = run(fed, 2)
    assert form(state.server) == form(start.server)
    for client, tree in state.locals.items():
        assert form(tree) == first[client]


@pytest.mark.parametrize("name", some_of(METHODS))
def test_what_comes_down_and_what_is_private_make_a_whole_model(name: str) -> None:
    fed, method, state, ctx = one_step_of(name)
    private = method.private(ctx)
    entries = {*method.arch.parameters, *method.arch.buffers}  # a method may have changed the network
    for client in fed.training.clients:
        down = method.broadcast(state.server, client.name, ctx)
        assert not set(down["model"]) & private
        assert set(down["model"]) | private >= entries  # a private head may stand beside the network's own
        ready = method.begin(down, fed._local(state, client, ctx))
        assert set(ready["model"]) == set(down["model"]) | private
        last = replace(ctx, stage="final")
        settled = method.begin(method.broadcast(state.server, client.name, last), fed._local(state, client, last))
        for phases, begun in ((method.phases(ctx), ready), (method.last_phases(last), settled)):
            for phase in phases:
                beside = set(begun[phase.slot]) - entries
                assert method.trainable(phase) <= method.arch.trainable | beside
                assert method.trainable(phase) <= set(begun[phase.slot])
    for phase in (*method.phases(ctx), *method.last_phases(replace(ctx, stage="final"))):
        covered = [n for names, _ in method.groups(phase) for n in names]
        assert sorted(covered) == sorted(method.trainable(phase))  # every name once
    for tree in fed.deploy(state).trained().values():
        assert set(tree) >= method.provides
        assert set(tree["model"]) == entries
        assert method.predict(tree, torch.zeros(2, *SHAPE, dtype=torch.float64)).logits.shape == (2, CLASSES)


@pytest.mark.parametrize("name", some_of(METHODS))
def test_a_run_is_a_function_of_its_seed(name: str) -> None:
    first, again = (run(federation(name, SIZED)[0]) for _ in range(2))
    assert equal_trees(first[0].server, again[0].server)
    assert first[0].locals.keys() == again[0].locals.keys()
    assert all(equal_trees(first[0].locals[client], again[0].locals[client]) for client in first[0].locals)
    assert [report.loss for report in first[1]] == [report.loss for report in again[1]]
    other = Session(*_with_another_seed(name))
    ends = [run(other)[0], first[0]]
    # where weights do not travel the server has no model
    models = [end.server["model"] or end.locals["a"]["model"] for end in ends]
    assert far(*models) > 1e-3


def _with_another_seed(name: str) -> tuple[Any, ...]:
    fed, engine = federation(name, SIZED)
    return fed.setup, fed.task, engine, DOUBLE, SEED + 1, 3


@pytest.mark.parametrize("name", some_of(METHODS))
def test_a_run_resumed_from_its_file_ends_the_same(name: str, tmp_path: Path) -> None:
    fed, _ = federation(name, SIZED, replace(TRAIN, clip=0.2), rounds=4)  # a norm is a sum in the order of names
    whole, _ = run(fed)
    half, _ = run(fed, 2)
    save(tmp_path / "state", half.trees(), {"round": half.round})
    state = State.of(load(tmp_path / "state")[0], half.round, DOUBLE.device)
    for _ in range(2):
        state, _ = fed.step(state)
    assert equal_trees(state.server, whole.server)
    assert state.locals.keys() == whole.locals.keys()
    assert all(equal_trees(state.locals[client], whole.locals[client]) for client in whole.locals)


@pytest.mark.parametrize("name", some_of(METHODS))
def test_evaluating_on_the_way_changes_nothing(name: str) -> None:
    fed, _ = federation(name, SIZED)
    state = fed.start()
    for _ in range(3):
        fed.deploy(state).trained()
        fed.after_local(state)
        state, _ = fed.step(state)
    assert equal_trees(state.server, ran(name, SIZED).server)


@pytest.mark.parametrize("name", some_of(METHODS))
def test_unseen_clients_never_influence_training(name: str) -> None:
    """Whether there are any, what they have, and that they were served between rounds."""
    task = make_task((5, 9, 12), unseen=2)
    theirs = torch.cat([client.test for client in task.unseen])
    images, labels = task.images.clone(), task.labels.clone()
    images[theirs], labels[theirs] = 0, 0
    ends = []
    for other in (task, replace(task, images=images, labels=labels), replace(task, unseen=())):
        fed, _ = federation(name, other)
        state = fed.start()
        for _ in range(fed.rounds):
            fed.unseen(fed.deploy(state))
            state, _ = fed.step(state)
        ends.append(state)
    for end in ends[1:]:
        assert equal_trees(end.server, ends[0].server)
        assert all(equal_trees(end.locals[client], local) for client, local in ends[0].locals.items())


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "local"])
def test_models_after_local_training_are_those_of_the_next_round(name: str) -> None:
    fed, watch = federation(name, SIZED)
    state, _ = run(fed, 1)
    trees = fed.after_local(state)
    assert set(trees) == {"a", "b", "c"}
    following, _ = fed.step(state)
    for client, tree in trees.items():
        reply = watch.replies[-1][client]
        assert equal(tree["model"], {**following.locals.get(client, {}).get("model", {}), **reply.up["model"]})


def test_no_model_after_local_training_where_clients_do_not_train() -> None:
    fed, _ = federation("centralised", SIZED)
    assert fed.after_local(run(fed, 1)[0]) == {}


# --- a step -----------------------------------------------------------------------------------------------------------


def stepped(method: Method, phase: Phase, count: int = 6, rounds: int = 1) -> tuple[Tensors, Tensors, Plan]:
    """A model before and after this phase on one client, and the plan."""
    task = make_task((count,))
    start = {n: t.double() if t.is_floating_point() else t for n, t in method.arch.init(0).items()}
    plan = Plan((phase,), Context(0, 1, 1), SEED)
    reply = work(method, {"model": start}, {}, task.clients[0], task, plan, DOUBLE)
    return start, reply.up["model"], plan


def batches_of(method: Method, phase: Phase, plan: Plan, count: int = 6) -> list[Batch]:
    task = make_task((count,))
    order, sizes = schedule_of(method, phase, task.samples(task.clients[0], phase.data), plan, "a")
    return [{"x": task.images[index].double() / 255, "y": task.labels[index]} for index in order.split(sizes)]


def test_a_phase_moves_its_own_names_and_the_statistics() -> None:
    method = FedAvg(AWKWARD, TRAIN)
    before, after, _ = stepped(method, Phase(trainable=frozenset({"out.bias", "foo.weight"})))
    moved = {name for name in ENTRIES if not torch.equal(before[name], after[name])}
    assert moved == {"out.bias", "foo.weight"} | {n for n in NORM if "running" in n or "tracked" in n}
    before, after, _ = stepped(method, Phase(trainable=frozenset({"out.bias"}), batch_stats=False))
    assert {name for name in ENTRIES if not torch.equal(before[name], after[name])} == {"out.bias"}


def test_a_group_has_its_own_optimiser() -> None:
    train = replace(TRAIN, momentum=0.9, weight_decay=0.1)
    phase = Phase(epochs=3, groups=((frozenset(HEAD), SGD(lr=0.5, momentum=0.5)),))
    method = FedAvg(AWKWARD, train)
    before, after, plan = stepped(method, phase)
    module = module_of(before)
    rest = [p for n, p in module.named_parameters() if n not in HEAD]
    head = [p for n, p in module.named_parameters() if n in HEAD]

    def both(_: object) -> torch.optim.Optimizer:
        special = {"params": head, "lr": 0.5, "momentum": 0.5, "weight_decay": 0.0}
        return torch.optim.SGD([{"params": rest}, special], train.lr, momentum=0.9, weight_decay=0.1)

    torch_training(module, batches_of(method, phase, plan), both)
    assert far(after, module.state_dict()) < 1e-12


@pytest.mark.parametrize("base", ["sgd", "adam"])
def test_groups_with_adam_count_their_own_steps(base: str) -> None:
    train = replace(TRAIN, optimiser=base)
    phase = Phase(epochs=3, groups=((frozenset(HEAD), Adam(lr=0.01)),))
    method = FedAvg(PLAIN, train)
    before, after, plan = stepped(method, phase)
    module = module_of(before, Plain)
    rest = [p for n, p in module.named_parameters() if n not in HEAD]
    kind = torch.optim.Adam if base == "adam" else torch.optim.SGD
    others = kind(rest, train.lr)
    head = torch.optim.Adam([p for n, p in module.named_parameters() if n in HEAD], 0.01)
    for batch in batches_of(method, phase, plan):
        torch_training(module, [batch], lambda _: Both(others, head))
    assert far(after, module.state_dict()) < 1e-12


class Both(torch.optim.Optimizer):
    """Two optimisers that outlive a call of ``torch_training``."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})
        self.parts = parts

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def test_optimiser_memory_is_fresh_in_every_phase_and_round() -> None:
    class Twice(FedAvg):
        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(name="one"), Phase(name="two"))

    watched, steps = watching(Twice)
    run(federation(watched, make_task((8,)), replace(TRAIN, momentum=0.9))[0], 2)
    assert [phase.name for _, _, phase in steps] == ["one", "one", "two", "two"] * 2
    for number, (before, _, _) in enumerate(steps):
        fresh = all(not bool(leaf.any()) for leaf in before["optim"].values())
        assert set(before["optim"]) == {f"velocity/{name}" for name in PARAMETERS}
        assert fresh == (number % 2 == 0)


def test_now_says_where_in_the_run_a_client_is() -> None:
    train = replace(TRAIN, lr_decay=0.5, local_epochs=2)
    watched, steps = watching(FedAvg)
    run(federation(watched, SIZED, train)[0])
    rounds = []
    for before, _, _ in steps:
        now = before["now"]
        assert all(leaf.dtype == torch.float64 for leaf in now.values())
        number, size = int(now["round"]), int(now["samples"])
        rounds.append(number)
        assert float(now["decay"]) == 0.5**number
        assert float(now["lr"]) == 0.05 * 0.5**number
        assert float(now["rounds"]) == float(now["clients"]) == 3.0
        assert int(now["steps"]) == 2 * {5: 1, 9: 2, 12: 3}[size]  # with BatchNorm nobody is alone: 5 and 4 + 5
        first = {5: 0, 9: 5, 12: 14}[size]
        own = SIZED.labels[first : first + size]
        assert now["histogram"].tolist() == [int((own == c).sum()) for c in range(CLASSES)]
    assert sorted(set(rounds)) == [0, 1, 2]


def test_the_rate_stops_falling_after_the_last_round() -> None:
    train = Train(lr_decay=0.5)
    assert [Context(r, 3, 1).decay(train) for r in range(4)] == [1.0, 0.5, 0.25, 0.25]
    assert Context(0, 0, 1).decay(train) == 1.0
    # what is served after r rounds was trained by the last of them
    assert [Context(r, 3, 1, "final").decay(train) for r in range(5)] == [1.0, 1.0, 0.5, 0.25, 0.25]


def test_a_fold_sees_every_sample_once_in_order_and_trains_nothing() -> None:
    seen: list[Tensor] = []

    class Folding(FedAvg):
        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(kind="fold", name="look"),)

        def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
            seen.append(batch["index"])
            return {**state, "count": {"n": torch.tensor(len(torch.cat(seen)))}}

    fed, watch = federation(Folding, make_task((10,)))
    state, _ = run(fed, 1)
    assert torch.cat(seen).tolist() == list(range(10))
    assert equal(state.server["model"], fed.start().server["model"])
    assert watch.replies[0]["a"].steps == 0


def test_cached_features_train_the_head_as_the_whole_network_would() -> None:
    method = FedAvg(AWKWARD, TRAIN)
    how: dict[str, Any] = {"trainable": frozenset(HEAD), "epochs": 3, "batch_stats": False}
    before, cached, _ = stepped(method, Phase(inputs="features", **how), 10)
    _, plain, _ = stepped(method, Phase(**how), 10)
    assert far(cached, plain) < 1e-13
    assert far(cached, before) > 0.01


def test_a_phase_may_train_on_validation_data() -> None:
    watched, steps = watching(FedAvg)

    class OnValidation(watched):  # type: ignore[valid-type,misc]
        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(data="val"),)

    run(federation(OnValidation, SIZED)[0], 1)
    assert sorted(torch.cat([batch["index"] for _, batch, _ in steps]).tolist()) == [0, 1, 5, 6, 14, 15]


def test_a_phase_on_public_data_needs_public_data() -> None:
    class Public(FedAvg):
        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(data="public"),)

    with pytest.raises(UserError, match=r"needs a public set.*\[split\] public"):
        run(federation(Public, replace(SIZED, public=None))[0], 1)
    state, _ = run(federation(Public, replace(SIZED, public=torch.arange(4)))[0], 1)
    assert all(bool(leaf.isfinite().all()) for leaf in state.server["model"].values())


def test_one_sample_alone_meets_running_statistics() -> None:
    fed, watch = federation("fedavg", make_task((1, 8)))
    run(fed)
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        before, after = downs["a"]["model"], replies["a"].up["model"]
        assert replies["a"].finite
        assert all(torch.equal(before[n], after[n]) for n in ENTRIES - PARAMETERS)
        assert not torch.equal(before["out.bias"], after["out.bias"])


def test_the_reported_loss_is_the_mean_over_steps_then_over_clients_by_size() -> None:
    seen: dict[int, list[float]] = {}

    class Noting(FedAvg):
        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            value, buffers = super().loss(state, tensors, batch, phase)
            seen.setdefault(int(state["now"]["samples"]), []).append(float(value.detach()))
            return value, buffers

    _, (report,) = run(federation(Noting, SIZED)[0], 1)
    means = {size: sum(values) / len(values) for size, values in seen.items()}
    assert report.loss == pytest.approx(sum(size * mean for size, mean in means.items()) / 26, rel=1e-12)


def test_now_agrees_with_what_the_server_is_told() -> None:
    contexts: list[ServerContext] = []

    class Listening(FedAvg):
        def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
            contexts.append(ctx)
            return super().aggregate(server, ups, ctx)

    train = replace(TRAIN, lr_decay=0.5)
    fed, _ = federation(Listening, SIZED, train)
    run(fed)
    for number, server in enumerate(contexts):
        plan = Plan((), fed.context(number), SEED)
        client = now_of(fed.setup.method, SIZED, SIZED.clients[0], plan, 1, DOUBLE)
        for name in ("round", "rounds", "clients"):
            assert float(getattr(server, name)) == float(client[name])
        assert train.lr * server.decay(train) == pytest.approx(float(client["lr"]), rel=1e-7)
        assert server.stage == "round"
        assert server.samples.tolist() == [5.0, 9.0, 12.0]
    assert [server.round for server in contexts] == [0, 1, 2]
    assert len({server.seed for server in contexts}) == 3


# --- the server half --------------------------------------------------------------------------------------------------


def test_weights_sum_to_one() -> None:
    ctx = server_context([1.0, 2.0, 4.0])
    by_size = FedAvg(PLAIN, Train(weights="size")).weights(ctx)
    uniform = FedAvg(PLAIN, Train(weights="uniform")).weights(ctx)
    assert by_size.tolist() == [1 / 7, 2 / 7, 4 / 7]
    assert uniform.tolist() == [1 / 3] * 3
    assert by_size.dtype == uniform.dtype == torch.float64


def test_two_architectures_cannot_be_averaged() -> None:
    with pytest.raises(UserError, match="FedAvg averages weights, so all clients need one architecture, not a, b"):
        FedAvg(PLAIN).init_server({"a": {}, "b": {}}, ("x", "y"), NO_IDS)


def test_participants_are_a_fair_and_repeatable_choice() -> None:
    task = make_task((2,) * 8)
    fed, watch = federation("fedavg", task, rounds=40, participation=0.5)
    run(fed)
    rounds = [list(downs) for downs in watch.downs]
    assert all(len(names) == 4 and names == sorted(names) for names in rounds)  # client order
    counts = [sum(name in names for names in rounds) for name in "abcdefgh"]
    assert min(counts) >= 10
    assert len({tuple(names) for names in rounds}) > 20
    other, again = federation("fedavg", task, rounds=40, participation=0.5)
    run(other, 5)
    assert [list(downs) for downs in again.downs] == rounds[:5]
    lone, watched = federation("fedavg", task, participation=0.01)
    run(lone, 2)
    assert [len(downs) for downs in watched.downs] == [1, 1]  # never nobody


def test_absent_clients_keep_their_private_memory() -> None:
    fed, watch = federation("fedbn", make_task((4,) * 4), participation=0.5, rounds=6)
    state = fed.start()
    for _ in range(6):
        before = state
        state, _ = fed.step(state)
        present = set(watch.downs[-1])
        assert set(state.locals) == set(before.locals) | present
        for name in set(before.locals) - present:
            assert equal_trees(state.locals[name], before.locals[name])
        for name in set(before.locals) & present:
            assert not equal_trees(state.locals[name], before.locals[name])


# --- unseen clients ----------------------------------------------------------------------------------------------------


def test_unseen_clients_start_from_the_global_model_and_the_mean_of_what_is_given_away() -> None:
    task = make_task((5, 9, 12), unseen=2)
    for name, private in (("fedavg", set()), ("scaffold", set()), ("ditto", set()), ("fedbn", NORM), ("fedper", HEAD)):
        fed, _ = federation(name, task)
        state, _ = run(fed)
        deployment = fed.deploy(state)
        models = fed.unseen(deployment)
        assert set(models) == {"new0", "new1"}
        floats = 0
        for tree in models.values():
            shared = ENTRIES - private
            assert equal(pick(tree["model"], shared), pick(state.server["model"], shared))
            for entry in private:
                own = torch.stack([state.locals[c]["model"][entry].double() for c in "abc"])
                expected = own.amax(0) if entry.endswith("tracked") else own.mean(0)
                assert torch.allclose(tree["model"][entry].double(), expected, rtol=1e-6)
            floats = sum(tree["model"][entry].numel() for entry in private if not entry.endswith("tracked"))
        assert deployment.given_bytes == 3 * 8 * floats


def test_the_mean_of_what_is_given_away_is_as_precise_as_the_run() -> None:
    fed, _ = federation("fedper", make_task((5, 9, 12), unseen=1))
    state, _ = run(fed)
    models = fed.unseen(fed.deploy(state))
    for entry in HEAD:
        expected = torch.stack([state.locals[c]["model"][entry] for c in "abc"]).mean(0)
        assert torch.allclose(models["new0"]["model"][entry], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["local", "lg-fedavg"])
def test_methods_that_offer_nothing_serve_no_unseen_clients(name: str) -> None:
    """The alternative is a score of weights that nobody trained."""
    fed, _ = federation(name, make_task((5, 9, 12), unseen=1))
    state, _ = run(fed)
    assert fed.unseen(fed.deploy(state)) == {}


# --- clients that come to nothing -------------------------------------------------------------------------------------

ROTTEN = 9  # samples of the client that fails


def rotten(base: type[Method], how: str, everybody: bool = False, rounds: tuple[int, ...] = (1,)) -> type[Method]:
    """A method one of whose clients (or all) fails in some rounds."""

    def fails(state: Tree) -> Tensor:
        now = state["now"]
        when = torch.stack([now["round"] == number for number in rounds]).any()
        return when & (torch.tensor(everybody) | (now["samples"] == ROTTEN))

    class Rotten(base):  # type: ignore[valid-type,misc]
        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            value, buffers = super().loss(state, tensors, batch, phase)
            if how == "loss becomes NaN":  # and with it every gradient
                return value * torch.where(fails(state), torch.nan, 1.0), buffers
            bad = {"loss is NaN": torch.nan, "loss is infinite": torch.inf}.get(how)
            return (value if bad is None else torch.where(fails(state), bad, value)), buffers

        def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
            up, kept = super().finish(state, down, local)
            tree, slot = (up, "model") if how == "update is infinite" else (kept, next(iter(kept), ""))
            if how in ("update is infinite", "memory is NaN") and slot and bool(fails(state)):
                name = next(n for n, leaf in tree[slot].items() if leaf.is_floating_point())
                tree[slot] = {**tree[slot], name: tree[slot][name] + (torch.inf if tree is up else torch.nan)}
            return up, kept

    return Rotten


def failures() -> Iterator[tuple[type[Method], str]]:
    for base in (FedAvg, FedBN, Scaffold, Ditto, Local):
        for how in ("loss becomes NaN", "loss is NaN", "loss is infinite", "update is infinite", "memory is NaN"):
            if not (base is FedAvg and how == "memory is NaN") and not (base is Local and how == "update is infinite"):
                yield base, how


@pytest.mark.parametrize(("base", "how"), list(failures()))
def test_a_client_that_is_not_finite_is_named_and_left_out(base: type[Method], how: str) -> None:
    fed, watch = federation(rotten(base, how), SIZED)
    first, report = fed.step(fed.start())
    assert report.diverged == ()
    second, report = fed.step(first)
    assert report.diverged == ("b",)
    assert report.participants == 3
    assert torch.isfinite(torch.tensor(report.loss))
    # its memory stays, the others' goes on
    assert all(equal_trees(second.locals[c], first.locals[c]) == (c == "b") for c in first.locals)
    # the server hears the others only
    sound = {name: reply.up for name, reply in watch.replies[1].items() if name != "b"}
    expected, _ = fed.setup.method.aggregate(first.server, sound, server_context([5.0, 12.0], fed.context(first.round)))
    assert equal_trees(second.server, expected)
    assert base is Local or not equal_trees(second.server, first.server)
    third, report = fed.step(second)  # it is well again
    assert report.diverged == ()
    assert all(
        bool(leaf.isfinite().all()) for tree in third.trees().values() for s in tree.values() for leaf in s.values()
    )


@pytest.mark.parametrize("base", [FedAvg, FedBN, Scaffold, Ditto, Local])
def test_when_nobody_is_finite_nothing_changes(base: type[Method]) -> None:
    fed, _ = federation(rotten(base, "loss becomes NaN", everybody=True), SIZED)
    first, _ = fed.step(fed.start())
    second, report = fed.step(first)
    assert report.diverged == ("a", "b", "c")
    assert second.round == 2
    assert equal_trees(second.server, first.server)
    assert all(equal_trees(second.locals[c], first.locals[c]) for c in first.locals)
    assert second.locals.keys() == first.locals.keys()
    assert report.loss != report.loss  # NaN: there is none


def test_a_client_that_fails_at_once_starts_anew() -> None:
    fed, _ = federation(rotten(FedBN, "loss becomes NaN", rounds=(0,)), SIZED)
    first, report = fed.step(fed.start())
    assert report.diverged == ("b",)
    assert set(first.locals) == {"a", "c"}
    second, report = fed.step(first)
    assert report.diverged == ()
    assert set(second.locals) == {"a", "b", "c"}


def test_scaffolds_controls_still_average_to_the_servers_without_a_failed_client() -> None:
    fed, _ = federation(rotten(Scaffold, "loss becomes NaN"), SIZED)
    state, _ = run(fed)
    for name, control in state.server["c"].items():
        mean = sum((tree["ci"][name] for tree in state.locals.values()), torch.tensor(0.0)) / 3
        assert torch.allclose(mean, control, rtol=0, atol=1e-12)


def test_a_client_whose_last_phases_fail_serves_with_what_it_had() -> None:
    class Failing(FedAvg):
        def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(name="final"),)

        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            value, buffers = super().loss(state, tensors, batch, phase)
            bad = (state["now"]["samples"] == ROTTEN) & torch.tensor(phase.name == "final")
            return value * torch.where(bad, torch.nan, 1.0), buffers

    fed, _ = federation(Failing, SIZED)
    state, _ = run(fed)
    deployed = fed.deploy(state).trained()
    assert equal(deployed["b"]["model"], state.server["model"])
    assert far(deployed["a"]["model"], state.server["model"]) > 1e-4


def test_a_client_that_fails_after_local_training_serves_with_what_it_had() -> None:
    fed, _ = federation(rotten(FedBN, "loss becomes NaN"), SIZED)
    state, _ = run(fed, 1)
    trees = fed.after_local(state)
    assert far(trees["a"]["model"], fed.deploy(state).trained()["a"]["model"]) > 1e-4
    assert equal(trees["b"]["model"], fed.deploy(state).trained()["b"]["model"])


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 0}, "batch-size must be at least 1, not 0"),
        ({"local_epochs": -1}, "local-epochs must not be negative, not -1"),
        ({"local_steps": -1}, "local-steps must not be negative, not -1"),
        ({"optimiser": "rmsprop"}, "optimiser must be one of sgd, adam, not 'rmsprop'"),
        ({"lr_decay": 0.0}, r"lr-decay must lie in \(0, 1\], not 0"),
        ({"lr_decay": 1.5}, r"lr-decay must lie in \(0, 1\], not 1.5"),
        ({"clip": 0.0}, "clip must be positive, not 0"),
        ({"lr": -1.0}, "lr must not be negative, not -1"),
        ({"momentum": -1.0}, "momentum must not be negative"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        Train(**settings)


def test_the_optimiser_of_the_settings() -> None:
    assert Train(lr=0.3, momentum=0.9, weight_decay=0.1).optim() == SGD(0.3, 0.9, 0.1)
    assert Train(lr=0.3, optimiser="adam", weight_decay=0.1).optim() == Adam(lr=0.3, weight_decay=0.1)
    assert Train(lr=0.3, momentum=0.9).optim(0.7) == SGD(0.7, 0.9)


@pytest.mark.parametrize("name", some_of(METHODS))
def test_a_rate_of_zero_is_not_a_failure(name: str) -> None:
    # from the released start a model is a product, which clients and server round differently
    exact: dict[str, Any] = {"start": "network"} if name == "odpfl-hn" else {}
    network = PLAIN if name != "fedbn" else AWKWARD
    fed, _ = federation(name, make_task((8, 8)), replace(TRAIN, lr=0.0), network, **exact)
    state, reports = run(fed, 2)
    assert all(report.diverged == () for report in reports)
    parameters = set(fed.setup.method.arch.parameters)
    assert equal(pick(state.server["model"], parameters), pick(fed.start().server["model"], parameters))


def test_info_reaches_a_client_when_it_starts() -> None:
    told: dict[str, ClientInfo] = {}

    class Curious(FedAvg):
        def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
            told[info.client] = info
            return {"note": {"samples": torch.tensor(info.samples)}}

        def begin(self, down: Tree, local: Tree) -> Tree:
            return {**super().begin(down, local), **local}

    fed, _ = federation(Curious, make_task((5, 9), unseen=1))
    state, _ = run(fed, 2)
    fed.unseen(fed.deploy(state))
    assert [(info.client, info.unseen, info.samples) for info in told.values()] == [
        ("a", False, 5),
        ("b", False, 9),
        ("new0", True, 0),
    ]
    assert [int(info.histogram.sum()) for info in told.values()] == [5, 9, 0]
    assert len({info.seed for info in told.values()}) == 3
    assert {name: int(tree["note"]["samples"]) for name, tree in state.locals.items()} == {"a": 5, "b": 9}
