"""FedMD, its Tent and HeteroFedTTA: networks of several sizes in one federation, and nothing but logits between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedshift.blocks.logit_exchange import AdaptedExchange, LogitExchange, divergence, ordered, rows_of
from fedshift.core.arch import Arch
from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Batch, Method, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, pick, shapes
from fedshift.data.task import Task
from fedshift.engines import augment
from fedshift.engines.base import Engine
from fedshift.engines.reference import schedule_of, start_phase
from fedshift.engines.schedule import Plan
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, Experiment, MethodSpec
from fedshift.methods.fedavg import FedAvg
from fedshift.models.lenet import LeNet
from fedshift.runs.deployment import unseen_phases
from fedshift.runs.run import run as run_experiment
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.state import State
from fedshift.systems.fedtta.hetero import HeteroFedTTA
from fedshift.systems.fedtta.learned_loss import NAMES, RATE, SLOT, norms
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    PLAIN,
    SEED,
    SHAPE,
    Plain,
    Watch,
    equal,
    equal_trees,
    far,
    make_task,
    run,
)

HETERO = ("fedmd", "hetero-tent", "heterofedtta")
TABLES = {"fedmd": ("base",), "hetero-tent": ("personal",), "heterofedtta": ("base", "personal")}
PUBLIC = 10  # images
TRAIN = Train(lr=0.05, batch_size=4, local_epochs=1, momentum=0.5, weight_decay=0.01)


class Wide(nn.Module):
    """Another size of network, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 9)
        self.second = nn.Linear(9, 7)
        self.top = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.top(self.second(self.first(x.flatten(1)).tanh()).tanh())
        return logits


WIDE = Arch.of(Wide, SHAPE)
ENDED = Context(2, 2, 3, "final")
TWO, THREE = (PLAIN, WIDE), (PLAIN, WIDE, AWKWARD)
MODULES: dict[str, type[nn.Module]] = {PLAIN.name: Plain, WIDE.name: Wide}


def public_task(sizes: Sequence[int] = (5, 9, 12), unseen: int = 0) -> Task:
    """Clients, unseen ones, and public images that nobody owns; ids are neither positions nor in order."""
    task = make_task((*sizes, PUBLIC), unseen=unseen)
    ids = torch.arange(len(task.ids)) * 7919 % 10007
    return replace(task, clients=task.clients[:-1], public=task.clients[-1].train, ids=ids)


def mixed(
    name: str,
    task: Task | None = None,
    archs: Sequence[Arch] = TWO,
    train: Train = TRAIN,
    rounds: int = 2,
    engine: Engine | None = None,
    participation: float = 1.0,
    **options: Any,
) -> tuple[Session, Watch]:
    """A federation whose clients have these networks in turn, and what was said in it."""
    cls = METHODS[name].make
    methods = {arch.name: cls(arch=cls.build(arch, options), train=train, **options) for arch in archs}
    watch = Watch(engine or Sequential(DOUBLE))  # type: ignore[arg-type]
    setup = Setup(MethodSpec(name=name), methods, train)
    return Session(setup, task or public_task(), watch, DOUBLE, SEED, rounds, participation), watch


@cache
def trained(name: str, unseen: int = 0, archs: Sequence[Arch] = TWO) -> tuple[Session, Watch, State]:
    fed, watch = mixed(name, public_task(unseen=unseen), archs)
    return fed, watch, run(fed)[0]


def method_of(fed: Session, client: str) -> Method:
    return fed.method_of(fed.task.client(client))


def public_images(task: Task) -> Tensor:
    return task.images[task.public].double() / 255


def module_of(arch: Arch, tensors: Tensors) -> nn.Module:
    """A plain module in double precision with these weights."""
    module = MODULES[arch.name]().double()
    module.load_state_dict({name: tensors[name].clone() for name in module.state_dict()})
    return module


