"""FedICON's two stages: who trains what on which images, what travels when, and that nothing else happens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Experiment
from fedshift import run as run_experiment
from fedshift.blocks.views import contrastive_views
from fedshift.core.arch import Arch
from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, drop, pick
from fedshift.data.task import Client, Task
from fedshift.engines.base import Engine
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, MethodSpec
from fedshift.runs.round import RoundReport
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.folder import RunFolder
from fedshift.store.state import State
from fedshift.store.trees import load, save
from fedshift.systems.fedicon import projection
from fedshift.systems.fedicon.method import FedICON
from tests.conftest import ragged_task, tiny_arch, tiny_train
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    HEAD,
    PLAIN,
    TRAIN,
    Awkward,
    Plain,
    Watch,
    copied,
    equal,
    equal_trees,
    far,
    federation,
    make_task,
    module_of,
    run,
    watching,
)
from tests.test_resume import check_identical, contents

ARCHS: dict[str, tuple[Arch, type[nn.Module]]] = {"awkward": (AWKWARD, Awkward), "plain": (PLAIN, Plain)}
SIZED = make_task((5, 9, 12), unseen=2)
ENCODER = (set(AWKWARD.parameters) | set(AWKWARD.buffers)) - HEAD
ROUNDS, HEADS = 2, 3
SHORT: dict[str, Any] = {"head_rounds": HEADS, "head_epochs": 2, "personal_epochs": 2}


def fedicon(
    task: Task = SIZED, arch: Arch = AWKWARD, method: Any = "fedicon", rounds: int = ROUNDS, **how: Any
) -> tuple[Session, Watch]:
    """A federation with short stages."""
    return federation(method, task, arch=arch, rounds=rounds, **{**SHORT, **how})


def whole(fed: Session) -> tuple[State, list[RoundReport]]:
    """Both stages."""
    return run(fed, fed.rounds + fed.setup.method.extra_rounds)


def images(client: Client, task: Task = SIZED) -> Tensor:
    return task.images[client.train].double() / 255


def mean_feature(arch: Arch, tensors: Tensors, client: Client, task: Task = SIZED) -> Tensor:
    with torch.no_grad():
        return arch.encode(tensors, images(client, task))[0].mean(0)


def of_client(steps: list[tuple[Tree, Batch, Phase]], client: Client) -> list[tuple[Tree, Batch, Phase]]:
    return [step for step in steps if int(step[0]["now"]["samples"]) == len(client.train)]


def floats(tensors: Mapping[str, Tensor], names: set[str] | frozenset[str] | None = None) -> int:
    """How many numbers travel if these entries do."""
    chosen = pick(tensors, tensors if names is None else names)
    return sum(leaf.numel() for leaf in chosen.values() if leaf.is_floating_point())


# ---- gradient flow ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_what_each_phase_may_touch(name: str) -> None:
    arch = ARCHS[name][0]
    method = FedICON(arch=arch, train=TRAIN, **SHORT)
    for number in range(ROUNDS):
        (contrast,) = method.phases(Context(number, ROUNDS, 3))
        assert (contrast.name, contrast.slot, contrast.inputs) == ("contrastive", "model", "x")
        assert method.trainable(contrast) == frozenset(arch.parameters) - arch.head
    for number in range(ROUNDS, ROUNDS + HEADS):
        head, descriptor = method.phases(Context(number, ROUNDS, 3))
        assert (head.name, head.inputs, head.batch_stats, head.epochs) == ("head", "features", False, 2)
        assert method.trainable(head) == arch.head
        assert descriptor.kind == "fold"
    personal, descriptor = method.last_phases(Context(ROUNDS + HEADS, ROUNDS, 3, "final"))
    assert (method.trainable(personal), personal.inputs, personal.batch_stats) == (arch.head, "features", False)
    assert descriptor.kind == "fold"
    assert method.extra_rounds == HEADS
    assert FedICON(arch=arch, train=TRAIN, share=False).extra_rounds == 0
    assert METHODS["fedavg"].make(arch=arch, train=TRAIN).extra_rounds == 0


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("name", ARCHS)
def test_contrast_moves_the_encoder_alone_and_the_head_stage_the_head_alone(name: str, supervised: bool) -> None:
    arch = ARCHS[name][0]
    fed, watch = fedicon(arch=arch, supervised=supervised)
    state = fed.start()
    for number in range(ROUNDS + HEADS):
        before = state.server["model"]
        state, _ = fed.step(state)
        after = state.server["model"]
        assert after.keys() == before.keys()
        still, moving = (arch.head, arch.encoder) if number < ROUNDS else (arch.encoder, arch.head)
        assert equal(pick(after, still), pick(before, still))  # bitwise
        trained = moving & set(arch.parameters)
        for client in SIZED.clients:
            up = watch.replies[number][client.name].up["model"]
            assert set(up) == moving
            assert {entry for entry in trained if torch.equal(up[entry], before[entry])} == set()


@pytest.mark.parametrize("supervised", [True, False])
def test_the_losses_have_gradients_where_the_table_says(supervised: bool) -> None:
    """Contrast: the encoder only. Head: the head only, for its input is a feature and not an image."""
    watched, steps = watching(FedICON)
    fed, _ = fedicon(method=watched, supervised=supervised)
    state, _ = whole(fed)
    fed.deploy(state)
    method = fed.setup.method
    assert {phase.name for _, _, phase in steps} == {"contrastive", "head", "personal"}
    for kind in ("contrastive", "head", "personal"):
        before, batch, phase = next(step for step in steps if step[2].name == kind)
        everything = {**state.server["model"], **before["model"]}

        def loss(
            t: Tensors,
            before: Tree = before,
            batch: Batch = batch,
            phase: Phase = phase,
            rest: Tensors = drop(everything, AWKWARD.parameters),  # noqa: B008
        ) -> tuple[Tensor, Tensors]:
            return method.loss(before, {**rest, **t}, batch, phase)

        grads, _, _ = gradient(loss, pick(everything, AWKWARD.parameters))
        touched = {entry for entry, grad in grads.items() if float(grad.abs().max()) > 0}
        assert touched == (ENCODER & set(AWKWARD.parameters) if kind == "contrastive" else HEAD)


# ---- against torch ------------------------------------------------------------------------------------------------------
def one_by_one(z: Tensor, groups: list[int], temperature: float) -> Tensor:
    """SupCon anchor by anchor."""
    z = z / z.norm(dim=1, keepdim=True)
    losses = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        total = torch.stack([(z[i] @ z[a] / temperature).exp() for a in others]).sum()
        friends = [p for p in others if groups[p] == groups[i]]
        losses.append(-torch.stack([((z[i] @ z[p] / temperature).exp() / total).log() for p in friends]).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("name", ARCHS)
def test_a_contrastive_round_is_torchs(name: str, supervised: bool) -> None:
    arch, kind = ARCHS[name]
    watched, steps = watching(FedICON)
    fed, watch = fedicon(arch=arch, method=watched, supervised=supervised, temperature=0.3, flip=False)
    start = fed.start()
    fed.step(start)
    for client in SIZED.clients:
        module = module_of(start.server["model"], kind).train()
        module.out = nn.Identity()
        optimiser = torch.optim.SGD(module.parameters(), TRAIN.lr)
        seen = []
        for _, batch, _ in of_client(steps, client):
            seen += batch["index"].tolist()
            x = SIZED.images[batch["index"]].double() / 255
            views = [contrastive_views(x, batch["views"][:, i], flip=False) for i in range(2)]
            assert len(x) == 1 or float((views[0] - views[1]).abs().max()) > 1e-3
            groups = batch["y"].tolist() if supervised else list(range(len(x)))
            optimiser.zero_grad()
            one_by_one(module((torch.cat(views) - 0.5) / 0.5), groups * 2, 0.3).backward()
            optimiser.step()
        assert sorted(seen) == sorted(client.train.tolist())
        # BatchNorm's statistics too: both views are one batch
        assert far(watch.replies[0][client.name].up["model"], dict(module.state_dict())) < 1e-10


@pytest.mark.parametrize("name", ARCHS)
def test_heads_on_cached_features_are_heads_on_a_frozen_encoder_that_is_run_again(name: str) -> None:
    """The federated one in each round, from what was received, and the personal one from the last federated one."""
    arch, kind = ARCHS[name]
    watched, steps = watching(FedICON)
    fed, watch = fedicon(arch=arch, method=watched, head_lr=0.3, head_epochs=3)
    state, _ = run(fed, ROUNDS)

    def check(received: State, found: Mapping[str, Tensors], epochs: int) -> None:
        for client in SIZED.clients:
            module = module_of(received.server["model"], kind).eval()
            optimiser = torch.optim.SGD(module.out.parameters(), 0.3)
            seen = []
            for _, batch, _ in of_client(steps, client):
                seen += batch["index"].tolist()
                x = SIZED.images[batch["index"]].double() / 255
                optimiser.zero_grad()
                F.cross_entropy(module((x - 0.5) / 0.5), batch["y"]).backward()
                optimiser.step()
            assert sorted(seen) == sorted(client.train.tolist() * epochs)
            assert far(found[client.name], pick(dict(module.state_dict()), arch.head)) < 1e-12

    for _ in range(HEADS):
        steps.clear()
        received = state
        state, _ = fed.step(state)
        check(received, {n: reply.up["model"] for n, reply in watch.replies[-1].items()}, epochs=3)
    steps.clear()
    deployed = fed.deploy(state).trained()
    check(state, {n: pick(tree["model"], arch.head) for n, tree in deployed.items()}, epochs=2)


# ---- the server ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_the_server_takes_the_weighted_mean_of_what_went_up(weights: str) -> None:
    fed, watch = fedicon(train=replace(TRAIN, weights=weights))
    sizes = torch.tensor([5.0, 9.0, 12.0])
    share = fed.setup.method.weights(ServerContext(0, ROUNDS, 3, samples=sizes, seed=0))
    assert float(share.sum()) == pytest.approx(1, abs=1e-15)
    assert torch.allclose(share, sizes.double() / 26 if weights == "size" else torch.full((3,), 1 / 3).double())
    state = fed.start()
    for number in range(ROUNDS + HEADS):
        state, _ = fed.step(state)
        ups = [watch.replies[number][name].up for name in "abc"]
        for entry, leaf in ups[0]["model"].items():
            if leaf.is_floating_point():
                mean = sum(float(w) * up["model"][entry] for w, up in zip(share, ups, strict=True))
                assert float((state.server["model"][entry] - mean).abs().max()) < 1e-12
        if number >= ROUNDS:  # descriptors are all worth the same
            mean = sum(up["descriptor"]["local"] for up in ups) / 3
            assert float((state.server["descriptor"]["global"] - mean).abs().max()) < 1e-12


def test_equal_clients_give_their_common_value() -> None:
    """The paper's equation would shrink the encoder by the number of clients."""
    fed, watch = fedicon()
    state = fed.start()
    for number in range(ROUNDS + HEADS):
        before = state
        state, _ = fed.step(state)
        up = watch.replies[number]["b"].up
        ctx = ServerContext(number, ROUNDS, 3, samples=torch.tensor([5.0, 9.0, 12.0]), seed=0)
        merged, _ = fed.setup.method.aggregate(before.server, dict.fromkeys("abc", up), ctx)
        assert far(pick(merged["model"], up["model"]), up["model"]) < 1e-15
        untouched = drop(before.server["model"], up["model"])
        assert equal(pick(merged["model"], untouched), untouched)


