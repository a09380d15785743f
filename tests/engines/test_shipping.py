"""Code of a script or a notebook reaches worker processes, and gives the numbers it gives without them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fedshift.engines import shipping

CODE = """
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import fedshift
from fedshift import Adapter, Experiment, Method
import beside

def helper(value):
    return torch.tanh(value) * HALF

HALF = 0.5

@fedshift.method("my-method")
@dataclass(frozen=True)
class MyMethod(Method):
    weights_of: Sequence[float] = (1.0, 2.0)

    def loss(self, state, tensors, batch, phase):
        value, buffers = super().loss(state, tensors, batch, phase)
        extra = torch.zeros(self.arch.classes).sum() + helper(value) + beside.twice(value)
        return self.weights_of[1] * value + extra, buffers

@fedshift.adapter("my-adapter")
@dataclass(frozen=True)
class MyAdapter(Adapter):
    tilts: Sequence[float] = ()

    def predict(self, state, x, draws):
        output, state = super().predict(state, x, draws)
        tilt = torch.linspace(0, self.tilts[0], self.arch.classes)
        ops, classes = self.arch.classes, beside.twice(1)
        return output._replace(logits=F.log_softmax(output.logits + helper(tilt) * classes, -1)), state

class MyNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(192, 6), nn.Linear(6, 10)
        self.classes = torch.ones(1).numel()

    def forward(self, x):
        return self.head(F.relu(self.body(x.flatten(1))) * self.classes + 0 * helper(x.sum()))
"""
WORK = """
import json, sys, warnings

def numbers(folder, engine, processes):
    methods = [
        {"name": "my-method", "weights-of": [0.5, 1.5], "adapters": ["none", {"name": "my-adapter", "tilts": [3.0]}]},
        {"name": "fedavg", "adapters": [{"name": "my-adapter", "tilts": [2.0]}]},
    ]
    settings = {"rounds": 2, "baselines": False, "data": {"size": 8}, "method": methods, "precision": "float64"}
    experiment = Experiment.parse({"name": "small", **settings})
    result = fedshift.run(
        experiment, out + "/" + folder, engine=engine, processes=processes, network=MyNetwork, device="cpu"
    )
    clock = ("seconds-per-round", "memory-grown", "memory-peak")
    return [{key: value for key, value in row.items() if key not in clock} for row in result.as_dicts()]

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    expected = numbers("alone", "sequential", 1)
    answers = [numbers("workers", "parallel", 1), numbers("jobs", "sequential", 2)]
assert not [str(w.message) for w in caught if "process" in str(w.message)], [str(w.message) for w in caught]
assert len({row["adapter-name"] for row in expected}) == 2, expected
print([compare(expected, answer) for answer in answers])
"""
COMPARE = """
def compare(rows, others):
    assert len(rows) == len(others) > 2
    for row, other in zip(rows, others):
        assert row.keys() == other.keys()
        for key in row:
            close = isinstance(row[key], float) and abs(row[key] - other[key]) < 1e-9
            assert close or row[key] == other[key], (key, row, other)
    return True
"""
NOTEBOOK = """
cells = {cells!r}
out = {out!r}
import sys
namespace = sys.modules["__main__"].__dict__ if {name!r} == "__main__" else {{"__name__": {name!r}}}
namespace["out"] = out
for cell in cells:
    exec(cell, namespace)
