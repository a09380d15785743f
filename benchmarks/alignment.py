"""How much of an encoder's gradient is FedCiR's alignment, for several weights of it.

    python benchmarks/alignment.py --rounds 30 -c data.size=32 -c split.train=0.64 -c split.val=0.16 -c split.tune=true

Trains row FedCiR of a preset, then takes training images of every client: cross-entropy and divergence, the norms of their
gradients in the encoder, and the ratio of the norms at each weight.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from fedshift.blocks import gaussians
from fedshift.core import rng
from fedshift.core.context import Phase
from fedshift.core.tree import pick
from fedshift.engines.auto import compute_for, engine_for
from fedshift.engines.reference import pixels
from fedshift.engines.torch_flags import steady
from fedshift.experiment.schema import Experiment
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task

WEIGHTS = (5e-7, 5e-6, 5e-5, 5e-4)


def main(
    preset: str = "pacs-feature",
    change: Annotated[list[str] | None, typer.Option("-c", help="Override a key, as in fedshift run.")] = None,
    rounds: int = 30,
    images: int = 128,
    device: str = "auto",
) -> None:
    experiment = Experiment.load(preset, overrides=[*(change or []), f"rounds={rounds}"])
    spec = next(spec for spec in experiment.method if spec.title == "FedCiR")
    compute = compute_for(device, experiment.precision)
    seed = experiment.seeds[0]
    task = make_task(experiment, seed)
    method = (setup := make_setup(experiment, spec, task)).method
    with steady(compute.tf32):
        _, engine = engine_for("auto", compute, method.arch.has_convolution, len(task.clients))
        session = Session(setup, task, engine, compute, seed, rounds)
        state = session.start()
        for _ in range(rounds):
            state, _ = session.step(state)
        engine.close()
    model, table = state.server["model"], state.server["gaussians"]
    low, high = float(table["deviation"].min()), float(table["deviation"].max())
    print(f"after {rounds} rounds the generated classes deviate by {low:.2f} to {high:.2f} in a dimension")
    print(f"{'client':<14}{'CE':>7}{'KL':>8}{'|dCE|':>8}{'|dKL|':>9}", *(f"{weight:>9.0e}" for weight in WEIGHTS))
    for client in task.clients:
        samples = task.samples(client, "train")
        index = samples.index[rng.permutation(rng.seed_of(seed, client.name), len(samples.index))[:images]]
        x = pixels(samples.images, index, compute.dtype).to(compute.device)
        y = samples.labels[index].to(compute.device)
        noise = rng.normal(seed, torch.arange(len(y)), (method.arch.feature_size,)).to(x)
        live = {name: leaf.clone().requires_grad_() for name, leaf in pick(model, method.arch.trainable).items()}
        encoder = [live[name] for name in live if name in method.arch.encoder]
        phase = Phase(trainable=method.arch.trainable)
        output = method.outputs({**model, **live}, {"x": x, "y": y, "noise": noise}, phase)
        wrong = F.cross_entropy(output.logits, y)
        own = gaussians.of_classes(table, y)
        apart = gaussians.divergence(output.aux["mean"], output.aux["deviation"], *own).mean()

        def slope(value: Tensor, encoder: list[Tensor] = encoder) -> float:
            found = torch.autograd.grad(value, encoder, retain_graph=True)
            return float(torch.cat([leaf.flatten() for leaf in found]).norm())

        first, second = slope(wrong), slope(apart)
        ratios = (f"{weight * second / first:9.4f}" for weight in WEIGHTS)
        numbers = f"{wrong.item():7.3f}{apart.item():8.0f}{first:8.2f}{second:9.1f}"
        print(f"{client.name:<14}{numbers}", *ratios)


if __name__ == "__main__":
    typer.run(main)
