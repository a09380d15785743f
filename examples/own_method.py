"""Your own method: override the hook in which it differs from FedAvg; it runs on every engine and meets every adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

import fedshift
from fedshift import ServerContext, Tensors, Tree
from fedshift.core.options import BelowOne
from fedshift.core.tree import pick, subtract, zeros_like


@fedshift.method("momentum", paper="Measuring the Effects of Non-Identical Data Distribution", venue="arXiv", year=2019)
@dataclass(frozen=True)
class ServerMomentum(fedshift.Method):
    """FedAvg whose server has inertia: ``v <- beta v + (mean_k w_k - w)``, ``w <- w + v``.

    BatchNorm's running statistics are averaged without it: a variance with inertia may become negative.
    """

    beta: BelowOne = 0.5

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: torch.Tensor) -> Tree:
        """The server starts at rest. What it remembers is one more slot of its state, and is in every checkpoint."""
        server = super().init_server(models, clients, public)
        return {**server, "velocity": zeros_like(pick(server["model"], self.arch.trainable))}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """The average first, then the inertia; how fast the server moves is logged as server/speed."""
        after, metrics = super().aggregate(server, ups, ctx)
        here = pick(server["model"], self.arch.trainable)
        step = subtract(pick(after["model"], self.arch.trainable), here)
        velocity = {name: self.beta * server["velocity"][name] + leaf for name, leaf in step.items()}
        model = {**after["model"], **{name: here[name] + leaf for name, leaf in velocity.items()}}
        speed = torch.stack([leaf.square().sum() for leaf in velocity.values()]).sum().sqrt()
        return {"model": model, "velocity": velocity}, {**metrics, "speed": speed}


def main() -> None:
    """Beside FedAvg, each with an adapter."""
    experiment = fedshift.Experiment(
        name="own-method",
        rounds=8,
        baselines=False,
        data={"size": 8},
        model={"name": "mlp"},
        train={"lr": 0.1, "batch-size": 20},
        method=[{"name": name, "adapters": ["none", "t3a"]} for name in ("fedavg", "momentum")],
    )
    result = fedshift.run(experiment)
    for row in result.rows:
        print(f"{row.method:9} {row.adapter:5} {result.accuracy(row.method, row.adapter):.1f} %")


if __name__ == "__main__":
    main()