# ---- what travels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_first_the_encoder_then_everything_once_then_the_head(name: str) -> None:
    arch = ARCHS[name][0]
    fed, watch = fedicon(arch=arch)
    state = fed.start()
    p_e, p_h = floats(state.server["model"], arch.encoder), floats(state.server["model"], arch.head)
    d, waiting = arch.feature_size, pick(state.server["model"], arch.head)
    for number in range(ROUNDS + HEADS):
        sent = state.server
        state, report = fed.step(state)
        contrast, first = number < ROUNDS, number == ROUNDS
        down_names = arch.encoder if contrast else arch.encoder | arch.head if first else arch.head
        for client in SIZED.clients:
            down, reply = watch.downs[number][client.name], watch.replies[number][client.name]
            assert equal(down["model"], pick(sent["model"], down_names))
            if contrast:
                assert set(reply.up) == {"model"}
                assert set(reply.up["model"]) == arch.encoder
                assert set(reply.local) == {"personal"}  # the head waits
                assert equal(reply.local["personal"], waiting)
            else:
                assert {slot: set(leaves) for slot, leaves in reply.up.items()} == {
                    "model": arch.head,
                    "descriptor": {"local"},
                }
                expected = mean_feature(arch, sent["model"], client)
                assert float((reply.up["descriptor"]["local"] - expected).abs().max()) < 1e-12
                assert equal(reply.local["encoder"], pick(sent["model"], arch.encoder))
        assert report.bytes_up == 3 * 8 * (p_e if contrast else p_h + d)
        down_floats = p_e if contrast else p_e + p_h + d if first else p_h + d
        assert report.bytes_down == 3 * 8 * down_floats, f"round {number}"


