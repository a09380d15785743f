"""Our training method and adapters on the papers' protocols: the rows of ``docs/results/ours.md``.

    python benchmarks/ours.py unseen-digits alike weak                                no download, minutes on a CPU
    python benchmarks/ours.py unseen-mnist --seconds 3600                             likewise, with $FEDSHIFT_DATA
    python benchmarks/ours.py brfl-0.1 brfl-1.0 unseen-cifar unseen-fashion digits    on a GPU, seeds stacked
    python benchmarks/ours.py office-domain --only ours FedICON                       some of a part's methods
    python benchmarks/ours.py choose-images --seeds 10 --tune                         validation in place of test images

Every part has a number of seconds after which it is ended, so that the next one has its turn; rows that are finished count,
and with ``--runs DIR`` the same command goes on with the others. ``$OUT/ours-PART.json`` has every seed's number and is
written every minute; ``python docs/generate.py --results $OUT`` takes it into the repository, where the pages of the five
systems show it. Rounds are the last ones: nothing is chosen on the way.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.builder.ours import our_summary
from docs.builder.summaries import as_json

from benchmarks.reproduce import RUNNING, Ended, clock_of, finished, spent_before, within
from fedshift import Experiment, run
from fedshift.runs.open import open_run

FIVE = ("original", "corrupted", "out-of-client", "natural", "mixture")
TWO_HEADS: dict[str, Any] = {
    "name": "fedthe", "label": "two heads", "adapters": [
        {"name": "the", "label": "personal head", "e": 0.0},
        {"name": "the", "label": "shared head", "e": 1.0},
        {"name": "the", "label": "FedTHE"},
        {"name": "the", "label": "FedTHE, views", "views": 8},
        {"name": "the-plus", "label": "FedTHE+"},
        {"name": "home-or-away", "label": "home-or-away"},
        {"name": "home-or-away", "label": "home-or-away, views", "views": 8},
    ],
}  # fmt: skip
GLOBAL: dict[str, Any] = {
    "name": "fedavg", "label": "FedAvg", "adapters": [
        {"name": "none"},
        {"name": "none", "label": "views", "views": 8},
        {"name": "t3a", "label": "T3A"},
        {"name": "t3a", "label": "T3A, views", "views": 8},
    ],
}  # fmt: skip
TENT = {
    "name": "tent", "label": "TENT", "params": "all", "batch-size": 0, "predict-when": "after", "optimiser": "sgd",
    "train-lr": True, "weight-decay": 1e-4, "clip": 10.0, "bits": True,
}  # fmt: skip
FINDERS = [
    {"name": "none"},
    TENT,
    {"name": "prior-em", "label": "prior-em"},
    {"name": "prior-em", "label": "prior-em, unguarded", "guard": False},
    {"name": "prior-em", "label": "prior-em, online", "mode": "online"},
    {"name": "prior-em", "label": "BBSE", "estimate": "bbse"},
    {"name": "prior-em", "label": "RLLS", "estimate": "rlls"},
    {"name": "prior-em", "label": "prior-em, views", "views": 8},
]


def ours(flip: bool, *more: Any) -> dict[str, Any]:
    """The composition, with one setting everywhere; only whether images may be mirrored depends on what they show."""
    return {
        "name": "ours",
        "label": "ours",
        "flip": flip,
        "adapters": ["none", {"name": "ours", "label": "ours"}, *more],
    }


BARE = {"name": "ours", "label": "ours, not refreshed", "passes": 0}  # where networks have BatchNorm


def unseen(preset: str, flip: bool, methods: list[dict[str, Any]], *more: Any, **changes: Any) -> dict[str, Any]:
    """A protocol of unseen clients, the composition last; digits and clothes are not mirrored."""
    finders = [{**one, "flip": flip} if "views" in one else one for one in FINDERS]
    every = [*({**method, "adapters": finders} for method in methods), ours(flip, *more)]
    return {"preset": preset, "method": every, **changes}


VIEWED = {"name": "ours", "label": "ours, views", "views": 8}
BRFL = [ours(True, VIEWED), TWO_HEADS, GLOBAL]
PLAIN = {"crop": 1.0, "colour": 0.0}
STRONG = {"crop": 0.6, "colour": 1.0}
CHOICES: dict[str, dict[str, Any]] = {
    "nothing": {"control": False, "tempered": 1.0, **PLAIN},
    "control": {"tempered": 1.0, **PLAIN},
    "views": {"control": False, "tempered": 1.0, **STRONG},
    "control, views": {"tempered": 1.0, **STRONG},
    "control, views, half balanced": STRONG,
    "control, views, not balanced": {"tempered": 0.0, **STRONG},
    "control, half balanced": PLAIN,
    "views, half balanced": {"control": False, **STRONG},
    "control, weak views, half balanced": {},  # what was chosen
    "control, small views": {"tempered": 1.0, "crop": 0.4, "colour": 1.0},
    "control, weak views": {"tempered": 1.0},
}


def choices() -> list[dict[str, Any]]:
    """The composition with parts of it left out, to choose from."""
    return [
        {"name": "ours", "label": label, "flip": False, **settings, "adapters": ["none", "ours"]}
        for label, settings in CHOICES.items()
    ]


DIGITS: dict[str, Any] = {
    "rounds": 20, "stream": [{"name": "original", "kind": "original"}], "data.limit": 3000,
    "partition": {"kind": "pathological", "clients": 30},
    "split": {"train": 0.8, "val": 0.2, "test": 0.0, "unseen": 0.5},
    "train": {"lr": 0.05, "batch-size": 20, "weights": "uniform", "weight-decay": 5e-4},
}  # fmt: skip
SEEDS = "30,31,32"  # no choice has seen them
PARTS: dict[str, dict[str, Any]] = {
    "brfl-0.1": {"preset": "brfl", "sweep": {}, "partition.alpha": 0.1, "method": BRFL},
    "brfl-1.0": {"preset": "brfl", "sweep": {}, "partition.alpha": 1.0, "method": BRFL},
    "unseen-cifar": unseen("new-clients", True, [{"name": "fedavg", "label": "FedAvg"}], rounds=400),
    "unseen-cifar-scaffold": unseen(
        "new-clients", True, [{"name": "scaffold", "label": "SCAFFOLD", "server-lr": 1.5}], rounds=400
    ),
    "unseen-digits": {**unseen("default", False, [{"name": "fedavg", "label": "FedAvg"}], BARE), **DIGITS},
    "choose-classes": {
        "preset": "default", "method": choices(), **DIGITS, "rounds": 60, "train.lr": 0.2, "model.norm": False,
    },
    "choose-images": {"preset": "digits-covariate", "rounds": 30, "method": choices()},
    "alike": unseen("default", False, [{"name": "fedavg", "label": "FedAvg"}], BARE),
    "weak": {
        **unseen("default", False, [{"name": "fedavg", "label": "FedAvg"}], BARE, rounds=8),
        "partition": {"kind": "by-domain", "clients-per-domain": 4, "inside": "dirichlet", "alpha": 0.3},
        "split": {
            "train": 0.6, "val": 0.2, "test": 0.2, "train-limit": 40,
            "unseen": [f"{kind}-{k}" for kind in ("font", "pen") for k in range(4)],
        },
    },
    "unseen-fashion": unseen("new-clients-fashion", False, [{"name": "fedavg", "label": "FedAvg"}]),
    "unseen-mnist": unseen(
        "new-clients-mnist", False, [{"name": "fedavg", "label": "FedAvg"}],
        **{"data.source": "parquet:$FEDSHIFT_DATA/writers.parquet"},
    ),
    "digits": {"preset": "digits-covariate", "method": [ours(False)]},
    "digits-fedicon": {"preset": "digits-covariate", "rows": ["FedICON"]},
    "office-covariate": {"preset": "office-covariate", "method": [ours(True)], "rows": ["FedICON"]},
    "office-feature": {"preset": "office-feature", "data.size": 64, "method": [ours(True)], "rows": ["FedCiR", "FedAvg"]},
    "office-domain": {"preset": "office-domain", "method": [ours(True)], "rows": ["FedICON"]},
    "office-unseen": {
        "preset": "office-unseen", "rounds": 100, "data.size": 128, "method": [ours(True, BARE)],
        "rows": ["FDSE", "FedBN"],
    },
    "pacs-personal": {
        "preset": "pacs-personal", "rounds": 30, "data.size": 128, "method": [ours(True)],
        "rows": ["Ditto", "FDSE", "FedBN"],
    },
}  # fmt: skip


def experiment_of(part: str, seeds: list[int], rounds: int | None, tune: bool, only: list[str]) -> Experiment:
    """A preset with our rows and those of its own that a part names by their labels, scored once, after the last round."""
    changes = dict(PARTS[part])
    table = Experiment.load(changes.pop("preset")).model_dump(by_alias=True)
    rows = changes.pop("rows", ())
    methods = [*changes.get("method", ()), *(method for method in table["method"] if method["label"] in rows)]
    changes["method"] = [method for method in methods if not only or method["label"] in only]
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = table
        for name in path:
            inner = inner[name]
        inner[last] = value
    table["rounds"] = rounds or table["rounds"]
    streams = [stream for stream in table["stream"] if "brfl" not in part or stream["name"] in FIVE]
    evaluate = {
        "every": table["rounds"], "mean-of": [s["name"] for s in streams] if "brfl" in part else [],
        "advice": False, "artefacts": False, "predictions": False, "after-local": table["evaluate"]["after-local"],
    }  # fmt: skip
    if tune:
        table["split"]["tune"] = True
        streams = [stream for stream in streams if stream["name"] not in ("natural", "mixture")]
        evaluate["mean-of"] = []
    return Experiment.parse(
        {
            **table,
            "name": part,
            "notes": [],
            "baselines": False,
            "seeds": seeds,
            "stream": streams,
            "evaluate": evaluate,
        }
    )


def scores_of(folder: Path) -> dict[str, dict[str, float]]:
    """Client means of every adapter of a run, by stream and population."""
    return {
        label: {
            f"{row.metric.column.model} {row.metric.stream} ({row.metric.population})".strip(): row.summary.client_mean
            for row in rows
            if row.selection == "last" and row.metric == row.metric.plain and row.summary.client_mean is not None
        }
        for label, rows in open_run(folder).folder.scores().items()
    }


def points_of(experiment: Experiment) -> int:
    """How many runs of a method a seed has."""
    return math.prod(len(values) for values in experiment.sweep.values())


def collect(runs: Path, points: int) -> dict[str, dict[str, list[float]]]:
    """What the finished adapters of a part's runs found: every seed's number, by row and column.

    A sweep over so many ``points`` (domains) is one number a seed, the mean over them, if all of them are there.
    """
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for folder in finished(runs):
        seed = folder.name.partition("-")[0]
        for adapter, columns in scores_of(folder).items():
            for column, value in columns.items():
                row = found.setdefault(f"{folder.parent.name} / {adapter}", {})
                row.setdefault(column, {}).setdefault(seed, []).append(value)
    table: dict[str, dict[str, list[float]]] = {}
    for row_name, columns_of in found.items():
        whole = {
            column: [round(sum(values) / points, 2) for values in seeds.values() if len(values) == points]
            for column, seeds in columns_of.items()
        }
        table[row_name] = {column: values for column, values in whole.items() if values}
    return table


def tell(rows: dict[str, dict[str, list[float]]]) -> None:
    """Print the means."""
    for row_name, means in rows.items():
        cells = (f"{column} {sum(values) / len(values):.1f}" for column, values in means.items())
        seeds = max(map(len, means.values()), default=0)
        print(f"  {row_name:34s} {seeds} seeds: {', '.join(cells)}".replace(" (clients)", ""))


def written(
    part: str, asked: argparse.Namespace, told: str, runs: Path, out: Path, before: float, ended: Ended
) -> None:
    """A part's summary, into its file; the time is that of all sittings, and is kept beside the runs for the next one."""
    seeds, seconds = numbers(asked.seeds), before + ended.seconds
    experiment = experiment_of(part, seeds, asked.rounds, asked.tune, asked.only)
    clock_of(runs).write_text(f"{seconds:.0f}")
    rows = collect(runs, points_of(experiment))
    summary = our_summary(
        part, told, seeds=seeds, rounds=experiment.rounds, seconds=seconds, ended=ended.how, rows=rows
    )
    kind = "trial" if asked.tune or asked.rounds else "ours"  # no page takes what was tuned or shortened
    (out / f"{kind}-{part}.json").write_text(as_json(summary), encoding="utf-8")
    if ended.how != RUNNING:
        print(f"{part}: seeds {asked.seeds}, {ended.seconds:.0f} s{ended.how and ', ' + ended.how}", flush=True)
        tell(rows)


