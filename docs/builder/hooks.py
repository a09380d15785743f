"""What mkdocs does beside copying: generated pages, notebooks run while it builds, pages that lie outside ``docs/``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

TOP = Path(__file__).parents[2]
sys.path.insert(0, str(TOP))  # mkdocs has this file alone

from docs.builder import api, notebooks, pages  # noqa: E402

SHIM = "https://unpkg.com/iframe-worker/shim"  # what the theme would fetch

# pages beside docs/, and where they go
ROOT = {path.name: path.name.lower() for path in sorted(TOP.glob("*.md")) if path.name != "README.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is generated, and put notebooks in the place of their files."""
    silent = api.undocumented()
    if silent:
        raise PluginError(f"public, and without a docstring: {', '.join(silent)}")
    made: dict[str, str | bytes] = {**pages.pages(), **api.pages(), **_outside()}
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        made |= notebooks.pages(Path(str(file.abs_src_path)), file.src_uri)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    config.nav = _filled(config.nav or [], [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files beside ``docs/`` and to notebooks lead to their pages; a README's own place is the home page."""
    up = "../" * page.file.src_uri.count("/")
    for name, target in ROOT.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{name}", f"]({up}{target}", markdown)
    markdown = re.sub(r"(\]\([\w./-]+)\.ipynb\)", r"\1.md)", markdown)
    return re.sub(r"\]\((?:\.\./)+README\.md", f"]({up}index.md", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """What a page that is opened from disk needs to search comes from the site itself."""
    return output.replace(SHIM, get_relative_url("from-disk.js", page.url))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """The same for the page that says that there is no such page."""
    return output_content.replace(SHIM, "/from-disk.js") if template_name.endswith(".html") else output_content


def _outside() -> dict[str, str]:
    """Pages that lie beside ``docs/``, their links as seen from inside."""
    texts = {target: (TOP / name).read_text(encoding="utf-8") for name, target in ROOT.items()}
    return {
        target: text.replace("](docs/results/README.md", "](results/glance.md")
        .replace("](docs/", "](")
        .replace("](README.md", "](index.md")
        for target, text in texts.items()
    }


def _filled(nav: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with the pages that a line ending in * stands for."""
    named = {path for path in _paths(nav) if not path.endswith("*")}

    def entries(items: list[Any]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            if isinstance(item, Mapping):
                found.append({key: entries(value) if isinstance(value, list) else value for key, value in item.items()})
            elif item.endswith("*"):
                deep = item.count("/")
                found += sorted(p for p in pages if fnmatch(p, item) and p.count("/") == deep and p not in named)
            else:
                found.append(item)
        return found

    return entries(nav)


def _paths(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, Mapping) else nav
    return [path for item in items for path in _paths(item)]
