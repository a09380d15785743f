"""Whole experiments on tiny data: what is on disk, what the numbers mean, and that a user's own parts fit in."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedshift
from fedshift import Arch, Experiment, Method, Pool, Result, UserError, cli, run
from fedshift.core.compatibility import missing_for_method
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tree
from fedshift.doctor import EXTRAS
from fedshift.engines.base import Compute, Score
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import MethodSpec
from fedshift.models.mlp import MLP
from fedshift.runs import evaluate
from fedshift.runs.measuring import measured
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task, split_as_own
from fedshift.store.summary import mean_and_std, summarise
from fedshift.store.toml import toml_text
from fedshift.store.trees import load
from tests.conftest import ragged_task, some_of

SIZES = {"north": 25, "south": 40, "east": 60, "west": 95}
BOTH = [{"name": "original", "kind": "original"}, {"name": "corrupted", "kind": "corrupted"}]
BYTES = 4  # of a float32


def noisy_pool() -> Pool:
    """Four domains of different size, three classes that can be learnt, some labels that cannot."""
    rng = np.random.default_rng(0)
    domains = [name for name, count in SIZES.items() for _ in range(count)]
    truth = [i % 3 for count in SIZES.values() for i in range(count)]
    shapes = rng.normal(0, 12, (3, 3, 8, 8))
    tints = dict(zip(SIZES, rng.normal(0, 40, (4, 3, 1, 1)), strict=True))
    means = np.stack([128 + shapes[y] + tints[d] for y, d in zip(truth, domains, strict=True)])
    images = np.clip(means + rng.normal(0, 60, means.shape), 0, 255).astype(np.uint8)
    labels = [int(rng.integers(3)) if rng.random() < 0.2 else y for y in truth]
    return fedshift.from_arrays(images, labels, domains=domains)


POOL = noisy_pool()


def tiny(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "name": "tiny", "rounds": 2, "baselines": False, "model": {"name": "mlp", "hidden": [4]},
        "train": {"lr": 0.1, "batch-size": 16, "momentum": 0.9}, "evaluate": {"every": 1, "oracle": True},
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


def go(experiment: Experiment, out: Path, **more: Any) -> Result:
    return run(experiment, out, **{"engine": "sequential", "data": POOL, **more})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command prints; it must end well."""
    monkeypatch.setattr(sys, "argv", ["fedshift", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


# ---- on disk ------------------------------------------------------------------------------------------------------------
def test_the_folder_of_a_run(tmp_path: Path) -> None:
    methods = [{"name": "fedbn", "label": "FedBN (ours)", "adapters": ["none", {"name": "tent", "lr": 0.01}]}]
    experiment = tiny(
        rounds=3, seeds=[4], method=methods, stream=BOTH, split={"train": 0.5, "val": 0.25, "test": 0.25},
        model={"name": "mlp", "hidden": [4], "norm": True},
    )  # fmt: skip
    (folder,) = go(experiment, tmp_path).folders
    assert folder.parent == tmp_path / "tiny" / "FedBN (ours)"
    assert folder.name.startswith("4-")
    assert len(folder.name) == len("4-") + 8
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(
        ["config.toml", "metrics.jsonl", "ckpt-000003.safetensors", "best.safetensors", "done", "costs.json",
         "snapshot.safetensors", "artefacts/complete",
         *(name.format(label) for label in ("none", "tent lr=0.01")
           for name in ("adapters/{}.jsonl", "twins/{}.jsonl", "predictions/{}.parquet")),
         *(f"artefacts/{name}/{file}" for name in SIZES
           for file in ("config.toml", "model.safetensors")),
         "artefacts/west/known.safetensors"]  # the others have too few validation images to say what is usual
    )  # fmt: skip
    task = make_task(experiment, 4, POOL)
    config = tomllib.loads((folder / "config.toml").read_text())
    assert tomllib.loads(toml_text(config)) == config
    assert (config["seed"], config["rounds"], config["task-hash"]) == (4, 3, task.hash)
    assert (config["method"]["name"], config["method"]["label"]) == ("fedbn", "FedBN (ours)")
    again = Experiment.parse(
        {key: config[key] for key in ("rounds", "split", "model", "train", "stream", "evaluate", "data")}
    )
    for part in ("rounds", "split", "model", "train", "stream", "evaluate", "data"):
        assert getattr(again, part) == getattr(split_as_own(experiment, POOL), part), part
    done = json.loads((folder / "done").read_text())
    assert done["fedshift"] == fedshift.__version__
    assert (done["torch"], done["task-hash"]) == (torch.__version__, task.hash)
    assert (done["seed"], done["rounds"], done["device"]) == (4, 3, "cpu")
    rounds = [line for line in lines(folder / "metrics.jsonl") if "train/loss" in line]
    assert [line["round"] for line in rounds] == [1, 2, 3]
    for line in rounds:
        assert {"participants", "diverged", "bytes-down", "bytes-up", "seconds"} < set(line)
        assert (line["participants"], line["diverged"]) == (4, [])
        assert line["train/loss"] > 0
    scored = [line for line in lines(folder / "metrics.jsonl") if "personal/val/clients" in line]
    assert [line["round"] for line in scored] == [1, 2, 3]
    assert all({"personal/original/clients", "personal/corrupted/clients"} < set(line) for line in scored)
    trees, facts = load(folder / "ckpt-000003.safetensors")
    assert facts["round"] == 3
    assert set(trees) == {"server", *(f"client {name}" for name in SIZES)}
    for name, options in (("none", {}), ("tent lr=0.01", {"lr": 0.01})):
        rows = lines(folder / "adapters" / f"{name}.jsonl")
        metrics = [f"personal/{stream}/clients" for stream in ("original", "corrupted")]
        assert [(row["selection"], row["metric"]) for row in rows] == [
            (rule, metric) for rule in ("last", "best-val") for metric in metrics
        ]
        assert all(row["options"] == options for row in rows)
        assert all(list(row["by-client"]) == sorted(SIZES) for row in rows)


TOML = {
    "nested": {"a": 1, "b": {"c": {"d": [1, 2.5, "x"]}}, "m": [{"n": 1, "o": {"p": True}, "q": [{"r": 1}]}, {"n": 2}]},
    "numbers": {"small": 1e-05, "large": 1e22, "negative": -0.0, "infinite": math.inf, "yes": True, "no": False},
    "words": {"quote": 'a "b" \\ c', "lines": "a\nb\tc", "empty": "", "umlaut": "Größe", "control": "\x01\x1f\x7f"},
    "lists": {"none": [], "deep": [[1], [2, 3]], "mixed": [{"a": [1]}]},
    "keys": {"a.b": 1, "with space": 2, "": 3, "model.hidden": {"x": 1}},
    "beyond the first plane": {"label": "𝛼 = 0.1 😀"},
    "foreign keys": {"networks": {"réseau": [1]}},
}  # fmt: skip


@pytest.mark.parametrize("case", TOML)
def test_toml_is_read_back_as_it_was(case: str) -> None:
    assert tomllib.loads(toml_text(TOML[case])) == TOML[case]


@pytest.mark.parametrize("label", ["𝛼 = 0.1", "a/b", "../../elsewhere", "a: b?", " ", "."])
def test_any_label_works_or_is_refused_and_stays_inside_the_folder(label: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with contextlib.suppress(UserError):
        result = go(tiny(rounds=1, method=[{"name": "fedavg", "label": label}]), out)
        assert [row.method for row in result.rows] == [label]
        assert all(out.resolve() / "tiny" in folder.resolve().parents for folder in result.folders)
        return
    assert not list(tmp_path.rglob("done"))  # refused before it was run, not after


# ---- what the numbers mean ----------------------------------------------------------------------------------------------
def by_hand(counts: Mapping[str, list[float]]) -> dict[str, float]:
    accuracies = sorted(100 * correct / samples for samples, correct, *_ in counts.values())
    samples = sum(n for n, *_ in counts.values())
    worst = accuracies[: max(1, len(accuracies) // 10)]
    return {
        "client_mean": statistics.mean(accuracies),
        "pooled": 100 * sum(correct for _, correct, *_ in counts.values()) / samples,
        "std": statistics.pstdev(accuracies),
        "worst10": statistics.mean(worst),
        "loss": sum(loss for _, _, loss, *_ in counts.values()) / samples,
    }


def test_client_mean_pooled_std_and_worst_tenth_from_the_counts(tmp_path: Path) -> None:
    result = go(
        tiny(stream=BOTH, method=[{"name": "fedavg", "adapters": ["none", {"name": "tent", "params": "all"}]}]),
        tmp_path,
    )
    task = make_task(tiny(stream=BOTH), 0, POOL)
    for row in result.rows:
        for (rule, metric), (numbers,) in row.values.items():
            if rule == "oracle":
                continue
            counts, summary = numbers.by_client, numbers.summary
            assert {name: own.samples for name, own in counts.items()} == {c.name: len(c.test) for c in task.clients}
            for part, value in by_hand(counts).items():
                found = getattr(summary, part)
                assert found == pytest.approx(value, abs=1e-3 if part == "loss" else 1e-9), (metric, part)
                assert row.number(metric, rule, part) == (pytest.approx(found), 0.0)
            assert summary.clients == 4
            assert abs(summary.client_mean - summary.pooled) > 1e-3  # clients differ in size: two different numbers
    first = result.rows[0]
    assert result.accuracy("fedavg") == first.scores("global/original/clients")[0].summary.client_mean
    assert result.accuracy("fedavg", "tent params=all", "corrupted", "last") == (
        result.rows[1].scores("global/corrupted/clients", "last")[0].summary.client_mean
    )
    with pytest.raises(UserError, match="no result of method 'fedavg' with adapter 't3a' on stream 'original'"):
        result.accuracy("fedavg", "t3a")


def test_the_counts_are_those_of_the_saved_model(tmp_path: Path) -> None:
    (folder,) = go(tiny(stream=BOTH), tmp_path).folders
    task = make_task(tiny(stream=BOTH), 0, POOL)
    module = MLP(hidden=(4,)).make((3, 8, 8), 3).eval()
    module.load_state_dict(load(folder / "ckpt-000002.safetensors")[0]["server"]["model"])
    for row in lines(folder / "adapters" / "none.jsonl")[:2]:
        stream = row["metric"].split("/")[1]
        for client in task.clients:
            samples = task.samples(client, stream)
            with torch.no_grad():
                logits = module((samples.images[samples.index].float() / 255 - 0.5) / 0.5)
            labels = samples.labels[samples.index]
            loss = float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            expected = [len(labels), int((logits.argmax(1) == labels).sum()), pytest.approx(loss, abs=1e-3)]
            assert row["by-client"][client.name] == expected


def test_the_worst_tenth_of_many_clients() -> None:
    scores = {f"c{i:02d}": Score(10 + i, 1 + (7 * i) % 10, 1.0) for i in range(25)}
    summary = summarise(scores)
    expected = by_hand({name: [s.samples, s.correct, s.loss] for name, s in scores.items()})
    for part, value in expected.items():
        assert getattr(summary, part) == pytest.approx(value)
    lowest = sorted(s.accuracy for s in scores.values())
    assert summary.worst10 == pytest.approx(50 * (lowest[0] + lowest[1]))  # two of twenty-five
    lost = summarise({**scores, "empty": Score(0, 0, 0.0)})
    assert lost == summary  # a client without samples has no accuracy
    assert mean_and_std([5.0]) == (5.0, 0.0)
    assert mean_and_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(statistics.stdev([1, 2, 6])))


def test_three_selection_rules(tmp_path: Path) -> None:
    """On many seeds, so that rounds really differ and pooled and mean accuracy do not always agree."""
    methods = [{"name": "fedavg", "adapters": ["none", {"name": "tent", "params": "all"}]}]
    experiment = tiny(
        rounds=7, seeds=list(range(8)), method=methods, train={"lr": 0.5, "batch-size": 8, "momentum": 0.9}
    )
    result = go(experiment, tmp_path)
    plain, adapted = result.rows
    metric = "global/original/clients"
    assert [key for key, _ in plain.values] == ["last", "best-val", "oracle"]
    assert [key for key, _ in adapted.values] == ["last", "best-val"]  # the oracle is for plain models only
    chosen, by_mean = [], []
    for seed, folder in enumerate(result.folders):
        scored = {line["round"]: line for line in lines(folder / "metrics.jsonl") if "global/val/clients" in line}
        assert list(scored) == [1, 2, 3, 4, 5, 6, 7]
        pooled = [scored[r]["global/val/clients"]["pooled"] for r in scored]
        best = 1 + pooled.index(max(pooled))  # the first of equals
        chosen.append(best)
        means = [scored[r]["global/val/clients"]["client-mean"] for r in scored]
        by_mean.append(1 + means.index(max(means)))
        done = json.loads((folder / "done").read_text())
        assert done["best-round"] == best
        found = {rule: plain.scores(metric, rule)[seed] for rule in ("last", "best-val", "oracle")}
        assert (found["last"].round, found["best-val"].round) == (7, best)
        for rule, at in (("last", 7), ("best-val", best)):
            for part in ("client-mean", "pooled", "std", "worst-10"):
                assert found[rule].summary.to_json()[part] == scored[at][metric][part], (seed, rule, part)
        tests = {r: scored[r][metric]["client-mean"] for r in scored}
        reached = {rule: score.summary.client_mean for rule, score in found.items()}
        assert reached["oracle"] == max(tests.values())
        assert tests[found["oracle"].round] == max(tests.values())
        assert reached["oracle"] >= max(reached["last"], reached["best-val"])
        assert load(folder / "best.safetensors")[1]["round"] == best
    assert any(best != 7 for best in chosen)
    assert any(a != b for a, b in zip(chosen, by_mean, strict=True))
    assert plain.number(metric, "oracle")[0] > plain.number(metric, "best-val")[0]  # type: ignore[index]


def test_a_round_that_both_rules_choose_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Mapping[str, Score]] = []

    def watched(scores: Mapping[str, Score]) -> Any:
        streams.append(scores)
        return measured(scores)

    monkeypatch.setattr(evaluate, "measured", watched)
    (row,) = go(tiny(rounds=1, evaluate={"advice": False}), tmp_path).rows
    assert len(streams) == 1
    assert row.number(metric := "global/original/clients", "last") == row.number(metric, "best-val") is not None


def test_without_an_oracle_and_with_validation_at_the_end_only(tmp_path: Path) -> None:
    result = go(tiny(rounds=3, evaluate={"every": 0}), tmp_path)
    (row,) = result.rows
    assert [rule for rule, _ in row.values] == ["last", "best-val"]
    scored = [line["round"] for line in lines(result.folders[0] / "metrics.jsonl") if "global/val/clients" in line]
    assert scored == [3]
    every_two = go(tiny(rounds=3, evaluate={"every": 2}), tmp_path)
    scored = [line["round"] for line in lines(every_two.folders[0] / "metrics.jsonl") if "global/val/clients" in line]
    assert scored == [2, 3]


def test_seeds_give_mean_and_deviation(tmp_path: Path) -> None:
    result = go(tiny(seeds=[3, 5, 8]), tmp_path)
    (row,) = result.rows
    assert row.seeds == (3, 5, 8)
    assert [json.loads((folder / "done").read_text())["seed"] for folder in result.folders] == [3, 5, 8]
    for part in ("client_mean", "pooled", "worst10"):
        each = []
        for seed in (3, 5, 8):
            (alone,) = go(tiny(seeds=[seed]), tmp_path / "alone").rows
            each.append(alone.number("global/original/clients", "last", part)[0])  # type: ignore[index]
        assert len(set(each)) > 1
        mean, deviation = row.number("global/original/clients", "last", part)  # type: ignore[misc]
        assert mean == pytest.approx(statistics.mean(each))
        assert deviation == pytest.approx(statistics.stdev(each))
    dicts = result.as_dicts()
    assert sorted({row["seed"] for row in dicts}) == [3, 5, 8]
    assert len(dicts) == 3 * 3  # rules times seeds


def test_a_data_seed_of_its_own_holds_the_data_still(tmp_path: Path) -> None:
    result = go(tiny(seeds=[0, 1], data={"seed": 9}), tmp_path)
    hashes = [json.loads((folder / "done").read_text())["task-hash"] for folder in result.folders]
    assert hashes[0] == hashes[1] == make_task(tiny(), 9, POOL).hash
    weights = [load(next(folder.glob("ckpt-*")))[0]["server"]["model"]["head.weight"] for folder in result.folders]
    assert not torch.equal(*weights)


def test_a_sweep_gives_a_row_for_every_point(tmp_path: Path) -> None:
    sweep = {"train.lr": [0.01, 0.3], "train.local-epochs": [1, 2], "method.fedprox.mu": [0.5]}
    result = go(tiny(rounds=1, sweep=sweep, method=[{"name": "fedprox"}]), tmp_path)
    points = [dict(row.point) for row in result.rows]
    assert points == [
        {"train.lr": lr, "train.local-epochs": epochs, "method.fedprox.mu": 0.5}
        for lr in (0.01, 0.3)
        for epochs in (1, 2)
    ]
    assert len(set(result.folders)) == 4
    losses = {row.number("global/original/clients", "last", "loss") for row in result.rows}
    assert len(losses) == 4
    for folder, point in zip(result.folders, points, strict=True):
        config = tomllib.loads((folder / "config.toml").read_text())
        assert config["sweep-point"] == point
        assert config["train"]["lr"] == point["train.lr"]
        assert config["train"]["local-epochs"] == point["train.local-epochs"]
        assert config["method"]["mu"] == 0.5
    assert all(row["train.lr"] in (0.01, 0.3) for row in result.as_dicts())
    assert [str(column.header) for column in result.table().columns][2:5] == list(sweep)


def test_a_sweep_over_lists(tmp_path: Path) -> None:
    result = go(tiny(rounds=1, sweep={"model.hidden": [[4], [5, 6]]}), tmp_path)
    assert [dict(row.point)["model.hidden"] for row in result.rows] in (
        [[4], [5, 6]],
        [(4,), (5, 6)],
        ["[4]", "[5, 6]"],
    )


# ---- rounds -------------------------------------------------------------------------------------------------------------
class Watched(Sequential):
    """The reference engine, with a list of who trained when."""

    def train(self, method, downs, locals, task, plan):  # type: ignore[no-untyped-def]
        TRAINED.append((plan.ctx.round, tuple(downs)))
        return super().train(method, downs, locals, task, plan)


TRAINED: list[tuple[int, tuple[str, ...]]] = []


def who_trains(participation: float, seed: int, clients: int = 10, rounds: int = 6) -> list[tuple[str, ...]]:
    task = ragged_task((3,) * clients)
    setup = make_setup(tiny(), MethodSpec(name="fedavg"), task)
    session = Session(setup, task, Watched(), Compute(), seed, rounds, participation)
    TRAINED.clear()
    state = session.start()
    for _ in range(rounds):
        state, report = session.step(state)
        assert report.participants == len(TRAINED[-1][1])
    assert [number for number, _ in TRAINED] == list(range(rounds))
    return [names for _, names in TRAINED]


@pytest.mark.parametrize(("participation", "count"), [(0.4, 4), (0.25, 3), (0.24, 2), (0.01, 1), (0.94, 9), (1.0, 10)])
def test_participation_picks_the_stated_number(participation: float, count: int) -> None:
    rounds = who_trains(participation, seed=0)
    names = [f"client-{i}" for i in range(10)]
    for chosen in rounds:
        assert len(set(chosen)) == count
        assert list(chosen) == [name for name in names if name in chosen]  # in client order
    assert rounds == who_trains(participation, seed=0)
    if count < 10:
        assert len(set(rounds)) > 1
        assert rounds != who_trains(participation, seed=1)
    if count == 4:
        assert {name for chosen in rounds for name in chosen} > set(rounds[0])


def test_participation_in_an_experiment(tmp_path: Path) -> None:
    (folder,) = go(tiny(rounds=3, participation=0.5), tmp_path).folders
    rounds = [line for line in lines(folder / "metrics.jsonl") if "bytes-up" in line]
    assert [line["participants"] for line in rounds] == [2, 2, 2]
    assert all(line["bytes-up"] == 2 * (192 * 4 + 4 + 4 * 3 + 3) * BYTES for line in rounds)
    row = lines(folder / "adapters" / "none.jsonl")[0]
    assert sorted(row["by-client"]) == sorted(SIZES)  # everybody is scored, whoever trained


BODY, NORM, STATISTICS, HEAD = 192 * 4, 2 * 4, 2 * 4, 4 * 3 + 3  # with BatchNorm the first layer has no bias
MODEL = BODY + NORM + STATISTICS + HEAD  # every float that travels; the batch counter is an integer
COST = {
    "fedavg": (MODEL, MODEL),
    "fedprox": (MODEL, MODEL),
    "ditto": (MODEL, MODEL),
    "finetune": (MODEL, MODEL),
    "fedbn": (BODY + HEAD, BODY + HEAD),
    "fedper": (MODEL - HEAD, MODEL - HEAD),
    "lg-fedavg": (HEAD, HEAD),
    "scaffold": (MODEL + BODY + NORM + HEAD, MODEL + BODY + NORM + HEAD),
    "local": (0, 0),
}


def test_bytes_are_counted_by_hand(tmp_path: Path) -> None:
    methods = [{"name": name} for name in COST]
    result = go(tiny(method=methods, model={"name": "mlp", "hidden": [4], "norm": True}), tmp_path)
    for row, folder in zip(result.rows, result.folders, strict=True):
        down, up = COST[row.method]
        assert (row.cost["bytes-down"], row.cost["bytes-up"]) == (down * BYTES, up * BYTES), row.method
        for line in lines(folder / "metrics.jsonl"):
            if "bytes-up" in line:
                assert (line["bytes-down"], line["bytes-up"]) == (4 * down * BYTES, 4 * up * BYTES), row.method
        assert row.cost["seconds-per-round"] > 0


def test_double_precision_costs_twice_as_much(tmp_path: Path) -> None:
    single, double = (go(tiny(rounds=1, precision=p), tmp_path / p).rows[0] for p in ("float32", "float64"))
    assert double.cost["bytes-up"] == 2 * single.cost["bytes-up"]


# ---- models and populations ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", some_of(name for name in METHODS if "model" in METHODS[name].make.provides))
def test_after_local_is_scored_for_every_method(name: str, tmp_path: Path) -> None:
    settings = {"rounds": 1, "evaluate": {"after-local": True}, "model": {"name": "mlp", "hidden": [4], "norm": True}}
    settings["split"] = {"public": 0.1}
    method = {"name": name, "adapters": ["none", {"name": "bn", "batch-size": 16}]}
    result = go(tiny(**settings, method=[method]), tmp_path)
    row, adapted = (next(r for r in result.rows if r.adapter == a) for a in ("none", "bn batch-size=16"))
    kind = "personal" if METHODS[name].make.personal else "global"
    alone = name != "centralised"  # clients train for themselves
    for rule in ("last", "best-val"):
        expected = [f"{kind}/original/clients", *(["after-local/original/clients"] if alone else [])]
        assert [str(metric) for r, metric in row.values if r == rule] == expected
    assert not [metric for _, metric in adapted.values if metric.model == "after-local"]
    if not alone:
        return
    before, after = (row.scores(f"{model}/original/clients", "last")[0].by_client for model in (kind, "after-local"))
    assert list(before) == list(after)
    if name in ("fedavg", "local"):
        assert all(before[client] != after[client] for client in before)  # one more local round changed every client


def test_after_a_local_round_without_a_step_nothing_is_different(tmp_path: Path) -> None:
    settings = {"rounds": 1, "evaluate": {"after-local": True}, "train": {"lr": 0.0}}
    (row,) = go(tiny(**settings), tmp_path).rows
    before, after = (row.scores(f"{model}/original/clients", "last")[0] for model in ("global", "after-local"))
    assert before.by_client == after.by_client


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "ditto", "fedper", "scaffold", "finetune"])
def test_unseen_clients_have_rows_of_their_own(name: str, tmp_path: Path) -> None:
    settings = {"split": {"unseen": ["south"]}, "model": {"name": "mlp", "hidden": [4], "norm": True}}
    method = {"name": name, "adapters": ["none", "bn"]}
    result = go(tiny(**settings, stream=BOTH, method=[method]), tmp_path)
    kind = "personal" if METHODS[name].make.personal else "global"
    for row in result.rows:
        for rule in ("last", "best-val"):
            for stream in ("original", "corrupted"):
                seen = row.scores(f"{kind}/{stream}/clients", rule)[0].by_client
                unseen = row.scores(f"{kind}/{stream}/unseen", rule)[0].by_client
                assert sorted(seen) == ["east", "north", "west"]
                assert {client: counts[0] for client, counts in unseen.items()} == {"south": SIZES["south"]}


@pytest.mark.parametrize("name", ["local", "lg-fedavg"])
def test_methods_that_give_unseen_clients_nothing_have_no_row_for_them_and_say_so(name: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"{name} has nothing to give to unseen clients; that row is left out"):
        result = go(tiny(split={"unseen": ["south"]}, method=[{"name": name}]), tmp_path)
    assert {str(metric) for row in result.rows for _, metric in row.values} == {"personal/original/clients"}


def test_unseen_clients_of_fedavg_get_the_global_model(tmp_path: Path) -> None:
    result = go(tiny(split={"unseen": ["south"]}), tmp_path)
    module = MLP(hidden=(4,)).make((3, 8, 8), 3).eval()
    module.load_state_dict(load(next(result.folders[0].glob("ckpt-*")))[0]["server"]["model"])
    task = make_task(tiny(split={"unseen": ["south"]}), 0, POOL)
    with torch.no_grad():
        logits = module((task.images[task.unseen[0].test].float() / 255 - 0.5) / 0.5)
    correct = int((logits.argmax(1) == task.labels[task.unseen[0].test]).sum())
    assert result.rows[0].scores("global/original/unseen", "last")[0].by_client["south"][:2] == (40, correct)


def test_baselines_are_added_once(tmp_path: Path) -> None:
    def names(*methods: dict[str, object], **more: object) -> list[str]:
        return [row.method for row in go(tiny(rounds=1, method=list(methods), **more), tmp_path).rows]

    assert names({"name": "fedavg"}, baselines=True) == ["majority", "local", "finetune", "fedavg"]
    assert names({"name": "fedavg"}, {"name": "local"}, baselines=True) == ["majority", "finetune", "fedavg", "local"]
    assert names({"name": "finetune", "label": "ft"}, {"name": "local"}, baselines=True) == ["majority", "ft", "local"]
    assert names({"name": "fedavg"}) == ["fedavg"]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "ditto", "finetune", "fedrep"])