class Generous(FedICON):
    """Sends the encoder in every head round."""

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        down = super().broadcast(server, client, ctx)
        whole = server["model"] if ctx.ending or ctx.round >= ctx.rounds else down["model"]
        return {**down, "model": whole}


def test_a_client_that_comes_late_gets_the_encoder_then() -> None:
    task = make_task((5, 9, 12, 7, 8))
    fed, watch = fedicon(task, rounds=1, participation=0.4, head_rounds=6)
    state, _ = run(fed, 1)
    seen: set[str] = set()
    late: set[str] = set()
    for number in range(1, 7):
        sent = state.server["model"]
        state, report = fed.step(state)
        assert len(watch.downs[number]) == report.participants == 2
        for name, down in watch.downs[number].items():
            assert equal(down["model"], pick(sent, HEAD) if name in seen else sent)
            late |= {name} if name not in seen and number > 1 else set()
            seen.add(name)
        assert {name for name, local in state.locals.items() if "encoder" in local} == seen
    assert late, "the seed lets nobody come late"
    assert seen < set("abcde"), "and somebody never"
    deployed = fed.deploy(state).trained()
    assert set(deployed) == set("abcde")
    for name, tree in deployed.items():
        assert equal(pick(tree["model"], ENCODER), pick(state.server["model"], ENCODER)), name
        assert equal(tree["generic"], pick(state.server["model"], HEAD))
        assert far(pick(tree["model"], HEAD), tree["generic"]) > 1e-6
    # and all that is sent less often changes nothing
    other, _ = whole(fedicon(task, method=Generous, rounds=1, participation=0.4, head_rounds=6)[0])
    assert equal(other.server["model"], state.server["model"])
    assert equal(other.server["descriptor"], state.server["descriptor"])


