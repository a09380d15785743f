"""FDSE against modules, loops and SciPy; what travels and what stays, what its switches do, and the limits of 6.8."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import nnls
from torch import Tensor, nn

from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.method import Method, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, float_bytes
from fedshift.engines.vmapped import Vmapped
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment, MethodSpec
from fedshift.models.alexnet import AlexNet
from fedshift.runs.setup import check_method, make_setup
from fedshift.store.state import State
from fedshift.store.trees import load, save
from fedshift.systems.fdse import eraser as erasure
from fedshift.systems.fdse.eraser import Eraser
from fedshift.systems.fdse.method import FDSE, attention
from tests.conftest import refusal
from tests.methods.federations import (
    DOUBLE,
    PLAIN,
    equal,
    equal_trees,
    far,
    federation,
    make_task,
    run,
    watching,
)

SIZED = make_task((6, 9, 12))
TRAIN = Train(lr=0.1, batch_size=4, local_epochs=2, weight_decay=1e-3, clip=10.0, lr_decay=0.9)
CTX = Context(1, 3, 3)


def network() -> nn.Module:
    """A convolution and a hidden layer with BatchNorm, both odd, and a head."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, 2, 1), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(),
        nn.Linear(20, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3),
    )  # fmt: skip


ARCH = Arch.of(network, (1, 4, 4), "net")
BLOCKS = ("0", "4")
OWN = {f"{b}.{n}" for b in BLOCKS for n in ("dse.weight", "dse_norm.weight", "dse_norm.bias")}
HOME = {f"{b}.dse_norm.{n}" for b in BLOCKS for n in ("running_mean", "running_var", "num_batches_tracked")}
OUTER = {f"{b}.dfe_norm.{n}" for b in BLOCKS for n in ("running_mean", "running_var")}
COUNTERS = {f"{b}.dfe_norm.num_batches_tracked" for b in BLOCKS}
LEARNT = {"0.dfe.weight", "4.dfe.weight", "7.weight", "7.bias"} | {
    f"{b}.dfe_norm.{n}" for b in BLOCKS for n in ("weight", "bias")
}


def make(**options: Any) -> FDSE:
    return FDSE(arch=FDSE.build(ARCH, options), train=TRAIN, **options)


def test_the_network_has_the_entries_these_tests_speak_of() -> None:
    method = make()
    tracked = {f"{b}.{n}" for b in BLOCKS for n in ("tracked_mean", "tracked_var", "tracked_steps")}
    assert method.blocks == BLOCKS
    assert set(method.arch.parameters) == OWN | LEARNT
    assert set(method.arch.buffers) == HOME | OUTER | COUNTERS | tracked
    assert method.own == OWN
    assert method.private(CTX) == HOME | tracked


