"""FedTHE's training: who trains what on which extractor, what the descriptors are, what travels, and what it is good for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core.arch import Arch
from fedshift.core.context import Context, Phase
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, drop, pick
from fedshift.data import sources
from fedshift.data.partition import Dirichlet
from fedshift.data.streams import Original, OutOfClient
from fedshift.data.task import Client, Splitting, Task, build
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, MethodSpec
from fedshift.models.cnn import CNN
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.state import State
from fedshift.store.trees import load, save
from fedshift.systems.fedthe.method import FedTHE
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    HEAD,
    PLAIN,
    TRAIN,
    Awkward,
    copied,
    equal,
    equal_trees,
    far,
    federation,
    make_task,
    ran,
    run,
    watching,
)

ARCHS = {"awkward": AWKWARD, "plain": PLAIN}
SIZED = make_task((5, 9, 12), unseen=2)
NETWORK = set(AWKWARD.parameters) | set(AWKWARD.buffers)


def features(arch: Arch, tensors: Tensors, client: Client, task: Task = SIZED) -> Tensor:
    """All of a client's training images through an extractor, in inference mode."""
    with torch.no_grad():
        return arch.encode(tensors, task.images[client.train].double() / 255)[0]


def of_client(steps: list[tuple[Tree, Batch, Phase]], client: Client) -> list[tuple[Tree, Batch, Phase]]:
    return [step for step in steps if int(step[0]["now"]["samples"]) == len(client.train)]


# ---- gradient flow ------------------------------------------------------------------------------------------------------
def test_what_each_phase_may_touch() -> None:
    generic, personal, descriptor = FedTHE(arch=AWKWARD, train=TRAIN).phases(Context(0, 3, 2))
    method = FedTHE(arch=AWKWARD, train=TRAIN)
    assert (generic.slot, method.trainable(generic)) == ("model", AWKWARD.trainable)
    assert (personal.slot, method.trainable(personal)) == ("personal", AWKWARD.head)
    assert descriptor.kind == "fold"
    assert method.last_phases(Context(3, 3, 2, "final")) == (personal, descriptor)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_generic_training_moves_the_model_and_personal_training_the_private_head_alone(
    arch: str, balanced: bool
) -> None:
    watched, steps = watching(FedTHE)
    fed, watch = federation(watched, SIZED, arch=ARCHS[arch], balanced=balanced, personal_epochs=2)
    state = fed.start()
    for number in range(2):
        steps.clear()
        state, _ = fed.step(state)
        for client in SIZED.clients:
            received = watch.downs[number][client.name]["model"]
            own = of_client(steps, client)
            generic = [step for step in own if step[2].slot == "model"]
            personal = [step for step in own if step[2].slot == "personal"]
            assert [phase.name for _, _, phase in own] == ["generic"] * len(generic) + ["personal"] * len(personal)
            for before, _, _ in generic:  # the private head waits
                assert equal(before["personal"], generic[0][0]["personal"])
            shared = watch.replies[number][client.name].up["model"]
            for before, batch, _ in personal:
                assert equal(before["model"], shared)  # the shared model is ready and stands still
                assert equal(drop(before["personal"], HEAD), drop(received, HEAD))  # bitwise the received extractor
                with torch.no_grad():
                    x = SIZED.images[batch["index"]].double() / 255
                    assert float((ARCHS[arch].encode(received, x)[0] - batch["x"]).abs().max()) < 1e-12
            kept = watch.replies[number][client.name].local["personal"]
            assert set(kept) == HEAD
            assert all(float((kept[name] - personal[0][0]["personal"][name]).abs().max()) > 1e-6 for name in HEAD)
            moved = {name for name in received if not torch.equal(received[name], shared[name])}
            assert set(ARCHS[arch].parameters) <= moved


def test_the_losses_have_gradients_where_the_table_says() -> None:
    """Generic: extractor and W_g. Personal: W_l only, for its input is a feature and not an image."""
    watched, steps = watching(FedTHE)
    fed, _ = federation(watched, SIZED)
    fed.step(fed.start())
    method = fed.setup.method
    assert [steps[0][2].name, steps[-1][2].name] == ["generic", "personal"]
    for state, batch, phase in (steps[0], steps[-1]):
        live = pick(state[phase.slot], AWKWARD.parameters)
        buffers = drop(state[phase.slot], AWKWARD.parameters)

        def loss(
            t: Tensors, state: Tree = state, batch: Batch = batch, phase: Phase = phase, buffers: Tensors = buffers
        ) -> tuple[Tensor, Tensors]:
            return method.loss(state, {**buffers, **t}, batch, phase)

        grads, _, _ = gradient(loss, live)
        touched = {name for name, grad in grads.items() if float(grad.abs().max()) > 0}
        assert touched == (set(AWKWARD.parameters) if phase.name == "generic" else HEAD)