def test_a_client_whose_head_failed_does_not_count_as_one_that_has_the_encoder() -> None:
    class Fails(FedICON):
        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            value, buffers = super().loss(state, tensors, batch, phase)
            bad = phase.name == "head" and int(state["now"]["samples"]) == 9 and int(state["now"]["round"]) == ROUNDS
            return (value * float("nan") if bad else value), buffers

    fed, watch = fedicon(method=Fails)
    state, reports = whole(fed)
    assert [report.diverged for report in reports] == [(), (), ("b",), (), ()]
    sent = [set(watch.downs[number]["b"]["model"]) for number in range(ROUNDS, ROUNDS + HEADS)]
    assert sent == [ENCODER | HEAD, ENCODER | HEAD, HEAD]
    assert set(watch.downs[ROUNDS + 1]["a"]["model"]) == HEAD
    assert equal(pick(fed.deploy(state).trained()["b"]["model"], ENCODER), pick(state.server["model"], ENCODER))


def test_the_head_of_the_start_is_what_the_head_stage_starts_from() -> None:
    fed, watch = fedicon()
    start = fed.start()
    run(fed, ROUNDS + 1)
    assert equal(pick(watch.downs[ROUNDS]["a"]["model"], HEAD), pick(start.server["model"], HEAD))


# ---- what is deployed ---------------------------------------------------------------------------------------------------
def test_clients_serve_with_a_personal_head_and_keep_the_federated_one_and_descriptors() -> None:
    fed, _ = fedicon()
    state, _ = whole(fed)
    own = {c.name: mean_feature(AWKWARD, state.server["model"], c) for c in SIZED.clients}
    common = torch.stack(list(own.values())).mean(0)
    deployed = fed.deploy(state).trained()
    for name, tree in deployed.items():
        assert set(tree) == {"model", "generic", "descriptors"} == set(FedICON.provides)
        assert set(tree["model"]) == ENCODER | HEAD
        assert equal(pick(tree["model"], ENCODER), pick(state.server["model"], ENCODER))
        assert equal(tree["generic"], pick(state.server["model"], HEAD))
        assert far(pick(tree["model"], HEAD), tree["generic"]) > 1e-6
        assert float((tree["descriptors"]["local"] - own[name]).abs().max()) < 1e-12
        assert float((tree["descriptors"]["global"] - common).abs().max()) < 1e-12
    still = fedicon(personal_epochs=0)[0].deploy(state).trained()
    assert all(equal(pick(tree["model"], HEAD), tree["generic"]) for tree in still.values())
    assert fed.deploy(state).given_bytes == 3 * 8 * AWKWARD.feature_size