# ---- a second implementation ----------------------------------------------------------------------------------------------
class Block(nn.Module):
    """A block as the paper draws it; ``both`` is what its outer BatchNorm was given last."""

    def __init__(self, before: int, wide: int, conv: bool, relu: bool) -> None:
        super().__init__()
        half = -(-wide // 2)
        self.wide, self.relu, self.conv = wide, relu, conv
        self.dfe = nn.Conv2d(before, half, 3, 2, 1, bias=False) if conv else nn.Linear(before, half, bias=False)
        self.dse_norm = nn.BatchNorm2d(half)
        self.dse = nn.Conv2d(half, half, 3 if conv else 1, padding=1 if conv else 0, groups=half, bias=False)
        self.dfe_norm = nn.BatchNorm2d(wide)

    def forward(self, x: Tensor) -> Tensor:
        made = self.dfe(x)
        u = self.dse_norm(made if self.conv else made[:, :, None, None])
        u = torch.relu(u) if self.relu else u
        self.both = torch.cat([u, self.dse(u)], 1)[:, : self.wide]
        out = torch.relu(self.dfe_norm(self.both))
        return out if self.conv else out.flatten(1)


class Net(nn.Module):
    def __init__(self, relu: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": Block(1, 5, True, relu), "4": Block(20, 7, False, relu)})
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks["4"](self.blocks["0"](x).flatten(1)))
        return logits

    def tensors(self) -> Tensors:
        """By the names of fedshift's network."""
        return {
            name.replace("blocks.", "").replace("head.", "7."): leaf.detach().clone()
            for name, leaf in self.state_dict().items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        own = {name: tensors[name.replace("blocks.", "").replace("head.", "7.")] for name in self.state_dict()}
        self.load_state_dict({name: leaf.clone() for name, leaf in own.items()})


def min_norm(units: np.ndarray) -> np.ndarray:
    """Non-negative least squares on [D; 1]."""
    system = np.vstack([units.T, np.ones((1, len(units)))])
    raw, _ = nnls(system, np.eye(len(system))[-1])
    return np.asarray(raw / raw.sum())


class Reference:
    """A federation in plain torch: one module per client, one dictionary for what the server shares."""

    def __init__(self, initial: Tensors, clients: int, sizes: list[int], options: Mapping[str, Any]) -> None:
        self.options = {"lam": 0.1, "tau": 0.5, "beta": 0.001, "consensus": True, "similarity": True} | dict(options)
        self.nets = [Net(self.options.get("activation", False)).double() for _ in range(clients)]
        for net in self.nets:
            net.load(initial)
        self.server = {name: leaf for name, leaf in self.nets[0].tensors().items() if name in LEARNT | OUTER}
        self.sizes = sizes

    def round(self, number: int, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
        for net, own in zip(self.nets, batches, strict=True):
            self._train(net, own, number)
        self._aggregate([net.tensors() for net in self.nets])

    def _train(self, net: Net, batches: list[tuple[Tensor, Tensor]], number: int) -> None:
        optimiser = torch.optim.SGD(net.parameters(), TRAIN.lr * 0.9**number, weight_decay=TRAIN.weight_decay)
        anchor = net.tensors()
        tracked: dict[str, tuple[Tensor, Tensor]] = {}
        if self.options.get("start") == "received":
            for b in BLOCKS:
                tracked[b] = anchor[f"{b}.dfe_norm.running_mean"], anchor[f"{b}.dfe_norm.running_var"]
        for x, y in batches:
            loss = F.cross_entropy(net.train()((x - 0.5) / 0.5), y)
            levels = torch.exp(self.options["beta"] * torch.arange(1, 3, dtype=torch.float64))
            for b, weight in zip(BLOCKS, levels / levels.sum(), strict=True):
                both = net.blocks[b].both
                now = both.mean((0, 2, 3)), both.var((0, 2, 3))
                if b in tracked:
                    now = tuple(0.9 * old.detach() + 0.1 * new for old, new in zip(tracked[b], now, strict=True))
                tracked[b] = now
                means = ((now[0] - anchor[f"{b}.dfe_norm.running_mean"]) ** 2).sum() / both.shape[1]
                var = ((now[1].sum() - anchor[f"{b}.dfe_norm.running_var"].sum()) / both.shape[1]) ** 2
                if number > 0:
                    loss = loss + self.options["lam"] * weight * (means + var)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimiser.step()

    def _aggregate(self, ends: list[Tensors]) -> None:
        count = len(ends)
        for name in OUTER:
            self.server[name] = sum(end[name] for end in ends) / count
        groups: dict[str, list[str]] = {}
        for name in sorted(LEARNT):
            joined = name.rsplit(".", 1)[0] if self.options.get("granularity") == "layer" else name
            groups.setdefault(joined, []).append(name)
        for names in groups.values():
            if not self.options["consensus"]:
                for name in names:
                    parts = [size * end[name] for size, end in zip(self.sizes, ends, strict=True)]
                    self.server[name] = sum(parts) / sum(self.sizes)
                continue
            rows = [torch.cat([(end[n] - self.server[n]).flatten() for n in names]).numpy() for end in ends]
            norms = [float(np.linalg.norm(row)) for row in rows]
            units = np.stack([row / (norm + 1e-8) for row, norm in zip(rows, norms, strict=True)])
            step = torch.from_numpy(sum(norms) / count * (min_norm(units) @ units))
            for name, part in zip(names, step.split([self.server[n].numel() for n in names]), strict=True):
                self.server[name] = self.server[name] + part.view_as(self.server[name])
        own = [{name: end[name] for name in OWN} for end in ends]
        if self.options["similarity"]:
            for name in OWN:
                values = [end[name] for end in ends]
                joined = name.rsplit(".", 1)[0] if self.options.get("granularity") == "layer" else name
                together = [n for n in OWN if n == joined or n.rsplit(".", 1)[0] == joined]
                rows = [torch.cat([end[n].flatten() for n in together]) for end in ends]
                for k, row in enumerate(rows):
                    scores = [float((row / row.norm() * (v / v.norm())).sum()) / self.options["tau"] for v in rows]
                    shares = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0).tolist()
                    own[k][name] = sum(share * value for share, value in zip(shares, values, strict=True))
        for net, end, mixed in zip(self.nets, ends, own, strict=True):
            net.load({**end, **self.server, **mixed})


def compare(rounds: int = 2, **options: Any) -> tuple[State, Reference]:
    """The same federation twice, after each round: the largest difference must be nothing."""
    watched, steps = watching(FDSE)
    fed, _ = federation(watched, SIZED, TRAIN, ARCH, rounds, **options)
    sizes = [len(client.train) for client in SIZED.clients]
    reference = Reference(fed.initial["net"], 3, sizes, options)
    state = fed.start()
    for number in range(rounds):
        steps.clear()
        state, report = fed.step(state)
        assert report.diverged == ()
        batches: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
        for before, batch, _ in steps:
            batches[sizes.index(int(before["now"]["samples"]))].append((batch["x"], batch["y"]))
        assert [len(own) for own in batches] == [4, 4, 6]  # 6 = 4 + 2, 9 = 4 + 5, 12 = 4 + 4 + 4
        reference.round(number, batches)
        shared = {name: leaf for name, leaf in state.server["model"].items() if name in LEARNT | OUTER}
        assert far(shared, reference.server) < 1e-7, number
        for client, net in zip(SIZED.clients, reference.nets, strict=True):
            mixed, expected = state.server[f"own {client.name}"], net.tensors()
            assert far(mixed, {name: expected[name] for name in OWN}) < 1e-7, number
            kept = {name: leaf for name, leaf in state.locals[client.name]["model"].items() if name in HOME}
            assert far(kept, {name: expected[name] for name in HOME}) < 1e-7, number
    for client, net in zip(SIZED.clients, reference.nets, strict=True):
        served = fed.deploy(state).trained()[client.name]["model"]
        x = SIZED.images[client.test].double() / 255
        with torch.no_grad():
            logits = net.eval()((x - 0.5) / 0.5)
            assert float((fed.setup.method.arch(served, x).logits - logits).abs().max()) < 1e-6
    return state, reference


# ---- the whole method ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lam": 2.0, "beta": 1.0, "tau": 0.05},
        {"lam": 2.0, "start": "received"},
        {"granularity": "layer"},
        {"activation": True, "lam": 1.0},
        {"consensus": False},
        {"similarity": False},
        {"lam": 0.0},
        {"lam": 0.0, "consensus": False, "similarity": False},
    ],
    ids=str,
)
def test_rounds_in_plain_torch_end_the_same(options: dict[str, Any]) -> None:
    state, _ = compare(rounds=3 if not options else 2, **options)
    assert far(state.server["own a"], state.server["own b"]) > 1e-4


