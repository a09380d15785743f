"""Values that cannot be meant get a sentence before anything runs, and none of them takes long to say no to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from fedshift.core.arch import Arch
from fedshift.data import _patterns
from fedshift.data._patterns import matches
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.runs import estimate
from fedshift.runs.plan import MOST_RUNS
from fedshift.runs.run import carry_out, plan
from tests.input.program import fedshift, run, table

# what is asked for, and a part of the sentence that refuses it
REFUSED = {
    "rounds=true": "rounds: input should be a valid integer, not True",
    "rounds=3.0": "rounds: input should be a valid integer",
    'rounds="3"': "rounds: input should be a valid integer",
    "seeds=[true]": "seeds.0: input should be a valid integer",
    'seeds=["0"]': "seeds.0",
    "seeds=[-1]": "seeds.0",
    "seeds=[99999999999999999999]": "seeds.0",
    "participation=true": "participation",
    "checkpoint-every=true": "checkpoint-every",
    "evaluate.every=true": "every",
    "evaluate.oracle=1": "oracle",
    "baselines='no'": "baselines",
    "data.limit=true": "limit",
    "data.channels=true": "channels",
    "data.size=true": "size",
    "data.mean=[nan]": "mean.0: input should be a finite number",
    "data.std=[inf]": "std.0: input should be a finite number",
    'data.classes=["1", "1"]': "'1' is named twice",
    'data.domains=["pen", "pen"]': "'pen' is named twice",
    'split.unseen=["paper", "paper"]': "unseen names 'paper' twice",
    "split.train=true": "train = True is not valid",
    "split.train-limit=-1": "train-limit",
    "train.lr=inf": "lr must be finite, not inf",
    "train.lr=nan": "lr must",
    'train.lr="0.1"': "lr = '0.1' is not valid",
    "train.weight-decay=inf": "weight-decay must be finite, not inf",
    "train.batch-size=3.0": "batch-size = 3.0 is not valid",
    'method=[{name="fedprox", mu=inf}]': "mu must be finite, not inf",
    'method=[{name="fedprox", mu=true}]': "mu must be a number, not True",
    "model.hidden=[0]": "hidden must be positive numbers",
    "model.hidden=[-1]": "hidden must be positive numbers",
    "model.hidden=[true]": "hidden",
    "model.hidden=[999999999]": "GiB of memory",
    "model.hidden=[99999999999, 99999999999]": "network 'mlp'",
    "model.norm=1": "norm = 1 is not valid",
    "model=[]": "model: it must have at least one network",
    "stream=[]": "stream: list should have at least 1 item",
    'stream=[{name="", kind="original"}]': "it must have a name",
    'stream=[{name="a", kind="corrupted", severity=true}]': "severity",
    'name=""': "name: it must have a name",
    "data.size=100000": "62,780 GiB of memory",
    "x=" + 5000 * "[" + 5000 * "]": "too many brackets",
    "rounds=999999999999": "add --yes",
    "train.local-epochs=99999999": "add --yes",
    "seeds=[" + ", ".join(map(str, range(MOST_RUNS + 1))) + "]": "10,001 runs",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change[:40])
def test_a_value_that_cannot_be_meant_is_refused(change: str, tmp_path: Path) -> None:
    started = time.perf_counter()
    said = run(tmp_path / "runs", 'method=[{name="fedavg"}]', change)
    assert said.refused, said.err[-2000:]
    assert REFUSED[change] in said.err
    assert time.perf_counter() - started < 10
    assert not (tmp_path / "runs").exists()


def test_a_file_of_brackets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("x = " + 5000 * "[" + 5000 * "]")
    said = fedshift("run", tmp_path / "deep.toml")
    assert said.refused
    assert "deep.toml has too many brackets" in said.err


def test_no_limit_is_what_zero_says(tmp_path: Path) -> None:
    """Presets write ``train-limit = 0`` for all images; it is not a wish for none."""
    said = fedshift("data", "default", "-c", "split.train-limit=0", "--format", "json")
    fewer = fedshift("data", "default", "--format", "json")
    assert said.code == fewer.code == 0
    assert said.out != fewer.out


def test_going_on_and_beginning_again_exclude_each_other(tmp_path: Path) -> None:
    said = fedshift("run", "-c", "rounds=1", "--resume", "--restart", "--out", tmp_path / "runs")
    assert said.refused
    assert "not both" in said.err
    jobs = plan(Experiment(rounds=1, baselines=False), tmp_path / "runs")
    with pytest.raises(UserError, match="not both"):
        carry_out(jobs, resume=True, restart=True)


def test_words_of_other_commands_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    said = run(tmp_path / "runs", 'method=[{name="fedavg"}]', "name=x")
    assert said.code == 0, said.err
    (tmp_path / "loop").symlink_to("loop")
    refusals = {
        ("advise", "--metric", "x"): "there is no measure 'x'",
        ("compare", str(tmp_path / "runs"), "--metric", "x"): "there is no measure 'x'",
        ("join", "--data", str(tmp_path / "loop")): "there is no file or folder",
        ("cost-to-target", "--target", "nan"): "--target is an accuracy in percent",
        ("inspect", "--samples", "0"): "--samples must be at least 2",
        ("show", "--by", "x"): "there is no column 'x'",
    }
    for (command, *words), sentence in refusals.items():
        said = fedshift(command, tmp_path / "runs", *words)
        assert said.refused, (command, said.err[-2000:])
        assert sentence in said.err


@pytest.mark.parametrize("name", ["2024.parquet", "true.parquet", "done.parquet", "a=b,c.parquet", "[x].parquet"])
def test_any_file_name_is_a_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "x.parquet", ["a", "b"] * 20, ["c", "d"] * 20).rename(name)
    if "," in name:  # a comma is between several files
        assert fedshift("data", name).refused
        return
    said = fedshift("data", name)
    assert said.code == 0, said.err


def test_what_takes_a_week_needs_a_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "LONGEST", 1e-6)
    said = run(tmp_path / "runs", 'method=[{name="fedavg"}]')
    assert said.refused
    assert "add --yes if it is meant" in said.err
    arguments = ["-c", "rounds=1", "-c", "baselines=false", "-c", "data.size=8", "-c", 'method=[{name="fedavg"}]']
    said = fedshift("run", *arguments, "-c", "model.name=mlp", "--yes", "--out", tmp_path / "runs")
    assert said.code == 0, said.err


def test_an_estimate_grows_with_what_is_asked_for(tmp_path: Path) -> None:
    small, large = (
        estimate.estimate(
            plan(Experiment(rounds=rounds, baselines=False, data={"size": 8}, model={"name": "mlp"}), tmp_path),
            torch.device("cpu"),
        )
        for rounds in (10, 1000)
    )
    assert large.seconds == pytest.approx(100 * small.seconds)
    assert small.memory == large.memory > 0


def test_an_estimate_looks_at_every_network_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []

    def forward(arch: Arch) -> int:
        counted.append(arch.name)
        return 1000

    monkeypatch.setattr(estimate, "_forward", forward)
    methods = [{"name": "fedavg"}, {"name": "fedprox"}, {"name": "ditto"}]
    settings = {"baselines": False, "data": {"size": 8}, "model": {"name": "mlp"}, "method": methods}
    jobs = plan(Experiment.parse(settings), tmp_path)
    estimate.estimate(jobs, torch.device("cpu"))
    assert counted == ["mlp"]


def test_a_pattern_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_patterns, "MOST_SECONDS", 1)
    images = [{"bytes": b"", "path": f"{'a' * 40}{i}!"} for i in range(4)]
    data = table(tmp_path / "data.parquet", ["a", "b"] * 2, ["c", "d"] * 2, image=images)
    said = run(tmp_path / "runs", f"data.source=parquet:{data}", 'data.columns={group="image.path~^(a+)+$"}')
    assert said.refused
    assert "takes too long" in said.err


def test_patterns_are_those_of_python() -> None:
    assert matches(r"(?<=/)[0-9]+|é", ["a/12", "b/x", "é", ""]) == ["12", "", "é", ""]