def test_unseen_clients_have_the_encoder_and_the_federated_head() -> None:
    fed, _ = fedicon()
    state, _ = whole(fed)
    common = fed.deploy(state).trained()["a"]["descriptors"]["global"]
    unseen = fed.unseen(fed.deploy(state))
    assert set(unseen) == {"new0", "new1"}
    for tree in unseen.values():
        assert equal(tree["model"], state.server["model"])
        assert equal(tree["generic"], pick(state.server["model"], HEAD))
        assert torch.equal(tree["descriptors"]["local"], common)
        assert torch.equal(tree["descriptors"]["global"], common)
    scores = fed.evaluate(fed.setup.plain, unseen, ["test"])
    assert {name for name, _ in scores} == {"new0", "new1"}


@pytest.mark.parametrize("adapter", ["the", "the-plus", "t3a", "tent", "tsa", "none"])
def test_adapters_sit_on_it(adapter: str) -> None:
    fed, _ = fedicon()
    state, _ = whole(fed)
    made = {AWKWARD.name: fed.setup.adapter(AdapterSpec(name=adapter), fed.setup.method)}
    for trees in (fed.deploy(state).trained(), fed.unseen(fed.deploy(state))):
        scores = fed.evaluate(made, trees, ["test"])
        assert {name for name, _ in scores} == set(trees)
        assert all(score.samples > 0 and score.loss == score.loss for score in scores.values())


@pytest.mark.parametrize("number", range(ROUNDS + HEADS + 1))
def test_at_every_moment_clients_and_unseen_ones_have_a_whole_model(number: int) -> None:
    """Validation asks in the middle of a run; for an absent head the network's own would step in without a word."""
    fed, _ = fedicon()
    state, _ = run(fed, number)
    for trees in (fed.deploy(state).trained(), fed.unseen(fed.deploy(state))):
        assert all(set(tree["model"]) == ENCODER | HEAD for tree in trees.values())
        assert all(set(tree["generic"]) == HEAD for tree in trees.values())


@pytest.mark.parametrize("number", [0, ROUNDS - 1, ROUNDS, ROUNDS + HEADS])
def test_after_one_more_local_round_too(number: int) -> None:
    fed, _ = fedicon()
    state, _ = run(fed, number)
    for tree in fed.after_local(state).values():
        assert set(tree["model"]) == ENCODER | HEAD


def test_without_head_rounds_the_heads_are_personal_and_the_descriptors_those_of_the_encoder() -> None:
    fed, _ = fedicon(head_rounds=0)
    state, reports = whole(fed)
    assert len(reports) == ROUNDS
    own = {c.name: mean_feature(AWKWARD, state.server["model"], c) for c in SIZED.clients}
    common = torch.stack(list(own.values())).mean(0)
    for name, tree in fed.deploy(state).trained().items():
        assert far(pick(tree["model"], HEAD), pick(fed.start().server["model"], HEAD)) > 1e-6
        assert equal(pick(tree["model"], ENCODER), pick(state.server["model"], ENCODER))
        assert float((tree["descriptors"]["local"] - own[name]).abs().max()) < 1e-12
        assert float((tree["descriptors"]["global"] - common).abs().max()) < 1e-12


# ---- sharing nothing ----------------------------------------------------------------------------------------------------
def test_without_sharing_nothing_travels_and_unseen_clients_get_nothing() -> None:
    fed, watch = fedicon(share=False)
    start = fed.start()
    state, reports = whole(fed)
    assert len(reports) == ROUNDS
    assert equal(state.server["model"], start.server["model"])
    for number, report in enumerate(reports):
        assert (report.bytes_down, report.bytes_up) == (0, 0)
        for name in "abc":
            assert not any(watch.downs[number][name].values())
            assert not any(watch.replies[number][name].up.values())
    assert fed.unseen(fed.deploy(state)) == {}
    assert fed.deploy(state).given_bytes == 0