def test_without_its_ideas_it_is_fedavg_with_private_erasers() -> None:
    """No regulariser, everybody listens to themselves, means by size: nothing of an eraser comes from another client."""
    options = {"lam": 0.0, "tau": 1e-13, "consensus": False}
    state, _ = compare(**options)
    fed, watch = federation(FDSE, SIZED, TRAIN, ARCH, 2, **options)
    again, _ = run(fed)
    ups = {client: reply.up["model"] for client, reply in watch.replies[-1].items()}
    for client, up in ups.items():
        assert far(again.server[f"own {client}"], {name: up[name] for name in OWN}) < 1e-12
    for name in LEARNT:
        mean = sum(len(c.train) / 27 * ups[c.name][name] for c in SIZED.clients)
        assert torch.allclose(again.server["model"][name], torch.as_tensor(mean), atol=1e-14)
    assert equal_trees(state.server, again.server)


def test_engines_agree() -> None:
    fed, _ = federation(FDSE, SIZED, TRAIN, ARCH, 2, lam=1.0)
    one, _ = run(fed)
    fed.engine = Vmapped(DOUBLE)
    other, _ = run(fed)
    assert all(far(one.server[slot], other.server[slot]) < 1e-10 for slot in one.server)
    assert all(far(one.locals[c]["model"], other.locals[c]["model"]) < 1e-10 for c in one.locals)


# ---- the client ----------------------------------------------------------------------------------------------------------
def begun(method: FDSE, number: int, seed: int = 0) -> tuple[Tree, dict[str, Tensor]]:
    """A client's state in round ``number`` with statistics that are somewhere, and a batch."""
    generator = torch.Generator().manual_seed(seed)
    model = {n: t.double() if t.is_floating_point() else t for n, t in method.arch.init(seed).items()}
    for name in OUTER | {n for n in HOME if "batches" not in n}:
        noise = torch.randn(model[name].shape, generator=generator, dtype=torch.float64)
        model[name] = noise.abs() + 0.3 if name.endswith("var") else noise
    private = method.private(CTX)
    down = {"model": {n: t for n, t in model.items() if n not in private}}
    state = method.begin(down, {"model": {n: t for n, t in model.items() if n in private}})
    state["now"] = {"round": torch.tensor(float(number), dtype=torch.float64)}
    x = torch.rand(6, 1, 4, 4, generator=generator, dtype=torch.float64)
    return state, {"x": x, "y": torch.tensor([0, 1, 2, 0, 1, 2])}


