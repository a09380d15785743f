"""``make gpu`` without a GPU: it fails when a part of it does not hold, whichever that is."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedshift.core.registry import METHODS
from tests.cuda.fast import made
from tests.test_engines_agree import make

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, as if there were a GPU."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("gpu")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    yield module
    for name in ("gpu", "networks"):
        sys.modules.pop(name, None)


def broken() -> str:
    raise ZeroDivisionError("of all things")


def test_one_part_that_does_not_hold_fails_all_and_the_table_is_last(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, Callable[[], str]] = {"one": lambda: "fine", "two": broken, "three": lambda: "fine too"}
    monkeypatch.setattr(gpu, "PARTS", parts)
    assert gpu.main() == 1
    *_, heading, one, two, three = capsys.readouterr().out.splitlines()
    assert heading.startswith("a GPU, torch ")
    assert (one.split()[:2], two.split()[:2], three.split()[:2]) == (["one", "ok"], ["two", "FAILED"], ["three", "ok"])
    assert "ZeroDivisionError: of all things" in two
    del parts["two"]
    assert gpu.main() == 0
    monkeypatch.setattr(sys, "argv", ["gpu.py", "four"])
    assert gpu.main() == 2
    assert "there is no part 'four'; there are: one, three" in capsys.readouterr().err
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2


@pytest.mark.parametrize(
    ("said", "held"), [("= 312 passed in 2.0s =", True), ("= 300 passed, 12 skipped in 2.0s =", False)]
)
def test_tests_that_are_skipped_are_not_passed(
    said: str, held: bool, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "carried_out", lambda *_: f"....\n{said}\n")
    if held:
        assert gpu.tests() == "312 passed in 2.0s"
    else:
        with pytest.raises(gpu.Failed, match="12 skipped"):
            gpu.tests()


@pytest.mark.parametrize(
    ("ways", "times", "sentence"),
    [
        (["implicit"], [1.0, 2.0], ""),
        (["groups"], [1.0], "kernels of our own were not in use, but groups"),
        ([], [1.0], "not in use, but none"),
        (["implicit"], [], "not heard compiling"),
        (["implicit"], [4.0, 4.0], "2 kernels compiled in 8.0 s, more than 5"),
    ],
)
def test_kernels_that_are_off_or_slow_to_compile_are_seen(
    ways: list[str], times: list[float], sentence: str, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(arguments: list[str], **_: str) -> str:
        Path(arguments[3]).write_text(json.dumps(times))
        return ""

    monkeypatch.setattr(gpu, "carried_out", ran)
    monkeypatch.setattr(gpu, "used", lambda _: ways)
    if sentence:
        with pytest.raises(gpu.Failed, match=sentence):
            gpu.kernels()
    else:
        assert gpu.kernels() == "2 kernels compiled in 3.0 s"


@pytest.mark.parametrize(
    ("ours", "pooled", "loop", "ways", "holds"),
    [
        (90.0, 100.0, 1.0, "implicit", True),
        (84.0, 100.0, 1.0, "implicit", False),  # for 100 clients
        (90.0, 100.0, 3.0, "implicit", False),
        (90.0, 100.0, 1.0, "groups+patches", False),
    ],
)
def test_a_ratio_that_fell_is_seen(
    ours: float, pooled: float, loop: float, ways: str, holds: bool, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(compiled: Any) -> float:
        return pooled if compiled else pooled / 2  # the better one counts

    stand_ins = {
        "vmapped_rate": lambda *_, **__: (ours, ways),
        "loop_rate": lambda *_: loop,
        "pooled": lambda _, __, compiled: compiled,
        "rate": rate,
        "freed": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(gpu.networks, name, stand_in)
    if holds:
        assert gpu.ratios().startswith("20 clients: 0.90 of pooled, 90.0 x sequential; 100 clients")
    else:
        with pytest.raises(gpu.Failed):
            gpu.ratios()


@pytest.mark.parametrize("name", list(METHODS))
def test_there_is_a_network_on_which_a_gpu_checks_every_method(name: str) -> None:
    """Those that a method refuses are passed over in silence there."""
    assert any(made(name, norm) for norm in (False, True))
    assert any(make(name, norm) for norm in (False, True))