def answers(module: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = module((x - 0.5) / 0.5)
    return logits


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HETERO)
def test_messages_are_tables_of_logits_and_nothing_else(name: str) -> None:
    fed, watch = mixed(name)
    _, reports = run(fed)
    table = (PUBLIC, CLASSES)
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client, down in downs.items():
            assert shapes(down) == tuple(("consensus", kind, table) for kind in TABLES[name])
            assert shapes(replies[client].up) == tuple(("logits", kind, table) for kind in TABLES[name])
    floats = 3 * len(TABLES[name]) * PUBLIC * CLASSES * 8
    assert [(report.bytes_down, report.bytes_up) for report in reports] == [(floats, floats)] * 2


@pytest.mark.parametrize("name", HETERO)
def test_the_server_knows_no_weights_and_averages_uniformly(name: str) -> None:
    _, watch, state = trained(name)
    assert set(state.server) == {"model", "consensus"}
    assert state.server["model"] == {}
    replies = [
        reply for replies in watch.replies[-2:] for reply in replies.values()
    ]  # of both networks, sizes 5, 9, 12
    for kind in TABLES[name]:
        mean = torch.stack([reply.up["logits"][kind] for reply in replies]).mean(0)
        assert torch.allclose(state.server["consensus"][kind], mean, rtol=0, atol=1e-14)
        assert len({tuple(reply.up["logits"][kind].flatten().tolist()) for reply in replies}) == 3


@pytest.mark.parametrize("name", HETERO)
def test_everybody_starts_from_a_network_of_its_own(name: str) -> None:
    fed, _ = mixed(name, public_task(unseen=2))
    ctx = fed.context(fed.start().round)
    born = [fed._first_local(client, ctx)["model"] for client in (*fed.task.clients, *fed.task.unseen)]
    assert [len(model) - len(NAMES) * (name == "heterofedtta") for model in born] == [4, 6, 4, 4, 6]
    for one, other in ((0, 2), (0, 3), (1, 4)):  # of one size
        for entry in set(born[one]):
            assert not torch.equal(born[one][entry], born[other][entry])
    again = [fed._first_local(client, ctx)["model"] for client in (*fed.task.clients, *fed.task.unseen)]
    assert all(equal(a, b) for a, b in zip(born, again, strict=True))


def test_only_those_who_take_part_are_heard() -> None:
    fed, watch = mixed("fedmd", public_task((4, 4, 4, 4)), participation=0.5, rounds=3)
    state, reports = run(fed)
    assert [report.participants for report in reports] == [2, 2, 2]
    replies = [reply for replies in watch.replies for reply in replies.values()][-2:]
    mean = torch.stack([reply.up["logits"]["base"] for reply in replies]).mean(0)
    assert torch.allclose(state.server["consensus"]["base"], mean, rtol=0, atol=1e-14)


# --- rows of images ---------------------------------------------------------------------------------------------------


def test_rows_are_found_by_id_for_many_clients_at_once() -> None:
    ids = torch.tensor([[50, -3, 7, 7, 1 << 62], [9, 8, 7, 6, 5]])
    asked = torch.tensor([[7, 1 << 62, 50], [5, 9, 7]])
    public = [ordered(own) for own in ids]
    expected = [[2, 4, 0], [4, 0, 2]]  # equal images have one id, and the first one's row
    assert [rows_of(own, some).tolist() for own, some in zip(public, asked, strict=True)] == expected
    stacked = {name: torch.stack([own[name] for own in public]) for name in ("ids", "rows")}
    assert vmap(rows_of)(stacked, asked).tolist() == expected


@pytest.mark.parametrize("name", HETERO)
def test_every_image_is_told_apart(name: str) -> None:
    """A digested batch meets the rows that were said about its own images, whatever its order."""
    fed, _, state = trained(name)
    method = fed.setup.methods[PLAIN.name]
    assert isinstance(method, LogitExchange)
    client = fed.task.clients[0]
    ctx = fed.context(state.round)
    begun = method.begin(method.broadcast(state.server, client.name, ctx), state.locals[client.name])
    order = torch.tensor([7, 2, 9, 0])
    assert fed.task.public is not None
    found = method.teachers(begun, {"index": fed.task.ids[fed.task.public[order]]})
    assert {kind: table.tolist() for kind, table in found.items()} == {
        kind: state.server["consensus"][kind][order].tolist() for kind in TABLES[name]
    }


