"""A skewed federation: what a table hides, what the alarm says, and what ``advise`` recommends.

    python benchmarks/skewed.py

Four clients (digit domains) whose images are to 70 % of one class, in training and in tests, and few to train on: a weak
model that calls nearly everything by that class looks good by accuracy. FedAvg with Tent and T3A, FedTTA with its adapter,
FedBN, beside the rows that are always there, and FedAvg trained with ``balance = "softmax"``.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from fedshift import Experiment, Pool, run
from fedshift.data.embedded import digits

CLASSES = ("benign", "seven", "eight", "nine")  # digits below seven are all the same to this clinic
CLIENTS = ("pen", "paper", "china", "font")


def skewed(pool: Pool) -> Pool:
    """Four domains, 70 % of whose images are of one class."""
    own = pool.only(domains=CLIENTS)
    return replace(own, labels=(own.labels - 6).clamp(min=0), classes=CLASSES)


def main(
    rounds: int = 15,
    seeds: Annotated[int, typer.Option(help="So many, from 0 on.")] = 3,
    limit: Annotated[int, typer.Option(help="Training images of each client.")] = 100,
    metric: Annotated[str, typer.Option(help="The headline, and what rounds are chosen by.")] = "accuracy",
    engine: str = "auto",
) -> None:
    pool = skewed(digits(16))
    experiment = Experiment.parse({
        "name": "skewed", "rounds": rounds, "seeds": list(range(seeds)), "data": {"size": 16},
        "split": {"train": 0.4, "val": 0.3, "test": 0.3, "train-limit": limit}, "model": {"name": "cnn", "norm": True},
        "train": {"lr": 0.02, "batch-size": 20, "momentum": 0.9}, "evaluate": {"every": 5, "metric": metric},
        "method": [
            {"name": "fedavg", "adapters": ["none", "tent", "t3a"]},
            {"name": "fedavg", "label": "fedavg balanced", "adapters": ["none", "tent"], "train": {"balance": "softmax"}},
            {"name": "fedbn", "adapters": ["none", "tent"]},
            {"name": "fedtta", "adapters": ["none", "fedtta"]},
        ],
    })  # fmt: skip
    console = Console(width=160)
    result = run(experiment, Path(tempfile.mkdtemp()), engine=engine, data=pool)
    counts = torch.bincount(pool.labels, minlength=4)
    console.print(f"{len(pool)} images of {len(CLIENTS)} clients, {100 * counts.max() / len(pool):.0f} % of one class")
    console.print(result.table())
    console.print(result.measures_table())
    for note in result.trouble:
        console.print(f"- {note}", highlight=False, markup=False)
    advice = result.advice()
    console.print(advice.table())
    for line in advice.lines():
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
