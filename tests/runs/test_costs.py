"""The cost ledger: every number against a count by hand, through interruptions, and as people see it."""

from __future__ import annotations

import io
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fedshift import Arch, Experiment
from fedshift.core.registry import METHODS
from fedshift.core.tree import float_bytes
from fedshift.data.task import Task
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import MethodSpec
from fedshift.models.alexnet import AlexNet
from fedshift.results.collect import collect
from fedshift.results.cost_table import costs_table
from fedshift.results.result import Result, Row
from fedshift.runs.flops import _with_flops, count, tally
from fedshift.runs.memory import memory_so_far, resident_peak
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task
from fedshift.store.costs import Costs, measured
from fedshift.store.found import find_runs
from fedshift.store.lines import History
from fedshift.store.seal import SEAL
from tests.conftest import ragged_task, some_of
from tests.runs.test_run import POOL, command, go, lines, tiny

RAGGED = (33, 7, 1, 20, 40)  # samples of the clients; a batch has eight
BATCH, EPOCHS = 8, 2
TRAIN = {"lr": 0.1, "batch-size": BATCH, "local-epochs": EPOCHS}
ALEXNET = 12_974_154  # parameters for ten classes, as in FDSE's Table 4
NORMALISED = 64 + 192 + 384 + 256 + 256 + 1024 + 1024  # channels that AlexNet's BatchNorms see


def session_of(
    method: str = "fedavg",
    network: nn.Module | Callable[[], nn.Module] | None = None,
    task: Task | None = None,
    rounds: int = 3,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Session:
    experiment = tiny(**{"train": TRAIN, **changes})
    task = task or ragged_task(RAGGED)
    setup = make_setup(experiment, MethodSpec.model_validate({"name": method, **(options or {})}), task, network)
    return Session(setup, task, Sequential(), Compute(), 0, rounds)


def counted(method: str = "fedavg", network: Any = None, rounds: int = 3, **more: Any) -> Costs:
    costs = count(session_of(method, network, rounds=rounds, **more), rounds)
    assert costs.notes == ()
    return costs


# ---- sizes ----------------------------------------------------------------------------------------------------------------
def alexnet(method: str, **more: Any) -> Session:
    return session_of(method, task=ragged_task((4, 3), side=64, classes=10), model={"name": "alexnet"}, **more)


def test_alexnet_has_the_published_size() -> None:
    costs = count(alexnet("fedbn"), 1)
    assert costs.parameters == ALEXNET
    counters = 7 * 8  # num_batches_tracked of seven layers
    assert costs.bytes_network == 4 * (ALEXNET + 2 * NORMALISED) + counters
    assert round(costs.bytes_network / 2**20, 2) == 49.52
    assert NORMALISED == 3200


def test_fdse_has_the_published_size() -> None:
    fed = alexnet("fdse", options={"bias": True})
    costs = count(fed, 1)
    assert costs.parameters == 6_508_010
    (tensors,) = fed.initial.values()
    tracked = {"t": {name: leaf for name, leaf in tensors.items() if "tracked_" in name}}  # for its regulariser
    assert round((costs.bytes_network - float_bytes(tracked)) / 2**20, 2) == 24.86  # type: ignore[operator]


@pytest.mark.parametrize(("method", "multiply_adds"), [("fedbn", 4.41e10), ("fdse", 2.24e10)])
def test_a_forward_pass_takes_the_published_flops(method: str, multiply_adds: float) -> None:
    """FDSE's Table 4: 50 images of 256 pixels; theirs count a little more than products and convolutions."""
    shape = (3, 256, 256)
    arch = METHODS[method].make.build(Arch.of(lambda: AlexNet().make(shape, 10), shape), {})
    tensors = {name: leaf.to("meta") for name, leaf in arch.init(0).items()}
    with torch.no_grad():
        _, took = tally(lambda: arch(tensors, torch.zeros(50, *shape, device="meta")))
    assert took.flops / 2 == pytest.approx(multiply_adds, rel=0.015)
    assert took.flops / 2 < multiply_adds


def test_clients_with_different_networks_count_in_the_mean() -> None:
    """Three clients have the first network, two the second."""
    models = [{"name": "mlp", "hidden": [4]}, {"name": "mlp", "hidden": [10]}]
    costs = counted("local", model=models)
    sizes = [192 * n + n + n * 4 + 4 for n in (4, 10)]
    assert costs.parameters == pytest.approx((3 * sizes[0] + 2 * sizes[1]) / 5)
    single = [counted("local", model=model) for model in models]
    assert single[0].flops_round != single[1].flops_round
    assert costs.flops_step == single[1].flops_step
    assert costs.memory_step == single[1].memory_step


# ---- FLOPs ----------------------------------------------------------------------------------------------------------------
def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))