def numbers(seeds: str) -> list[int]:
    """Of seeds with commas."""
    return [int(seed) for seed in seeds.split(",")]


def main() -> None:
    """Each part in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--seeds", default=SEEDS, help="with commas; seeds of one part share a GPU")
    parser.add_argument("--rounds", type=int, help="in place of the part's own")
    parser.add_argument("--seconds", type=float, default=600, help="after which a part is ended")
    parser.add_argument("--runs", type=Path, help="where run folders go, and go on; left out: a temporary folder")
    parser.add_argument("--tune", action="store_true", help="validation images in place of test images")
    parser.add_argument("--only", nargs="+", default=[], metavar="LABEL", help="some of a part's methods")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # of a part's own process
    asked = parser.parse_args()
    if asked.into:
        experiment = experiment_of(asked.parts[0], numbers(asked.seeds), asked.rounds, asked.tune, asked.only)
        run(experiment, asked.into, processes=1, resume=True)
        return
    out, base = Path(os.environ.get("OUT") or tempfile.mkdtemp()), asked.runs or Path(tempfile.mkdtemp())
    for part in asked.parts:
        own = ["--tune"] * asked.tune + (["--rounds", str(asked.rounds)] if asked.rounds else [])
        own += ["--only", *asked.only] if asked.only else []
        told = shlex.join([part, *own, *([] if asked.seeds == SEEDS else ["--seeds", asked.seeds])])
        runs = base / part
        runs.mkdir(parents=True, exist_ok=True)
        look = partial(written, part, asked, told, runs, out, spent_before(runs))
        command = [sys.executable, __file__, part, "--seeds", asked.seeds, "--into", str(runs), *own]
        look(within(asked.seconds, command, runs.with_name(f"{part}.log"), look))


if __name__ == "__main__":
    main()