def test_mixed_architectures_are_refused_by_methods_that_average(name: str, tmp_path: Path) -> None:
    models = [{"name": "mlp", "hidden": [4]}, {"name": "mlp", "hidden": [5]}]
    with pytest.raises(
        UserError, match=r"^\w+ averages weights, so all clients need one architecture, not mlp, mlp-1$"
    ):
        go(tiny(model=models, method=[{"name": name}]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_of_one_method_only(tmp_path: Path) -> None:
    methods = [
        {"name": "fedavg"},
        {"name": "fedavg", "label": "wide", "model": {"hidden": [7]}},
        {"name": "fedavg", "label": "still", "train": {"lr": 0.0}},
    ]
    result = go(tiny(method=methods), tmp_path)
    assert [row.method for row in result.rows] == ["fedavg", "wide", "still"]
    models = [load(next(folder.glob("ckpt-*")))[0]["server"]["model"] for folder in result.folders]
    assert [model["head.weight"].shape[1] for model in models] == [4, 7, 4]
    setup = make_setup(tiny(), MethodSpec(name="fedavg"), make_task(tiny(), 0, POOL))
    start = Session(setup, make_task(tiny(), 0, POOL), Sequential(), Compute(), 0, 2).start().server["model"]
    assert torch.allclose(models[2]["head.weight"], start["head.weight"], atol=1e-6)  # a rate of zero moves nothing
    assert not torch.allclose(models[0]["head.weight"], start["head.weight"], atol=1e-3)
    configs = [tomllib.loads((folder / "config.toml").read_text()) for folder in result.folders]
    assert [config["method"].get("train") for config in configs] == [None, None, {"lr": 0.0}]
    assert [config["train"]["lr"] for config in configs] == [0.1, 0.1, 0.1]


# ---- from a file, with changes ------------------------------------------------------------------------------------------
FILE = """
title = "A file"
rounds = 4
seeds = [0]
[data]
source = "embedded:digits"
size = 8
[[stream]]
name = "original"
kind = "original"
[[stream]]
name = "corrupted"
kind = "corrupted"
[model]
name = "mlp"
hidden = [4]
[[method]]
name = "fedprox"
[[method]]
name = "fedprox"
label = "strong"
mu = 0.3
adapters = ["none", {name = "tent", params = "all"}]
[[method]]
name = "fedavg"
[small]
rounds = 1
"data.size" = 9
"method.strong.mu" = 7.0
"stream.corrupted.severity" = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my-study.toml"
    path.write_text(FILE)
    return path


def mus(experiment: Experiment) -> list[object]:
    return [method.options().get("mu") for method in experiment.method]


def test_a_file_as_it_is(file: Path) -> None:
    plain = Experiment.load(file)
    assert (plain.name, plain.title, plain.rounds, plain.data.size) == ("my-study", "A file", 4, 8)
    assert mus(plain) == [None, 0.3, None]
    assert [adapter.name for adapter in plain.method[1].adapters] == ["none", "tent"]
    assert plain.method[1].adapters[1].options() == {"params": "all"}


def test_changes_on_the_command_line(file: Path) -> None:
    assert mus(Experiment.load(file, ["method.strong.mu=0.5"])) == [None, 0.5, None]
    assert mus(Experiment.load(file, ["method.fedprox.mu=0.5"])) == [0.5, 0.5, None]
    assert mus(Experiment.load(file, ["method.mu=0.25"])) == [0.25, 0.25, 0.25]
    changed = Experiment.load(file, ["stream.corrupted.severity=2", "method.fedavg.train.lr=0.7", "name=other"])
    assert [stream.options() for stream in changed.stream] == [{}, {"severity": 2}]
    assert [method.train for method in changed.method] == [{}, {}, {"lr": 0.7}]
    assert changed.name == "other"
    several = Experiment.load(file, ["seeds=[1,2]", "train.local-epochs=3", "model.name=cnn", "baselines=false"])
    assert (several.seeds, several.train, several.baselines) == ([1, 2], {"local-epochs": 3}, False)
    assert several.models[0].name == "cnn"
    assert Experiment.load(file, ["rounds=1", "rounds=2"]).rounds == 2  # the last one counts


def test_the_small_table(file: Path) -> None:
    small = Experiment.load(file, ["scale=small"])
    assert (small.scale, small.rounds, small.data.size) == ("small", 1, 9)
    assert mus(small) == [None, 7.0, None]
    assert small.stream[1].options() == {"severity": 1}
    assert Experiment.load(file, ["scale=small", "rounds=3"]).rounds == 3  # what is asked for wins
    assert Experiment.load(file, ["scale=full"]) == Experiment.load(file)


def test_changes_reach_the_run(file: Path, tmp_path: Path) -> None:
    changes = ["method.strong.mu=0.5", "rounds=1", "stream.corrupted.severity=2", "baselines=false"]
    result = run(Experiment.load(file, changes), tmp_path / "out", engine="sequential")
    config = tomllib.loads((result.folders[1] / "config.toml").read_text())
    assert (config["method"]["mu"], config["stream"][1]["severity"], config["rounds"]) == (0.5, 2, 1)
    again = run(Experiment.load(file, [*changes, "stream.corrupted.severity=4"]), tmp_path / "out", engine="sequential")
    metric = "global/corrupted/clients"
    assert result.rows[1].number(metric, "last", "loss") != again.rows[1].number(metric, "last", "loss")
    clean = "global/original/clients"
    assert result.rows[1].number(clean, "last", "loss") == again.rows[1].number(clean, "last", "loss")


@pytest.mark.parametrize(
    "change", ["seeds.a=3", "method.strong.adapters.tent.lr=0.1", "method.fedavg.adapters.none.x=1"]
)
def test_changes_inside_lists_work_or_are_refused_in_a_sentence(change: str, file: Path) -> None:
    with contextlib.suppress(UserError):
        adapter = Experiment.load(file, [change]).method[1].adapters[1]
        assert adapter.options() == {"params": "all", **({"lr": 0.1} if "tent" in change else {})}


# ---- a user's own parts -------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Somebody's own network."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.first = nn.Linear(192, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.flat(x)).relu())


def server_model(folder: Path) -> dict[str, torch.Tensor]:
    return load(next(folder.glob("ckpt-*")))[0]["server"]["model"]


def test_an_own_network_as_a_class(tmp_path: Path) -> None:
    methods = [{"name": "fedavg", "adapters": ["none", {"name": "tent", "params": "all"}]}, {"name": "fedper"}]
    result = go(tiny(seeds=[0, 1], method=methods), tmp_path, network=Net)
    assert [(row.method, row.adapter) for row in result.rows] == [
        ("fedavg", "none"), ("fedavg", "tent params=all"), ("fedper", "none"),
    ]  # fmt: skip
    assert set(server_model(result.folders[0])) == set(Net().state_dict())
    starts = [go(tiny(rounds=0, seeds=[seed]), tmp_path / "start", network=Net).folders[0] for seed in (0, 1)]
    assert not torch.equal(*(server_model(folder)["last.weight"] for folder in starts))  # made anew for each seed
    twice = go(tiny(rounds=0), tmp_path / "again", network=Net).folders[0]
    assert torch.equal(server_model(twice)["last.weight"], server_model(starts[0])["last.weight"])


def test_an_own_network_as_an_instance(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Net().train()
    before = {name: leaf.clone() for name, leaf in network.state_dict().items()}
    result = go(tiny(seeds=[0, 1], rounds=0), tmp_path / "start", network=network)
    for folder in result.folders:  # its weights are every seed's start
        assert all(torch.equal(leaf, before[name]) for name, leaf in server_model(folder).items())
    trained = go(tiny(), tmp_path, network=network).folders[0]
    assert not torch.equal(server_model(trained)["last.weight"], before["last.weight"])
    assert network.training
    assert all(torch.equal(leaf, before[name]) for name, leaf in network.state_dict().items())  # it is left alone


def test_an_own_network_that_does_not_fit(tmp_path: Path) -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 2)

    with pytest.raises(UserError, match="network 'two' gives 2 logits, but the data have 3 classes"):
        go(tiny(), tmp_path, network=Two)
    with pytest.raises(UserError, match=r"network 'sequential' does not take images of shape \[3, 8, 8\]"):
        go(tiny(), tmp_path, network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(10, 3)))


@pytest.mark.parametrize("other", ["width", "weights"])
def test_two_own_networks_do_not_share_a_finished_run(other: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, second = (lambda: Net(4), lambda: Net(9)) if other == "width" else (Net(5), Net(5))
    one = go(tiny(rounds=1), tmp_path, network=first)
    two = go(tiny(rounds=1), tmp_path, network=second)
    alone = go(tiny(rounds=1), tmp_path / "alone", network=second)
    metric = "global/original/clients"
    assert two.rows[0].number(metric, "last", "loss") == alone.rows[0].number(metric, "last", "loss")
    assert one.rows[0].number(metric, "last", "loss") != two.rows[0].number(metric, "last", "loss")


@pytest.fixture
def halved() -> Iterator[str]:
    """A method nobody has heard of, registered as a user would, and gone afterwards."""

    @fedshift.method("halved", paper="local", venue="here", year=2025)
    @dataclass(frozen=True)
    class Halved(Method):
        """The server goes a part of the way to the average."""

        way: float = 0.5

        def aggregate(
            self, server: Tree, ups: Mapping[str, Tree], ctx: fedshift.ServerContext
        ) -> tuple[Tree, fedshift.Tensors]:
            after, metrics = super().aggregate(server, ups, ctx)
            start, mean = server["model"], after["model"]
            return {**server, "model": {n: start[n] + self.way * (mean[n] - start[n]) for n in mean}}, metrics

    yield "halved"
    METHODS._entries.pop("halved")


def test_an_own_method_needs_no_change_of_the_package(
    halved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = [
        {"name": halved, "adapters": ["none", {"name": "tent", "params": "all"}]},
        {"name": halved, "label": "whole", "way": 1.0},
        {"name": halved, "label": "nowhere", "way": 0.0},
        {"name": "fedavg"},
    ]
    result = go(tiny(method=methods), tmp_path)
    half, whole, nowhere, fedavg = (server_model(folder)["head.weight"] for folder in result.folders)
    assert torch.allclose(whole, fedavg, atol=1e-6)
    start = server_model(go(tiny(rounds=0), tmp_path / "start").folders[0])["head.weight"]
    assert torch.equal(nowhere, start)
    assert not torch.allclose(half, fedavg, atol=1e-4)
    once = go(tiny(rounds=1, method=methods), tmp_path / "once").folders
    first, full = (server_model(once[i])["head.weight"] for i in (0, 1))
    assert torch.allclose(first, (start + full) / 2, atol=1e-6)
    rows = json.loads(command(monkeypatch, capsys, "list", "methods", "--format", "json"))
    (local,) = [row for row in rows if row["name"] == halved]
    assert local["options"] == {"way": 0.5}
    assert local["summary"] == "The server goes a part of the way to the average"
    with pytest.raises(UserError, match="method 'halved' has no option 'wai'; did you mean 'way'"):
        go(tiny(method=[{"name": halved, "wai": 1}]), tmp_path)
    engines = [go(tiny(method=methods[:1]), tmp_path / e, engine=e).rows[0].values for e in ("sequential", "vmapped")]
    for key, (numbers,) in engines[0].items():
        assert numbers.summary.client_mean == engines[1][key][0].summary.client_mean


def test_the_registry_is_as_it_was() -> None:
    assert "halved" not in METHODS


def test_own_arrays_and_an_own_task_as_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    pool = fedshift.from_arrays(
        rng.random((60, 8, 8)), ["cat", "dog"] * 30, users=[f"u{i // 20}" for i in range(60)], classes=("dog", "cat")
    )
    result = go(tiny(partition={"kind": "by-user"}), tmp_path, data=pool)
    assert list(lines(result.folders[0] / "adapters" / "none.jsonl")[0]["by-client"]) == ["u0", "u1", "u2"]
    assert server_model(result.folders[0])["body.1.weight"].shape == (4, 64)  # one channel
    task = make_task(tiny(partition={"kind": "by-user"}), 0, pool)
    given = go(tiny(partition={"kind": "by-user"}), tmp_path / "task", data=task)
    assert given.rows[0].values == result.rows[0].values
    with pytest.raises(UserError, match="the partition by-domain needs the domain of every image"):
        go(tiny(), tmp_path, data=pool)


# ---- engines ------------------------------------------------------------------------------------------------------------
def test_engines_give_equal_numbers(tmp_path: Path) -> None:
    methods = [
        {"name": "fedbn", "adapters": ["none", "tent", {"name": "bn", "mode": "refresh"}]},
        {"name": "scaffold"},
        {"name": "ditto"},
        {"name": "finetune"},
    ]
    settings = {
        "model": {"name": "mlp", "hidden": [4], "norm": True},
        "participation": 0.6,
        "split": {"unseen": ["north"]},
    }
    experiment = tiny(
        **settings, stream=BOTH, method=methods, evaluate={"every": 1, "oracle": True, "after-local": True}
    )
    results = {name: go(experiment, tmp_path / name, engine=name) for name in ("sequential", "vmapped", "parallel")}
    reference = results.pop("sequential")
    for name, result in results.items():
        assert [(row.method, row.adapter) for row in result.rows] == [
            (row.method, row.adapter) for row in reference.rows
        ]
        for local, theirs in zip(result.rows, reference.rows, strict=True):
            assert list(local.values) == list(theirs.values)
            for key, (numbers,) in theirs.values.items():
                (found,) = local.values[key]
                assert replace(found.summary, loss=numbers.summary.loss) == numbers.summary, (name, local.method, key)
                assert found.summary.loss == pytest.approx(numbers.summary.loss, rel=1e-3)
            assert local.cost["bytes-up"] == theirs.cost["bytes-up"]


# ---- finished work ------------------------------------------------------------------------------------------------------
def tent(lr: float) -> dict[str, object]:
    return {"name": "tent", "label": "adapted", "params": "all", "predict-when": "after", "optimiser": "sgd", "lr": lr}


def test_an_adapter_with_other_options_is_not_mistaken_for_a_finished_one(tmp_path: Path) -> None:
    first = go(tiny(method=[{"name": "fedavg", "adapters": [tent(0.0)]}]), tmp_path)
    second = go(tiny(method=[{"name": "fedavg", "adapters": [tent(5.0)]}]), tmp_path)
    alone = go(tiny(method=[{"name": "fedavg", "adapters": [tent(5.0)]}]), tmp_path / "alone")
    metric = "global/original/clients"
    losses = [r.rows[0].number(metric, "last", "loss") for r in (first, second, alone)]
    assert losses[0] != losses[2]
    assert losses[1] == losses[2]


def test_show_does_not_take_other_settings_for_other_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go(tiny(rounds=1), tmp_path)
    go(tiny(rounds=3), tmp_path)
    rows = json.loads(
        command(monkeypatch, capsys, "show", tmp_path / "tiny", "--format", "json"), parse_constant=refuse
    )
    last = [row for row in rows if row["selection"] == "last"]
    assert len(last) == 2
    table = command(monkeypatch, capsys, "show", tmp_path / "tiny", "--select", "last")
    assert "±" not in table  # a deviation over rounds = 1 and rounds = 3 would mean nothing
    assert table.count("fedavg") >= 4  # two rows in each of the two tables


# ---- the command line ---------------------------------------------------------------------------------------------------
CHANGES = [
    "-c", "rounds=1", "-c", "data.size=8", "-c", "model.name=mlp", "-c", "model.hidden=[4]", "-c", "name=cli",
    "-c", 'method=[{name="fedavg", adapters=["none", "tent"]}]',
]  # fmt: skip


def test_run_and_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = command(monkeypatch, capsys, "run", *CHANGES, "--out", tmp_path, "--engine", "sequential")
    assert "4 runs: 4 methods (majority, local, finetune, fedavg), 1 seed, 4 rounds; engine sequential on cpu" in said
    for word in ("local", "finetune", "fedavg", "tent", "original", "corrupted", "oracle"):
        assert word in said
    for name in ("results.png", "task.png"):
        with Image.open(tmp_path / "cli" / name) as picture:
            picture.verify()
        with Image.open(tmp_path / "cli" / name) as picture:
            assert picture.format == "PNG"
            assert 300 <= picture.width <= 3000
            assert 150 <= picture.height <= 3000
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20  # type: ignore[arg-type]  # not an empty page
    shown = command(monkeypatch, capsys, "show", tmp_path / "cli")
    assert "best pooled validation accuracy" in shown
    assert "the state after the last round" in command(monkeypatch, capsys, "show", tmp_path, "--select", "last")
    rows = json.loads(command(monkeypatch, capsys, "show", tmp_path, "--format", "json"), parse_constant=refuse)
    assert {(row["method"], row["adapter"]) for row in rows} == {
        ("majority", "none"), ("local", "none"), ("finetune", "none"), ("fedavg", "none"), ("fedavg", "tent"),
    }  # fmt: skip
    assert {row["selection"] for row in rows} == {"last", "best-val", "oracle"}
    for row in rows:
        model, stream, population = (row[key] for key in ("model", "stream", "population"))
        assert row["metric"] == f"{model}/{stream}/{population}"
        assert stream in ("original", "corrupted")
        assert population in ("clients", "unseen")
        assert model == ("global" if row["method"] == "fedavg" else "personal")
        assert 0 <= row["worst-10"] <= row["client-mean"] <= 100
        assert row["seed"] == 0
    one = next((tmp_path / "cli" / "fedavg").iterdir())
    alone = json.loads(command(monkeypatch, capsys, "show", one, "--format", "json"))
    assert alone == [row for row in rows if row["method"] == "fedavg"]  # a run folder, or one above it
    again = command(monkeypatch, capsys, "run", *CHANGES, "--out", tmp_path, "--engine", "sequential")
    assert again.count("finished before, not run again") == 4


@pytest.mark.parametrize("what", ["methods", "adapters", "models", "partitions", "streams", "presets", "pairs"])
def test_lists(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(command(monkeypatch, capsys, "list", what, "--format", "json"), parse_constant=refuse)
    names = [row["name"] for row in rows]
    assert names == sorted(set(names))
    assert len({frozenset(row) for row in rows}) == 1
    table = command(monkeypatch, capsys, "list", what)
    assert all(name in table for name in names)
    expected = {
        "methods": {"fedavg", "fedbn", "scaffold", "ditto"}, "adapters": {"none", "bn", "tent"}, "models": {"cnn", "mlp"},
        "partitions": {"iid", "dirichlet", "by-domain"}, "streams": {"original", "corrupted"}, "presets": {"default"},
        "pairs": {"fedavg", "fedbn"},
    }  # fmt: skip
    assert expected[what] <= set(names)


def test_doctor_knows_every_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = command(monkeypatch, capsys, "doctor")
    extras = set(metadata("fedshift").get_all("Provides-Extra") or ()) - {"dev", "docs"}  # for who works on it
    assert extras == set(EXTRAS)  # an extra exists once something imports it, and not before
    for extra in extras:
        lines_ = [line for line in said.splitlines() if line.strip().startswith((f"yes {extra}:", f"no  {extra}:"))]
        assert len(lines_) == 1, extra
        if lines_[0].strip().startswith("no"):
            assert f'pip install "fedshift[{extra}]"' in lines_[0]
    assert fedshift.__version__ in said
    assert f"torch {torch.__version__}" in said


# ---- nothing that is no number ------------------------------------------------------------------------------------------
WILD: dict[str, dict[str, object]] = {
    "divergence": {"train": {"lr": 1e30, "batch-size": 4}, "method": [{"name": "fedavg"}, {"name": "local"}]},
    "divergence with tent": {
        "method": [{"name": "fedavg", "adapters": [{"name": "tent", "params": "all", "lr": 1e30, "batch-size": 8}]}]
    },
    "no validation": {"split": {"train": 0.7, "val": 0.0, "test": 0.3}},
    "tests at unseen clients only": {"split": {"train": 0.8, "val": 0.2, "test": 0.0, "unseen": ["east"]}},
    "no round": {"rounds": 0},
    "no step": {"train": {"local-epochs": 0}},
}


@pytest.mark.parametrize("case", WILD)
@pytest.mark.filterwarnings("ignore:.*was left out of round")
def test_files_never_hold_nan(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = go(tiny(**WILD[case]), tmp_path)
    for folder in result.folders:
        for path in (folder / "metrics.jsonl", *(folder / "adapters").glob("*.jsonl")):
            assert lines(path), path
        json.loads((folder / "done").read_text(), parse_constant=refuse)
    rows = json.loads(command(monkeypatch, capsys, "show", tmp_path, "--format", "json"), parse_constant=refuse)
    assert rows
    command(monkeypatch, capsys, "show", tmp_path)
    if case == "no validation":
        assert json.loads((result.folders[0] / "done").read_text())["best-round"] == -1
        last, best = (result.rows[0].scores("global/original/clients", rule)[0] for rule in ("last", "best-val"))
        assert last.by_client == best.by_client
    if case == "tests at unseen clients only":
        row = result.rows[0]
        assert row.scores("global/original/clients", "last")[0].summary.client_mean is None
        assert row.scores("global/original/unseen", "last")[0].summary.client_mean >= 0  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:.*was left out of round")
def test_clients_that_diverge_are_named_and_left_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="client 'east' was left out of round 1, its loss or update is not finite"):
        # the images of another split can leave a client with dead units, whose loss is finite
        (folder,) = go(tiny(train={"lr": 1e30, "batch-size": 4}, split={"stratify": False}), tmp_path).folders
    rounds = [line for line in lines(folder / "metrics.jsonl") if "diverged" in line]
    assert rounds[0]["diverged"] == sorted(SIZES)
    start = server_model(go(tiny(rounds=0), tmp_path / "start").folders[0])
    for name, leaf in server_model(folder).items():
        assert torch.equal(leaf, start[name])  # nobody was sound, so the server stays where it was


@pytest.mark.grid
def test_every_method_that_can_run_here_runs_from_words_alone(tmp_path: Path) -> None:
    arch = Arch.of(MLP(hidden=(4,)).make((3, 8, 8), 3), (3, 8, 8), "mlp")
    able = [name for name in METHODS if missing_for_method(name, METHODS[name].make.requires, arch) is None]
    assert len(able) >= 8
    data = replace(make_task(tiny(), 0, POOL), public=torch.arange(6), hash="with a public set")
    result = go(tiny(rounds=1, method=[{"name": name} for name in able]), tmp_path, data=data)
    assert [row.method for row in result.rows] == able
    for row in result.rows:
        kind = "personal" if METHODS[row.method].make.personal else "global"
        assert row.number(f"{kind}/original/clients", "last") is not None


# ---- looking at data ------------------------------------------------------------------------------------------------------
def test_fedshift_data_shows_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["-c", "data.size=8", "-c", 'split.unseen=["font"]', "-c", 'data.domains=["pen", "font", "china"]']
    said = command(monkeypatch, capsys, "data", "default", *changes, "--out", str(tmp_path))
    assert "2 clients, 1 unseen" in said
    assert "font (unseen)" in said
    page = (tmp_path / "task.html").read_text()
    for word in ("pen", "china", "font", "original", "corrupted", "data:image/png;base64,"):
        assert word in page
    assert "paper" not in page.split("Where the data come from")[0]
    assert (tmp_path / "task.png").stat().st_size > 1000


def test_fedshift_data_takes_a_folder_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    for number in range(40):
        path = tmp_path / "images" / f"hospital-{number % 2}" / f"class-{number // 2 % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (number, 2 * number, 90)).save(path)
    said = command(monkeypatch, capsys, "data", str(tmp_path / "images"), "--out", str(tmp_path))
    assert "hospital-1" in said
    assert (tmp_path / "task.html").exists()


def test_only_some_domains_and_classes(tmp_path: Path) -> None:
    from fedshift import UserError
    from fedshift.experiment.schema import Experiment
    from fedshift.runs.setup import make_task

    chosen = {"size": 8, "domains": ["pen", "font"], "classes": ["7", "1"]}
    task = make_task(Experiment.parse({"data": chosen}), seed=0)
    assert [client.name for client in task.clients] == ["pen", "font"]
    assert task.classes == ("7", "1")
    assert set(task.labels.tolist()) == {0, 1}
    for wrong in ({"domains": ["pencil"]}, {"classes": ["eleven"]}):
        with pytest.raises(UserError, match="the data source has no"):
            make_task(Experiment.parse({"data": {"size": 8, **wrong}}), seed=0)


def test_an_override_of_a_swept_key_wins(tmp_path: Path) -> None:
    from fedshift.experiment.schema import Experiment

    path = tmp_path / "swept.toml"
    path.write_text('rounds = 1\n[sweep]\n"train.lr" = [0.1, 0.2]\nrounds = [1, 2]\n')
    assert len(list(Experiment.load(path).variants())) == 4
    points = [point for point, _ in Experiment.load(path, ["train.lr=0.5"]).variants()]
    assert points == [{"rounds": 1}, {"rounds": 2}]


def test_edited_code_is_not_mistaken_for_a_finished_run() -> None:
    from fedshift.methods.fedavg import FedAvg
    from fedshift.runs.code import code_digest

    made = [
        type("Mine", (FedAvg,), {"__module__": "notebook", "answer": answer}) for answer in (lambda _: 1, lambda _: 2)
    ]
    assert code_digest(FedAvg) == ""
    assert len({code_digest(cls) for cls in made}) == 2


@pytest.fixture
def late_failure() -> Iterator[str]:
    """FedAvg goes well, fine-tuning gives NaN."""
    from fedshift.methods.finetune import FineTune

    @fedshift.method("late-failure")
    @dataclass(frozen=True)
    class LateFailure(FineTune):
        """Fails at the end."""

        def loss(self, state: Tree, tensors: Any, batch: Any, phase: Any) -> Any:
            value, buffers = super().loss(state, tensors, batch, phase)
            return value * (float("nan") if phase.name == "finetune" else 1.0), buffers

    yield "late-failure"
    METHODS._entries.pop("late-failure")


def test_a_client_that_fails_in_its_last_steps_is_named(tmp_path: Path, late_failure: str) -> None:
    """The run goes on, is scored with what was received, and says who failed."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = go(tiny(method=[{"name": late_failure}]), tmp_path)
    said = [str(warning.message) for warning in caught if "last training steps" in str(warning.message)]
    assert said
    assert all("late-failure seed 0: client '" in text for text in said)
    assert all("nan" not in path.read_text().lower() for path in result.folders[0].rglob("*.jsonl"))
