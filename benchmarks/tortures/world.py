"""What all parts share: commands in processes of their own, runs to be tortured, and how two of them are compared."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.forks import LONGEST, become

from fedshift.cli import main
from fedshift.store.trees import load

CLOCK = {"seconds", "memory-grown", "memory-peak", "seal"}
SMALL = {
    "baselines": "false", "data.columns": '{image="image", label="label", client="clinic"}', "data.size": "8",
    "split.unseen": '["south"]', "model.name": "mlp", "model.hidden": "[4]", "train.local-epochs": "1", "name": "small",
    "stream": '[{name="original", kind="original"}]',
}  # fmt: skip
PLAIN = ("model.safetensors", "known.safetensors", "features.safetensors")  # no trees
CLIENTS = ("north", "east", "south")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """What was wrong, without the lines of a table."""
        return self.err.strip()

    def wrong(self) -> str:
        """Why it did not end as it should: 0, or one sentence and 1 or 2; empty if it did."""
        if "Traceback" in self.err or "Traceback" in self.out or "Exception ignored" in self.err:
            return f"a traceback: {self.err.strip().splitlines()[-1:]}"
        if self.code == -signal.SIGALRM:
            return f"no end after {LONGEST} s"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        if self.code and len(self.sentence.splitlines()) != 1:
            return f"not one sentence: {self.sentence!r}"
        return ""


@dataclass
class Tally:
    """What was counted, and what went wrong."""

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def count(self, what: str, times: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + times

    def fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"  FAILED {what}", flush=True)

    def progress(self, what: str, every: int) -> None:
        """A line now and then."""
        if self.counts.get(what, 0) % every == 0:
            print(f"  {self.counts.get(what, 0)} {what}, {len(self.failures)} failures", flush=True)

    def report(self, part: str, started: float) -> None:
        """One line; ends the program with 1 if anything went wrong."""
        numbers = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        print(f"{part}: {numbers}, {len(self.failures)} failures, {time.monotonic() - started:.0f} s", flush=True)
        if self.failures:
            raise SystemExit(1)


def fork(words: list[str], before: Callable[[], object] = lambda: None) -> tuple[int, Path]:
    """A command in a process of its own, which has everything imported already; its number, and where it prints."""
    place = Path(tempfile.mkdtemp(prefix="torture-said-"))
    sys.stdout.flush()
    number = os.fork()
    if number == 0:
        try:
            become(words, place, before)
        except SystemExit as ended:  # at once: the folders that this copy of the torture has open are not its to clear
            os._exit(ended.code if isinstance(ended.code, int) else 1)
    return number, place


def outcome(number: int, place: Path) -> Outcome:
    """Wait for a command."""
    _, status = os.waitpid(number, 0)
    said = [(place / name).read_text(errors="replace") if (place / name).exists() else "" for name in ("out", "err")]
    for path in (*place.iterdir(), place):
        path.unlink() if path.is_file() else path.rmdir()
    return Outcome(os.waitstatus_to_exitcode(status), *said)


def command(*words: object, before: Callable[[], object] = lambda: None) -> Outcome:
    """A command from beginning to end."""
    return outcome(*fork([str(word) for word in words], before))


def prepare(base: Path) -> None:
    """Data for small experiments, and everything imported and used once: processes begin with what this one has.

    Their ``fedshift run`` draws no pictures and no page, which take longer than all the rest and are no part of a run.
    """
    torch.set_num_threads(1)
    os.environ["FEDSHIFT_CACHE"] = str(base / "cache")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for k in range(180):
        label = k % 3
        pixels = torch.randint(0, 100, (8, 8), dtype=torch.uint8, generator=generator)
        pixels[2 * label : 2 * label + 3] += 120
        picture = io.BytesIO()
        Image.fromarray(pixels.numpy()).save(picture, "PNG")
        rows.append({"image": {"bytes": picture.getvalue()}, "label": label, "clinic": CLIENTS[k % 7 % 3]})
    pq.write_table(pa.Table.from_pylist(rows), base / "clinics.parquet")
    for module in ("pictures", "task"):
        plots = importlib.import_module(f"fedshift.results.plots.{module}")
        for name in {"save", "result_picture", "task_picture"} & set(vars(plots)):
            setattr(plots, name, lambda *_: None)
    importlib.import_module("fedshift.cli.run")._report = lambda *_: None
    for module in ("inspect", "join", "export"):
        importlib.import_module(f"fedshift.{module}")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for engine in ("sequential", "vmapped"):
            words = run_words(base / "warm", {"rounds": "1", "name": engine}, "--engine", engine)
            sys.argv = ["fedshift", *words]
            with contextlib.suppress(SystemExit):
                main()
    gc.freeze()  # what is there now is never copied to look whether somebody still needs it


def run_words(out: Path, settings: dict[str, str], *more: str) -> list[str]:
    """``fedshift run`` of a small experiment; its data lie beside the folder of runs."""
    source = {"data.source": f"parquet:{out.parent / 'clinics.parquet'}"}
    changes = [part for key, value in {**source, **SMALL, **settings}.items() for part in ("-c", f"{key}={value}")]
    return ["run", *changes, "--out", str(out), *more]


def killed_at(folder: Path, operation: int) -> Callable[[], None]:
    """Something that has this process killed at the so-manieth thing it does to files below a folder."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"):
            return
        if str(folder) in str(arguments[0]) and not str(arguments[0]).endswith(".lock"):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(hook)


# ---- what a run leaves ---------------------------------------------------------------------------------------------------
def contents(folder: Path, but: Path | None = None) -> dict[str, Any]:
    """Every file below a folder but pictures and one that may be damaged, without what a clock decides."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != but)
    return {str(path.relative_to(folder)): content_of(path) for path in files}


def content_of(path: Path) -> Any:
    """What a file holds, without what a clock decides."""
    if path.suffix == ".safetensors":
        return load_file(path) if path.name in PLAIN else load(path)
    if path.suffix == ".parquet":
        return pq.read_table(path)
    if path.suffix == ".jsonl":
        return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name in ("done", "costs.json", "complete"):
        table = json.loads(path.read_text())
        return {key: value for key, value in table.items() if not key.startswith(("seconds", "memory", "seal"))}
    return "" if path.suffix in (".png", ".html") else path.read_bytes()  # which say when they were made


def _timeless(line: Any) -> Any:
    if not isinstance(line, dict):  # of another shape, as some damage makes it
        return line
    return {key: value for key, value in line.items() if key not in CLOCK}


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Where two things differ in a single bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if not torch.equal(a, b):
            yield where
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            if key not in a or key not in b:
                yield f"{where}/{key} is {'new' if key in b else 'gone'}"
            else:
                yield from differences(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for k, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, f"{where}/{k}")
    elif a != b:
        yield where
