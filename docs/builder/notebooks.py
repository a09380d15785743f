"""Notebooks become pages: run from start to end while the site is built, so that what they show is what happens."""

from __future__ import annotations

import re
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def pages(path: Path, uri: str) -> dict[str, str | bytes]:
    """The page of a notebook, and the pictures its cells drew, by path."""
    stem = uri.removesuffix(".ipynb")
    notebook = executed(path.read_text(encoding="utf-8"))
    made: dict[str, str | bytes] = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for kind, content in filter(None, map(_shown, cell.outputs)):
            if kind == "png":
                name = f"{stem}-{len(made) + 1}.png"
                made[name] = b64decode(content)
                parts.append(f"![what the cell drew]({Path(name).name})")
            else:
                parts.append(content)
    return {**made, f"{stem}.md": "\n\n".join(parts) + "\n"}


@cache
def executed(text: str) -> Any:
    """A notebook with the outputs of all its cells; an error in one of them is raised."""
    notebook = nbformat.reads(text, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        kernel = KernelManager(transport="ipc", ip=str(Path(folder, "kernel")))
        Path(folder, "work").mkdir()
        try:
            NotebookClient(
                notebook, km=kernel, timeout=300, resources={"metadata": {"path": f"{folder}/work"}}
            ).execute()
        finally:
            kernel.shutdown_kernel(now=True)
    return notebook


def _shown(output: Any) -> tuple[str, str] | None:
    """What a page shows of an output: a picture, a table, or text."""
    if output.output_type == "stream":
        text = "\n".join(_lines(output.text))
        return ("text", f"```{{.text .output}}\n{text}\n```") if text else None
    data = output.get("data", {})
    if "image/png" in data:
        return "png", data["image/png"]
    if "text/html" in data:
        return "html", f'<div class="output">\n{data["text/html"].strip()}\n</div>'
    text = data.get("text/plain", "").rstrip()
    return ("text", f"```{{.text .output}}\n{text}\n```") if text else None


def _lines(text: str) -> Iterator[str]:
    """As a terminal would show it in the end: what a carriage return writes over is gone."""
    for line in ANSI.sub("", text).rstrip("\n").split("\n"):
        yield line.rstrip("\r").rsplit("\r", 1)[-1].rstrip()
