"""Small things that people reach for: versions, completion, words after Ctrl-C, networks of one's own, colours, orders."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.main import get_command
from typer.testing import CliRunner

import fedshift
from fedshift import Experiment, UserError
from fedshift.cli import app
from fedshift.cli.guard import _next
from fedshift.doctor import EXTRAS
from fedshift.inspect import inspect
from fedshift.results.collect import collect
from fedshift.results.plots.style import PALETTE
from fedshift.store.found import find_runs

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "rounds": 1,
    "baselines": False,
    "data": {"size": 8, "domains": ["pen", "paper"]},
    "split": {"train-limit": 20},
    "evaluate": {"advice": False},
}


# ---- the command line -----------------------------------------------------------------------------------------------
def test_it_says_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"fedshift {fedshift.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_presets_and_lists(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def completed(*words: str) -> list[str]:
        line = " ".join(words)
        monkeypatch.setenv("_FEDSHIFT_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        with pytest.raises(SystemExit):
            get_command(app).main(args=[], prog_name="fedshift")
        return re.findall(r"[\w-]+", capsys.readouterr().out)

    assert {"run", "report"} <= set(completed("fedshift", "r"))
    assert {"brfl", "brfl-100"} <= set(completed("fedshift", "run", "brf"))
    assert "methods" in completed("fedshift", "list", "me")
    monkeypatch.setenv("_FEDSHIFT_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit):
        get_command(app).main(args=[], prog_name="fedshift")
    assert "fedshift" in capsys.readouterr().out


def test_who_stops_a_command_is_told_what_to_type_next() -> None:
    """tests/runs/test_processes.py has the signals themselves."""
    assert _next(["run", "a b.toml"]).endswith("fedshift run 'a b.toml' --resume")
    assert _next(["deploy", "run", "server", "--resume"]).endswith("fedshift deploy run server --resume")
    assert _next(["tune", "mine.toml"]).endswith("the same command goes on: fedshift tune mine.toml")
    assert _next(["watch"]) == ""


def test_doctor_lists_the_extras_that_do_something() -> None:
    """Every extra that it lists is declared, installs what it names, and something imports that."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(declared) - {"docs", "dev"}
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for extra, (module, _) in EXTRAS.items():
        assert any(entry.startswith(module) for entry in declared[extra]), extra
        names = {re.split(r"[^\w-]", entry)[0].replace("-skinny", "") for entry in declared[extra]}
        assert any(re.search(rf"^\s*(import|from) ([\w.]+\.)?{name}\b", code, re.MULTILINE) for name in names), extra


# ---- networks of one's own ------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Two linear layers; the one that gives the logits is made first."""

    def __init__(self, answer: str = "plain", outputs: int = 10) -> None:
        super().__init__()
        self.last = nn.Linear(8, outputs)
        self.first = nn.Linear(192, 8)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        inner = torch.relu(self.first(x.flatten(1)))
        logits = self.last(inner)
        return {"plain": logits, "pair": (logits, inner), "dict": {"logits": logits}, "list": [logits]}[self.answer]


def test_the_head_can_be_named_wherever_a_network_is_given(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"name the layer that gives the logits with head=\.\.\."):
        fedshift.run(Experiment(**SMALL), out=tmp_path, network=Net)
    result = fedshift.run(Experiment(**SMALL), out=tmp_path, network=Net, head="last")
    (folder,) = result.folders
    own = fedshift.load(folder / "artefacts" / "pen", network=Net, head="last")
    assert own.method.arch.head == {"last.weight", "last.bias"}
    assert inspect(folder, samples=10, network=Net, head="last")["runs"][0]["accuracy"]["by-client"] == pytest.approx(
        result.rows[0].by_client("original/clients")
    )
    with pytest.raises(UserError, match="head names a layer of your own network"):
        fedshift.run(Experiment(**SMALL), out=tmp_path, head="last")