def test_without_sharing_every_client_has_its_own_encoder_then_its_own_head() -> None:
    watched, steps = watching(FedICON)
    fed, _ = fedicon(method=watched, share=False, head_lr=0.3)
    start = fed.start()
    state, _ = whole(fed)
    first = start.server["model"]
    for client in SIZED.clients:
        local = state.locals[client.name]["model"]
        assert equal(pick(local, HEAD), pick(first, HEAD))  # nobody has trained a head
        for entry in ENCODER & set(AWKWARD.parameters):
            assert not torch.equal(local[entry], first[entry])
    steps.clear()
    deployed = fed.deploy(state).trained()
    assert {phase.name for _, _, phase in steps} == {"personal"}
    for client in SIZED.clients:
        local, tree = state.locals[client.name]["model"], deployed[client.name]
        assert equal(pick(tree["model"], ENCODER), pick(local, ENCODER))
        module = module_of(local).eval()
        optimiser = torch.optim.SGD(module.out.parameters(), 0.3)
        for _, batch, _ in of_client(steps, client):
            optimiser.zero_grad()
            x = SIZED.images[batch["index"]].double() / 255
            F.cross_entropy(module((x - 0.5) / 0.5), batch["y"]).backward()
            optimiser.step()
        assert far(pick(tree["model"], HEAD), pick(dict(module.state_dict()), HEAD)) < 1e-12
        feature = mean_feature(AWKWARD, local, client)
        assert float((tree["descriptors"]["local"] - feature).abs().max()) < 1e-12
    alone, _ = whole(fedicon(make_task((5,)), share=False)[0])
    assert equal(alone.locals["a"]["model"], state.locals["a"]["model"])  # the others made no difference


# ---- labels -------------------------------------------------------------------------------------------------------------
def test_supervision_makes_a_difference() -> None:
    ends = [run(fedicon(supervised=supervised)[0], ROUNDS)[0] for supervised in (True, False)]
    assert far(pick(ends[0].server["model"], ENCODER), pick(ends[1].server["model"], ENCODER)) > 1e-4


def test_unsupervised_contrast_looks_at_no_label() -> None:
    other = replace(SIZED, labels=(SIZED.labels + torch.arange(len(SIZED.labels))) % CLASSES)
    assert not torch.equal(other.labels, SIZED.labels)
    for supervised in (False, True):
        (a, b), (c, d) = (
            (run(fedicon(task, supervised=supervised)[0], ROUNDS)[0], whole(fedicon(task, supervised=supervised)[0])[0])
            for task in (SIZED, other)
        )
        assert equal(a.server["model"], c.server["model"]) is not supervised
        assert far(pick(b.server["model"], HEAD), pick(d.server["model"], HEAD)) > 1e-4  # the head needs labels
        if not supervised:
            assert equal(pick(b.server["model"], ENCODER), pick(d.server["model"], ENCODER))


def test_where_every_image_of_a_batch_has_its_own_label_supervision_says_nothing() -> None:
    task = make_task((3, 3, 3))
    task = replace(task, labels=torch.arange(9) % 3)
    ends = [run(fedicon(task, supervised=supervised)[0], ROUNDS)[0] for supervised in (True, False)]
    assert far(pick(ends[0].server["model"], ENCODER), pick(ends[1].server["model"], ENCODER)) < 1e-12


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"flip": False}])
def test_options_of_the_contrast_reach_it(options: dict[str, Any]) -> None:
    base, other = (run(fedicon(**own)[0], 1)[0].server["model"] for own in ({}, options))
    assert far(pick(base, ENCODER), pick(other, ENCODER)) > 1e-6


def test_options_of_the_heads_reach_them() -> None:
    base = whole(fedicon()[0])[0].server["model"]
    for options in ({"head_lr": 0.5}, {"head_epochs": 1}, {"head_rounds": 1}):
        other = whole(fedicon(**options)[0])[0].server["model"]
        assert equal(pick(base, ENCODER), pick(other, ENCODER))
        assert far(pick(base, HEAD), pick(other, HEAD)) > 1e-6
    untrained, start = whole(fedicon(head_epochs=0)[0])[0].server["model"], fedicon()[0].start().server["model"]
    assert far(pick(untrained, HEAD), pick(start, HEAD)) < 1e-15


