"""The command line called in this process, and what it said."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fedshift import cli

# an experiment that ends within a second
SMALL = ("rounds=1", "baselines=false", "data.size=8", "model.name=mlp", "model.hidden=[4]", "evaluate.every=0")


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def refused(self) -> bool:
        """One sentence, and the exit code of a user's mistake."""
        return self.code == 2 and self.err.startswith("error: ") and len(self.err.strip().splitlines()) == 1


def fedshift(*arguments: str) -> Said:
    """Call a command; an exception that reaches the top is a traceback with exit code 70."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fedshift", *map(str, arguments)]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                code = end.code or 0
            except Exception:
                traceback.print_exc()
                code = 70
    finally:
        sys.argv = before
    return Said(code, out.getvalue(), err.getvalue())


def run(out: Path, *changes: str) -> Said:
    """``fedshift run`` of a small experiment with some changes."""
    settings = [part for change in (*SMALL, *changes) for part in ("-c", change)]
    return fedshift("run", *settings, "--out", str(out), "--engine", "sequential")


def png(seed: int, side: int = 8) -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def table(path: Path, labels: list[Any], clients: list[Any], **columns: list[Any]) -> Path:
    """A Parquet file in the usual layout."""
    images = [{"bytes": png(i), "path": f"{i}.png"} for i in range(len(labels))]
    pq.write_table(pa.table({"image": images, "label": labels, "domain": clients, **columns}), path)
    return path