@pytest.mark.parametrize(
    ("answer", "words"),
    [("pair", "returns a tuple of Tensor, Tensor"), ("dict", "returns a dict"), ("list", "returns a list of Tensor")],
)
def test_what_is_no_logits_gets_a_sentence(tmp_path: Path, answer: str, words: str) -> None:
    with pytest.raises(UserError, match=f"network 'net' {words}: it must return its logits"):
        fedshift.run(Experiment(**SMALL), out=tmp_path, network=lambda: Net(answer), head="last")


def test_more_logits_than_classes_get_a_sentence(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="network 'net' gives 12 logits, but the data have 10 classes"):
        fedshift.run(Experiment(**SMALL), out=tmp_path, network=lambda: Net(outputs=12), head="last")


# ---- looking at results ---------------------------------------------------------------------------------------------
def test_colours_do_not_repeat_before_ten() -> None:
    assert len(set(PALETTE)) == len(PALETTE) >= 10
    page = (ROOT / "src/fedshift/results/pages/templates/page.css").read_text()
    for theme in re.findall(r"--s0:[^}]*", page):
        colours = re.findall(r"--s\d+: (#\w+)", theme)
        assert len(set(colours)) == len(colours) >= 10


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Result:
    methods = [
        {"name": "fedprox", "label": "z"},
        {"name": "fedavg", "adapters": ["tent", "none", "bn"]},
        {"name": "fedprox", "label": "a", "mu": 0.5},
    ]
    streams = [{"name": "original", "kind": "original"}, {"name": "by-class", "kind": "original", "order": "by-class"}]
    experiment = Experiment(**SMALL, seeds=[1, 0], method=methods, stream=streams, model={"name": "cnn", "norm": True})
    return fedshift.run(experiment, out=tmp_path_factory.mktemp("runs"), engine="sequential")


def test_show_orders_and_names_as_run_does(ordered: fedshift.Result) -> None:
    base = ordered.folders[0].parents[1]
    for number, folder in enumerate(ordered.folders):  # whoever was begun last
        (folder / "config.toml").touch()
        assert number < 6
    again = collect(find_runs(base))
    named = [(row.method, row.adapter, row.seeds) for row in ordered.rows]
    assert [(row.method, row.adapter, row.seeds) for row in again.rows] == named
    assert [name for name, *_ in named] == ["z", "fedavg", "fedavg", "fedavg", "a"]
    assert [adapter for _, adapter, _ in named][1:4] == ["tent", "none", "bn"]
    (base / "plan.json").write_text("{")  # nobody needs it
    assert len(collect(find_runs(base)).rows) == 5


def test_inspect_looks_at_adapted_models_on_a_chosen_stream(ordered: fedshift.Result, tmp_path: Path) -> None:
    (folder,) = (path for path in ordered.folders if "fedavg" in path.parts and path.name.startswith("0-"))
    found = inspect(folder, tmp_path, samples=10, adapter="tent", stream="by-class")["runs"][0]
    assert (found["adapter"], found["stream"]) == ("tent", "by-class")
    scored = next(row for row in ordered.rows if row.adapter == "tent").scores("by-class/clients")
    of_seed = scored[ordered.rows[1].seeds.index(0)].values("accuracy")
    assert found["accuracy"]["by-client"] == pytest.approx(of_seed)
    assert json.loads((tmp_path / "inspect.json").read_text())["runs"][0]["adapter"] == "tent"
    with pytest.raises(UserError, match="has no stream 'orignal'; it has: original, by-class"):
        inspect(folder, tmp_path, stream="orignal")


def test_help_says_what_arguments_are_for() -> None:
    """A pair of typer and click that forgets it has been about, and words in brackets are no markup."""
    commands = dict(get_command(app).commands)  # type: ignore[attr-defined]
    commands |= {f"deploy {name}": command for name, command in commands.pop("deploy").commands.items()}
    for name, command in commands.items():
        for parameter in command.params:
            assert getattr(parameter, "help", None), (name, parameter.name)
    said = CliRunner().invoke(app, ["tune", "--help"]).stdout
    assert "beside [tune]" in " ".join(said.replace("│", " ").split())
