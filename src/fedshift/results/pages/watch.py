"""Runs while they go on: what their folders say now, and a page that asks for it again and again."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fedshift
from fedshift.errors import UserError
from fedshift.results.gather import begun, candidates
from fedshift.results.pages.report import rendered
from fedshift.results.sections.curves import MOST_POINTS, lines_of
from fedshift.results.sections.origin import duration, facts_of
from fedshift.results.sections.views import evenly, short
from fedshift.results.trouble import diverged_training, grown_loss
from fedshift.store.files import attempt, parsed, read_text
from fedshift.store.folder import DONE, METRICS, RunFolder
from fedshift.store.found import read_config, title_of
from fedshift.store.lines import History
from fedshift.store.lock import owner_of
from fedshift.store.plans import PLAN
from fedshift.store.seal import read_lines
from fedshift.store.summary import whole

SCRIPTS = ("page.js", "watch.js")
RECENT = 10  # rounds that tell how long the next one takes
WAITING, TRAINING, SCORING, FINISHED = "waiting", "training", "scoring", "finished"
STOPPED, UNREADABLE = "stopped", "damaged"
NOTHING: Mapping[str, Any] = {"done": 0, "pace": "", "eta": "", "value": "", "curves": [], "losses": []}  # is known yet


@dataclass
class Memory:
    """Histories that were read, by file: one that has not changed since is not read again."""

    known: dict[Path, tuple[tuple[int, int], History]] = field(default_factory=dict)

    def history(self, folder: RunFolder) -> History:
        """All that a run has written; while it goes on the last line may be half there."""
        path = folder.path / METRICS
        try:
            found = path.stat()
        except FileNotFoundError:
            return History()
        stamp = found.st_mtime_ns, found.st_size
        if self.known.get(path, ((0, 0),))[0] != stamp:
            lines = read_lines(path, folder.strict, growing=not (folder.path / DONE).exists())
            self.known[path] = stamp, parsed(path, lambda: History.of(lines))
        return self.known[path][1]


def watch_page(path: Path) -> str:
    """The page; it holds nothing but its scripts, and asks for the rest."""
    static = {"title": path.resolve().name, "version": fedshift.__version__}
    return rendered("watch.html.j2", SCRIPTS, static, {}, connect="'self'")


def state_of(path: Path, memory: Memory) -> dict[str, Any]:
    """Everything the page shows, read anew from the folders: it does not matter who was restarted, or when."""
    folders = sorted(candidates(path), key=begun)
    jobs = _jobs(path)
    runs = [_run(folder, memory, jobs.get(str(folder), {})) for folder in folders]
    known = {run["folder"] for run in runs}
    runs += [_waiting(folder, job) for folder, job in jobs.items() if folder not in known]
    left = _left(runs)
    going = sum(run["state"] in (TRAINING, SCORING) for run in runs)
    return {
        "folder": str(path),
        "now": time.strftime("%H:%M:%S"),
        "done": sum(run["done"] for run in runs),
        "rounds": sum(run["rounds"] for run in runs),
        "counts": _counts(runs),
        "eta": "" if left is None or not going else f"about {duration(left / going)} left",
        "runs": runs,
        "failures": [text for run in runs for text in run.pop("failures")],
    }


def _run(folder: Path, memory: Memory, job: Mapping[str, Any]) -> dict[str, Any]:
    """One run as plain data."""
    bare = {**NOTHING, "folder": str(folder), "name": folder.name, "seed": None, "rounds": 0, "failures": []}
    try:
        config = read_config(folder)
        history = memory.history(RunFolder(folder))
    except (UserError, OSError) as error:
        return {**bare, "state": UNREADABLE, "failures": [f"{folder} cannot be read ({error})"]}
    facts = facts_of(folder)
    title = f"{title_of(config)} seed {config['seed']}"
    done = history.rounds[-1].round if history.rounds else 0
    rounds = int(facts.get("rounds") or job.get("rounds") or max(config.get("rounds", 0), done))
    pace = statistics.median([line.seconds for line in history.rounds[-RECENT:]]) if history.rounds else None
    state = _state(folder, bool(facts) or (folder / "done").is_file())
    left = None if pace is None or state != TRAINING else pace * max(rounds - done, 0)
    failures = [*diverged_training(title, history.rounds, config.get("participation", 1.0))]
    failures += grown_loss(title, history.rounds, history.evaluations)
    if state == STOPPED:
        failures.append(f"{title} has stopped after round {done} of {rounds}: go on with fedshift run ... --resume")
    last = history.rounds[-1] if history.rounds else None
    return {
        **bare,
        "name": title,
        "seed": config["seed"],
        "rounds": rounds,
        "done": done,
        "state": state,
        "left": left,
        "pace": "" if pace is None else f"{duration(pace)} a round",
        "eta": "" if left is None else duration(left),
        "value": "" if last is None or last.loss is None else f"{last.loss:.3f}",
        "losses": [] if last is None else [[name, short(value)] for name, value in last.losses.items()],
        "curves": _curves(history),
        "failures": failures,
    }


def _state(folder: Path, done: bool) -> str:
    busy = owner_of(folder) is not None
    if done:
        return SCORING if busy else FINISHED
    return TRAINING if busy else STOPPED


def _curves(history: History) -> list[dict[str, Any]]:
    made = []
    for (title, unit), points in lines_of(history).items():
        rounds = sorted(points)
        chosen = [rounds[k] for k in evenly(len(rounds), MOST_POINTS)]
        made.append({"title": title, "unit": unit, "x": chosen, "y": [short(points[x]) for x in chosen]})
    return made


def _jobs(path: Path) -> dict[str, dict[str, Any]]:
    """Runs that were planned, by their folder."""
    found: dict[str, dict[str, Any]] = {}
    for plan in sorted([*path.rglob(PLAN), *(above / PLAN for above in path.parents[:2] if (above / PLAN).is_file())]):
        found |= attempt(partial(_planned, plan), []) or {}
    return {folder: job for folder, job in found.items() if Path(folder).is_relative_to(path)}


def _planned(plan: Path) -> dict[str, dict[str, Any]]:
    text = read_text(plan)
    return parsed(plan, lambda: {str(plan.parent / job["folder"]): _job(job) for job in json.loads(text)["runs"]})


def _job(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": str(stored["name"]), "seed": whole(stored["seed"]), "rounds": whole(stored["rounds"])}


def _waiting(folder: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """A run that has not begun."""
    own = {"folder": folder, "name": job["name"], "seed": job["seed"], "rounds": job["rounds"]}
    return {**NOTHING, **own, "state": WAITING, "failures": []}


def _left(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of work that are left, if any run tells how long a round takes; waiting ones are taken for like it."""
    going = [run for run in runs if run.get("left") is not None]
    rounds = sum(run["rounds"] - run["done"] for run in going)
    if not rounds:
        return None
    work = sum(run["left"] for run in going)
    waiting = sum(run["rounds"] for run in runs if run["state"] == WAITING)
    return float(work + waiting * work / rounds)


def _counts(runs: Sequence[Mapping[str, Any]]) -> str:
    """How many runs are where.

    >>> _counts([{"state": "finished"}, {"state": "training"}, {"state": "finished"}])
    '1 training, 2 finished'
    """
    order = (TRAINING, SCORING, WAITING, STOPPED, UNREADABLE, FINISHED)
    found = {state: sum(run["state"] == state for run in runs) for state in order}
    return ", ".join(f"{count} {state}" for state, count in found.items() if count)
