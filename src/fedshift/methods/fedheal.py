"""FedHEAL: the server ignores updates against a client's habit, and listens more to clients that move far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.core.context import ServerContext
from fedshift.core.method import Method
from fedshift.core.options import UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, subtract, weighted_mean, zeros_like

SMALLEST = 1e-30  # instead of a division by zero, whose numerator is zero too


@method(
    "fedheal",
    paper="Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity",
    venue="CVPR",
    year=2024,
)
@dataclass(frozen=True)
class FedHEAL(Method):
    """FedAvg with a mask on every client's update and weights that learn from how far the clients move.

    With ``D_k = w_k - w``: an entry of ``D_k`` is masked if its sign (zero counts as positive) had a share of at most
    ``threshold`` in the client's earlier rounds; nothing is masked in its first one. ``dist_k`` is the sum over tensors
    of the norms of the masked ``D_k``. Then ``delta_k <- (1 - beta) delta_k + beta dist_k / sum_j dist_j`` and
    ``a_k <- a_k + delta_k``, divided by their sum. Every entry of ``w`` moves by the mean of the unmasked ``D_k``, with
    ``a_k`` renormalised over those clients, and stays where all are masked. BatchNorm statistics are averaged with
    ``a_k``. Clients do FedAvg's work and notice nothing.

    ``a_k`` starts from FedAvg's weights, which differ from round to round when only some clients take part. So the
    server keeps how many times as much as in FedAvg a client counts; a round shares out what its participants had
    together. The authors' script keeps the sums of ``a_k`` undivided, and counts the last distances of absent clients.

    ``beta = 0`` keeps FedAvg's weights, and then this is FedAvg for as long as no client turns round anywhere.
    ``threshold = 0`` masks only directions that are new to a client; 1 masks everything from its second round on.
    """

    threshold: UnitInterval = 0.3
    beta: UnitInterval = 0.4

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """For every client: its rounds, in how many of them each entry rose, its weight and the change of that."""
        server = super().init_server(models, clients, public)
        trained = pick(server["model"], self.arch.trainable)
        return {
            **server,
            **{_rises(client): {name: leaf.int() for name, leaf in zeros_like(trained).items()} for client in clients},
            "took-part": {client: torch.zeros((), dtype=torch.int32) for client in clients},
            "boost": {client: torch.ones((), dtype=torch.float64) for client in clients},
            "delta": {client: torch.zeros((), dtype=torch.float64) for client in clients},
        }

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """Mask, weigh, average, remember."""
        here = pick(server["model"], self.arch.trainable)
        updates = {client: subtract(up["model"], here) for client, up in ups.items()}
        kept = {
            client: {n: self.kept(d, server[_rises(client)][n], server["took-part"][client]) for n, d in update.items()}
            for client, update in updates.items()
        }
        masked = {c: {name: delta * kept[c][name] for name, delta in update.items()} for c, update in updates.items()}
        weights, memory = self.reweigh(server, masked, self.weights(ctx))
        mean = weighted_mean([up["model"] for up in ups.values()], weights)
        step, share = (weighted_mean(list(parts.values()), weights) for parts in (masked, kept))
        moved = {name: leaf + step[name] / share[name].clamp(min=SMALLEST) for name, leaf in here.items()}
        rises = {
            _rises(client): {name: server[_rises(client)][name] + (delta >= 0) for name, delta in update.items()}
            for client, update in updates.items()
        }
        came = {client: server["took-part"][client] + 1 for client in ups}
        return {
            **server,
            **memory,
            **rises,
            "took-part": {**server["took-part"], **came},
            "model": {**server["model"], **mean, **moved},
        }, {}

    def kept(self, update: Tensor, rises: Tensor, rounds: Tensor) -> Tensor:
        """One where a client goes where it went in more than ``threshold`` of its earlier rounds, zero elsewhere."""
        same_way = torch.where(update >= 0, rises, rounds - rises)
        habit = same_way / rounds.clamp(min=1) > self.threshold
        return ((rounds == 0) | habit).to(update.dtype)

    def reweigh(self, server: Tree, masked: Mapping[str, Tensors], shares: Tensor) -> tuple[Tensor, Tree]:
        """This round's weights, from FedAvg's (``shares``), and what the server keeps of them."""
        # in the network's order: a checkpoint does not keep that of the names, and a sum depends on it in its last bits
        norms = [torch.stack([update[name].norm() for name in self.arch.parameters]) for update in masked.values()]
        far = torch.stack(norms).double().sum(1)
        boost, delta = (torch.stack([server[slot][client] for client in masked]) for slot in ("boost", "delta"))
        delta = (1 - self.beta) * delta + self.beta * far / far.sum().clamp(min=SMALLEST)
        before = boost * shares.to(far.device)
        before = before / before.sum()
        weights = (before + delta) / (before + delta).sum()
        boost = boost * weights / before.clamp(min=SMALLEST)
        changed = {"boost": boost, "delta": delta}
        return weights, {
            slot: {**server[slot], **dict(zip(masked, leaf.unbind(), strict=True))} for slot, leaf in changed.items()
        }


def _rises(client: str) -> str:
    """The slot that counts, for every entry, in how many rounds this client's update was not negative."""
    return f"rises of {client}"
