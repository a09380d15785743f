"""FLOPs and memory of a client's training steps, counted without training.

Every distinct phase of a run takes one step on a full batch of random images: on torch's ``meta`` device, where tensors
have shapes but no numbers, so that it takes milliseconds; or for real where a network or a loss looks at numbers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedshift.core.context import Context, Phase
from fedshift.core.method import Method
from fedshift.core.tree import Tensors, Tree, map_tree
from fedshift.data.task import Client, Task
from fedshift.engines import augment
from fedshift.engines.base import Compute
from fedshift.engines.reference import hand_over, now_of, schedule_of, start_phase, still_valid
from fedshift.engines.schedule import Plan, draw, fitting, seeds_for
from fedshift.runs.session import Session
from fedshift.store.costs import Costs

T = TypeVar("T")


@dataclass(frozen=True)
class Tally:
    """What a piece of work took."""

    flops: int
    memory: int  # bytes of tensors alive at once


@dataclass(frozen=True)
class Spent:
    """A client's local work of one round."""

    flops: float  # mean over clients
    steps: Mapping[str, int]  # FLOPs of a full batch, by phase
    memory: int  # of the step that needs most
    up: Tree  # what the server is given


def count(session: Session, rounds: int) -> Costs:
    """The part of the ledger that needs no training; what cannot be counted is None, with a note."""
    members = session.by_arch(session.training.clients)
    sizes = [(len(clients), network_size(session, name)) for name, clients in members.items()]
    costs = Costs(
        parameters=_mean((n, parameters) for n, (parameters, _) in sizes),
        bytes_network=_mean((n, size) for n, (_, size) in sizes),
    )
    problem = None
    for device in (torch.device("meta"), torch.device("cpu")):
        try:
            return _with_flops(costs, session, rounds, Compute(device, session.compute.dtype))
        except Exception as error:  # a network of the user's may fail in any way; the run must not
            problem = error
    reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return replace(costs, notes=(f"FLOPs and memory of a step could not be counted ({reason})",))


def network_size(session: Session, arch: str) -> tuple[int, int]:
    """Parameters of a network, and its bytes with buffers."""
    tensors = session.initial[arch]
    parameters = session.setup.methods[arch].arch.parameters
    size = sum(leaf.numel() * leaf.element_size() for leaf in tensors.values())
    return sum(tensors[name].numel() for name in parameters), size


def _with_flops(costs: Costs, session: Session, rounds: int, compute: Compute) -> Costs:
    """The ledger with FLOPs and the memory of a step: means over clients, networks and rounds."""
    works: list[tuple[int, Spent]] = []  # weighted by clients and rounds
    ends: list[tuple[int, Spent]] = []
    for arch, clients in session.by_arch(session.training.clients).items():
        method = session.setup.methods[arch]
        for phases, when in _distinct(method, session, rounds).items():
            first = session.context(when[0])
            works.append((len(when) * len(clients), _local(session, clients, phases, first, compute)))
    for arch, clients in session.by_arch(session.task.clients).items():
        last = replace(session.context(rounds), stage="final")
        phases = session.setup.methods[arch].last_phases(last)
        ends.append((len(clients), _local(session, clients, phases, last, compute)))
    steps: dict[str, float] = {}
    for _, work in works:
        steps |= {name: max(flops, steps.get(name, 0)) for name, flops in work.steps.items()}
    server = _aggregation(session, rounds, compute) if works else None
    unknown = works and server is None
    return replace(
        costs,
        flops_step=max(steps.values(), default=None),
        flops_round=_mean((weight, work.flops) for weight, work in works),
        flops_end=_mean((weight, work.flops) for weight, work in ends),
        flops_server=server,
        memory_step=max((work.memory for _, work in works), default=None),
        steps=steps,
        notes=("the server's FLOPs could not be counted",) if unknown else (),
    )


def _aggregation(session: Session, rounds: int, compute: Compute) -> int | None:
    """FLOPs of the server in the last round, of as many messages as come up; None if they cannot be counted."""
    ctx, come = session.context(rounds - 1), session.participants(rounds - 1)
    sent: dict[str, Tree] = {}  # by architecture
    for arch, clients in session.by_arch(come).items():
        phases = session.setup.methods[arch].phases(ctx)
        sent[arch] = _local(session, clients, phases, ctx, compute).up
    owners = {client.name: arch for arch, clients in session.by_arch(come).items() for client in clients}
    for device in (compute.device, torch.device("cpu")):  # a server that looks at numbers gets some
        there = {arch: _given_numbers(up) if device.type == "cpu" else up for arch, up in sent.items()}
        ups = {client.name: there[owners[client.name]] for client in come}
        server = _copied(session.start().server, Compute(device, compute.dtype))
        with suppress(Exception):  # meta tensors refuse in many ways, and a method of the user's may do anything
            return tally(partial(session.aggregated, server, ups, come, ctx))[1].flops
    return None


def _given_numbers(tree: Tree) -> Tree:
    """The tree on the CPU, with random numbers where there are none."""
    generator = torch.Generator().manual_seed(0)

    def numbers(leaf: Tensor) -> Tensor:
        if leaf.device.type != "meta":
            return leaf
        if not leaf.is_floating_point():
            return torch.ones_like(leaf, device="cpu")
        return torch.rand(leaf.shape, dtype=leaf.dtype, generator=generator)

    return map_tree(numbers, tree)


def _distinct(method: Method, session: Session, rounds: int) -> dict[tuple[Phase, ...], list[int]]:
    """The different sequences of phases a run has, and the rounds that have them."""
    found: dict[tuple[Phase, ...], list[int]] = {}
    for number in range(rounds):
        found.setdefault(method.phases(session.context(number)), []).append(number)
    return found