def test_both_phases_against_torch() -> None:
    """Extractor and W_g by balanced softmax with torch's SGD, W_l by cross-entropy on features of the received model."""
    watched, steps = watching(FedTHE)
    fed, watch = federation(watched, SIZED, personal_epochs=2, personal_lr=0.3)
    start = fed.start()
    fed.step(start)
    for client in SIZED.clients:
        own = of_client(steps, client)
        module = Awkward().double()
        module.load_state_dict({name: leaf.clone() for name, leaf in start.server["model"].items()})
        optimiser = torch.optim.SGD(module.train().parameters(), TRAIN.lr)
        counts = SIZED.histogram(client).double()
        for _, batch, phase in own:
            if phase.slot == "model":
                scores = (counts + 1) * module((batch["x"] - 0.5) / 0.5).exp()  # balanced softmax, written out
                chosen = scores[torch.arange(len(scores)), batch["y"]] / scores.sum(1)
                optimiser.zero_grad()
                (-chosen.log().mean()).backward()
                optimiser.step()
        assert far(watch.replies[0][client.name].up["model"], dict(module.state_dict())) < 1e-12
        head = nn.Linear(12, CLASSES).double()
        head.load_state_dict({name.removeprefix("out."): start.server["model"][name].clone() for name in HEAD})
        optimiser = torch.optim.SGD(head.parameters(), 0.3)
        inputs = dict(zip(client.train.tolist(), features(AWKWARD, start.server["model"], client), strict=True))
        seen = []
        for _, batch, phase in own:
            if phase.slot == "personal":
                seen += batch["index"].tolist()
                x = torch.stack([inputs[i] for i in batch["index"].tolist()])
                optimiser.zero_grad()
                F.cross_entropy(head(x), batch["y"]).backward()
                optimiser.step()
        expected = {f"out.{name}": leaf.detach() for name, leaf in head.state_dict().items()}
        assert far(watch.replies[0][client.name].local["personal"], expected) < 1e-12
        assert sorted(seen) == sorted(client.train.tolist() * 2)


def test_generic_training_does_not_reach_the_private_head_of_the_same_round() -> None:
    """It sits on what was received: other rates, losses and lengths of generic training change nothing in round one."""
    heads = []
    for train, balanced in (
        (TRAIN, True),
        (TRAIN, False),
        (replace(TRAIN, lr=0.5), True),
        (replace(TRAIN, local_epochs=4), True),
    ):
        fed, watch = federation("fedthe", SIZED, train=train, balanced=balanced, personal_lr=0.1)
        state, _ = fed.step(fed.start())
        heads.append(watch.replies[0])
        _, _ = fed.step(state)
        heads[-1] = {**heads[-1], "second": watch.replies[1]["a"]}
    for other in heads[1:]:
        for name in "abc":
            assert equal_trees(heads[0][name].local, other[name].local)
            assert far(heads[0][name].up["model"], other[name].up["model"]) > 1e-4
        assert far(heads[0]["second"].local["personal"], other["second"].local["personal"]) > 1e-6  # later it does


def test_the_private_head_is_kept_from_round_to_round() -> None:
    watched, steps = watching(FedTHE)
    fed, watch = federation(watched, SIZED)
    state, _ = fed.step(fed.start())
    steps.clear()
    fed.step(state)
    for client in SIZED.clients:
        first = next(step for step in of_client(steps, client) if step[2].slot == "personal")
        assert equal(pick(first[0]["personal"], HEAD), watch.replies[0][client.name].local["personal"])
    still, watch = federation("fedthe", SIZED, personal_epochs=0)
    start = still.start()
    still.step(start)
    assert equal(watch.replies[0]["b"].local["personal"], pick(start.server["model"], HEAD))


# ---- limits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "train", [TRAIN, replace(TRAIN, momentum=0.9, weight_decay=0.1, lr_decay=0.7, weights="uniform")]
)
@pytest.mark.parametrize("arch", ARCHS)
def test_without_balance_the_shared_model_is_fedavgs(arch: str, train: Train) -> None:
    ours, theirs = (
        ran(name, SIZED, train=train, arch=ARCHS[arch], **options)
        for name, options in (("fedthe", {"balanced": False}), ("fedavg", {}))
    )
    assert equal(ours.server["model"], theirs.server["model"])
    assert far(ran("fedthe", SIZED, train=train, arch=ARCHS[arch]).server["model"], theirs.server["model"]) > 1e-4