def hidden() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, 4))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 4))


def grouped() -> nn.Module:
    first, second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, padding=1, groups=4)
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(8 * 64, 4))


LAYERS: dict[Callable[[], nn.Module], tuple[int, ...]] = {  # multiply-adds of the layers for one image
    linear: (192 * 4,),
    hidden: (192 * 6, 6 * 4),
    convolution: (16 * 5 * 27, 80 * 4),
    grouped: (64 * 4 * 3, 64 * 8 * 9, 512 * 4),
}


@pytest.mark.parametrize("network", LAYERS, ids=lambda network: network.__name__)
def test_flops_by_hand(network: Callable[[], nn.Module]) -> None:
    """Forward, weights' gradients, inputs' gradients; nobody needs the gradient of the images."""
    layers = LAYERS[network]
    image = 2 * (3 * sum(layers) - layers[0])
    costs = counted(network=network)
    assert costs.flops_step == BATCH * image
    assert costs.steps == {"model/train": BATCH * image}
    assert costs.flops_round == image * EPOCHS * sum(RAGGED) / len(RAGGED)
    assert costs.flops_end == 0


def test_frozen_layers_and_cached_features_are_cheaper() -> None:
    body, head = LAYERS[hidden]
    whole, images = 2 * (2 * body + 3 * head), sum(RAGGED) / len(RAGGED)
    rep = counted("fedrep", hidden)
    assert rep.steps == {"model/head": BATCH * 2 * (body + 2 * head), "model/body": BATCH * 2 * (2 * body + 2 * head)}
    the = counted("fedthe", hidden, options={"personal-epochs": 3})
    once = 2 * body + 3 * 2 * 2 * head  # features once, then the head on them
    assert the.steps == {
        "model/generic": BATCH * whole,
        "personal/personal": BATCH * 4 * head,
        "personal/descriptor": 0,
    }
    assert the.flops_step == BATCH * whole
    assert the.flops_round == pytest.approx(images * (EPOCHS * whole + once))
    assert the.flops_end == pytest.approx(images * once)
    assert counted("ditto", hidden).flops_round == 2 * counted(network=hidden).flops_round  # type: ignore[operator]
    assert counted("finetune", hidden).flops_end == counted(network=hidden).flops_round


def test_the_mean_over_rounds_of_different_kinds() -> None:
    """FedICON: two views and their similarities in the experiment's rounds, then a head on features."""
    body, head = LAYERS[hidden]
    options = {"head-rounds": 5, "head-epochs": 3}
    costs = count(session_of("fedicon", hidden, options=options), rounds := 3 + 5)
    step = 2 * BATCH * 2 * 2 * body + 3 * 2 * (2 * BATCH) ** 2 * 6
    assert costs.steps == {"model/contrastive": step, "model/head": BATCH * 4 * head, "model/descriptor": 0}
    images = sum(RAGGED) / len(RAGGED)
    contrast, later = EPOCHS * step / BATCH, 2 * body + 3 * 4 * head
    assert costs.flops_round == pytest.approx(images * (3 * contrast + 5 * later) / rounds)


def test_no_rounds_have_no_flops() -> None:
    costs = counted(network=hidden, rounds=0)
    assert (costs.flops_step, costs.flops_round, costs.memory_step) == (None, None, None)
    assert costs.parameters == 192 * 6 + 6 + 6 * 4 + 4


@pytest.mark.parametrize("method", some_of(sorted(METHODS)))
def test_every_method_is_counted_without_computing(method: str) -> None:
    experiment = tiny(split={"public": 0.1})
    task = make_task(experiment, 0, POOL)
    fed = session_of(method, task=task, model={"name": "cnn", "width": 2, "hidden": 6, "norm": True})
    meta, real = (_with_flops(Costs(), fed, 3, Compute(torch.device(device))) for device in ("meta", "cpu"))
    assert meta.flops_round is not None
    assert (meta.flops_round > 0) == (method != "majority")  # which trains nothing
    assert (meta.steps, meta.flops_round, meta.flops_end) == (real.steps, real.flops_round, real.flops_end)
    assert meta.flops_server == real.flops_server
    assert meta.flops_server is not None
    assert meta.memory_step == pytest.approx(real.memory_step, rel=0.02)