# --- FedMD, slowly ----------------------------------------------------------------------------------------------------


def own_batches(fed: Session, client: str, phase: Phase, round_: int) -> list[Tensor]:
    """Positions of a client's batches among its samples of a phase."""
    method = method_of(fed, client)
    part = fed.task.samples(fed.task.client(client), phase.data)
    order, sizes = schedule_of(method, phase, part, Plan((phase,), fed.context(round_), SEED), client)
    return list(order.split(sizes))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), TRAIN.lr, momentum=TRAIN.momentum, weight_decay=TRAIN.weight_decay)


def test_two_rounds_of_fedmd_are_those_of_plain_torch() -> None:
    fed, _ = mixed("fedmd")
    task, x = fed.task, public_images(fed.task)
    models = {
        client.name: module_of(method_of(fed, client.name).arch, fed._first_local(client, fed.context(0))["model"])
        for client in task.clients
    }
    assert [len(list(model.parameters())) for model in models.values()] == [4, 6, 4]
    ensemble = torch.zeros(0)
    for round_ in range(2):
        for client in task.clients:
            model = models[client.name]
            if round_:
                optimiser = sgd(model)
                for batch in own_batches(fed, client.name, Phase(data="public", epochs=1), round_):
                    optimiser.zero_grad()
                    kl(ensemble[batch], answers(model, x[batch])).backward()
                    optimiser.step()
            optimiser = sgd(model)
            for batch in own_batches(fed, client.name, Phase(), round_):
                own = client.train[batch]
                optimiser.zero_grad()
                F.cross_entropy(answers(model, task.images[own].double() / 255), task.labels[own]).backward()
                optimiser.step()
        with torch.no_grad():
            ensemble = torch.stack([answers(model, x) for model in models.values()]).mean(0)
    state, _ = run(fed)
    assert float((state.server["consensus"]["base"] - ensemble).abs().max()) < 1e-12
    for client in task.clients:
        assert far(state.locals[client.name]["model"], dict(models[client.name].state_dict())) < 1e-12
        served = fed.deploy(state).trained()[client.name]["model"]
        assert equal(served, state.locals[client.name]["model"])  # who has trained does not digest once more


# --- what is said after a step on the public images -------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize(("bits", "rate"), [(True, None), (False, 0.7)])
def test_tents_message_is_that_of_one_step_on_the_mean_entropy(
    bits: bool, rate: float | None, clip: float | None
) -> None:
    train = replace(TRAIN, clip=clip, lr_decay=0.5)
    fed, watch = mixed("hetero-tent", train=train, bits=bits, adapt_lr=rate)
    state, _ = run(fed)  # the second round has half the rate
    x = public_images(fed.task)
    said = {name: reply.up["logits"]["personal"] for replies in watch.replies[-2:] for name, reply in replies.items()}
    for client, local in state.locals.items():
        model = module_of(method_of(fed, client).arch, local["model"])
        log_p = answers(model, x).log_softmax(1)
        (-(log_p.exp() * log_p).sum(1).mean() / (math.log(2) if bits else 1)).backward()
        if clip is not None:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), clip)) > clip
        torch.optim.SGD(model.parameters(), 0.5 * (0.05 if rate is None else rate), weight_decay=0.01).step()
        after = answers(model, x).detach()
        assert torch.allclose(said[client], after, rtol=0, atol=1e-12)
        before = answers(module_of(method_of(fed, client).arch, local["model"]), x).detach()
        assert float((after - before).abs().max()) > 1e-5