def torch_loss(state: Tree, batch: Mapping[str, Tensor], lam: float, beta: float) -> float:
    net = Net().double().train()
    net.load(state["model"])
    value = F.cross_entropy(net((batch["x"] - 0.5) / 0.5), batch["y"])
    raw = [float(np.exp(beta * level)) for level in (1, 2)]
    for b, weight in zip(BLOCKS, raw, strict=True):
        both = net.blocks[b].both
        mean = ((both.mean((0, 2, 3)) - state["model"][f"{b}.dfe_norm.running_mean"]) ** 2).mean()
        var = (both.var((0, 2, 3)).mean() - state["model"][f"{b}.dfe_norm.running_var"].mean()) ** 2
        value = value + lam * weight / sum(raw) * (mean + var)
    return float(value.detach())


@pytest.mark.parametrize("lam", [0.0, 0.1, 0.3, 7.0])
@pytest.mark.parametrize("beta", [0.001, 0.7])
def test_the_loss_by_hand(lam: float, beta: float) -> None:
    method = make(lam=lam, beta=beta)
    for number in (0, 1, 2, 9):
        state, batch = begun(method, number)
        value, buffers = method.loss(state, state["model"], batch, Phase())
        expected = torch_loss(state, batch, lam if number else 0.0, beta)
        assert float(value) == pytest.approx(expected, rel=1e-12), number
        assert set(buffers) == set(method.arch.buffers)


def test_every_tensor_learns_from_the_loss() -> None:
    method = make()
    for number in (0, 1):
        state, batch = begun(method, number)
        live = {name: state["model"][name] for name in method.arch.parameters}
        rest = {name: leaf for name, leaf in state["model"].items() if name not in live}
        grads, _, buffers = gradient(
            lambda t, s=state, r=rest, b=batch: method.loss(s, {**r, **t}, b, Phase()),  # type: ignore[misc]
            live,
        )
        for name in LEARNT | {f"0.{kind}" for kind in erasure.OWN} if number == 0 else grads:
            # without an activation BN_DFE undoes what a hidden layer's eraser does: only the regulariser moves that
            assert grads[name].abs().max() > 1e-9, name
        assert not any(leaf.requires_grad for leaf in buffers.values())


def test_the_regulariser_acts_from_the_second_round_on() -> None:
    ends = {lam: [run(federation(FDSE, SIZED, TRAIN, ARCH, 2, lam=lam)[0], n)[0] for n in (1, 2)] for lam in (0.0, 5.0)}
    for slot, leaves in ends[0.0][0].server.items():
        assert far(leaves, ends[5.0][0].server[slot]) < 1e-14
    assert far(ends[0.0][1].server["model"], ends[5.0][1].server["model"]) > 1e-3


def test_a_lone_image_has_no_statistics_and_trains_without_them() -> None:
    method = make(lam=5.0)
    state, batch = begun(method, 3)
    lone = {name: leaf[:1] for name, leaf in batch.items()}
    value, buffers = method.loss(state, state["model"], lone, Phase(batch_stats=False))
    logits = method.arch(state["model"], lone["x"]).logits
    assert float(value) == pytest.approx(float(F.cross_entropy(logits, lone["y"])), rel=1e-12)
    assert buffers == {}


def test_what_features_are_drawn_to_is_what_was_received_all_round_long() -> None:
    watched, steps = watching(FDSE)
    fed, watch = federation(watched, SIZED, TRAIN, ARCH, 2)
    run(fed)
    for before, _, _ in steps:
        downs = watch.downs[int(before["now"]["round"])]
        client = {6: "a", 9: "b", 12: "c"}[int(before["now"]["samples"])]
        assert equal(before["anchor"], {n: t for n, t in downs[client]["model"].items() if n in OUTER})
    first = [before for before, _, _ in steps if float(before["log"]["steps"]) == 0]
    assert len(first) == 6
    for before in first:  # also in the second round
        assert all(float(before["model"][f"{b}.tracked_steps"]) == 0 for b in BLOCKS)


# ---- the server ----------------------------------------------------------------------------------------------------------
def unit_rows(clients: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(clients, size, generator=generator, dtype=torch.float64), dim=1)


@pytest.mark.parametrize("clients", [1, 2, 3, 10, 50])
def test_attention(clients: int) -> None:
    rows = unit_rows(clients, 12)
    for tau in (1e-3, 0.01, 0.5, 3.0):
        mixing = attention(rows, tau)
        assert mixing.shape == (clients, clients)
        assert torch.allclose(mixing.sum(1), torch.ones(clients, dtype=torch.float64))
        assert (mixing >= 0).all()
        assert torch.equal(mixing.argmax(1), torch.arange(clients))  # nobody is closer to one than oneself
    assert torch.allclose(attention(rows, 1e-8), torch.eye(clients, dtype=torch.float64))
    assert torch.allclose(attention(rows, 1e8), torch.full((clients, clients), 1 / clients, dtype=torch.float64))
    assert torch.allclose(attention(rows.float(), 1e-6), torch.eye(clients))