def test_where_classes_are_equally_many_balance_changes_nothing() -> None:
    task = make_task((6, 9, 12))
    level = replace(task, labels=torch.arange(len(task.labels)) % CLASSES)
    assert len(set(level.histogram(level.clients[0]).tolist())) == 1
    balanced, plain = (ran("fedthe", level, balanced=balanced) for balanced in (True, False))
    assert far(balanced.server["model"], plain.server["model"]) < 1e-12
    for name in "abc":
        assert far(balanced.locals[name]["personal"], plain.locals[name]["personal"]) < 1e-12


# ---- descriptors --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", [{}, {"local_steps": 2}, {"last_batch": "wrap"}, {"augment": "shift-flip"}])
@pytest.mark.parametrize("arch", ARCHS)
def test_descriptors_are_mean_features_of_the_received_extractor_and_their_uniform_mean(
    arch: str, recipe: dict[str, Any]
) -> None:
    # sizes 5, 9, 12: a mean by size would be another one
    fed, watch = federation("fedthe", SIZED, arch=ARCHS[arch], train=replace(TRAIN, **recipe))
    state = fed.start()
    size = ARCHS[arch].feature_size
    assert torch.equal(state.server["descriptor"]["global"], torch.ones(size, dtype=torch.float64))
    for number in range(3):
        received = state.server
        state, _ = fed.step(state)
        expected = {c.name: features(ARCHS[arch], received["model"], c).mean(0) for c in SIZED.clients}
        for client in SIZED.clients:
            down, reply = watch.downs[number][client.name], watch.replies[number][client.name]
            assert torch.equal(down["descriptor"]["global"], received["descriptor"]["global"])
            assert float((reply.up["descriptor"]["local"] - expected[client.name]).abs().max()) < 1e-12
            assert torch.equal(reply.local["descriptor"]["local"], reply.up["descriptor"]["local"])
        mean = torch.stack(list(expected.values())).mean(0)
        assert float((state.server["descriptor"]["global"] - mean).abs().max()) < 1e-12


@pytest.mark.parametrize("sync", [True, False])
def test_which_versions_of_the_descriptors_are_deployed(sync: bool) -> None:
    """Synchronised: both are of the final extractor. Lagged, as in the authors' code: h_g is one extractor older."""
    fed, _ = federation("fedthe", SIZED, sync_descriptors=sync, personal_lr=0.2)
    before, _ = run(fed, 2)
    after, _ = fed.step(before)
    deployed = fed.deploy(after).trained()
    final = {c.name: features(AWKWARD, after.server["model"], c).mean(0) for c in SIZED.clients}
    older = {c.name: features(AWKWARD, before.server["model"], c).mean(0) for c in SIZED.clients}
    common = torch.stack(list((final if sync else older).values())).mean(0)
    for client in SIZED.clients:
        tree = deployed[client.name]
        assert set(tree) == {"model", "generic", "descriptors"} == set(FedTHE.provides)
        assert float((tree["descriptors"]["local"] - final[client.name]).abs().max()) < 1e-12
        assert float((tree["descriptors"]["global"] - common).abs().max()) < 1e-12
        assert equal(drop(tree["model"], HEAD), drop(after.server["model"], HEAD))
        assert equal(tree["generic"], pick(after.server["model"], HEAD))
        assert far(pick(tree["model"], HEAD), after.locals[client.name]["personal"]) > 1e-6
    other = federation("fedthe", SIZED, sync_descriptors=not sync, personal_lr=0.2)[0].deploy(after).trained()
    assert float((other["a"]["descriptors"]["global"] - deployed["a"]["descriptors"]["global"]).abs().max()) > 1e-6
    assert equal(other["a"]["model"], deployed["a"]["model"])