def test_heterofedttas_messages_are_before_and_after_one_step_on_the_learnt_loss() -> None:
    fed, watch = mixed("heterofedtta", train=replace(TRAIN, lr_decay=0.5), inner_lr=0.4)
    state, _ = run(fed)
    x = public_images(fed.task)
    said = {name: reply.up["logits"] for replies in watch.replies[-2:] for name, reply in replies.items()}
    for client, local in state.locals.items():
        model = module_of(method_of(fed, client).arch, local["model"])
        assert torch.allclose(said[client]["base"], answers(model, x), rtol=0, atol=1e-12)
        loss = torch.stack([norms(local["model"], answers(model, part), len(part)).sum() for part in x.split(4)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        torch.optim.SGD(model.parameters(), 0.5 * 0.4, weight_decay=1e-4).step()
        assert torch.allclose(said[client]["personal"], answers(model, x), rtol=0, atol=1e-10)
        assert float((said[client]["personal"] - said[client]["base"]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["hetero-tent", "heterofedtta"])
def test_the_step_is_made_for_the_message_only(name: str) -> None:
    """Models stay where training left them: their own passes over the public images move nothing."""

    def models(looks: bool) -> State:
        cls = METHODS[name].make
        assert issubclass(cls, AdaptedExchange)

        class Short(cls):  # type: ignore[valid-type,misc]
            def looks(self) -> tuple[Phase, ...]:
                return super().looks() if looks else ()

        made = {arch.name: Short(arch=arch, train=TRAIN) for arch in TWO}
        fed = Session(Setup(MethodSpec(name=name), made, TRAIN), public_task(), Watch(), DOUBLE, SEED, 1)
        return run(fed)[0]

    with_, without = models(True), models(False)
    assert all(equal(with_.locals[client]["model"], without.locals[client]["model"]) for client in "abc")


# --- digesting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HETERO)
def test_nobody_digests_in_the_first_round(name: str) -> None:
    method = mixed(name)[0].setup.method
    later, first = ([phase.name for phase in method.phases(Context(round_, 3, 3))] for round_ in (1, 0))
    assert later == ["digest", *first]
    assert [phase.data for phase in method.phases(Context(1, 3, 3))].count("train") == 1
    assert method.last_phases(ENDED) == ()
    (phase,) = unseen_phases(method, ENDED)
    assert (phase.data, phase.epochs, phase.labelled) == ("public", 2, False)


def digest_loss(method: Method, state: Tree, batch: Batch) -> tuple[Tensor, Tensors]:
    """The digest's loss and its gradient for everything that learns."""
    live = {name: leaf.detach().requires_grad_() for name, leaf in state["model"].items()}
    (phase,) = unseen_phases(method, ENDED)
    value, _ = method.loss(state, live, batch, phase)
    grads = torch.autograd.grad(value, list(live.values()))
    return value.detach(), dict(zip(live, grads, strict=True))


def digesting(fed: Session, state: State, client: str = "a") -> tuple[Method, Tree, Batch]:
    method, ctx = method_of(fed, client), fed.context(state.round)
    begun = method.begin(method.broadcast(state.server, client, ctx), state.locals[client])
    assert fed.task.public is not None
    index = fed.task.public[[3, 1, 8, 5]]
    batch = {"x": fed.task.images[index].double() / 255, "y": fed.task.labels[index], "index": fed.task.ids[index]}
    return method, {**begun, "now": {"decay": torch.tensor(0.5).double()}}, batch


@pytest.mark.parametrize("lam", [0.0, 0.8])
def test_heterofedttas_digest_is_eq_14_through_the_inner_step(lam: float) -> None:
    fed, _, trained_state = trained("heterofedtta")
    _, state, batch = digesting(fed, trained_state)
    method = HeteroFedTTA(arch=PLAIN, train=TRAIN, lam=lam, inner_lr=0.4)
    value, grads = digest_loss(method, state, batch)

    live = {name: leaf.detach().requires_grad_() for name, leaf in state["model"].items()}
    x = (batch["x"] - 0.5) / 0.5

    def logits(psi: Tensors) -> Tensor:
        hidden = (x.flatten(1) @ psi["hidden.weight"].T + psi["hidden.bias"]).tanh()
        return hidden @ psi["out.weight"].T + psi["out.bias"]

    psi = {name: live[name] for name in PLAIN.parameters}
    before = logits(psi)
    scores = before
    for layer in range(4):
        scores = scores @ live[f"{SLOT}.{layer}.weight"].T + live[f"{SLOT}.{layer}.bias"]
        scores = scores.relu() if layer < 3 else scores
    inner = (scores.square().sum() + 1e-12).sqrt()
    slope = torch.autograd.grad(inner, list(psi.values()), create_graph=True)
    steps = zip(psi.items(), slope, strict=True)
    adapted = {name: leaf - 0.5 * 0.4 * (grad + 1e-4 * leaf) for (name, leaf), grad in steps}
    tables = {kind: table[[3, 1, 8, 5]] for kind, table in trained_state.server["consensus"].items()}
    expected = kl(tables["personal"], logits(adapted)) + lam * kl(tables["base"], before)
    assert float(value) == pytest.approx(float(expected.detach()), abs=1e-12)
    by_hand = torch.autograd.grad(expected, list(live.values()))
    assert far(grads, dict(zip(live, by_hand, strict=True))) < 1e-12
    assert max(float(grads[name].abs().max()) for name in NAMES) > 1e-6  # the loss network learns too


def test_without_lambda_the_base_ensemble_does_not_matter() -> None:
    fed, _, state = trained("heterofedtta", 2)

    def told(kind: str) -> State:
        table = state.server["consensus"][kind]
        consensus = {**state.server["consensus"], kind: table.flip(0) * 3 - 1}
        return replace(state, server={**state.server, "consensus": consensus})

    for lam, kind, matters in ((0.0, "base", False), (0.0, "personal", True), (0.8, "base", True)):
        other, _ = mixed("heterofedtta", fed.task, lam=lam)
        ends = [other.step(begun)[0] for begun in (state, told(kind))]
        new = [other.unseen(other.deploy(begun)) for begun in (state, told(kind))]
        for client in "abc":
            assert equal_trees(ends[0].locals[client], ends[1].locals[client]) != matters
        for client in ("new0", "new1"):
            assert equal_trees(new[0][client], new[1][client]) != matters


@pytest.mark.parametrize("name", HETERO)
@pytest.mark.parametrize("archs", [TWO, THREE])
def test_digesting_brings_an_unseen_client_closer_to_the_ensemble(name: str, archs: Sequence[Arch]) -> None:
    _, _, state = trained(name, 3, archs)
    task = public_task(unseen=3)
    x, tables = public_images(task), state.server["consensus"]
    apart: list[list[float]] = []
    for epochs in (0, 2, 12):
        fed, _ = mixed(name, task, archs, unseen_epochs=epochs)
        served = fed.unseen(fed.deploy(state))
        for client in task.unseen:
            method, tree = fed.method_of(client), served[client.name]
            logits = method.predict(tree, x).logits
            apart.append([float(divergence(table, logits)) for table in tables.values()])
    for new in range(3):
        falling = [sum(apart[3 * step + new]) for step in range(3)]
        assert falling[0] > falling[1] > falling[2]
        assert falling[2] < 0.7 * falling[0]


@pytest.mark.parametrize("name", HETERO)
def test_a_long_digest_ends_with_the_ensembles_opinion(name: str) -> None:
    """The loss of the digest itself falls to almost nothing where the network is large enough."""
    fed, _, state = trained(name)
    method, begun, batch = digesting(fed, state, "b")
    method = replace(method, train=Train(lr=0.5))
    (phase,) = unseen_phases(method, ENDED)
    memory: Tensors = {}
    for names, rule in method.groups(phase):
        memory |= rule.memory(pick(begun["model"], names))
    begun = {**begun, "optim": memory, "log": {"loss": torch.tensor(0.0), "steps": torch.tensor(0.0)}}
    losses = []
    for _ in range(400):
        losses.append(float(digest_loss(method, begun, batch)[0]))
        begun = augment.step(method, begun, batch, phase)
    assert losses[-1] < 0.02 * losses[0]
    assert losses[-1] >= -1e-12  # a divergence, not a cross-entropy


def test_momentum_goes_on_from_digest_to_revisit() -> None:
    """One optimiser for the whole round, as in the authors' code: the velocity of the digest is in the first revisit."""
    fed, _, state = trained("heterofedtta")
    method, begun, batch = digesting(fed, state)
    digest, revisit, *_ = method.phases(fed.context(1))
    assert (digest.name, revisit.name) == ("digest", "train")
    now = {"decay": torch.tensor(1.0).double(), "lr": torch.tensor(0.05).double()}
    assert not any(bool(leaf.any()) for leaf in begun["momentum"].values())  # a round starts at rest
    after = augment.step(method, start_phase(method, begun, digest, now), batch, digest)
    kept = start_phase(method, after, revisit, now)
    rested = {**kept, "momentum": {name: torch.zeros_like(leaf) for name, leaf in kept["momentum"].items()}}
    ends = [augment.step(method, tree, batch, revisit)["momentum"] for tree in (kept, rested)]
    for name, before in after["momentum"].items():
        factor = 0.9 if SLOT in name else TRAIN.momentum
        assert torch.allclose(ends[0][name] - ends[1][name], factor * before, rtol=0, atol=1e-12)
    assert any(bool(leaf.any()) for name, leaf in after["momentum"].items() if SLOT in name)


def test_the_loss_network_is_twice_as_wide_as_the_networks_first_layer() -> None:
    """32, 64 and 128 for the paper's small, medium and big network, unless somebody says otherwise."""
    method = METHODS["heterofedtta"].make
    for width, expected in ((16, 32), (32, 64), (64, 128)):
        arch = Arch.of(lambda w=width: LeNet(width=w, hidden=8).make((3, 8, 8), 10), (3, 8, 8))  # type: ignore[misc]
        info = ClientInfo("a", 5, torch.zeros(10), 1, torch.arange(3))
        for options, wide in (({}, expected), ({"loss_width": 7}, 7)):
            local = method(arch=arch, train=TRAIN, **options).init_local(arch.init(0), info, ENDED)
            shapes_ = [tuple(local["model"][name].shape) for name in NAMES if name.endswith("weight")]
            assert shapes_ == [(wide, 10), (wide, wide), (wide, wide), (1, wide)]


# --- engines ----------------------------------------------------------------------------------------------------------


def gap(a: Tree, b: Tree) -> float:
    assert shapes(a) == shapes(b)
    return max((float((a[s][n] - b[s][n]).abs().max()) for s in a for n in a[s] if a[s][n].numel()), default=0.0)


@pytest.mark.parametrize("name", HETERO)
def test_three_sizes_in_one_federation_whatever_the_engine(name: str) -> None:
    task = public_task((5, 9, 12, 1, 4), unseen=4)
    ends = []
    for engine in (Sequential(DOUBLE), Vmapped(DOUBLE)):
        fed, _ = mixed(name, task, THREE, replace(TRAIN, clip=1.0, lr_decay=0.9), engine=engine)
        state, reports = run(fed)
        assert all(report.diverged == () for report in reports)
        ends.append(
            (
                state,
                {**fed.deploy(state).trained(), **fed.unseen(fed.deploy(state))},
                [report.loss for report in reports],
            )
        )
    (state, served, losses), (other, also, same) = ends
    assert len({len(tree["model"]) for tree in state.locals.values()}) == 3
    assert gap(state.server, other.server) < 1e-10
    for client, tree in state.locals.items():
        assert gap(tree, other.locals[client]) < 1e-10
    assert list(served) == [*"abcde", "new0", "new1", "new2", "new3"] == list(also)
    for client, tree in served.items():
        assert gap(tree, also[client]) < 1e-10
    assert losses == pytest.approx(same, abs=1e-10)


# --- unseen clients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HETERO)
def test_unseen_clients_of_every_size_digest_and_adapt(name: str) -> None:
    fed, _ = mixed(name, public_task(unseen=4), THREE)
    state, _ = run(fed)
    served = fed.unseen(fed.deploy(state))
    sizes = [set(arch.parameters) | set(arch.buffers) for arch in (*THREE, PLAIN)]
    assert [set(tree["model"]) for tree in served.values()] == sizes  # in turn, from the first one on
    start = {c.name: fed._first_local(c, fed.context(state.round))["model"] for c in fed.task.unseen}
    for client, tree in served.items():
        method = method_of(fed, client)
        assert set(tree) == method.provides
        moved = [name for name in method.arch.parameters if not torch.equal(tree["model"][name], start[client][name])]
        assert set(moved) == set(method.arch.parameters)
    assert far(served["new0"]["model"], served["new3"]["model"]) > 1e-3
    wholesale = {"params": "all", "batch-size": 0, "predict-when": "after", "optimiser": "sgd", "lr": 0.05}
    specs = [AdapterSpec(name="none"), AdapterSpec(name="tent", **wholesale)]
    if name == "heterofedtta":
        specs.append(AdapterSpec(name="fedtta"))
    everybody = {**fed.deploy(state).trained(), **served}
    losses = []
    for spec in specs:
        adapters = {arch: fed.setup.adapter(spec, method) for arch, method in fed.setup.methods.items()}
        scores = fed.evaluate(adapters, everybody, ["test"])
        assert {client for client, _ in scores} == set(everybody)
        losses.append([scores[client, "test"].loss for client in served])
    assert all(a != b for other in losses[1:] for a, b in zip(losses[0], other, strict=True))  # each of them adapted


def test_heterofedtta_deploys_the_rate_of_the_last_round() -> None:
    fed, _ = mixed("heterofedtta", public_task(unseen=1), train=replace(TRAIN, lr_decay=0.5), rounds=3, inner_lr=0.4)
    state, _ = run(fed)
    for tree in (*fed.deploy(state).trained().values(), *fed.unseen(fed.deploy(state)).values()):
        assert set(tree[SLOT]) == {*NAMES, RATE}
        assert float(tree[SLOT][RATE]) == pytest.approx(0.4 * 0.25)
        assert not set(tree["model"]) & set(NAMES)


@pytest.mark.parametrize("name", HETERO)
def test_unseen_clients_never_influence_training(name: str) -> None:
    fed, _ = mixed(name, public_task(unseen=3))
    alone, _ = mixed(name, replace(fed.task, unseen=()))
    state = fed.start()
    for _ in range(2):
        fed.unseen(fed.deploy(state))
        state, _ = fed.step(state)
    expected, _ = run(alone)
    assert equal_trees(state.server, expected.server)
    assert state.locals.keys() == expected.locals.keys() == set("abc")
    assert all(equal_trees(state.locals[client], expected.locals[client]) for client in "abc")


@pytest.mark.parametrize("name", HETERO)
def test_labels_of_the_public_set_and_of_unseen_clients_are_never_read(name: str) -> None:
    task = public_task(unseen=2)
    seen = torch.cat([client.train for client in task.clients])
    labels = torch.full_like(task.labels, -1)
    labels[seen] = task.labels[seen]
    ends = []
    for given in (task, replace(task, labels=labels)):
        fed, _ = mixed(name, given)
        state, _ = run(fed)
        ends.append((state.server, fed.unseen(fed.deploy(state))))
    assert equal_trees(ends[0][0], ends[1][0])
    assert all(equal_trees(ends[0][1][client], ends[1][1][client]) for client in ends[0][1])


# --- what the federation and the method's hooks owe them --------------------------------------------------------------


def test_public_ids_reach_clients_and_the_server() -> None:
    told: list[list[int]] = []

    class Curious(FedAvg):
        def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
            told.append(info.public.tolist())
            return {}

        def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
            return {**super().init_server(models, clients, public), "public": {"ids": public}}

    task = public_task(unseen=1)
    expected = [int(task.ids[i]) for i in task.public] if task.public is not None else []
    assert len(expected) == PUBLIC
    for given, ids in ((task, expected), (replace(task, public=None), [])):
        told.clear()
        setup = Setup(MethodSpec(name="x"), {"plain": Curious(arch=PLAIN, train=TRAIN)}, TRAIN)
        fed = Session(setup, given, Watch(), DOUBLE, SEED, 1)
        state, _ = run(fed)
        fed.unseen(fed.deploy(state))
        assert told == [ids] * len(told)
        assert len(told) > 3
        assert state.server["public"]["ids"].dtype == torch.int64
        assert state.server["public"]["ids"].tolist() == ids


@pytest.mark.parametrize("name", HETERO)
def test_without_a_public_set_there_is_one_sentence(name: str) -> None:
    with pytest.raises(UserError, match=r"public set of unlabelled images; add \[split\] public = 0\.1") as said:
        mixed(name, replace(public_task(), public=None))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("fedmd", {"digest_epochs": -1}, "digest-epochs must not be negative, not -1"),
        ("hetero-tent", {"unseen_epochs": -1}, "unseen-epochs must not be negative, not -1"),
        ("hetero-tent", {"adapt_lr": -0.5}, "adapt-lr must not be negative, not -0.5"),
        ("heterofedtta", {"lam": -0.1}, "lam must not be negative, not -0.1"),
        ("heterofedtta", {"inner_lr": -0.1}, "inner-lr must not be negative, not -0.1"),
        ("heterofedtta", {"digest_epochs": -2}, "digest-epochs must not be negative, not -2"),
        ("heterofedtta", {"mu": 0.1}, "mu must be 0, because nobody receives a model"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(METHODS, "method", name, options, arch=PLAIN, train=TRAIN)


# --- from words to a report -------------------------------------------------------------------------------------------


@pytest.mark.grid
def test_mixed_sizes_are_one_run_and_one_report(tmp_path: Path) -> None:
    experiment = Experiment.parse(
        {
            "rounds": 2,
            "data": {"size": 8, "limit": 400},
            "partition": {"kind": "iid", "clients": 8},
            "split": {"train": 0.8, "val": 0.2, "test": 0.0, "unseen": 0.5, "public": 0.1},
            "model": [{"name": "mlp", "hidden": [6]}, {"name": "mlp", "hidden": [8, 5]}, {"name": "cnn", "width": 2}],
            "train": {"lr": 0.05, "batch-size": 16, "local-steps": 2},
            "evaluate": {"every": 1},
            "method": [
                {"name": "fedmd"},
                {"name": "hetero-tent", "adapters": ["none", {"name": "tent", "params": "all", "batch-size": 0}]},
                {"name": "heterofedtta", "adapters": ["none", "fedtta"]},
            ],
        }
    )
    result = run_experiment(experiment, tmp_path, engine="sequential", device="cpu")
    names = [(row.method, row.adapter) for row in result.rows]
    assert [method for method, _ in names] == ["fedmd", "hetero-tent", "hetero-tent", "heterofedtta", "heterofedtta"]
    for row in result.rows:
        for rule in ("last", "best-val"):
            (numbers,) = row.scores("personal/original/unseen", rule)
            assert numbers.summary.clients == 4
            assert 0 <= numbers.summary.worst10 <= numbers.summary.client_mean <= 100  # type: ignore[operator]
    again = run_experiment(experiment, tmp_path, engine="sequential", device="cpu")
    assert [row.values for row in again.rows] == [row.values for row in result.rows]