@pytest.mark.parametrize("options", [
    {"temperature": 0.0}, {"temperature": -1.0}, {"head_rounds": -1}, {"head_epochs": -1}, {"personal_epochs": -1},
    {"head_lr": -0.1},
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must"):
        FedICON(arch=AWKWARD, train=TRAIN, **options)


# ---- engines, states ----------------------------------------------------------------------------------------------------
def both_stages(engine: Engine, method: FedICON, participation: float) -> tuple[State, dict[str, Tree], list[float]]:
    setup = Setup(MethodSpec(name="fedicon"), {"net": method}, method.train)
    fed = Session(setup, ragged_task(unseen=1), engine, DOUBLE, seed=3, rounds=2, participation=participation)
    state, reports = run(fed, 2 + method.extra_rounds)
    return state, {**fed.deploy(state).trained(), **fed.unseen(fed.deploy(state))}, [report.loss for report in reports]


def gap(a: Tree, b: Tree) -> float:
    assert {slot: set(leaves) for slot, leaves in a.items()} == {slot: set(leaves) for slot, leaves in b.items()}
    return max((float((a[s][n].double() - b[s][n].double()).abs().max()) for s in a for n in a[s]), default=0.0)


@pytest.mark.parametrize(
    ("norm", "participation", "options"),
    [
        (False, 1.0, {}),
        (True, 1.0, {}),
        (True, 0.6, {"supervised": False}),
        (False, 0.6, {"supervised": False, "flip": False}),
        (True, 1.0, {"share": False}),
    ],
)
def test_engines_agree_in_both_stages(norm: bool, participation: float, options: dict[str, Any]) -> None:
    method = FedICON(
        arch=tiny_arch(norm=norm),
        train=tiny_train(local_epochs=1),
        head_rounds=3,
        head_epochs=2,
        personal_epochs=2,
        **options,
    )
    reference = both_stages(Sequential(DOUBLE), method, participation)
    other = both_stages(Vmapped(DOUBLE), method, participation)
    assert gap(reference[0].server, other[0].server) < 1e-10
    assert set(reference[0].locals) == set(other[0].locals)
    assert all(gap(tree, other[0].locals[name]) < 1e-10 for name, tree in reference[0].locals.items())
    assert set(reference[1]) == set(other[1])
    assert all(gap(tree, other[1][name]) < 1e-10 for name, tree in reference[1].items())
    assert reference[2] == pytest.approx(other[2], abs=1e-10)


@pytest.mark.parametrize("number", range(1, ROUNDS + HEADS))
def test_a_stored_state_goes_on_where_it_stopped(tmp_path: Path, number: int) -> None:
    how = {"participation": 0.67}
    undisturbed, _ = whole(fedicon(**how)[0])
    fed, _ = fedicon(**how)
    state, _ = run(fed, number)
    server, locals = copied(state.server), {name: copied(tree) for name, tree in state.locals.items()}
    fed.deploy(state).trained()  # validation in the middle changes nothing
    assert equal_trees(state.server, server)
    assert all(equal_trees(state.locals[name], tree) for name, tree in locals.items())
    save(tmp_path / "state.safetensors", state.trees(), {})
    trees, _ = load(tmp_path / "state.safetensors")
    back = State.of(trees, number, torch.device("cpu"))
    again, _ = fedicon(**how)
    for _ in range(ROUNDS + HEADS - number):
        back, _ = again.step(back)
    assert equal_trees(back.server, undisturbed.server)
    assert back.locals.keys() == undisturbed.locals.keys()
    assert all(equal_trees(back.locals[name], tree) for name, tree in undisturbed.locals.items())
    first, second = again.deploy(back).trained(), fedicon(**how)[0].deploy(undisturbed).trained()
    assert all(equal_trees(first[name], tree) for name, tree in second.items())


def small(**changes: Any) -> Experiment:
    method = {
        "name": "fedicon",
        "head-rounds": 3,
        "head-epochs": 1,
        "personal-epochs": 1,
        "adapters": ["none", "fedicon"],
    }
    settings: dict[str, Any] = {
        "rounds": 2, "baselines": False, "data": {"size": 8}, "model": {"name": "mlp", "hidden": [4]},
        "checkpoint-every": 1, "name": "small", "participation": 0.6, "method": [method],
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


@pytest.mark.grid
def test_the_runner_runs_the_extra_rounds_and_resumes_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Session.step
    reference = run_experiment(small(), tmp_path / "whole", engine="sequential")
    folder = reference.folders[0]
    lines = [line for line in RunFolder(folder).lines() if "bytes-up" in line]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["bytes-up"] == lines[1]["bytes-up"] > lines[2]["bytes-up"] == lines[4]["bytes-up"]
    done = json.loads((folder / "done").read_text())
    assert (done["rounds"], done["extra-rounds"]) == (5, 3)
    scored = [row for rows in RunFolder(folder).scores().values() for row in rows]
    assert {row.round for row in scored if row.selection == "last"} == {5}
    assert {row.adapter for row in scored} == {"none", "fedicon"}
    for last in (2, 3, 4):
        out = tmp_path / f"killed after {last}"

        def stops(self: Session, state: State, last: int = last) -> tuple[State, RoundReport]:
            if state.round == last:
                raise KeyboardInterrupt
            return step(self, state)

        monkeypatch.setattr(Session, "step", stops)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(small(), out, engine="sequential")
        monkeypatch.setattr(Session, "step", step)
        with pytest.raises(UserError, match=f"interrupted after round {last} of 5"):
            run_experiment(small(), out, engine="sequential")
        resumed = run_experiment(small(), out, engine="sequential", resume=True)
        check_identical(contents(folder), contents(resumed.folders[0]))


def test_validation_chooses_no_state_whose_head_has_not_been_trained(tmp_path: Path) -> None:
    """A client tunes a head of its own whatever came down; who joins later has nothing but the federated one."""
    result = run_experiment(small(evaluate={"every": 1}), tmp_path, engine="sequential")
    folder = RunFolder(result.folders[0])
    validation = {
        line["round"]: line["personal/val/clients"]["pooled"] for line in folder.lines() if "bytes-up" not in line
    }
    assert sorted(validation) == [1, 2, 3, 4, 5]
    complete = {number: accuracy for number, accuracy in validation.items() if number > 2}
    chosen = {row.round for rows in folder.scores().values() for row in rows if row.selection == "best-val"}
    assert chosen == {next(number for number, accuracy in complete.items() if accuracy == max(complete.values()))}


def test_no_rounds_are_no_rounds_at_all_and_sharing_nothing_adds_none(tmp_path: Path) -> None:
    for number, changes in enumerate(
        (
            {"rounds": 0},
            {"method": [{"name": "fedicon", "share": False, "head-rounds": 3}]},
            {"method": [{"name": "fedavg"}]},
        )
    ):
        result = run_experiment(small(**changes), tmp_path / str(number), engine="sequential")
        rounds = 0 if number == 0 else 2
        done = json.loads((result.folders[0] / "done").read_text())
        assert (done["rounds"], done["extra-rounds"]) == (rounds, 0)
        assert len([line for line in RunFolder(result.folders[0]).lines() if "bytes-up" in line]) == rounds


def test_training_settings_hold_in_both_stages() -> None:
    """Steps, decay, momentum: engines agree, so it is enough that the stages obey."""
    watched, steps = watching(FedICON)
    train = Train(lr=0.05, batch_size=4, local_epochs=4, lr_decay=0.5)
    fed, _ = fedicon(method=watched, train=train, head_epochs=1)
    state = fed.start()
    for number in range(ROUNDS + HEADS):
        steps.clear()
        state, _ = fed.step(state)
        decay = {float(step[0]["now"]["decay"]) for step in steps}
        assert decay == {0.5 ** min(number, ROUNDS - 1)}  # rates stay where the experiment's rounds left them
        counted = [len(of_client(steps, client)) for client in SIZED.clients]
        assert counted == ([4, 8, 12] if number < ROUNDS else [2, 3, 3])


# ---- the projection -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [True, False])
def test_a_projection_is_trained_with_the_encoder_and_thrown_away(share: bool) -> None:
    fed, _ = fedicon(projection=True, share=share)
    start, method = fed.start(), fed.setup.method
    state, _ = run(fed, 1)
    place = state.server["model"] if share else state.locals["a"]["model"]
    assert all(float((place[name] - start.server["model"][name]).abs().max()) > 0 for name in projection.NAMES)
    state, _ = whole(fed)
    assert all(set(tree["model"]) == ENCODER | HEAD for tree in fed.deploy(state).trained().values())
    late = method.broadcast(state.server, "a", Context(ROUNDS, ROUNDS, 3))
    assert not set(late["model"]) & set(projection.NAMES)


def test_projections_of_other_starts_differ() -> None:
    first, again, other = (projection.fresh(AWKWARD.init(seed)["out.weight"], 4) for seed in (0, 0, 1))
    assert equal(first, again)
    assert all(not torch.equal(first[name], other[name]) for name in projection.NAMES)
