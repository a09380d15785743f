"""The API pages: first what ``import fedshift`` gives, then a page for each package, module by module."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import fedshift

SOURCE = Path(fedshift.__file__).parent
ELSEWHERE = {"systems", "methods", "adapters", "models", "cli"}  # they have pages of their own, or --help
GROUPS = {
    "core": "Write methods, adapters and networks",
    "data": "Data",
}  # by the package a name comes from
OTHERS = "Run, read, serve"


def pages() -> dict[str, str]:
    """All of them, by path."""
    packages = [path.name for path in sorted(SOURCE.iterdir()) if (path / "__init__.py").exists()]
    made = {f"api/{name}.md": _package(name) for name in packages if name not in ELSEWHERE}
    return {"api/index.md": _front([name for name in packages if name not in ELSEWHERE]), **made}


def _front(packages: list[str]) -> str:
    grouped: dict[str, list[str]] = {OTHERS: [], **{title: [] for title in GROUPS.values()}}
    for name in fedshift.__all__:
        home = str(getattr(getattr(fedshift, name), "__module__", ""))
        package = home.split(".")[1] if home.startswith("fedshift.") else "core"  # types of trees, decorators
        grouped[GROUPS.get(package, OTHERS)].append(name)
    parts = [
        "# API",
        "What `import fedshift` gives. Packages, module by module: "
        + ", ".join(f"[{name}]({name}.md)" for name in packages)
        + ".",
    ]
    for title, names in grouped.items():
        parts.append(f"## {title}")
        parts += [f"::: fedshift.{name}\n    options:\n      heading_level: 3" for name in sorted(names, key=str.lower)]
    return "\n\n".join(parts) + "\n"


def _package(name: str) -> str:
    parts = [f"# fedshift.{name}", _docstring(SOURCE / name / "__init__.py").replace("``", "`")]
    for path in _modules(SOURCE / name):
        dotted = ".".join(("fedshift", *path.relative_to(SOURCE).with_suffix("").parts))
        parts.append(f"::: {dotted}\n    options:\n      show_root_full_path: true")
    return "\n\n".join(parts) + "\n"


def _modules(folder: Path) -> Iterator[Path]:
    """Public modules, those of packages inside it too."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and not path.name.startswith("_"):
            yield path
        elif (path / "__init__.py").exists():
            yield from _modules(path)


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def undocumented() -> list[str]:
    """Public names that say nothing: of ``fedshift``, and every class, function and method of a public module."""
    silent = [f"fedshift.{name}" for name in fedshift.__all__ if not _says_something(name)]
    for path in sorted(SOURCE.rglob("*.py")):
        if any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(SOURCE).parts):
            continue
        where = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        silent += [f"fedshift.{where}.{name}" for name in _silent(ast.parse(path.read_text(encoding="utf-8")))]
    return silent


def _silent(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        overrides = any(ast.unparse(one) in ("overload", "override") for one in node.decorator_list)
        if not ast.get_docstring(node) and not overrides:
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner}" for inner in _silent(node))


def _says_something(name: str) -> bool:
    """A class or function by its docstring; another name, a type for instance, by the string beneath it."""
    value = getattr(fedshift, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        return bool(inspect.getdoc(value))
    home = next(
        path for path in sorted(SOURCE.rglob("*.py")) if f"\n{name}: TypeAlias" in path.read_text(encoding="utf-8")
    )
    body = ast.parse(home.read_text(encoding="utf-8")).body
    place = next(
        i for i, node in enumerate(body) if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    )
    after = body[place + 1] if place + 1 < len(body) else None
    return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
