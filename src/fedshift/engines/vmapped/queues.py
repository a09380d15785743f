"""Who moves next and with what: every client's batches in its own order, and the stacked states of those who move."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fedshift.core.context import Phase
from fedshift.core.method import Method
from fedshift.core.tree import Tree, map_tree
from fedshift.data.task import Client, Task
from fedshift.engines import augment
from fedshift.engines.base import Compute
from fedshift.engines.reference import schedule_of
from fedshift.engines.schedule import Plan, draw, seeds_for


class Group:
    """The clients that move now, stacked; regrouped only when other ones do."""

    def __init__(self, state: Tree, count: int, borrowed: bool) -> None:
        self._borrowed = borrowed  # a step's result belongs to a captured graph, which will overwrite it
        self._everyone = list(range(count))
        self._members, self._rows = self._everyone, self._everyone
        self._full = state
        self.state = state

    def choose(self, members: list[int], rows: list[int]) -> None:
        """Put the moved clients back and take these rows out."""
        if (members, rows) == (self._members, self._rows):
            return
        if self._members == self._everyone:
            self._full = map_tree(torch.clone, self.state) if self._borrowed else self.state
        else:
            moved = len(self._members)
            places = self._index(self._members)
            self._full = map_tree(lambda all_, some: all_.index_copy(0, places, some[:moved]), self._full, self.state)
        self._members, self._rows = members, rows
        index = self._index(rows)
        self.state = self._full if rows == self._everyone else map_tree(lambda leaf: leaf[index], self._full)

    def everyone(self) -> Tree:
        """All clients where they are now, in tensors that nobody else will write to."""
        self.choose(self._everyone, self._everyone)
        return map_tree(torch.clone, self.state) if self._borrowed else self.state

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=self._full["log"]["loss"].device)


class Queues:
    """Every client's batches of one phase, in its own order: one long index on the device, and where each batch begins."""

    def __init__(
        self,
        method: Method,
        phase: Phase,
        clients: Sequence[Client],
        task: Task,
        plan: Plan,
        compute: Compute,
        features: Sequence[Tensor] | None,
    ) -> None:
        parts = [task.samples(client, phase.data) for client in clients]
        plans = [
            schedule_of(method, phase, part, plan, client.name) for part, client in zip(parts, clients, strict=True)
        ]
        orders = [order for order, _ in plans]
        self.compute = compute
        self.part = parts[0]  # the images are shared; only the index differs
        self._sizes = [sizes for _, sizes in plans]
        lengths = [len(order) for order in orders]
        firsts = [0, *itertools.accumulate(lengths)]
        self._begins = [
            list(itertools.accumulate(sizes, initial=first)) for sizes, first in zip(self._sizes, firsts, strict=False)
        ]
        where = torch.cat([part.index[order] for part, order in zip(parts, orders, strict=True)]).to(compute.device)
        self._constants = {"where": _padded(where)}
        self._offsets: dict[int, Tensor] = {}
        self._taken = [0] * len(parts)
        self._wanted = augment.wanted(method, phase)
        seeds = [seeds_for(list(self._wanted), plan, client.name, phase) for client in clients]
        self._seeds = {n: torch.tensor([own[n] for own in seeds], device=compute.device) for n in self._wanted}
        if features is not None:
            ordered = [own[order.to(compute.device)] for own, order in zip(features, orders, strict=True)]
            self._constants["features"] = _padded(torch.cat(ordered))

    @property
    def signature(self) -> tuple[int, int]:
        """What a captured step depends on beside its inputs' values: where the images are, how long the index is."""
        return id(self.part.images), len(self._constants["where"])

    @property
    def count(self) -> int:
        """How many clients."""
        return len(self._sizes)

    @property
    def sizes(self) -> Sequence[Sequence[int]]:
        """Of each client's batches."""
        return self._sizes

    @property
    def lengths(self) -> list[int]:
        """How many steps each client takes."""
        return [len(sizes) for sizes in self._sizes]

    def take(self, members: Sequence[int], rows: Sequence[int], size: int) -> dict[str, Tensor]:
        """What a step of these rows needs (a filler repeats a member's), and the members' queues move on."""
        begins = self._upload([self._begins[k][self._taken[k]] for k in rows])
        if size not in self._offsets:
            self._offsets[size] = torch.arange(size, device=self.compute.device)
        order = {"span": begins[:, None] + self._offsets[size], **self._constants, **self._draws(rows, size)}
        for k in members:
            self._taken[k] += 1
        return order

    def _draws(self, rows: Sequence[int], size: int) -> dict[str, Tensor]:
        if not self._wanted:
            return {}
        which = self._upload(rows).repeat_interleave(size)
        steps = self._upload([self._taken[k] for k in rows]).repeat_interleave(size)
        seeds: dict[str, int | Tensor] = {name: own[which] for name, own in self._seeds.items()}
        ids = torch.arange(size, device=self.compute.device).repeat(len(rows))
        flat = draw(self._wanted, seeds, ids, self.compute.dtype, steps)
        return {name: leaf.reshape(len(rows), size, *leaf.shape[1:]) for name, leaf in flat.items()}

    def _upload(self, numbers: Sequence[int]) -> Tensor:
        """Numbers on the device without making the host wait for it."""
        tensor = torch.tensor(numbers)
        if self.compute.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.compute.device, non_blocking=True)


def _padded(rows: Tensor) -> Tensor:
    """Filled up to a power of two, so that a captured graph serves rounds with other clients; the filling is never read."""
    length = 1 << max(len(rows) - 1, 0).bit_length()
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])
