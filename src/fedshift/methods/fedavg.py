"""FedAvg: every client trains the received model, the server averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.method import Method
from fedshift.core.registry import method


@method(
    "fedavg",
    paper="Communication-Efficient Learning of Deep Networks from Decentralized Data",
    venue="AISTATS",
    year=2017,
)
@dataclass(frozen=True)
class FedAvg(Method):
    """Average of the clients' models.

    ``w <- sum_k p_k w_k`` with ``p_k = n_k / N`` or ``1 / K`` (``[train] weights``). Parameters and BatchNorm statistics
    are averaged with the same weights; ``num_batches_tracked`` is an integer and keeps its largest value.
    """

    linear: ClassVar[bool] = True
