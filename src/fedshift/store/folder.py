"""A run on disk: one seed of one method, in a folder that can be killed at any moment and gone on with.

``config.toml`` says what it is, ``metrics.jsonl`` has a line for every round and evaluation, ``ckpt-*.safetensors`` is
the newest state, ``best.safetensors`` the state that was best on validation (``best/*.safetensors`` those that were after
an adapter's own adaptation), ``adapters/*.jsonl`` the scores, ``twins/*.jsonl`` those on validation images under the same
shifts, ``predictions/*.parquet`` the probabilities they are of, and ``done`` appears last. ``costs.json`` is the cost
ledger; ``notes.txt`` says why numbers differ from a paper's; ``features.safetensors`` has features of some test images,
if they were asked for; ``snapshot.safetensors`` is what unseen clients are served from. Every file but the notes has a
seal (:mod:`fedshift.store.seal`), unless an older version wrote it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedshift.errors import HostError
from fedshift.store import files, seal
from fedshift.store.costs import Costs
from fedshift.store.files import Damaged, attempt, parsed
from fedshift.store.lines import History, Line
from fedshift.store.progress import Progress
from fedshift.store.rows import ScoreRow
from fedshift.store.state import State
from fedshift.store.trees import load, save

CONFIG, METRICS, DONE = "config.toml", "metrics.jsonl", "done"
NOTES = "notes.txt"  # one a line
COSTS = "costs.json"
FEATURES = "features.safetensors"
SNAPSHOT = "snapshot.safetensors"
OLD_SNAPSHOT = ("welcome.safetensors", "welcome/{}.safetensors")  # as older versions called them
CHECKPOINT = "ckpt-{:06d}.safetensors"
BY_ADAPTER = (
    "adapters/*.jsonl",
    "twins/*.jsonl",
    "predictions/*.parquet",
    "best/*.safetensors",
    "snapshots/*.safetensors",
)


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run, what is read from them, and writes that are whole or do not happen."""

    path: Path

    @staticmethod
    def of(out: Path, experiment: str, method: str, seed: int, config: Mapping[str, Any]) -> RunFolder:
        """``out/experiment/method/seed-hash``; the hash covers everything that decides what is trained."""
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]
        return RunFolder(out / experiment / method / f"{seed}-{digest}")

    # ---- how far it is -------------------------------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        """Whether training has ended; a run whose ``done`` is damaged has not, until that is written again."""
        return (self.path / DONE).exists() and attempt(self.ending, []) is not None

    def ending(self) -> dict[str, Any]:
        """What ``done`` says."""
        path = self.path / DONE
        table = seal.read_table(path, must=seal.has_seal(self.path / CONFIG))
        numbers = {key: table[key] for key in ("seed", "rounds", "lines", "best-round") if key in table}
        if "seed" not in numbers or not all(type(number) is int for number in numbers.values()):
            raise Damaged(path, "it has another shape")
        return table

    @property
    def strict(self) -> bool:
        """Whether every file must have a seal: older versions wrote none."""
        if seal.has_seal(self.path / CONFIG):
            return True
        return (self.path / DONE).is_file() and b'"sealed": true' in (self.path / DONE).read_bytes()

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.path.glob("ckpt-*.safetensors"))

    @property
    def begun(self) -> bool:
        """Whether there are rounds that a new beginning would throw away."""
        metrics = self.path / METRICS
        return bool(self.checkpoints()) or (metrics.exists() and (metrics.is_dir() or metrics.stat().st_size > 0))

    def begin(self, config: str) -> None:
        """Make the folder, empty of an earlier attempt."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / DONE).unlink(missing_ok=True)  # first: what is half gone is not finished
            kept = (self.path / name for name in ("best.safetensors", COSTS, FEATURES, SNAPSHOT))
            for old in (*self.checkpoints(), *kept, *itertools.chain(*map(self.path.glob, BY_ADAPTER))):
                old.unlink(missing_ok=True)
            for folder in self.path.glob("artefacts*"):
                shutil.rmtree(folder)
        except (IsADirectoryError, PermissionError) as error:
            raise HostError.of(error) from None
        self.write(METRICS, "")
        self.write_config(config)

    def sweep(self) -> None:
        """Remove what a killed process had begun to write; whoever calls it holds the folder's lock."""
        places = {".", *(pattern.partition("/")[0] for pattern in BY_ADAPTER)}
        for place in (*(self.path / name for name in places), *self.path.glob("artefacts*")):
            if place != self.path and place.is_symlink():
                raise Damaged(place, "it is a link, which may lead anywhere", "remove it, then repeat the fedshift run")
            files.sweep(place)

    def unsound(self) -> list[Damaged]:
        """What cannot be made again and is damaged: metrics and states; one that somebody removed is not damaged."""
        damaged: list[Damaged] = []
        attempt(self.history, damaged)
        for path in (*self.checkpoints(), *self.path.glob("best.safetensors"), *self.path.glob("best/*.safetensors")):
            attempt(partial(self._state, path, torch.device("cpu")), damaged)
        return damaged

    def reopen(self) -> None:
        """A finished run is to be trained again."""
        (self.path / DONE).unlink()

    # ---- states --------------------------------------------------------------------------------------------------------
    def checkpoint(self, state: State, progress: Progress) -> None:
        """Save the state, then forget older ones; the lines it counts are on disk before it is."""
        older = self.checkpoints()
        target = self.path / CHECKPOINT.format(state.round)
        self._flush_metrics()
        save(target, state.trees(), {"round": state.round, **progress.to_json()})
        for path in older:
            if path != target:
                path.unlink(missing_ok=True)

    def save_best(self, state: State, adapter: str = "") -> None:
        """Save the state that is best on validation so far, as it is or after an adapter's adaptation."""
        target = self._best(adapter)
        if adapter:
            self._folder_of(target)
        save(target, state.trees(), {"round": state.round})

    def restore(self, device: torch.device, note: Callable[[str], object]) -> tuple[State, Progress]:
        """The newest checkpoint that is sound; lines written after it are cut off, because those rounds will be run again.

        A UserError says what the checkpoint counts on and is not there: nothing is lost silently.
        """
        state, progress = self._newest(device, note)
        text = files.read_text(self.path / METRICS)
        lines = text.splitlines(keepends=True)[: progress.lines]
        self._check_lines(lines, progress.lines)
        for adapter, number in {"": progress.best_round, **progress.adapted_rounds}.items():
            if number >= 0:
                found = self._state(self._best(adapter), device).round
                if found != number and found <= state.round:  # a later one will be reached again
                    raise Damaged(self._best(adapter), f"it is of round {found}, not of round {number}")
        if "".join(lines) != text:
            self.write(METRICS, "".join(lines))
        for path in self.checkpoints():
            if path < self.path / CHECKPOINT.format(state.round):
                path.unlink(missing_ok=True)
        return state, progress

    def _newest(self, device: torch.device, note: Callable[[str], object]) -> tuple[State, Progress]:
        damaged: list[Damaged] = []
        saved = self.checkpoints() or [self.path / CHECKPOINT.format(0)]
        for path in reversed(saved):
            found = attempt(partial(self._checkpoint, path, device), damaged)
            if found is not None:
                for one in damaged:
                    note(f"{one.path} is damaged ({one.why}): going on from {path.name}")
                return found
        raise damaged[0]

    def _checkpoint(self, path: Path, device: torch.device) -> tuple[State, Progress]:
        trees, facts = load(path, self.strict)
        return parsed(path, lambda: (State.of(trees, int(facts["round"]), device), Progress.of(facts)))

    def last(self, device: torch.device) -> State:
        """The state after the last round."""
        saved = self.checkpoints()
        rounds = self.ending().get("rounds", 0) if (self.path / DONE).exists() else 0
        wanted = self.path / CHECKPOINT.format(rounds)
        return self._state(saved[-1] if saved and saved[-1] > wanted else wanted, device)

    def best(self, device: torch.device, adapter: str = "") -> State:
        """The state chosen by validation, for this adapter if it chose its own; the last one if there was none."""
        ending = self.ending()
        chosen = {"": ending.get("best-round", -1), **ending.get("adapted-rounds", {})}
        if "adapted-rounds" not in ending and adapter and self._best(adapter).is_file():  # an older version did not say
            return self._state(self._best(adapter), device)
        name = adapter if adapter in chosen else ""
        if chosen[name] < 0:
            return self.last(device)
        state = self._state(self._best(name), device)
        if state.round != chosen[name]:
            raise Damaged(self._best(name), f"it is of round {state.round}, not of round {chosen[name]}")
        return state

    def _best(self, adapter: str) -> Path:
        return self.path / (f"best/{adapter}.safetensors" if adapter else "best.safetensors")

    def _state(self, path: Path, device: torch.device) -> State:
        trees, facts = load(path, self.strict)
        return parsed(path, lambda: State.of(trees, int(facts["round"]), device))

    # ---- metrics -------------------------------------------------------------------------------------------------------
    def log(self, line: Line, number: int) -> None:
        """Append a line of metrics, the first one being number 1."""
        files.append(self.path / METRICS, seal.line_text(line.to_json(), str(number)))

    def lines(self) -> list[dict[str, Any]]:
        """All lines of metrics."""
        return seal.read_lines(self.path / METRICS, self.strict)

    def history(self) -> History:
        """All lines of metrics, by what they are; of a finished run no line is missing."""
        path = self.path / METRICS
        lines = self.lines()
        history = parsed(path, lambda: History.of(lines))
        if (self.path / DONE).exists():
            ending = self.ending()
            if "lines" in ending and len(lines) != ending["lines"]:
                raise Damaged(path, f"it has {len(lines)} of {ending['lines']} lines")
            if len(history.rounds) < ending.get("rounds", 0):
                raise Damaged(path, f"it has {len(history.rounds)} of {ending['rounds']} rounds")
        return history

    def _check_lines(self, lines: list[str], wanted: int) -> None:
        path = self.path / METRICS
        if len(lines) < wanted or not all(line.endswith("\n") for line in lines):
            raise Damaged(path, f"it has {len(lines)} lines, and {wanted} were written before its checkpoint")
        strict = self.strict
        for number, text in enumerate(lines, 1):
            seal.read_line(path, text, number, must=strict)

    def _flush_metrics(self) -> None:
        try:
            files.flush(self.path / METRICS)
        except OSError as error:
            raise HostError.of(error, str(self.path / METRICS), files.GO_ON) from None

    # ---- what follows from them ----------------------------------------------------------------------------------------
    def write(self, name: str, content: str | bytes) -> None:
        """Write a small file, all or nothing; a run folder that is gone is not made again."""
        target = self.path / name
        self._folder_of(target)
        files.write(target, content)

    def write_config(self, config: str) -> None:
        """Its settings, as TOML; without a seal where an older version has begun the run without one."""
        metrics = self.path / METRICS
        old = metrics.is_file() and metrics.stat().st_size > 0 and b'"seal"' not in metrics.read_bytes()
        self.write(CONFIG, config if old else seal.toml_sealed(config))

    def end(self, facts: Mapping[str, Any]) -> None:
        """Training has ended."""
        self._flush_metrics()
        self.write(DONE, seal.table_text({**facts, "sealed": seal.has_seal(self.path / CONFIG)}))

    def costs(self) -> Costs | None:
        """The cost ledger, if it was written yet."""
        path = self.path / COSTS
        if not path.exists():
            return None
        table = seal.read_table(path, self.strict)
        return parsed(path, lambda: Costs.of(table))

    def write_costs(self, costs: Costs) -> None:
        """The cost ledger."""
        self.write(COSTS, seal.table_text(costs.as_dict()))

    def notes(self) -> str:
        """Why numbers differ from a paper's, a line each."""
        path = self.path / NOTES
        return files.read_text(path) if path.exists() else ""

    def write_scores(self, label: str, rows: Iterable[ScoreRow]) -> None:
        """All scores of one adapter, by its label."""
        self.write(f"adapters/{label}.jsonl", seal.lines_text(row.to_json() for row in rows))

    def write_twins(self, label: str, rows: Iterable[ScoreRow]) -> None:
        """Scores of one adapter on validation images under the streams' shifts."""
        self.write(f"twins/{label}.jsonl", seal.lines_text(row.to_json() for row in rows))

    def twins(self, damaged: list[Damaged] | None = None) -> dict[str, list[ScoreRow]]:
        """Scores on validation images under the streams' shifts, otherwise as :meth:`scores`."""
        return self._rows_of("twins", damaged)

    def scores(self, damaged: list[Damaged] | None = None) -> dict[str, list[ScoreRow]]:
        """Scores by the adapter's label. Files that are damaged are left out and put into ``damaged``, if it is given."""
        return self._rows_of("adapters", damaged)

    def _rows_of(self, folder: str, damaged: list[Damaged] | None) -> dict[str, list[ScoreRow]]:
        found = {path.stem: path for path in sorted((self.path / folder).glob("*.jsonl"))}
        if damaged is None:
            return {label: self._rows(path, label) for label, path in found.items()}
        read = {label: attempt(partial(self._rows, path, label), damaged) for label, path in found.items()}
        return {label: rows for label, rows in read.items() if rows is not None}

    def _rows(self, path: Path, label: str) -> list[ScoreRow]:
        lines = seal.read_lines(path, self.strict, counted=True)
        return parsed(path, lambda: [ScoreRow.of(line, label) for line in lines])

    def _folder_of(self, target: Path) -> None:
        try:
            if target.parent != self.path:
                target.parent.mkdir(exist_ok=True)
        except FileExistsError:
            raise Damaged(target.parent, "it is no folder", f"remove it, then {files.AGAIN}") from None
        except OSError as error:
            raise HostError.of(error, str(target), files.GO_ON) from None


def artefacts_folder(adapter: str) -> str:
    """Where artefacts lie in a run folder, a folder for each client; ``adapter`` if it chose its round for itself."""
    return f"artefacts ({adapter})" if adapter else "artefacts"


def snapshot_file(adapter: str) -> str:
    """Where what unseen clients are served from lies in a run folder."""
    return f"snapshots/{adapter}.safetensors" if adapter else SNAPSHOT
