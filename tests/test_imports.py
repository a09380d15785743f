"""Who may import whom: the house has one way up, and this is the rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "fedshift"
PLUGINS = {"systems", "methods", "adapters"}
# what a package may import beside itself; ``errors`` and the package's version are everybody's
MAY = {
    "core": set(),
    "measures": set(),
    "blocks": {"core"},
    "systems": {"core", "blocks"},
    "methods": {"core", "blocks"},
    "adapters": {"core", "blocks"},
    "models": {"core"},
    "data": {"core"},
    "store": {"core", "measures"},
    "engines": {"core", "data", "store"},
    "experiment": set(),
    "results": {"core", "data", "measures", "store"},
    "runs": {"core", "blocks", "data", "measures", "store", "engines", "experiment", "results"},
    "join": {"core", "data", "measures", "store", "engines", "experiment", "results", "runs"},
    "inspect": {"core", "data", "measures", "store", "engines", "experiment", "results", "runs", "systems"},
    "export": {"core", "data", "measures", "store", "engines", "experiment", "runs"},
}
ALONE = {"catalogue.py", "doctor.py", "__init__.py", "errors.py"}
TOP = {"cli"}  # may import everybody, and nobody imports it


def imported(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports when it runs, also inside functions; those for types alone do not count."""
    tree = ast.parse(path.read_text())
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedshift"):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("fedshift."))


FILES = sorted(ROOT.rglob("*.py"))


def test_every_package_has_a_rule() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == set(MAY) | TOP
    assert {path.name for path in ROOT.glob("*.py")} == ALONE


@pytest.mark.parametrize("package", list(MAY))
def test_imports_go_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == package
        for module in imported(path)
        if module.split(".")[1] not in {package, "errors", "__version__"} | MAY[package]
    ]
    assert not wrong


def test_nothing_imports_the_command_line() -> None:
    others = [path for path in FILES if path.relative_to(ROOT).parts[0] not in TOP]
    assert not [path for path in others if any(module.startswith("fedshift.cli") for module in imported(path))]


def test_systems_do_not_know_each_other() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == "systems"
        for module in imported(path)
        if module.startswith("fedshift.systems.") and module.split(".")[2] != path.relative_to(ROOT).parts[1]
    ]
    assert not wrong


def test_the_contract_can_be_read_in_one_sitting() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "core").glob("*.py"))
    assert lines <= 1500
