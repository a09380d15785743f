"""What was found in runs, as numbers (JSON), pictures (PNG) and one page that needs nothing else."""

from __future__ import annotations

import base64
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

import fedshift
from fedshift.data.output import within
from fedshift.data.pool import Pool
from fedshift.data.task import Task
from fedshift.engines.auto import compute_for, engine_for
from fedshift.engines.torch_flags import steady
from fedshift.errors import HostError, UserError
from fedshift.inspect.looking import Look, Wish
from fedshift.inspect.looking import look as look_at
from fedshift.inspect.pictures import confusion_picture, curve_picture, pad_picture, risk_picture, tsne_picture
from fedshift.results.collect import collect, names_of
from fedshift.results.plain import Sheet
from fedshift.results.plots.pictures import density_picture
from fedshift.results.result import Result
from fedshift.results.tables import BROKEN, short_name
from fedshift.runs.open import SELECTIONS, choose_adapter, open_run
from fedshift.runs.own_network import headed
from fedshift.runs.setup import Network
from fedshift.store.files import Damaged, write
from fedshift.store.found import find_runs
from fedshift.store.summary import mean_and_std

PAGE, NUMBERS = "inspect.html", "inspect.json"
READ = {
    "pad": "Proxy A-distance: 0 if a linear SVM cannot tell two clients' features apart, 2 if it always can; lower means "
    "features that do not give away the client. The last column is a client against all clients' images together, its own "
    "among them, so that it stays below 2.",
    "risk": "Local risk: mean cross-entropy on a client's test images; the dashed line is the mean over clients. Lower is "
    "better, and bars of equal length mean that nobody is left behind.",
    "confusion": "Confusion: each row is a true class, each column what it was taken for; a perfect model fills the "
    "diagonal. The percentage is the client's accuracy.",
    "tsne": "t-SNE of features: points of one colour (class) together and markers (clients, or the domains that several of "
    "them share) mixed is what one hopes for; "
    "distances between far groups mean nothing.",
    "curve": "Adaptation on the learnt loss, step by step, means over new clients (or all, where there are none): the loss "
    "that is minimised, the entropy of the predictions, by which FedTTA++ stops, and the accuracy, which nobody sees there.",
    "weights": "What adapters told while they predicted, over all samples of a stream: for FedTHE, e is the weight of the "
    "global head (0: only the personal one decides, 1: only the global one).",
}
SHORT = "PAD: 0 if a linear SVM cannot tell clients' features apart, 2 if it always can. Risk: mean cross-entropy."
COLUMNS = {"pad": 2, "pad-union": 2, "risk": 3, "accuracy": 1}  # of the summary, and how many digits they have
SECTIONS = {
    "pad": "How far apart clients are",
    "risk": "Local risk",
    "confusion": "What is taken for what",
    "tsne": "Features in the plane",
    "curve": "Adaptation, step by step",
    "weights": "Weights of the heads",
}