def own_of(clients: int, seed: int = 0) -> list[Tensors]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: leaf.shape for name, leaf in make().arch.init(0).items() if name in OWN}
    return [
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()} for _ in range(clients)
    ]


def test_similarity_in_its_limits() -> None:
    own = own_of(4)
    mean = {name: torch.stack([one[name] for one in own]).mean(0) for name in OWN}
    for one, alone, everybody in zip(own, make(tau=1e-8)._mixed(own), make(tau=1e9)._mixed(own), strict=True):
        assert far(alone, one) < 1e-12
        assert far(everybody, mean) < 1e-8
    same = make(tau=0.5)._mixed([own[0]] * 4)
    assert all(far(one, own[0]) < 1e-12 for one in same)
    longer = [{name: (k + 1) * leaf for name, leaf in own[0].items()} for k in range(3)]  # values stay un-normalised
    assert all(far(one, longer[1]) < 1e-12 for one in make(tau=0.5)._mixed(longer))


def test_an_eraser_of_zeros_breaks_nothing() -> None:
    own = [{name: torch.zeros_like(leaf) for name, leaf in one.items()} for one in own_of(3)]
    assert all(not leaf.any() and leaf.isfinite().all() for one in make()._mixed(own) for leaf in one.values())
    mixed = make()._mixed([own[0], *own_of(2, seed=4)])
    assert all(leaf.isfinite().all() for one in mixed for leaf in one.values())


def aggregated(method: FDSE, ends: list[Tensors], start: Tensors) -> Tree:
    clients = tuple("abcdefgh"[: len(ends)])
    server = method.init_server({"net": start}, clients, torch.zeros(0, dtype=torch.int64))
    ups = {c: {"model": end} for c, end in zip(clients, ends, strict=True)}
    ctx = ServerContext(1, 3, len(ends), samples=torch.arange(1.0, 1 + len(ends)), seed=0)
    return method.aggregate(server, ups, ctx)[0]


def travelling(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    private = make().private(CTX)
    return {
        n: torch.randn(t.shape, generator=generator, dtype=torch.float64) if t.is_floating_point() else t + seed
        for n, t in make().arch.init(0).items()
        if n not in private
    }


def test_outer_statistics_are_a_plain_mean_and_inner_ones_stay_where_they_are() -> None:
    start = {n: t.double() if t.is_floating_point() else t for n, t in make().arch.init(3).items()}
    ends = [travelling(seed) for seed in (1, 2, 3)]
    after = aggregated(make(), ends, start)
    for name in OUTER:
        assert torch.allclose(after["model"][name], torch.stack([end[name] for end in ends]).mean(0), atol=1e-15)
    for name in COUNTERS:
        assert int(after["model"][name]) == 3
    for name in HOME:
        assert torch.equal(after["model"][name], start[name])
    assert set(after) == {"model", "own a", "own b", "own c"}
    assert not OWN & set(after["model"])


def test_equal_updates_are_the_update_and_two_meet_in_the_middle_of_their_directions() -> None:
    start = {n: t.double() if t.is_floating_point() else t for n, t in make().arch.init(3).items()}
    end = travelling(1)
    same = aggregated(make(), [end] * 3, start)
    assert far({n: same["model"][n] for n in LEARNT}, {n: end[n] for n in LEARNT}) < 1e-7
    other = {n: start[n] + 100 * (t - start[n]) if n in LEARNT else t for n, t in travelling(2).items()}
    both = aggregated(make(), [end, other], start)["model"]
    for name in LEARNT:
        moves = [point[name] - start[name] for point in (end, other)]
        norms = [move.norm() for move in moves]
        expected = sum(norms) / 2 * (moves[0] / norms[0] + moves[1] / norms[1]) / 2
        assert torch.allclose(both[name] - start[name], expected, atol=1e-5), name


def test_a_tensor_nobody_moved_stays() -> None:
    start = {n: t.double() if t.is_floating_point() else t for n, t in make().arch.init(3).items()}
    ends = [{**travelling(seed), "7.bias": start["7.bias"]} for seed in (1, 2, 3)]
    assert torch.equal(aggregated(make(), ends, start)["model"]["7.bias"], start["7.bias"])


def test_a_module_is_all_that_is_shared_or_all_that_is_ones_own_in_a_block() -> None:
    """Eq. 8 and 9: extractor and outer normalisation are one problem, eraser and inner normalisation another."""
    method = make(granularity="module")
    start = {n: t.double() if t.is_floating_point() else t for n, t in method.arch.init(3).items()}
    ends = [travelling(seed) for seed in (1, 2, 3)]

    def changed(name: str) -> set[str]:
        turned = [{**ends[0], name: start[name] - 9 * (ends[0][name] - start[name])}, *ends[1:]]
        pairs = [aggregated(method, given, start) for given in (ends, turned)]
        trees = [
            {**tree["model"], **{k: v for s in tree if s != "model" for k, v in tree[s].items()}} for tree in pairs
        ]
        return {n for n in OWN | LEARNT if not torch.allclose(trees[0][n], trees[1][n], atol=1e-9)}

    assert changed("4.dfe_norm.bias") == {"4.dfe.weight", "4.dfe_norm.weight", "4.dfe_norm.bias"}
    assert changed("4.dse_norm.bias") == {"4.dse.weight", "4.dse_norm.weight", "4.dse_norm.bias"}
    assert changed("7.bias") == {"7.bias", "7.weight"}  # the head is no block


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("relu", [False, True])
def test_without_the_papers_activation_half_of_a_block_tells_no_domain_and_the_inner_affine_does_not_learn(
    relu: bool, conv: bool
) -> None:
    """Both normalisations take a batch's statistics, so that the outer one undoes scale and shift of the inner one."""
    layer, norm = (nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)) if conv else (nn.Linear(8, 6), nn.BatchNorm1d(6))
    block = Eraser(layer, norm, expansion=2, kernel=3, relu=relu, bias=False).double().train()
    with torch.no_grad():
        for name, leaf in block.named_parameters():
            leaf.copy_(rng.normal(len(name), torch.arange(len(leaf)), leaf.shape[1:]))
    domains = [rng.normal(seed, torch.arange(40), (1, 6, 6) if conv else (8,)).double() for seed in (1, 2)]
    means = []
    for number, x in enumerate(domains):
        block.tracked_steps.zero_()
        out = block(x * (1 + number) + number)
        means.append(
            block.tracked_mean[:3].detach().clone()
        )  # of the half that reaches the outer normalisation as it is
    spread = float((means[0] - means[1]).abs().max())
    out.pow(3).mean().backward()
    slope = block.dse_norm.bias.grad
    assert slope is not None
    assert (spread < 1e-12) != relu
    if not conv:  # a padded convolution sees a shift at its border
        assert (float(slope.abs().max()) < 1e-12) != relu


