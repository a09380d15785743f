"""Your own adapter: what a deployed client does with unlabelled images. It works after every method."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import fedshift
from fedshift import Output, Tensors, Tree
from fedshift.core.options import UnitInterval


@fedshift.adapter("prior")
@dataclass(frozen=True)
class Prior(fedshift.Adapter):
    """Learns along the stream how frequent its classes are, and leans towards the frequent ones."""

    rate: UnitInterval = 0.1

    @property
    def batch(self) -> int:
        """Samples that belong together."""
        return 32

    def init(self, deployed: Tree) -> Tree:
        """All classes alike."""
        some = next(iter(deployed["model"].values()))
        flat = torch.full((self.arch.classes,), 1 / self.arch.classes, dtype=some.dtype, device=some.device)
        return {**deployed, "prior": {"share": flat}}

    def predict(self, state: Tree, x: torch.Tensor, draws: Tensors) -> tuple[Output, Tree]:
        """Answer, then learn from the answers."""
        output = self.predict_with(state, x)
        share = state["prior"]["share"]
        logits = output.logits + share.log()
        share = (1 - self.rate) * share + self.rate * logits.softmax(1).mean(0)
        return output._replace(logits=logits), {**state, "prior": {"share": share}}


def main() -> None:
    """After two methods, on clients whose classes are unequally frequent."""
    adapters = ["none", "prior"]
    experiment = fedshift.Experiment(
        name="own-adapter",
        rounds=12,
        baselines=False,
        data={"size": 8},
        model={"name": "mlp"},
        train={"lr": 0.1, "batch-size": 20},
        partition={"kind": "dirichlet", "clients": 5, "alpha": 0.1},
        method=[{"name": "fedavg", "adapters": adapters}, {"name": "ditto", "adapters": adapters}],
    )
    result = fedshift.run(experiment)
    for row in result.rows:
        print(f"{row.method:7} {row.adapter:6} {result.accuracy(row.method, row.adapter):.1f} %")


if __name__ == "__main__":
    main()