"""
ROOT = Path(__file__).parents[2]


def answer(folder: Path, text: str, *, where: Path | None = None) -> str:
    """What a script says whose folder has a module beside it."""
    folder.mkdir()
    (folder / "beside.py").write_text("def twice(value):\n    return 2 * value\n")
    (folder / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "script.py")]
    done = subprocess.run(
        command, cwd=where or folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "Warning" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.system
def test_a_script(tmp_path: Path) -> None:
    text = CODE + COMPARE + f"\nout = {str(tmp_path / 'runs')!r}\n" + WORK
    assert answer(tmp_path / "its", text, where=tmp_path) == "[True, True]"


@pytest.mark.system
@pytest.mark.parametrize("name", ["__main__", "cells"])
def test_a_notebook(tmp_path: Path, name: str) -> None:
    # where no module has its name, the meaning of annotations that are text is nowhere to be found
    code = CODE if name == "__main__" else CODE.replace("from __future__ import annotations", "")
    cells = [code, COMPARE, WORK]
    text = NOTEBOOK.format(cells=cells, out=str(tmp_path / "runs"), name=name)
    assert answer(tmp_path / "its", text) == "[True, True]"


@pytest.mark.parametrize("module", [torch.classes, torch.ops, torch.nn.functional, os.path, sys])
def test_modules_go_by_name(module: object) -> None:
    assert shipping.loads(shipping.dumps(module)) is module
    assert len(shipping.dumps(module)) < 200


def test_attributes_called_like_modules_of_torch() -> None:
    namespace: dict[str, object] = {"torch": torch, "__name__": "__main__"}
    exec("def count(arch): return torch.ones(arch.classes).sum() + arch.ops + arch.backends", namespace)

    class Arch:
        classes, ops, backends = 3, 2, 1

    sent = shipping.loads(shipping.dumps(namespace["count"]))
    assert sent is not namespace["count"]
    assert sent(Arch) == 6


def test_what_cannot_travel_is_refused() -> None:
    import threading

    with pytest.raises(shipping.CANNOT_TRAVEL):
        shipping.dumps(threading.Lock())


SHOW = "from fedshift.engines.shipping import search_path; print(*search_path(), sep='\\n')"


def path_of(folder: Path, *command: str, **variables: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    path = done.stdout.splitlines()
    assert "" not in path
    return path


@pytest.mark.system
def test_a_scripts_folder_comes_last_and_the_current_one_not_at_all(tmp_path: Path) -> None:
    source, here, scripts = str(ROOT / "src"), tmp_path / "here", tmp_path / "scripts"
    here.mkdir()
    scripts.mkdir()
    (scripts / "script.py").write_text(SHOW)
    path = path_of(here, str(scripts / "script.py"))
    assert path[-1] == str(scripts)
    assert path[0] == source
    assert str(here) not in path
    # an empty entry of PYTHONPATH is the current folder, which nobody meant
    assert str(here) not in path_of(here, str(scripts / "script.py"), PYTHONPATH=f":{source}")
    # one that is named stays where it is
    assert path_of(here, str(scripts / "script.py"), PYTHONPATH=f"{here}:{source}")[:2] == [str(here), source]
    # under -P a script's folder is nobody's either
    assert str(scripts) not in path_of(here, "-P", str(scripts / "script.py"))
    # an interactive session and a module of the user's are his code, fedshift's are not
    assert path_of(here, "-c", SHOW)[-1] == str(here)
    (here / "program.py").write_text(SHOW)
    assert path_of(here, "-m", "program")[-1] == str(here)
    deliberate = "import sys, os; sys.path.insert(0, os.getcwd())\n" + SHOW
    (scripts / "script.py").write_text(deliberate)
    assert path_of(here, str(scripts / "script.py"))[0] == str(here)


def test_the_command_line_has_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from importlib.machinery import ModuleSpec

    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("fedshift.cli", None))
    monkeypatch.setattr("multiprocessing.process.ORIGINAL_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", str(ROOT / "src")])
    assert shipping.search_path() == [str(ROOT / "src")]


@pytest.mark.system
def test_annotations_travel_as_what_they_mean() -> None:
    code = textwrap.dedent("""
        from __future__ import annotations
        from dataclasses import dataclass
        from typing import ClassVar
        from collections.abc import Sequence as Many

        @dataclass
        class Thing:
            some: Many[int] = ()
            kind: ClassVar[Many[str]] = ()
            def double(self): return [2 * one for one in self.some]
    """)
    check = textwrap.dedent("""
        import sys, typing
        from fedshift.engines import shipping
        made = shipping.loads(sys.stdin.buffer.read())
        print(typing.get_type_hints(made)["some"], made([4]).double())
    """)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    write = code + "\nimport sys\nfrom fedshift.engines import shipping\nsys.stdout.buffer.write(shipping.dumps(Thing))"
    sent = subprocess.run([sys.executable, "-c", write], env=environment, capture_output=True, check=True).stdout
    done = subprocess.run([sys.executable, "-c", check], env=environment, input=sent, capture_output=True, check=False)
    assert done.stdout.decode().strip() == "collections.abc.Sequence[int] [8]", done.stderr.decode()


def test_an_adapter_may_stand_in_for_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script registered under a known name is what its workers use."""
    from fedshift.core.adapter import Adapter
    from fedshift.core.registry import ADAPTERS, Entry

    known = ADAPTERS["none"]
    monkeypatch.setitem(ADAPTERS._entries, "none", known)
    ADAPTERS.adopt(Entry("none", Adapter, "a test", "", 0))
    assert ADAPTERS["none"].paper == "a test"
