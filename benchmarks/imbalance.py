"""What ``[train] balance`` does to rare classes: five digit domains whose clients train on few images of some digits.

    python benchmarks/imbalance.py --rare same
    python benchmarks/imbalance.py --rare own

With ``same`` the digits 5 to 9 are rare at every client, with ``own`` another five at each. Validation and test images stay
as many as they are. Printed are means over the seeds, and their standard deviation over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean, stdev
from typing import Annotated, get_args

import torch
import torch.nn.functional as F
import typer

from fedshift.core.context import Balance
from fedshift.data.task import Task
from fedshift.engines.auto import compute_for, engine_for
from fedshift.experiment.schema import Experiment, MethodSpec
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task

SETTINGS = [
    *(
        "data.size=16",
        "model.name=cnn",
        "model.width=16",
        "train.lr=0.05",
        "train.batch-size=32",
        "train.local-epochs=1",
    ),
    *("split.train-limit=0", "split.unseen=0.0"),
]


def thinned(task: Task, keep: float, own: bool) -> Task:
    """The task in which every client has a share ``keep`` of its training images of five classes."""
    clients = []
    for number, client in enumerate(task.clients):
        labels = task.labels[client.train]
        rare = (labels - 2 * number * own) % 10 >= 5
        number_in_class = F.one_hot(labels, 10).cumsum(0).gather(1, labels[:, None])[:, 0]
        most = (keep * labels.bincount(minlength=10)).ceil()[labels]
        clients.append(replace(client, train=client.train[~rare | (number_in_class <= most)]))
    return replace(task, clients=tuple(clients), hash="")


def measured(experiment: Experiment, task: Task, name: str, seed: int, engine: str = "auto") -> Mapping[str, float]:
    """A method's accuracies in percent after the last round, over the test images of all clients together.

    ``as trained on``: images count as much as their class does among the client's training images. ``balanced``: the mean
    over classes of the share that is found.
    """
    setup = make_setup(experiment, MethodSpec(name=name), task)
    compute = compute_for("cpu", experiment.precision)
    _, worker = engine_for(engine, compute, setup.method.arch.has_convolution, len(task.clients))
    session = Session(setup, task, worker, compute, seed, experiment.rounds)
    state = session.start()
    for _ in range(experiment.rounds):
        state, _ = session.step(state)
    hits, seen, weighed, weights = torch.zeros(10), torch.zeros(10), 0.0, 0.0
    for client, tree in session.deploy(state).trained().items():
        test, counts = task.client(client).test, task.histogram(task.client(client)).double()
        labels = task.labels[test]
        right = setup.method.predict(tree, task.images[test].float() / 255).logits.argmax(1) == labels
        hits += labels[right].bincount(minlength=10)
        seen += labels.bincount(minlength=10)
        weighed += float((counts[labels] * right).sum())
        weights += float(counts[labels].sum())
    worker.close()
    recall = hits / seen
    return {
        "as trained on": 100 * weighed / weights,
        "balanced": 100 * float(recall.mean()),
        "worst class": 100 * float(recall.min()),
    }


def main(
    rare: Annotated[str, typer.Option(help="same or own: which digits are rare")] = "same",
    keep: Annotated[float, typer.Option(help="Share of the training images of rare digits that stay.")] = 0.05,
    rounds: int = 20,
    seeds: int = 3,
    method: Annotated[list[str] | None, typer.Option(help="Default: fedavg and finetune.")] = None,
) -> None:
    print(f"{'method':<10} {'balance':<9} {'as trained on':>14} {'balanced':>14} {'worst class':>14}")
    for name in method or ["fedavg", "finetune"]:
        for balance in get_args(Balance):
            experiment = Experiment.load(None, [*SETTINGS, f"rounds={rounds}", f"train.balance={balance}"])
            tasks = {seed: thinned(make_task(experiment, seed), keep, rare == "own") for seed in range(seeds)}
            found = [measured(experiment, task, name, seed) for seed, task in tasks.items()]
            cells = [
                f"{mean(row[key] for row in found):8.1f} ± {stdev(row[key] for row in found) if seeds > 1 else 0:3.1f}"
                for key in found[0]
            ]
            print(f"{name:<10} {balance:<9}", *(f"{cell:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    typer.run(main)