def test_the_last_private_head_is_trained_on_the_final_extractor() -> None:
    watched, steps = watching(FedTHE)
    fed, _ = federation(watched, SIZED)
    state, _ = run(fed, 1)
    steps.clear()
    deployed = fed.deploy(state).trained()
    assert {phase.name for _, _, phase in steps} == {"personal"}
    for client in SIZED.clients:
        inputs = dict(zip(client.train.tolist(), features(AWKWARD, state.server["model"], client), strict=True))
        head = nn.Linear(12, CLASSES).double()
        head.load_state_dict({n.removeprefix("out."): state.locals[client.name]["personal"][n].clone() for n in HEAD})
        optimiser = torch.optim.SGD(head.parameters(), TRAIN.lr)
        for _, batch, _ in of_client(steps, client):
            optimiser.zero_grad()
            F.cross_entropy(head(torch.stack([inputs[i] for i in batch["index"].tolist()])), batch["y"]).backward()
            optimiser.step()
        expected = {f"out.{name}": leaf.detach() for name, leaf in head.state_dict().items()}
        assert far(pick(deployed[client.name]["model"], HEAD), expected) < 1e-12


def test_a_client_that_never_trained_takes_part_at_the_end_and_gives_nothing() -> None:
    fed, _ = federation("fedthe", SIZED, participation=0.34, rounds=1)
    state, _ = run(fed)
    assert len(state.locals) == 1
    deployed = fed.deploy(state).trained()
    (trained,) = state.locals
    own = {c.name: features(AWKWARD, state.server["model"], c).mean(0) for c in SIZED.clients}
    for name, tree in deployed.items():
        assert float((tree["descriptors"]["local"] - own[name]).abs().max()) < 1e-12
        assert float((tree["descriptors"]["global"] - own[trained]).abs().max()) < 1e-12
        assert far(pick(tree["model"], HEAD), tree["generic"]) > 1e-6


# ---- what travels -------------------------------------------------------------------------------------------------------
def test_model_and_one_descriptor_travel_in_both_directions_and_nothing_else() -> None:
    fed, watch = federation("fedthe", SIZED)
    start = fed.start()
    state, report = fed.step(start)
    floats = sum(leaf.numel() for leaf in start.server["model"].values() if leaf.is_floating_point())
    bytes_each = 8 * (floats + AWKWARD.feature_size)  # P + d
    assert (report.bytes_down, report.bytes_up) == (3 * bytes_each, 3 * bytes_each)
    for name in "abc":
        down, reply = watch.downs[0][name], watch.replies[0][name]
        assert {slot: set(leaves) for slot, leaves in down.items()} == {"model": NETWORK, "descriptor": {"global"}}
        assert {slot: set(leaves) for slot, leaves in reply.up.items()} == {"model": NETWORK, "descriptor": {"local"}}
        assert {slot: set(leaves) for slot, leaves in reply.local.items()} == {
            "personal": HEAD,
            "descriptor": {"local"},
        }
        assert equal(down["model"], start.server["model"])
    assert set(state.server) == {"model", "descriptor"}


@pytest.mark.parametrize("sync", [True, False])
def test_unseen_clients_have_the_global_head_twice_and_every_weight_gives_its_prediction(sync: bool) -> None:
    fed, _ = federation("fedthe", SIZED, sync_descriptors=sync)
    state, _ = run(fed)
    deployment = fed.deploy(state)
    unseen = fed.unseen(deployment)
    assert deployment.given_bytes == (3 * AWKWARD.feature_size * 8 if sync else 0)
    assert set(unseen) == {"new0", "new1"}
    common = next(iter(fed.deploy(state).trained().values()))["descriptors"]["global"]
    for client in SIZED.unseen:
        tree = unseen[client.name]
        assert equal(tree["model"], state.server["model"])
        assert equal(tree["generic"], pick(state.server["model"], HEAD))
        assert torch.equal(tree["descriptors"]["local"], tree["descriptors"]["global"])
        assert torch.equal(tree["descriptors"]["global"], common)
        x = SIZED.images[client.test].double() / 255
        expected = AWKWARD(state.server["model"], x).logits
        for weight in (None, 0.0, 0.3, 1.0):
            the = fed.setup.adapter(
                AdapterSpec(name="the", **({} if weight is None else {"e": weight})), fed.setup.method
            )
            output, _ = the.predict(the.init(tree), x, {})
            assert torch.equal(output.logits, expected)
            assert torch.equal(output.aux["e"], torch.full_like(output.aux["e"], 0.5 if weight is None else weight))
    scores = fed.evaluate(
        {AWKWARD.name: fed.setup.adapter(AdapterSpec(name="the"), fed.setup.method)}, unseen, ["test"]
    )
    assert all(score.telemetry["e"].mean == 0.5 for score in scores.values())


