"""What it takes to reach a target, against counts by hand."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedshift import UserError, run
from fedshift.core.tree import float_bytes
from fedshift.inspect import overhead
from fedshift.inspect.overhead import Overhead, Spent, accuracies, common_stream, moving_average, spent
from fedshift.runs.flops import count
from fedshift.runs.setup import make_task
from fedshift.store.costs import Costs
from fedshift.store.folder import RunFolder
from fedshift.store.lines import History
from tests.inspect.conftest import digits
from tests.runs.test_costs import ALEXNET, NORMALISED, alexnet
from tests.runs.test_features import error_of
from tests.runs.test_run import command


def lines(
    accuracy: list[float | None], every: int = 1, size: int = 10, metric: str = "global/val/clients"
) -> list[Any]:
    """Rounds of two clients, and an evaluation every few of them."""
    made: list[Any] = []
    for number in range(1, len(accuracy) * every + 1):
        made.append({"round": number, "participants": 2, "bytes-up": 2 * size, "bytes-down": 4 * size})
        if number % every == 0:
            made.append({"round": number, metric: {"client-mean": accuracy[number // every - 1]}})
    return made


def text(found: Overhead) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found.table())
    return console.export_text()


# ---- R* -------------------------------------
def test_the_moving_average() -> None:
    values = [(2, 10.0), (4, 20.0), (6, 60.0), (8, 70.0)]
    assert moving_average(values) == [(2, 10.0), (4, 15.0), (6, 30.0), (8, 50.0)]
    assert moving_average(values, window=1) == values
    assert moving_average([]) == []


def test_one_lucky_round_is_not_enough() -> None:
    lucky = lines([40, 40, 90, 40, 65, 70, 75])
    found = spent(History.of(lucky), Costs(flops_round=5.0), target=60)
    assert found.rounds == 5  # (90 + 40 + 65) / 3 = 65; two rounds before it (40 + 40 + 90) / 3 = 56.7


def test_rounds_between_evaluations_count() -> None:
    found = spent(History.of(lines([50, 61, 72, 73], every=5)), Costs(flops_round=7.0, memory_step=11.0), target=61)
    assert found == Spent(15, pytest.approx(206 / 3), 15 * 7.0, 15 * 10.0, 15 * 20.0, 11.0, None)
    assert found.as_dict()["bytes"] == 15 * 30


def test_reached_exactly_and_at_once() -> None:
    assert spent(History.of(lines([60.0])), Costs(), target=60).rounds == 1
    assert spent(History.of(lines([60.0])), Costs(), target=60).flops is None  # a run without a ledger


def test_never() -> None:
    found = spent(History.of(lines([50, 55, None, 54])), Costs(flops_round=1.0, memory_step=1.0), target=60)
    assert found == Spent(None, 53.0)
    assert set(found.as_dict().values()) == {None, 53.0}
    assert spent(History.of(lines([None])), Costs(), target=60) == Spent(None, None)


def test_bytes_are_added_up_round_by_round() -> None:
    """Methods may send other things in other rounds, and not everybody takes part."""
    changing = lines([50, 80, 80])
    changing[2] = {"round": 2, "participants": 4, "bytes-up": 400, "bytes-down": 0}
    assert spent(History.of(changing), Costs(), target=65).rounds == 2
    assert spent(History.of(changing), Costs(), target=65).bytes_up == 10 + 100
    assert spent(History.of(changing), Costs(), target=65).bytes_down == 20


def test_the_work_after_the_last_round_counts_once() -> None:
    assert spent(History.of(lines([60, 70])), Costs(flops_round=10.0, flops_end=3.0), target=65).flops == 23


def test_the_servers_training_is_a_number_of_its_own() -> None:
    found = spent(History.of(lines([60, 70])), Costs(flops_round=10.0, flops_server=4.0), target=65)
    assert (found.flops, found.flops_server) == (20, 8)
    row = text(Overhead(65, "val", (("fedgen", 0, found),)))
    assert "server" in row
    assert "server" not in text(Overhead(65, "val", (("fedavg", 0, replace(found, flops_server=0)),))).split("R*: ")[0]


# ---- hand counts of AlexNet ------------
@pytest.mark.parametrize("method", ["fedavg", "fdse"])
def test_alexnet_and_fdse_cost_what_their_sizes_say(method: str) -> None:
    session = alexnet(method, options={"bias": True} if method == "fdse" else {})
    costs = count(session, 1)
    begun = session.begun(session.start())
    sizes = {name: float_bytes(down) for name, down in begun.downs.items()}
    rounds = [
        {"round": r, "participants": len(sizes), "bytes-up": sum(sizes.values()), "bytes-down": sum(sizes.values())}
        for r in range(1, 119)
    ]
    scored = [{"round": 118, "global/original/clients": {"client-mean": 60.0}}]
    found = spent(History.of([*rounds, *scored]), costs, target=60, stream="original")
    parameters = {"fedavg": ALEXNET, "fdse": 6_508_010}[method]
    averages = 2 * NORMALISED  # FDSE's blocks share those of their second normalisation; the first one's stay
    assert costs.parameters == parameters
    assert found.bytes_down == 118 * 4 * (parameters + averages)
    assert found.as_dict()["bytes"] == 2 * 118 * 4 * (parameters + averages)
    assert costs.flops_round is not None
    assert found.flops == 118 * costs.flops_round
    assert found.memory_step == costs.memory_step


def test_compute_of_plain_training_is_steps_times_batch_times_three_forward_passes(fedavg: Path) -> None:
    """Less the gradient of the images, which nobody needs."""
    ((_, _, took),) = overhead(fedavg, target=1).runs
    layers = 192 * 12, 12 * 10
    forward = 2 * sum(layers)
    images = statistics.fmean(len(client.train) for client in make_task(digits(), 0).clients)  # one epoch
    assert took.rounds == 1
    assert took.flops == pytest.approx(images * (3 * forward - 2 * layers[0]))
    parameters = sum(layers) + 12 + 10
    assert (took.bytes_up, took.bytes_down) == (4 * parameters, 4 * parameters)


# ---- of run folders -------------------------
def test_the_numbers_of_runs(runs: Path, fedavg: Path) -> None:
    found = overhead(runs, target=15)
    assert found.stream == "original"
    assert [(name, seed) for name, seed, _ in found.runs] == [("fedavg", 0), ("fedthe", 0), ("local", 0), ("fedavg", 1)]
    logged = RunFolder(fedavg).history()
    averages = moving_average(accuracies(logged, "original"))
    assert [number for number, _ in averages] == [1, 2]
    wanted = next((number for number, mean in averages if mean >= 15), None)
    first = found.runs[0][2]
    assert first.rounds == wanted
    assert first.best == pytest.approx(max(mean for _, mean in averages))
    assert found.as_dict()["runs"][0]["rounds"] == wanted
    assert spent(logged, Costs(), 15, "val").best == max(mean for _, mean in moving_average(accuracies(logged, "val")))


def test_validation_counts_where_not_all_logged_test_accuracy() -> None:
    test, val = lines([50], metric="global/original/clients"), lines([50])
    both = [*test, *lines([50], metric="personal/corrupted/clients"), *val]
    odd = lines([1], metric="global/odd/clients")
    assert common_stream([History.of(both)] * 2) == "original"
    assert common_stream([History.of([*odd, *both]), History.of(both)]) == "original"
    assert common_stream([History.of(odd)]) == "odd"
    assert common_stream([History.of(both), History.of(val)]) == "val"


def test_rows_over_seeds() -> None:
    took = Spent(10, 80.0, 100.0, 5.0, 7.0, 3.0, None)
    seeds = [
        ("a", 0, took),
        ("a", 1, replace(took, rounds=20, flops=200.0)),
        ("b", 0, took),
        ("b", 1, Spent(None, 50.0)),
    ]
    found = Overhead(60, "val", tuple(seeds))
    a, b = found.rows()
    assert (a["rounds"], a["flops"], a["bytes"], a["reached"], a["seeds"]) == (15, 150, 12, 2, 2)
    assert a["rounds-std"] == pytest.approx(math.sqrt(50))
    assert (b["rounds"], b["flops"], b["reached"], b["best"]) == (None, None, 1, 65)
    shown = text(found)
    assert "15 ±7.1" in shown
    assert "1 of 2 seeds, best 65.0" in shown
    assert "never, best 50.0" in text(Overhead(60, "val", (seeds[3],)))


def test_the_definition_is_printed_beneath(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " ".join(command(monkeypatch, capsys, "overhead", runs, "--target", 99).split())
    assert said.count("never, best") == 3
    for sentence in (
        "R*: the first evaluated round",
        "mean of the last 3 evaluations",
        "steps x batch x 3F",
        "at least 99 %",
    ):
        assert sentence in said
    numbers = json.loads(command(monkeypatch, capsys, "overhead", runs, "--target", 1, "--format", "json"))
    assert numbers == overhead(runs, 1).as_dict()
    assert [row["rounds"] for row in numbers["methods"]] == [1, 1, 1]
    assert len(numbers["definition"]) == 4


@pytest.mark.parametrize("target", ["0", "-3", "100.5", "nan"])
def test_a_target_is_a_percentage(
    target: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(monkeypatch, capsys, "overhead", runs, "--target", target)
    assert "--target is an accuracy in percent" in said


def test_bad_folders(
    fedavg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no folder" in error_of(monkeypatch, capsys, "overhead", tmp_path / "x", "--target", 60)
    shutil.copytree(fedavg, tmp_path / "run")
    assert "--format must be" in error_of(monkeypatch, capsys, "overhead", tmp_path, "--target", 60, "--format", "csv")
    (tmp_path / "run" / "metrics.jsonl").write_text("{")
    assert "is damaged" in error_of(monkeypatch, capsys, "overhead", tmp_path, "--target", 60)
    (tmp_path / "run" / "done").unlink()
    assert "there is an unfinished one" in error_of(monkeypatch, capsys, "overhead", tmp_path, "--target", 60)


def test_a_run_without_evaluations_is_not_one_that_never_got_there(tmp_path: Path) -> None:
    split = {"train": 0.8, "val": 0.0, "test": 0.2}
    run(digits(rounds=1, split=split, evaluate={"every": 1}), tmp_path, engine="sequential")
    with pytest.raises(UserError, match=r"fedavg logged no accuracy while it trained.*evaluate\.oracle=true"):
        overhead(tmp_path, 10)
    with pytest.raises(UserError, match="in percent"):
        overhead(tmp_path, math.inf)