@pytest.mark.parametrize("granularity", ["tensor", "layer"])
def test_granularity_says_what_is_agreed_on_together(granularity: Any) -> None:
    """Per layer, weight and bias have one mixture: what clients do with one changes where the other goes."""
    method = make(granularity=granularity)
    start = {n: t.double() if t.is_floating_point() else t for n, t in method.arch.init(3).items()}
    ends = [travelling(seed) for seed in (1, 2, 3)]
    turned = [{**ends[0], "7.bias": start["7.bias"] - 9 * (ends[0]["7.bias"] - start["7.bias"])}, *ends[1:]]
    first, second = (aggregated(method, given, start)["model"] for given in (ends, turned))
    changed = {name for name in LEARNT if not torch.allclose(first[name], second[name], atol=1e-9)}
    assert changed == ({"7.bias"} if granularity == "tensor" else {"7.bias", "7.weight"})


# ---- switches ------------------------------------------------------------------------------------------------------------
def test_each_switch_changes_its_part_and_no_other() -> None:
    start = {n: t.double() if t.is_floating_point() else t for n, t in make().arch.init(3).items()}
    ends = [travelling(seed) for seed in (1, 2, 3)]
    full, no_consensus, no_similarity, no_regulariser = (
        aggregated(make(**options), ends, start)
        for options in ({}, {"consensus": False}, {"similarity": False}, {"lam": 0.0})
    )
    shares = [1 / 6, 2 / 6, 3 / 6]
    for name in LEARNT:
        mean = sum(share * end[name] for share, end in zip(shares, ends, strict=True))
        assert torch.allclose(no_consensus["model"][name], torch.as_tensor(mean), atol=1e-14), name
        assert far({name: full["model"][name]}, {name: no_consensus["model"][name]}) > 1e-3, name
    assert equal(no_similarity["model"], full["model"])
    for client, end in zip("abc", ends, strict=True):
        slot = f"own {client}"
        assert equal(no_similarity[slot], {n: end[n] for n in no_similarity[slot]})
        assert equal(no_consensus[slot], full[slot])
        assert far(full[slot], no_similarity[slot]) > 1e-3
    assert {n: no_consensus["model"][n] for n in OUTER} == {n: pytest.approx(full["model"][n]) for n in OUTER}
    assert equal_trees(no_regulariser, full)
    assert no_regulariser.keys() == full.keys()