# ---- states -------------------------------------------------------------------------------------------------------------
def test_deployed_is_a_pure_function_of_the_state(tmp_path: Path) -> None:
    """Best-on-validation asks for it in the middle of a run, a resumed run after a checkpoint."""
    fed, _ = federation("fedthe", SIZED)
    state, _ = run(fed, 2)
    server, locals = copied(state.server), {name: copied(tree) for name, tree in state.locals.items()}
    first = fed.deploy(state).trained()
    fed.unseen(fed.deploy(state))
    assert equal_trees(state.server, server)
    assert all(equal_trees(state.locals[name], tree) for name, tree in locals.items())
    assert all(equal_trees(fed.deploy(state).trained()[name], tree) for name, tree in first.items())
    save(tmp_path / "state.safetensors", state.trees(), {})
    trees, _ = load(tmp_path / "state.safetensors")
    back = State.of(trees, 2, torch.device("cpu"))
    again, _ = federation("fedthe", SIZED)
    assert all(equal_trees(again.deploy(back).trained()[name], tree) for name, tree in first.items())
    undisturbed, _ = run(federation("fedthe", SIZED)[0])
    for end in (fed.step(state)[0], again.step(back)[0]):
        assert equal_trees(end.server, undisturbed.server)
        assert all(equal_trees(end.locals[name], tree) for name, tree in undisturbed.locals.items())


@pytest.mark.parametrize("options", [{"personal_epochs": -1}, {"personal_lr": -0.1}])
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="must not be negative"):
        FedTHE(arch=AWKWARD, train=TRAIN, **options)  # type: ignore[arg-type]


# ---- what it is for -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Trained:
    """A federation on real images, and what its clients serve with."""

    federation: Session
    method: Method
    deployed: dict[str, Tree]
    task: Task


@cache
def digits_task(size: int = 16) -> Task:
    """Handwriting on two kinds of paper, dealt to five clients as in the paper's Dir(0.1)."""
    pool = sources.load("embedded:digits", size=size).only(("pen", "paper"))
    streams = {"original": Original(), "out-of-client": OutOfClient()}
    return build(pool, Dirichlet(5, alpha=0.1), Splitting(), streams)


@cache
def trained(name: str = "fedthe", rounds: int = 50, norm: bool = False, hidden: int = 32) -> Trained:
    """A small CNN of the paper's shape (no bias), trained until the global model is of some use."""
    task = digits_task()
    cls = METHODS[name].make
    network = CNN(width=8, hidden=hidden, bias=False, norm=norm)
    arch = Arch.of(lambda: network.make(task.shape, 10), task.shape, "cnn")
    train = Train(lr=0.1, batch_size=16, local_epochs=1, weight_decay=5e-4, weights="uniform")
    method = cls(arch=cls.build(arch, {}), train=train)
    compute = Compute()
    fed = Session(
        Setup(MethodSpec(name=name), {"cnn": method}, train), task, Sequential(compute), compute, seed=0, rounds=rounds
    )
    return Trained(fed, method, fed.deploy(run(fed)[0]).trained(), task)


@pytest.mark.grid
def test_the_weight_goes_to_the_global_head_where_the_data_are_other_clients() -> None:
    """Mean e out of client exceeds mean e in distribution by more than 0.1, and that pays."""
    made = trained()
    accuracy: dict[tuple[float | None, str], float] = {}
    mean: dict[str, float] = {}
    for weight in (None, 0.0, 1.0):
        spec = AdapterSpec(name="the", **({} if weight is None else {"e": weight}))
        adapter = made.federation.setup.adapter(spec, made.method)
        scores = made.federation.evaluate({"cnn": adapter}, made.deployed, ["original", "out-of-client"])
        for part in ("original", "out-of-client"):
            own = [score for (_, stream), score in scores.items() if stream == part]
            samples = sum(score.samples for score in own)
            assert samples == sum(len(client.test) for client in made.task.clients) > 150
            accuracy[weight, part] = sum(score.correct for score in own) / samples
            if weight is None:
                mean[part] = sum(score.telemetry["e"].total for score in own) / samples
    assert mean["out-of-client"] > mean["original"] + 0.1, mean
    # the heads are as different as they should be, and the ensemble has something of both
    assert accuracy[0.0, "original"] > accuracy[1.0, "original"] + 0.05, accuracy
    assert accuracy[1.0, "out-of-client"] > accuracy[0.0, "out-of-client"] + 0.3, accuracy
    assert accuracy[None, "original"] > accuracy[1.0, "original"] + 0.05, accuracy
    assert accuracy[None, "out-of-client"] > accuracy[0.0, "out-of-client"] + 0.15, accuracy
