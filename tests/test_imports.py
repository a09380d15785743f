"""Who may import whom: the house has one way up, and this is the rule."""

from __future__ import annotations

import ast
import re
import sys
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
    "track": set(),
    "privacy": {"core"},
    "results": {"core", "data", "measures", "store"},
    "runs": {"core", "blocks", "data", "measures", "store", "engines", "experiment", "privacy", "results", "track"},
    "join": {"core", "data", "measures", "store", "engines", "experiment", "results", "runs"},
    "tune": {"core", "data", "measures", "store", "engines", "experiment", "results", "runs"},
    "inspect": {"core", "data", "measures", "store", "engines", "experiment", "results", "runs", "systems"},
    "deploy": {"core", "data", "measures", "store", "engines", "experiment", "privacy", "results", "runs"},
    "export": {"core", "data", "measures", "store", "engines", "experiment", "runs"},
    "serve": {"core", "data", "measures", "store", "engines", "experiment", "runs"},
}
ALONE = {"catalogue.py", "doctor.py", "__init__.py", "__main__.py", "errors.py"}
TOP = {"cli", "__main__.py"}  # may import everybody, and nobody imports them


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
    assert packages | {"__main__.py"} == set(MAY) | TOP
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


def at_start(path: Path) -> Iterator[str]:
    """Modules that a file imports as soon as it is imported itself, and not first inside a function."""

    def walk(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.startswith("fedshift"))
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "TYPE_CHECKING" not in (
                ast.dump(node.test) if isinstance(node, ast.If) else ""
            ):
                for field in ("body", "orelse", "handlers", "finalbody"):
                    yield from walk(getattr(node, field, []))

    yield from walk(ast.parse(path.read_text()).body)


def file_of(module: str) -> Path | None:
    path = ROOT.parent / Path(*module.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


LIGHT = {"typer", "rich"}  # what help, lists and doctor may load beside Python's own


@pytest.mark.parametrize("start", ["fedshift.cli", "fedshift.catalogue", "fedshift.doctor"])
def test_starting_loads_nothing_heavy(start: str) -> None:
    """``fedshift --help`` must not wait for torch: commands import what they need when they are called."""
    todo, via = [start], {start: start}
    while todo:
        module = todo.pop()
        parents = module.split(".")
        for name in (".".join(parents[:end]) for end in range(1, len(parents) + 1)):
            path = file_of(name)
            for other in at_start(path) if path is not None else ():
                if other not in via:
                    via[other] = f"{via[module]} -> {other}"
                    todo += [other] if other.startswith("fedshift") else []
    ours = {*sys.stdlib_module_names, *LIGHT, "fedshift"}
    assert not [way for module, way in via.items() if module.split(".")[0] not in ours]


def test_text_reaches_the_screen_at_one_place() -> None:
    """Consoles and tables of rich read brackets in names as markup; those of ``results/plain.py`` show them."""
    markup = re.compile(r"\[(/|bold|red|green|yellow)[a-z ]*\]")
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in FILES
        if path.relative_to(ROOT).as_posix() != "results/plain.py"
        for pattern in (re.compile(r"rich\.(markup|table|console) import"), markup)
        if (found := pattern.search(path.read_text()))
    ]
    assert wrong == ["results/result.py: rich.table import"]  # for the types it returns