def inspect(
    path: str | Path,
    out: str | Path | None = None,
    *,
    samples: int = 200,
    select: str = "best-val",
    model: str = "deployed",
    steps: int = 0,
    device: str = "auto",
    network: Network | None = None,
    head: str | None = None,
    data: Pool | Task | None = None,
    adapter: str = "",
    stream: str = "",
    doing: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Look at finished runs, write page, numbers and pictures into ``out`` (default ``RUN/inspect``); the numbers return.

    ``path`` is a run folder or any folder above some; ``network`` and ``data`` are those the runs were given in Python. With
    ``steps`` adaptation on a learnt loss (FedTTA) is followed so far. ``adapter`` (a label of the run's own, or any name)
    lets models adapt along the stream they are looked at on, which is ``stream``, or else ``original``.

    >>> import tempfile
    >>> from fedshift import Experiment, run
    >>> tiny = Experiment(rounds=1, baselines=False, data={"size": 8}, model={"name": "mlp", "hidden": [8]})
    >>> result = run(tiny, out=tempfile.mkdtemp(), engine="sequential")
    >>> found = inspect(result.folders[0], samples=20)
    >>> [entry["method"] for entry in found["runs"]]
    ['fedavg']
    """
    if select not in SELECTIONS:
        raise UserError(f"--select must be {' or '.join(SELECTIONS)}, not {select!r}")
    wish = Wish(select, samples, model, steps, adapter, stream)
    folders = find_runs(Path(path))
    target = Path(out) if out is not None else within(Path(path), "inspect")
    _check(target)
    collected, damaged = collect(folders), list[Damaged]()
    looks = list(looks_at(collected.folders, wish, device, headed(network, head), data, doing, damaged))
    if not looks:
        raise damaged[0]
    drawn = list({look.name: look for look in reversed(looks)}.values())[::-1]  # the first seed of each
    doing("t-SNE")
    placed = {look.job.folder.path: place for look in drawn if (place := look.places()) is not None}
    numbers = {
        "fedshift": fedshift.__version__,
        "selection": select,
        "models-of": collected.choice(select),
        "samples": samples,
        "read": READ,
        "methods": summary(looks),
        "notes": [*(f"left out: {one}" for one in damaged), *collected.trouble],
        "runs": [{**as_dict(look), "tsne": placed.get(look.job.folder.path)} for look in looks],
    }
    doing("pictures")
    files = _pictures(drawn, placed, collected, select)
    page = _page(looks, drawn, files, numbers, Path(path))
    _write(target, {**files, NUMBERS: json.dumps(numbers, allow_nan=False) + "\n", PAGE: page})
    return numbers


def looks_at(
    folders: Sequence[Path],
    wish: Wish,
    device: str = "auto",
    network: Network | None = None,
    data: Pool | Task | None = None,
    doing: Callable[[str], object] = lambda _: None,
    damaged: list[Damaged] | None = None,
) -> Iterator[Look]:
    """One run after the other; runs on the same task share it. Damaged ones are put into ``damaged``, if it is given."""
    task: Task | None = None
    for path, name in names_of(folders).items():
        doing(f"making {name} again")
        opened = open_run(path, network)
        job = opened.job(task, data)
        task = job.task
        compute = compute_for(device, job.experiment.precision)
        convolutions = any(method.arch.has_convolution for method in job.setup.methods.values())
        _, engine = engine_for("auto", compute, convolutions, len(task.clients))
        with steady(compute.tf32):
            try:
                spec = choose_adapter(opened.scored, wish.adapter or "none")
                yield look_at(job, name, wish, engine, compute, doing, spec)
            except Damaged as error:
                if damaged is None:
                    raise
                damaged.append(error)
            finally:
                engine.close()


def as_dict(look: Look) -> dict[str, Any]:
    """One run's numbers."""
    return {
        "name": look.name,
        "method": look.job.setup.spec.title,
        **({"sweep-point": dict(look.job.point)} if look.job.point else {}),
        "seed": look.job.seed,
        "folder": str(look.job.folder.path),
        "task-hash": look.job.task.hash,
        "round": look.round,
        "model": look.model,
        "stream": look.wanted.stream,
        **({"adapter": look.adapter} if look.adapter else {}),
        "classes": list(look.job.task.classes),
        "clients": [part.client for part in look.parts],
        "unseen": [part.client for part in look.parts if part.unseen],
        "accuracy": {"by-client": dict(look.accuracies), "mean": look.accuracy},
        "risk": {"by-client": dict(look.risks), "mean": look.risk},
        "pad": None if look.distances is None else look.distances.as_dict(),
        "confusion": {name: counts.tolist() for name, counts in look.confusions.items()},
        "telemetry": {
            adapter: {
                str(metric): {name: told.to_json() for name, told in own.items()} for metric, own in found.items()
            }
            for adapter, found in look.telemetry.items()
        },
        "curve": None if look.curve is None else look.curve.as_dict(),
        "notes": list(look.notes),
    }


def summary(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Means and deviations over seeds, for every method; None where a seed has no number."""
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(look.name for look in looks):
        own = [look for look in looks if look.name == name]
        found = [look.distances for look in own]
        columns: dict[str, list[float | None]] = {
            "pad": [None if d is None else d.mean for d in found],
            "pad-union": [None if d is None else d.mean_union for d in found],
            "risk": [look.risk for look in own],
            "accuracy": [look.accuracy for look in own],
        }
        numbers = {key: _spread(values) for key, values in columns.items()}
        rows.append({"name": name, "model": own[0].model, "seeds": [look.job.seed for look in own], **numbers})
        if broken := sum(look.broken for look in own):
            rows[-1]["broken"] = broken
    return rows


def summary_table(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """:func:`summary` for a terminal."""
    table = Sheet(
        title="What was learnt, means over seeds", title_justify="left", caption=SHORT, caption_justify="left"
    )
    table.add_column("method", overflow="fold")
    table.add_column("model")
    for head in ("PAD\npairs", "PAD\nunion", "local\nrisk", "accuracy\n%"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        mark = f" {BROKEN}" if "broken" in row else ""
        cells = {key: _text(row[key], digits) for key, digits in COLUMNS.items()}
        table.add_row(row["name"], row["model"], *({**cells, "accuracy": cells["accuracy"] + mark}).values())
    return table


def steps_table(runs: Sequence[Mapping[str, Any]]) -> Sheet | None:
    """What adaptation did to the accuracy, for a terminal; None where none was followed."""
    followed = [(entry, entry["curve"]) for entry in runs if entry["curve"] is not None]
    if not followed:
        return None
    last = max(len(curve["points"]) for _, curve in followed) - 1
    caption = "Means over clients. Surest: after the step with the least entropy, which needs no labels to be found."
    table = Sheet(title="Adaptation on the learnt loss", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("run", overflow="fold")
    for head in ("round", "accuracy %\nbefore", "after\n1 step", "surest\n(step)", f"after\n{last}"):
        table.add_column(head, justify="right", no_wrap=True)
    for entry, curve in followed:
        points = curve["points"]
        reached = [f"{100 * point['accuracy']:.1f}" for point in points]
        entropies = {step: points[step]["entropy"] for step in range(1, len(points))}
        known = [step for step, entropy in entropies.items() if entropy is not None]  # none where it diverged
        surest = min(known, key=entropies.__getitem__, default=0)
        name = f"{entry['name']}, {curve['adapter']}, seed {entry['seed']}"
        sure = f"{reached[surest]} ({surest})" if surest else "-"
        table.add_row(name, str(curve["round"]), reached[0], reached[1], sure, reached[-1])
    return table


def _text(number: Mapping[str, float] | None, digits: int) -> str:
    if number is None:
        return "-"
    return f"{number['mean']:.{digits}f}" + (f" ±{number['std']:.{digits}f}" if number["std"] else "")


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    mean, deviation = mean_and_std(known)
    return {"mean": mean, "std": deviation}


def _pictures(
    looks: Sequence[Look], placed: dict[Path, dict[str, Any]], collected: Result, select: str
) -> dict[str, bytes]:
    """PNG files by name, of what there is to draw."""
    shown = [look for look in looks if look.job.folder.path in placed]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if any(look.distances is not None for look in looks):
            pad_picture(looks, folder / "pad.png")
        risk_picture(looks, folder / "risk.png")
        confusion_picture(looks, folder / "confusion.png")
        if shown:
            tsne_picture(shown, [placed[look.job.folder.path] for look in shown], folder / "tsne.png")
        if any(look.curve for look in looks):
            curve_picture([look for look in looks if look.curve], folder / "curve.png")
        if any(look.telemetry for look in looks):
            density_picture(collected, folder / "weights.png", select)
        return {f"{key}.png": file.read_bytes() for key in SECTIONS if (file := folder / f"{key}.png").is_file()}


def _page(
    looks: Sequence[Look], drawn: Sequence[Look], files: dict[str, bytes], numbers: dict[str, Any], path: Path
) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = (resources.files("fedshift.results.pages") / "templates" / "inspect.html.j2").read_text(encoding="utf-8")
    images = {name.removesuffix(".png"): base64.b64encode(content).decode() for name, content in files.items()}
    several = len(looks) > len(drawn)
    name = path.resolve().name if len(looks) > 1 else looks[0].job.title
    return environment.from_string(template).render(
        title=f"{name}: what was learnt",
        path=str(path),
        rule=numbers["models-of"],
        samples=numbers["samples"],
        streams=sorted({look.wanted.stream for look in looks}),
        rows=numbers["methods"],
        best={key: _best(numbers["methods"], key) for key in COLUMNS},
        personal=[look.name for look in drawn if look.model == "personal"],
        sections=[
            {"key": k, "title": t, "read": READ[k], "image": images[k]} for k, t in SECTIONS.items() if k in images
        ],
        weights=_weights(looks),
        notes=list(dict.fromkeys([*numbers["notes"], *(f"{look.name}: {n}" for look in looks for n in look.notes)])),
        seed=drawn[0].job.seed if several else None,
        numbers=NUMBERS,
    )


def _best(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    """The best mean of a column, where there are several to choose from; never of predictions that are not numbers."""
    known = [row for row in rows if row[key] is not None]
    fine: list[float] = [row[key]["mean"] for row in known if "broken" not in row]
    if len(known) < 2 or not fine:
        return None
    return max(fine) if key == "accuracy" else min(fine)


def _weights(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Means over seeds of what adapters told, by method, adapter and stream."""
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for look in looks:
        for adapter, by_metric in look.telemetry.items():
            for metric, by_name in by_metric.items():
                for name, told in by_name.items():
                    if told.mean is not None:
                        found.setdefault((look.name, adapter, short_name(metric), name), []).append(told.mean)
    keys = ("method", "adapter", "stream", "what")
    return [{**dict(zip(keys, key, strict=True)), "mean": statistics.fmean(v)} for key, v in found.items()]


def _check(folder: Path) -> None:
    """Find out before the work, not after, that a folder cannot be made or written."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"{folder} cannot be written; choose another folder with --out")
    if not os.access(nearest, os.W_OK):
        raise HostError(f"{folder} may not be written; choose another folder with --out")


def _write(folder: Path, files: dict[str, bytes | str]) -> None:
    """All of them, each whole; the page comes last, and pictures of an earlier look that has more go."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write(folder / name, content)
        for old in (folder / f"{key}.png" for key in SECTIONS if f"{key}.png" not in files):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise HostError.of(error, str(folder), "choose another folder with --out") from None
