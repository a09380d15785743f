"""A run on disk: one seed of one method, in a folder that can be killed at any moment and gone on with.

``config.toml`` says what it is, ``metrics.jsonl`` has a line for every round and evaluation, ``ckpt-*.safetensors`` is
the newest state, ``best.safetensors`` the state that was best on validation (``best/*.safetensors`` those that were after
an adapter's own adaptation), ``adapters/*.jsonl`` the scores, ``twins/*.jsonl`` those on validation images under the same
shifts, ``predictions/*.parquet`` the probabilities they are of, and ``done`` appears last. ``costs.json`` is the cost
ledger; ``notes.txt`` says why numbers differ from a paper's; ``features.safetensors`` has features of some test images,
if they were asked for; ``snapshot.safetensors`` is what unseen clients are served from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from fedshift.errors import UserError
from fedshift.store.lines import History, Line
from fedshift.store.lock import check_free
from fedshift.store.rows import ScoreRow
from fedshift.store.state import State
from fedshift.store.trees import load, save

NOTES = "notes.txt"  # one a line
COSTS = "costs.json"
PLAN = "plan.json"  # beside the methods' folders: every run of the experiment, begun or not
FEATURES = "features.safetensors"
SNAPSHOT = "snapshot.safetensors"
OLD_SNAPSHOT = ("welcome.safetensors", "welcome/{}.safetensors")  # as older versions called them
CHECKPOINT = "ckpt-{:06d}.safetensors"


class Reached(NamedTuple):
    """What a state reached on validation images; of two that reached the same the one with the lower loss is better.

    >>> Reached(80.0, 0.5).beats(Reached(80.0, 0.6)), Reached(70.0, 0.1).beats(Reached(80.0, 0.6))
    (True, False)
    """

    value: float = -math.inf  # of the measure that rounds are chosen by; more is better
    loss: float = math.inf

    def beats(self, other: Reached) -> bool:
        """Whether it is better; what is no better is not."""
        return (self.value, -self.loss) > (other.value, -other.loss)


@dataclass(frozen=True)
class Progress:
    """What a checkpoint knows beside the state."""

    lines: int = 0  # of metrics.jsonl
    best: Reached = field(default_factory=Reached)
    best_round: int = -1
    adapted: Mapping[str, Reached] = field(default_factory=dict)  # by adapter: after its own adaptation


@dataclass(frozen=True)
class RunFolder:
    """Paths and atomic writes of one run."""

    path: Path

    @staticmethod
    def of(out: Path, experiment: str, method: str, seed: int, config: Mapping[str, Any]) -> RunFolder:
        """``out/experiment/method/seed-hash``; the hash covers everything that decides what is trained."""
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]
        return RunFolder(out / experiment / method / f"{seed}-{digest}")

    @property
    def done(self) -> bool:
        """Whether training has ended."""
        return (self.path / "done").is_file()

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.path.glob("ckpt-*.safetensors"))

    def begin(self, config: str) -> None:
        """Make the folder, empty of an earlier attempt."""
        (self.path / "adapters").mkdir(parents=True, exist_ok=True)
        files = (self.path / name for name in ("best.safetensors", COSTS, FEATURES, SNAPSHOT))
        by_adapter = (
            self.path.glob(names)
            for names in (
                "adapters/*.jsonl", "twins/*.jsonl", "predictions/*.parquet", "best/*.safetensors",
                "snapshots/*.safetensors",
            )
        )  # fmt: skip
        for old in (*self.checkpoints(), *files, *itertools.chain(*by_adapter)):
            old.unlink(missing_ok=True)
        for folder in self.path.glob("artefacts*"):
            shutil.rmtree(folder)
        self.write("metrics.jsonl", "")
        self.write("config.toml", config)

    def checkpoint(self, state: State, progress: Progress) -> None:
        """Save the state, then forget older ones."""
        older = self.checkpoints()
        target = self.path / CHECKPOINT.format(state.round)
        facts = {
            "round": state.round,
            "lines": progress.lines,
            "best": _stored(progress.best),
            "best_round": progress.best_round,
            "adapted": {name: _stored(reached) for name, reached in progress.adapted.items()},
        }
        save(target, state.trees(), facts)
        for path in older:
            if path != target:
                path.unlink()

    def save_best(self, state: State, adapter: str = "") -> None:
        """Save the state that is best on validation so far, as it is or after an adapter's adaptation."""
        target = self._best(adapter)
        target.parent.mkdir(exist_ok=True)
        save(target, state.trees(), {"round": state.round})

    def restore(self, device: torch.device) -> tuple[State, Progress]:
        """The newest checkpoint; lines written after it are cut off, because those rounds will be run again."""
        trees, facts = load(self.checkpoints()[-1])
        adapted = cast(dict[str, Any], facts.get("adapted", {}))
        progress = Progress(
            lines=cast(int, facts["lines"]),
            best=_reached(facts["best"]),
            best_round=cast(int, facts["best_round"]),
            adapted={name: _reached(stored) for name, stored in adapted.items()},
        )
        lines = (self.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        self.write("metrics.jsonl", "".join(lines[: progress.lines]))
        return State.of(trees, cast(int, facts["round"]), device), progress

    def last(self, device: torch.device) -> State:
        """The newest state."""
        return self._state(self.checkpoints()[-1], device)

    def best(self, device: torch.device, adapter: str = "") -> State:
        """The state chosen by validation, for this adapter if it chose its own; the last one if there was none."""
        chosen = next((path for path in (self._best(adapter), self._best("")) if path.is_file()), None)
        return self.last(device) if chosen is None else self._state(chosen, device)

    def _best(self, adapter: str) -> Path:
        return self.path / (f"best/{adapter}.safetensors" if adapter else "best.safetensors")

    @staticmethod
    def _state(path: Path, device: torch.device) -> State:
        trees, facts = load(path)
        return State.of(trees, cast(int, facts["round"]), device)

    def log(self, line: Line) -> None:
        """Append a line of metrics."""
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(_json(line.to_json()) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """All lines of metrics as the file holds them."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def history(self) -> History:
        """All lines of metrics, by what they are."""
        return History.of(self.lines())

    def costs(self) -> dict[str, Any] | None:
        """The cost ledger, if it was written yet."""
        path = self.path / COSTS
        return dict(json.loads(path.read_text())) if path.is_file() else None

    def write(self, name: str, content: str | bytes) -> None:
        """Write a small file, all or nothing."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(temporary, target)

    def write_scores(self, label: str, rows: Iterable[ScoreRow]) -> None:
        """All scores of one adapter, by its label."""
        self.write(f"adapters/{label}.jsonl", "".join(_json(row.to_json()) + "\n" for row in rows))

    def write_twins(self, label: str, rows: Iterable[ScoreRow]) -> None:
        """Scores of one adapter on validation images under the streams' shifts."""
        self.write(f"twins/{label}.jsonl", "".join(_json(row.to_json()) + "\n" for row in rows))

    def twins(self) -> dict[str, list[ScoreRow]]:
        """Scores on validation images under the streams' shifts, by the adapter's label."""
        return self._rows_of("twins")

    def scores(self) -> dict[str, list[ScoreRow]]:
        """Scores by the adapter's label."""
        return self._rows_of("adapters")

    def _rows_of(self, folder: str) -> dict[str, list[ScoreRow]]:
        files = sorted((self.path / folder).glob("*.jsonl"))
        read = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
        return {label: [ScoreRow.of(row, label) for row in rows] for label, rows in read.items()}


def _stored(reached: Reached) -> list[float | None] | None:
    """For JSON, which knows no infinity."""
    return None if reached == Reached() else [reached.value, reached.loss if math.isfinite(reached.loss) else None]


def _reached(stored: Any) -> Reached:
    """From a checkpoint; older versions kept the accuracy alone."""
    if stored is None:
        return Reached()
    value, loss = stored if isinstance(stored, list) else (stored, None)
    return Reached(float(value), math.inf if loss is None else float(loss))


def artefacts_folder(adapter: str) -> str:
    """Where artefacts lie in a run folder, a folder for each client; ``adapter`` if it chose its round for itself."""
    return f"artefacts ({adapter})" if adapter else "artefacts"


def snapshot_file(adapter: str) -> str:
    """Where what unseen clients are served from lies in a run folder."""
    return f"snapshots/{adapter}.safetensors" if adapter else SNAPSHOT


def _json(value: Any) -> str:
    """One line of JSON; numbers that are not finite become null, because JSON has no word for them."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def read_config(folder: Path, what: str = "a run folder") -> dict[str, Any]:
    """The settings in a folder."""
    path = folder / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{folder} is not {what}: {path} cannot be read ({error})") from None


def title_of(config: Mapping[str, Any]) -> str:
    """What people call the method of a run.

    >>> title_of({"method": {"name": "finetune", "label": "FedAvg-FT"}})
    'FedAvg-FT'
    """
    title: str = config["method"].get("label") or config["method"]["name"]
    return title


def find_runs(path: Path) -> list[Path]:
    """The finished runs in a folder: a run itself, or any folder above some."""
    if not path.exists():
        raise UserError(f"there is no folder {path}")
    found = sorted(done.parent for done in path.rglob("done"))
    for run in (run for run in found if not (run / "config.toml").is_file()):
        raise UserError(f"{run} is not a run folder: it has no config.toml")
    if not found:
        unfinished = next(path.rglob("metrics.jsonl"), None)
        if unfinished is not None:
            check_free(unfinished.parent)
        hint = "; there is an unfinished one, go on with fedshift run ... --resume" if unfinished else ""
        raise UserError(f"{path} holds no finished run{hint}")
    return sorted(found, key=lambda run: (run / "config.toml").stat().st_mtime)