def _local(
    session: Session, clients: Sequence[Client], phases: tuple[Phase, ...], ctx: Context, compute: Compute
) -> Spent:
    """One full batch of every phase by the largest client, multiplied out to the batches of all clients."""
    task = session.task if ctx.ending else session.training
    client = max(clients, key=lambda one: len(one.train))
    plan = Plan(phases, ctx, session.seed)
    method, down, local = session.first_errand(client, ctx)
    total, memory = 0.0, 0
    steps: dict[str, int] = {}
    features: dict[tuple[str, str], Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        state = method.begin(_copied(down, compute), _copied(local, compute))
        for phase in phases:
            held, seen, full = _samples(method, phase, task, clients, plan)
            state = start_phase(method, state, phase, now_of(method, task, client, plan, 1, compute))
            features = still_valid(features, phase)
            if not full:
                continue
            batch = _batch(method, phase, full, plan, client.name, len(task.classes), compute)
            if phase.inputs == "features":
                key = (phase.slot, phase.data)
                if key not in features:
                    encoded, took = tally(
                        _encoder(method, state[phase.slot], batch["x"], compute), state, {"batch": batch}
                    )
                    features = {**features, key: encoded}
                    total, memory = total + took.flops * held / full, max(memory, took.memory)
                batch = {**batch, "x": features[key][:full]}
            state, took = tally(
                _step(method, state, batch, fitting(phase, method.arch, full), compute), state, {"batch": batch}
            )
            total, memory = total + took.flops * seen / full, max(memory, took.memory)
            name = f"{phase.slot}/{phase.name}"
            steps[name] = max(took.flops, steps.get(name, 0))
        up, _ = hand_over(method, state, _copied(down, compute), _copied(local, compute), plan)
    return Spent(total / len(clients), steps, memory, up)


def _copied(tree: Tree, compute: Compute) -> Tree:
    """Tensors of their own: what is equal before the first round is not the same memory later."""
    return map_tree(lambda leaf: leaf.to(compute.device, copy=True), tree)


def _samples(method: Method, phase: Phase, task: Task, clients: Sequence[Client], plan: Plan) -> tuple[int, int, int]:
    """Of a phase and all clients together: samples they hold, samples in all their batches, the size of a full one."""
    parts = [task.samples(client, phase.data) for client in clients]
    held, one = Counter(map(len, parts)), {len(part): part for part in parts}
    sizes = {n: schedule_of(method, phase, one[n], plan, clients[0].name)[1] for n in held}
    full = min(method.train.batch_size, max((size for own in sizes.values() for size in own), default=0))
    return sum(n * k for n, k in held.items()), sum(sum(sizes[n]) * k for n, k in held.items()), full


def _batch(
    method: Method, phase: Phase, size: int, plan: Plan, client: str, classes: int, compute: Compute
) -> dict[str, Tensor]:
    """Random images, labels and draws of the shapes that a step gets."""
    rows = torch.arange(size)
    wanted = augment.wanted(method, phase)
    draws = draw(wanted, seeds_for(list(wanted), plan, client, phase), rows, compute.dtype) if wanted else {}
    x = torch.rand(size, *method.arch.input_shape, dtype=compute.dtype)
    batch = {"x": x, "y": rows % classes, "index": rows, **draws}
    return {name: leaf.to(compute.device) for name, leaf in batch.items()}


def _encoder(method: Method, tensors: Tensors, x: Tensor, compute: Compute) -> Callable[[], Tensor]:
    def encode() -> Tensor:
        with compute.device, torch.no_grad():
            return method.arch.encode(tensors, x)[0]

    return encode


def _step(
    method: Method, state: Tree, batch: Mapping[str, Tensor], phase: Phase, compute: Compute
) -> Callable[[], Tree]:
    def step() -> Tree:
        with compute.device:  # where a loss makes tensors of its own
            return augment.step(method, state, batch, phase)

    return step


# ---- counters ------------------------------------------------------------------------------------------------------------
def tally(work: Callable[[], T], *present: Tree) -> tuple[T, Tally]:
    """What the work gives, its FLOPs, and the most bytes alive at once, ``present`` tensors included.

    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> tally(lambda: a @ b, {"inputs": {"a": a, "b": b}})[1]
    Tally(flops=48, memory=104)
    """
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _backward_flops})
    with _Alive(present) as alive, counter:
        result = work()
    return result, Tally(counter.get_total_flops(), alive.peak)


def _backward_flops(
    grad_out: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    _bias: object,
    _stride: object,
    _padding: object,
    _dilation: object,
    transposed: bool,
    _output_padding: object,
    _groups: object,
    output_mask: Sequence[bool],
    **_shapes: object,
) -> int:
    """Each gradient of a convolution takes as much as the convolution.

    torch's own formula takes grouped convolutions for whole ones: too much, by the number of groups.
    """
    outputs = prod(x) if transposed else prod(grad_out)
    return 2 * outputs * prod(weight[1:]) * (output_mask[0] + output_mask[1])


class _Alive(TorchDispatchMode):
    """Adds up the storages of all tensors as they come and go."""

    def __init__(self, present: Iterable[Tree]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: set[int] = set()
        self._now = self.peak = 0
        self._see(list(present))

    def _see(self, tensors: object) -> None:
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self._now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(result)
        return result


def _mean(weighted: Iterable[tuple[int, float]]) -> float | None:
    """The mean of numbers with weights, or None if there are none."""
    pairs = list(weighted)
    total = sum(weight for weight, _ in pairs)
    return sum(weight * number for weight, number in pairs) / total if total else None