def test_options_of_the_network_change_the_network() -> None:
    arches = {str(o): make(**o).arch for o in ({}, {"bias": True}, {"kernel": 5}, {"expansion": 3})}
    shapes = {key: {n: t.shape for n, t in arch.init(0).items()} for key, arch in arches.items()}
    assert set(shapes[str({"bias": True})]) - set(shapes["{}"]) == {"0.bias", "0.dfe.bias", "4.bias", "4.dfe.bias"}
    assert shapes[str({"kernel": 5})]["0.dse.weight"] == (3, 1, 5, 5)
    assert shapes[str({"kernel": 5})]["4.dse.weight"] == (4, 1, 1, 1)
    assert shapes[str({"expansion": 3})]["0.dse.weight"] == (4, 1, 3, 3)


# ---- what travels --------------------------------------------------------------------------------------------------------
@cache
def alexnet(bias: bool) -> tuple[FDSE, Tree]:
    backbone = Arch.of(lambda: AlexNet().make((3, 64, 64), 10), (3, 64, 64), "alexnet")
    method = FDSE(arch=FDSE.build(backbone, {"bias": bias}), bias=bias)
    return method, {"model": method.arch.init(0)}


@pytest.mark.parametrize(("bias", "parameters"), [(True, 6_508_010), (False, 6_503_210)])
def test_alexnets_messages_have_the_bytes_of_appendix_b(bias: bool, parameters: int) -> None:
    method, model = alexnet(bias)
    server = method.init_server({"alexnet": model["model"]}, ("a", "b"), torch.zeros(0, dtype=torch.int64))
    down = method.broadcast(server, "a", CTX)
    statistics = 2 * (64 + 192 + 384 + 256 + 256 + 1024 + 1024)  # of BN_DFE
    assert float_bytes(down) == 4 * (parameters + statistics)
    private = method.private(CTX)
    local = {"model": {n: t for n, t in model["model"].items() if n in private}}
    up, kept = method.finish(method.begin(down, local), down, local)
    assert float_bytes(up) == 4 * (parameters + statistics)
    assert set(kept["model"]) == private
    gift, _ = method.settle(None, down, kept, replace(CTX, stage="final"))
    assert float_bytes(gift) == 4 * 2 * 1600  # the statistics of BN_DSE, once


def test_inner_statistics_never_travel() -> None:
    fed, watch = federation(FDSE, SIZED, TRAIN, ARCH, 2)
    state, reports = run(fed)
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client, reply in replies.items():
            for message in (downs[client], reply.up):
                assert set(message) == {"model"}
                assert set(message["model"]) == OWN | LEARNT | OUTER | COUNTERS
            assert set(reply.local["model"]) == fed.setup.method.private(CTX)
    floats = sum(t.numel() for n, t in fed.initial["net"].items() if n in OWN | LEARNT | OUTER)
    assert all(report.bytes_up == report.bytes_down == 3 * 8 * floats for report in reports)
    inner = "4.dse_norm.running_mean"
    assert torch.equal(state.server["model"][inner], fed.initial["net"][inner])
    assert len({tuple(tree["model"][inner].tolist()) for tree in state.locals.values()}) == 3


def test_a_client_gets_its_own_erasers_back() -> None:
    fed, _ = federation(FDSE, SIZED, TRAIN, ARCH, 2)
    state, _ = run(fed)
    for client in "abc":
        down = fed.setup.method.broadcast(state.server, client, CTX)["model"]
        assert equal({n: down[n] for n in state.server[f"own {client}"]}, state.server[f"own {client}"])
    assert far(state.server["own a"], state.server["own c"]) > 1e-3


# ---- unseen clients, absentees, files ------------------------------------------------------------------------------------
def test_unseen_clients_start_from_the_means_of_erasers_and_inner_statistics() -> None:
    fed, _ = federation(FDSE, make_task((6, 9, 12), unseen=2), TRAIN, ARCH, 2)
    state, _ = run(fed)
    unseen = fed.unseen(fed.deploy(state))
    assert set(unseen) == {"new0", "new1"}
    for tree in unseen.values():
        model = tree["model"]
        assert set(model) == {*fed.setup.method.arch.parameters, *fed.setup.method.arch.buffers}
        for name in OWN:
            mean = torch.stack([state.server[f"own {c}"][name] for c in "abc"]).mean(0)
            assert torch.allclose(model[name], mean, atol=1e-14), name
        for name in HOME:
            leaves = torch.stack([state.locals[c]["model"][name] for c in "abc"])
            assert torch.allclose(model[name], leaves.mean(0) if leaves.is_floating_point() else leaves.amax(0)), name
        for name in LEARNT | OUTER:
            assert torch.equal(model[name], state.server["model"][name]), name
        assert not any(model[f"{b}.{n}"].any() for b in BLOCKS for n in ("tracked_mean", "tracked_steps"))
    floats = sum(t.numel() for n, t in fed.initial["net"].items() if n in HOME and t.is_floating_point())
    assert fed.deploy(state).given_bytes == 3 * 8 * floats


