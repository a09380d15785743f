"""Your own network: any nn.Module whose last layer is linear, under any method and any adapter."""

from __future__ import annotations

import torch
from torch import nn

import fedshift


class Net(nn.Module):
    """Two residual blocks; BatchNorm is found by type, whatever the attributes are called."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.first = self._block(width)
        self.second = self._block(width)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.out = nn.Linear(16 * width, 10)

    @staticmethod
    def _block(width: int) -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images, already normalised, to logits."""
        x = self.stem(x)
        x = x + self.first(x)
        x = x + self.second(x)
        return self.out(self.pool(x).flatten(1))


def main() -> None:
    """Give the class, and every seed starts from fresh weights; give an instance, and all start from its weights."""
    experiment = fedshift.Experiment(
        name="own-network",
        rounds=8,
        baselines=False,
        data={"size": 16},
        split={"train-limit": 80},
        train={"lr": 0.05, "momentum": 0.9, "batch-size": 20},
        method=[{"name": "fedavg", "adapters": ["none", "bn"]}, {"name": "fedbn", "adapters": ["none", "tent"]}],
    )
    result = fedshift.run(experiment, network=Net)
    for row in result.rows:
        print(f"{row.method:7} {row.adapter:5} {result.accuracy(row.method, row.adapter):.1f} %")


if __name__ == "__main__":
    main()
