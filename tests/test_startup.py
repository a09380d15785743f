"""Who asks for help gets it at once: names of the package are imported when somebody uses them."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import fedshift

COMMANDS = [["--help"], ["run", "--help"], ["list", "methods"], ["list", "pairs"], ["list", "presets"], ["doctor"]]
HEAVY = ("torch", "numpy", "pydantic", "pyarrow", "matplotlib", "sklearn", "scipy", "PIL", "loky")


def test_every_name_is_there_and_where_type_checkers_see_it() -> None:
    tree = ast.parse(Path(fedshift.__file__).read_text())
    seen = {
        node.module.removeprefix("fedshift."): tuple(alias.name for alias in node.names)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert seen == fedshift._PLACES
    assert sorted(name for names in seen.values() for name in names) == sorted(fedshift.__all__)
    assert all(getattr(fedshift, name) is not None for name in fedshift.__all__)
    assert set(fedshift.__all__) <= set(dir(fedshift))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Federation'"):
        _ = fedshift.Federation
    assert not hasattr(fedshift, "__wrapped__")


@pytest.mark.system
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_heavy_import_before_anything_is_asked_for(command: list[str]) -> None:
    script = f"""
import sys
from fedshift import cli
sys.argv = ["fedshift", *{command!r}]
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.system
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_there_within_four_tenths_of_a_second(command: list[str]) -> None:
    """Of a processor's time, the best of five: others may use the machine, and waiting for them is not ours."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "fedshift.cli", *command], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.4


@pytest.mark.system
def test_a_process_that_makes_runs_imports_nothing_that_it_need_not() -> None:
    """It measures without SciPy, whose import takes as long as hundreds of measurements."""
    script = """
import sys
import numpy as np
from fedshift.measures.measurement import Measurement
from fedshift.measures.predictions import Predictions
from fedshift.runs import workers
Measurement.of(Predictions(np.log([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 1])))
print([name for name in ("scipy", "sklearn", "matplotlib", "pandas") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