def test_who_is_absent_keeps_its_erasers_and_statistics() -> None:
    fed, watch = federation(FDSE, make_task((8, 8, 8, 8)), TRAIN, ARCH, 4, participation=0.5)
    state = fed.start()
    for _ in range(4):
        before = state
        state, report = fed.step(state)
        assert report.participants == 2
        present = set(watch.downs[-1])
        for client in "abcd":
            same = equal(before.server[f"own {client}"], state.server[f"own {client}"])
            assert same == (client not in present)
            if client not in present and client in before.locals:
                assert equal_trees(before.locals[client], state.locals[client])
    assert set(state.server) == {"model", "own a", "own b", "own c", "own d"}


def test_the_server_survives_a_file(tmp_path: Path) -> None:
    fed, _ = federation(FDSE, SIZED, TRAIN, ARCH, 3)
    half, _ = run(fed, 2)
    kept = copy.deepcopy(half.server)
    save(tmp_path / "state", half.trees())
    trees, _ = load(tmp_path / "state")
    assert equal_trees(trees["server"], kept)
    assert [list(leaves) for leaves in trees["server"].values()] == [list(leaves) for leaves in kept.values()]
    resumed, _ = fed.step(State.of(trees, 2, DOUBLE.device))
    whole, _ = fed.step(half)
    assert equal_trees(resumed.server, whole.server)
    assert all(equal_trees(resumed.locals[c], whole.locals[c]) for c in "abc")


# ---- settings ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expansion": 1}, "expansion must be at least 2, not 1"),
        ({"expansion": 0}, "expansion must be at least 2, not 0"),
        ({"kernel": 2}, "kernel must be odd and positive, not 2"),
        ({"kernel": -1}, "kernel must be odd and positive, not -1"),
        ({"tau": 0.0}, "tau must be positive, not 0"),
        ({"tau": -1.0}, "tau must be positive, not -1"),
        ({"lam": -1.0}, "lam must not be negative, not -1"),
        ({"lam": float("nan")}, "lam must not be negative, not nan"),
        ({"granularity": "channel"}, "granularity = 'channel' is not valid"),
        ({"start": "zero"}, "start = 'zero' is not valid"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any], said: str) -> None:
    sentence = refusal(METHODS, "method", "fdse", options, arch=ARCH, train=TRAIN)
    assert sentence.startswith("method 'fdse': ")
    assert said in sentence
    assert "\n" not in sentence
    spec = MethodSpec.model_validate({"name": "fdse", **options})
    experiment = Experiment.model_validate({"model": {"name": "cnn", "norm": True}})
    with pytest.raises(UserError) as error:  # and before the network is built
        make_setup(experiment, spec, SIZED)
    assert str(error.value) == sentence


def test_settings_reach_the_network_as_the_types_they_have() -> None:
    """Types are strict: a whole number is not written 3.0."""
    experiment = Experiment.model_validate({"model": {"name": "cnn", "norm": True}})
    with pytest.raises(
        UserError, match=r"^method 'fdse': expansion = 3.0 is not valid: input should be a valid integer"
    ):
        make_setup(experiment, MethodSpec.model_validate({"name": "fdse", "expansion": 3.0}), SIZED)
    spec = MethodSpec.model_validate({"name": "fdse", "expansion": 3, "kernel": 5})
    method: Method = make_setup(experiment, spec, SIZED).method
    assert isinstance(method, FDSE)
    assert (method.expansion, method.kernel) == (3, 5)
    assert method.arch.init(0)["body.0.dse.weight"].shape == (22, 1, 5, 5)


def test_a_network_without_batch_norm_is_refused_in_a_sentence() -> None:
    method = FDSE(arch=FDSE.build(PLAIN, {}), train=TRAIN)
    with pytest.raises(UserError, match=r"^method 'fdse' needs domain-shift erasers.* model 'plain' does not have$"):
        check_method("fdse", method)


def test_the_outer_statistics_are_those_the_regulariser_uses() -> None:
    assert {name.removeprefix("dfe_norm.") for name in erasure.ANCHORS} == {"running_mean", "running_var"}
    watched, steps = watching(FDSE)
    run(federation(watched, SIZED, replace(TRAIN, local_epochs=1), ARCH, 1)[0])
    assert all(set(before["anchor"]) == OUTER for before, _, _ in steps)