@pytest.mark.parametrize(("method", "gaussians"), [("fedgen", 0), ("fedcir", 1000)])
def test_the_servers_own_training_by_hand(method: str, gaussians: int) -> None:
    """Five steps of a generator on everybody's heads, and for FedCiR what its Gaussians are fitted to."""
    fed = session_of(method, hidden)
    size, classes, batch, heads = 6, 4, 32, len(RAGGED)
    inner, outer = (classes + size) * 8 * size, 8 * size * size
    step = 2 * batch * (2 * inner + 3 * outer + 2 * heads * classes * size)
    assert count(fed, 3).flops_server == 5 * step + gaussians * classes * 2 * (inner + outer)
    assert counted("fedavg", hidden).flops_server == 0
    few = Session(fed.setup, fed.task, Sequential(), Compute(), 0, 3, participation=0.4)
    less = 2 * batch * 2 * (heads - 2) * classes * size  # heads that did not come up
    assert count(few, 3).flops_server == count(fed, 3).flops_server - 5 * less  # type: ignore[operator]


class Curious(nn.Module):
    """Looks at numbers, which tensors without any cannot answer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hidden()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x if float(x.sum()) > -1e9 else -x)
        return result


def test_a_network_that_looks_at_numbers_is_counted_for_real() -> None:
    assert counted(network=Curious).flops_round == counted(network=hidden).flops_round


class Shy(nn.Module):
    """Does not work while it is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hidden()

    def forward(self, x: Tensor) -> Tensor:
        if _get_current_dispatch_mode() is not None:
            raise ValueError("not while [you] watch\nand so on")
        result: Tensor = self.inner(x)
        return result


def test_what_cannot_be_counted_leaves_an_empty_cell_and_a_note(tmp_path: Path) -> None:
    result = go(tiny(seeds=[0, 1]), tmp_path, network=Shy)
    (row,) = result.rows
    assert not {"flops-step", "flops-round", "memory-step"} & set(row.cost)
    assert (row.cost["parameters"], row.cost["bytes-up"]) == (192 * 6 + 6 + 6 * 4 + 4, 4 * (192 * 6 + 6 + 6 * 4 + 4))
    reason = "FLOPs and memory of a step could not be counted (ValueError: not while [you] watch)"
    assert [note for note in result.notes if note not in result.trouble] == [f"fedavg: {reason}"]
    stored = json.loads((result.folders[0] / "costs.json").read_text())
    assert (stored["flops-step"], stored["notes"]) == (None, [reason])
    shown = {str(column.header): list(map(str, column.cells)) for column in result.costs_table().columns}
    assert shown["step\nGFLOPs"] == shown["round\nGFLOPs"] == [""]
    assert shown["para-\nmeters"] == ["1.186k"]


# ---- bytes ----------------------------------------------------------------------------------------------------------------
BODY, NORM, HEAD, FEATURES = 192 * 4, 4 * 4, 4 * 3 + 3, 4  # NORM: scale, shift, mean and variance
P = BODY + NORM + HEAD
TRAVELS: dict[str, tuple[int, int | None]] = {  # floats each way, and given away at the end
    "fedavg": (P, 0),
    "scaffold": (2 * P - NORM // 2, 0),  # statistics have no control variate
    "fedbn": (P - NORM, NORM),
    "fedper": (P - HEAD, HEAD),
    "fedrep": (P - HEAD, None),
    "lg-fedavg": (HEAD, 0),
    "ditto": (P, 0),
    "fedrod": (P, 0),
    "apfl": (P, 0),
    "fedthe": (P + FEATURES, FEATURES),
    "local": (0, 0),
}


def test_bytes_are_those_of_appendix_b(tmp_path: Path) -> None:
    methods = [{"name": name} for name in TRAVELS]
    model = {"name": "mlp", "hidden": [4], "norm": True}
    result = go(tiny(method=methods, model=model, participation=0.5, rounds=3), tmp_path)
    for row in result.rows:
        floats, once = TRAVELS[row.method]
        assert (row.cost["bytes-up"], row.cost["bytes-down"]) == (4 * floats, 4 * floats), row.method
        assert once is None or row.cost["bytes-published"] == 4 * once, row.method  # each client takes part once
        assert row.cost["parameters"] == P - NORM // 2
        assert row.cost["bytes-network"] == 4 * P + 8  # and a counter of batches


def test_the_bytes_of_alexnet() -> None:
    for method, floats in (("fedavg", ALEXNET + 2 * NORMALISED), ("fedbn", ALEXNET - 2 * NORMALISED)):
        fed = alexnet(method)
        down = fed.setup.method.broadcast(fed.start().server, fed.task.clients[0].name, fed.context(0))
        assert float_bytes(down) == 4 * floats


def test_a_resumed_run_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small() -> Experiment:
        return tiny(rounds=5, participation=0.5, method=[{"name": "scaffold"}], **{"checkpoint-every": 2})

    step = Session.step

    def stops(self: Session, state: Any) -> Any:
        if state.round == 3:
            raise KeyboardInterrupt
        return step(self, state)

    monkeypatch.setattr(Session, "step", stops)
    with pytest.raises(KeyboardInterrupt):
        go(small(), tmp_path / "halved")
    monkeypatch.setattr(Session, "step", step)
    assert not list((tmp_path / "halved").rglob("costs.json"))
    halved, whole = go(small(), tmp_path / "halved", resume=True), go(small(), tmp_path / "whole")
    rounds = [line for line in lines(halved.folders[0] / "metrics.jsonl") if "bytes-up" in line]
    assert [line["round"] for line in rounds] == [1, 2, 3, 4, 5]
    local, theirs = halved.rows[0].cost, whole.rows[0].cost
    assert set(local) - {"memory-grown"} == set(theirs) - {"memory-grown"}
    for key in set(theirs) - {"seconds-per-round", "memory-grown", "memory-step"}:
        assert local[key] == theirs[key], key
    assert local["seconds-per-round"] == statistics.median(line["seconds"] for line in rounds[1:])


# ---- seconds and memory ---------------------------------------------------------------------------------------------------
def test_seconds_are_a_median_without_the_first_round() -> None:
    def of(*seconds: float) -> float | None:
        rounds = [{"round": 1, "participants": 1, "bytes-up": 1, "bytes-down": 1, "seconds": s} for s in seconds]
        return measured(Costs(), History.of([*rounds, {"round": 1, "seconds": 99.0}]).rounds, None).seconds_per_round

    assert (of(9, 1, 2, 4), of(9), of(9, 3), of()) == (2, 9, 3, None)


def test_tensors_alive_at_once() -> None:
    x = torch.rand(1000)
    with torch.no_grad():
        assert tally(lambda: x.exp().exp().exp(), {"x": {"x": x}})[1].memory == 3 * 4000  # two at a time, and x
    live = x.requires_grad_()
    # the three results wait for the backward pass, which makes one gradient more while it reads another
    _, took = tally(lambda: torch.autograd.grad(live.exp().exp().exp().sum(), live), {"x": {"x": live}})
    assert 4 * 4000 < took.memory <= 6 * 4000 + 100
    assert tally(lambda: x.view(10, 100).t(), {"x": {"x": x}})[1].memory == 4000  # views are free


def test_memory_grows_with_the_network_and_what_a_method_holds() -> None:
    small, large = (counted(network=None, model={"name": "mlp", "hidden": [n]}).memory_step for n in (4, 400))
    held = 4 * (192 * 400 + 400 + 400 * 4 + 4)
    assert small is not None
    assert large is not None
    assert large > 3 * held > small > 0  # the model, its gradient and the next model
    wide = {"name": "mlp", "hidden": [400]}
    both = counted("ditto", model=wide).memory_step
    assert both is not None
    assert both > large + held  # a second model, and what the first one was


GROWTH = """
import sys, torch
from fedshift import Experiment, run
from fedshift.runs.memory import memory_so_far, resident_peak
before = resident_peak()
large = torch.ones(1 << 26)
grown = memory_so_far(torch.device("cpu"), before)["memory-grown"]
assert (1 << 27) < grown < (1 << 29), grown
small = Experiment(rounds=1, baselines=False, data={"size": 8}, model={"name": "mlp", "hidden": [4096, 1024]})
cost = run(small, out=sys.argv[1], engine="sequential").rows[0].cost
assert cost["seconds-per-round"] > 0 and cost["memory-step"] > 0 and cost["memory-grown"] > 1 << 20, cost
print("measured")
"""


@pytest.mark.system
def test_a_process_sees_its_own_growth(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("measured\n"), done.stderr


def test_what_did_not_grow_is_not_known() -> None:
    cpu = torch.device("cpu")
    peak = resident_peak()
    assert peak is not None
    assert memory_so_far(cpu, peak + (1 << 40)) == {}
    assert memory_so_far(cpu, None) == {}
    assert memory_so_far(cpu, 0)["memory-grown"] >= peak


def test_other_processes_are_not_measured(tmp_path: Path) -> None:
    result = go(tiny(rounds=1), tmp_path, engine="parallel")
    assert all("memory-grown" not in line for line in lines(result.folders[0] / "metrics.jsonl"))
    assert result.rows[0].cost["memory-step"] > 0


# ---- on disk and on the screen --------------------------------------------------------------------------------------------
def test_the_ledger_is_written_once_and_read_back(tmp_path: Path) -> None:
    experiment = tiny(method=[{"name": "fedbn", "adapters": ["none", "tent"]}], model={"name": "cnn", "norm": True})
    result = go(experiment, tmp_path)
    path = result.folders[0] / "costs.json"
    stored = {key: value for key, value in json.loads(path.read_text()).items() if key != SEAL}
    costs = Costs.of(stored)
    assert costs.as_dict() == {**stored, "notes": ()}
    assert all(row.cost == costs.numbers() for row in result.rows)  # adapters share their method's
    assert {row["flops-round"] for row in result.as_dicts()} == {costs.flops_round}
    written = path.stat().st_mtime_ns
    assert go(experiment, tmp_path).rows[0].cost == result.rows[0].cost
    assert path.stat().st_mtime_ns == written
    path.unlink()  # a run of an earlier version
    (row, _) = collect(find_runs(tmp_path)).rows
    assert row.cost["bytes-up"] == costs.bytes_up
    assert "parameters" not in row.cost
    assert go(experiment, tmp_path).rows[0].cost["flops-round"] == costs.flops_round


def test_seeds_are_averaged(tmp_path: Path) -> None:
    result = go(tiny(seeds=[0, 1, 2]), tmp_path)
    each = [json.loads((folder / "costs.json").read_text()) for folder in result.folders]
    seconds = [costs["seconds-per-round"] for costs in each]
    assert result.rows[0].cost["seconds-per-round"] == pytest.approx(sum(seconds) / 3)


LARGE = {
    "parameters": 86_567_656.0, "bytes-network": 346_270_624.0, "bytes-up": 692_541_248.0, "bytes-down": 692_541_248.0,
    "bytes-published": 153_000.0, "flops-step": 1.2345e12, "flops-round": 9.8765e14, "seconds-per-round": 123.4,
    "memory-step": 9.87e9, "memory-peak": 9.87e10,
}  # fmt: skip
TINY = {key: value / 1e6 for key, value in LARGE.items()}


def printed(table: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("costs", [LARGE, TINY, {}], ids=["large", "tiny", "none"])
def test_the_table_fits_a_terminal(costs: dict[str, float]) -> None:
    names = ["finetune-rotation", "FedAvg + balanced fine-tuning"]
    shown = printed(costs_table([((name,), costs) for name in names], ("method",)), 100)
    assert max(map(len, shown)) <= 100
    assert not any("…" in line for line in shown)
    assert shown[0].strip() == "Costs"
    assert all(len(line) == len(shown[1]) for line in shown[2:6])
    assert "finetune" in shown[5]  # a long name folds, numbers stay whole


def test_a_row_for_every_method_and_point() -> None:
    rows = [Row(m, a, (("train.lr", lr),), (0,), {}, LARGE) for m in ("a", "b") for lr in (1, 2) for a in ("none", "x")]
    table = Result(tuple(rows), ()).costs_table()
    cells = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    assert (cells["method"], cells["train.lr"]) == (["a", "a", "b", "b"], ["1", "2", "1", "2"])
    assert cells["para-\nmeters"] == ["86.57M"] * 4
    assert cells["up\nMiB"] == ["660"] * 4
    assert cells["step\nGFLOPs"] == ["1,234"] * 4
    assert cells["once\nMiB"] == ["0.146"] * 4
    plain = Result((Row("a", "none", (), (0,), {}, {"bytes-published": 0.0}),), ()).costs_table()
    assert not {"once\nMiB", "peak\nMiB"} & {str(column.header) for column in plain.columns}
    assert "Once" not in str(plain.caption)


FILE = """
name = "ledger"
rounds = 1
baselines = false
[data]
size = 8
[model]
name = "mlp"
hidden = [4]
[[method]]
name = "fedper"
adapters = ["none", { name = "tent", params = "all" }]
"""


def test_run_and_show_print_the_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger.toml").write_text(FILE)
    out = tmp_path / "runs"
    said = command(monkeypatch, capsys, "run", tmp_path / "ledger.toml", "--out", out, "--engine", "sequential")
    shown = command(monkeypatch, capsys, "show", out)
    for text in (said, shown):
        ledger = re.split("The same client mean|Notes:|What to deploy", text[text.index("Costs") :])[0]
        assert ledger.count("fedper") == 1  # adapters share it
        for words in ("meters", "GFLOPs: 2 per multiply-add", "Up, down:", "Once:", "Round s:", "Step MiB:"):
            assert words in ledger, words
    rows = json.loads(command(monkeypatch, capsys, "show", out, "--format", "json"))
    assert {row["parameters"] for row in rows} == {192 * 4 + 4 + 4 * 10 + 10}
    assert all(row["bytes-published"] == 4 * (4 * 10 + 10) for row in rows)
