"""One client's local work and one client's evaluation: the readable reference every engine must agree with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.batching import batch_sizes
from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Method
from fedshift.core.tree import Tensors, Tree, all_finite, pick
from fedshift.data.streams import Setting
from fedshift.data.task import Client, Samples, Task
from fedshift.engines import augment
from fedshift.engines.balance import balance_of
from fedshift.engines.base import Compute, Density, Reply, Score, sound
from fedshift.engines.pulse import beat
from fedshift.engines.schedule import Plan, batches, draw, fitting, seeds_for

T = TypeVar("T")
EVALUATION_CHUNK = 512  # per-sample adapters give the same answers in chunks of any size


def info_of(task: Task, client: Client, seed: int, unseen: bool = False) -> ClientInfo:
    """What a client knows about itself when it starts; ``seed`` is the run's."""
    own = rng.seed_of(seed, "birth", client.name)
    public = {} if task.public is None else {"public": task.ids[task.public]}
    return ClientInfo(client.name, len(client.train), task.histogram(client), own, unseen=unseen, **public)


def first_local(
    method: Method, model: Tensors, task: Task, client: Client, seed: int, ctx: Context, unseen: bool = False
) -> Tree:
    """The local state of a client that has none yet; ``model`` is the run's common initialisation."""
    return method.init_local(model, info_of(task, client, seed, unseen), ctx)


def now_of(method: Method, task: Task, client: Client, plan: Plan, steps: int, compute: Compute) -> Tensors:
    """The slot ``now``: where in the run a client is, as tensors."""
    decay = plan.ctx.decay(method.train)
    floats = {"lr": method.train.lr * decay, "decay": decay, "steps": steps, "samples": len(client.train)}
    whole = {"round": plan.ctx.round, "rounds": plan.ctx.rounds, "clients": plan.ctx.clients}
    tensors = {name: torch.tensor(value, dtype=compute.dtype) for name, value in {**floats, **whole}.items()}
    histogram = task.histogram(client).to(compute.dtype)
    return {name: leaf.to(compute.device) for name, leaf in {**tensors, "histogram": histogram}.items()}


def placed(task: Task, device: torch.device) -> Task:
    """The task with its images on the device, so that batches are gathered there."""
    if device.type == "cpu":
        return task
    streams = {
        name: replace(
            stream,
            images=None if stream.images is None else stream.images.to(device),
            labels=stream.labels.to(device),
            ids=stream.ids.to(device),
        )
        for name, stream in task.streams.items()
    }
    return replace(
        task,
        images=task.images.to(device),
        labels=task.labels.to(device),
        ids=task.ids.to(device),
        streams=streams,
    )


class Placement:
    """Remembers the last task it moved to a device: moving is slow, and one run uses one task."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[Task, Task] | None = None

    def __call__(self, task: Task) -> Task:
        """The task on the device."""
        if self._last is None or self._last[0] is not task:
            self._last = (task, placed(task, self._device))
        return self._last[1]


def pixels(images: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Chosen images as floats in [0, 1]."""
    return as_floats(images[index], dtype)


def as_floats(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as floats in [0, 1]."""
    return images.to(dtype) / 255


def channels_last(x: Tensor) -> Tensor:
    """Images with the channels of a pixel beside each other: a CPU convolves a third faster in this order.

    >>> channels_last(torch.zeros(2, 3, 4, 4)).stride()
    (48, 1, 12, 3)
    """
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def as_it_is(x: Tensor) -> Tensor:
    """The same tensor."""
    return x


def start_phase(method: Method, state: Tree, phase: Phase, now: Tensors) -> Tree:
    """A phase starts with fresh optimiser memory; running totals go on."""
    memory: Tensors = {}
    if phase.kind != "fold":
        for names, rule in method.groups(phase):
            memory |= rule.memory(pick(state[phase.slot], names))
    zero = torch.zeros_like(now["lr"])
    return {**state, "now": now, "optim": memory, "log": state.get("log", {"loss": zero, "steps": zero})}


def schedule_of(method: Method, phase: Phase, part: Samples, plan: Plan, client: str) -> tuple[Tensor, list[int]]:
    """A phase's positions among the client's samples in their order, and the sizes of the batches."""
    alone = method.arch.has_batch_norm and phase.batch_stats
    labels = part.labels[part.index].cpu() if balance_of(method.train, phase) == "sampler" else None
    return batches(len(part), phase, method.train, plan.seed_for(client, phase.data), alone, labels)


def work(method: Method, down: Tree, local: Tree, client: Client, task: Task, plan: Plan, compute: Compute) -> Reply:
    """A client's round: initialise, go through the phases, hand over what goes up and what stays."""
    state = method.begin(down, local)
    data = [task.samples(client, phase.data) for phase in plan.phases]
    plans = [schedule_of(method, phase, part, plan, client.name) for phase, part in zip(plan.phases, data, strict=True)]
    features: dict[tuple[str, str], Tensor] = {}
    lay = channels_last if compute.device.type == "cpu" and method.arch.has_convolution else as_it_is
    with seeded(method, plan.seed_for(client.name, "layers")):
        for phase, part, (order, sizes) in zip(plan.phases, data, plans, strict=True):
            now = now_of(method, task, client, plan, len(sizes), compute)
            state = start_phase(method, state, phase, now)
            features = still_valid(features, phase)
            if phase.inputs == "features" and (phase.slot, phase.data) not in features:
                features = {**features, (phase.slot, phase.data): features_of(method, state, phase, part, compute)}
            cached = features.get((phase.slot, phase.data)) if phase.inputs == "features" else None
            steps = order.split(sizes)
            for size, batch in _batches(method, phase, part, steps, plan, client.name, compute, cached):
                state = augment.step(method, state, batch, fitting(phase, method.arch, size), lay)
                beat(size)
    return conclude(method, state, down, local, plan)


def settle(method: Method, down: Tree, local: Tree, client: Client, task: Task, plan: Plan, compute: Compute) -> Reply:
    """After the last round: what a client gives away and keeps; one that fails in its last phases goes without them."""
    reply = work(method, down, local, client, task, plan, compute) if plan.phases else None
    if reply is not None and reply.finite:
        return reply
    gift, kept = method.settle(None, down, local, plan.ctx)
    return Reply(gift, kept, math.nan if reply else 0.0, 0, reply is None)


def conclude(method: Method, state: Tree, down: Tree, local: Tree, plan: Plan) -> Reply:
    """Split the final state into what goes up and what stays, and look whether it is sound."""
    up, kept = hand_over(method, state, down, local, plan)
    log = state.get("log", {})
    steps = int(log["steps"]) if log else 0
    loss = float(log["loss"]) / steps if steps else 0.0
    return Reply(up, kept, loss, steps, math.isfinite(loss) and all_finite(up) and all_finite(kept))


def hand_over(method: Method, state: Tree, down: Tree, local: Tree, plan: Plan) -> tuple[Tree, Tree]:
    """What goes up and what stays; after the last phases only gifts go up."""
    if plan.ctx.ending:
        return method.settle(state, down, local, plan.ctx)
    return method.finish(state, down, local)


def still_valid(features: Mapping[tuple[str, str], T], phase: Phase) -> dict[tuple[str, str], T]:
    """Cached features by (slot, data) when this phase begins: one that trains on images may move any encoder."""
    moves = phase.inputs == "x" and phase.kind != "fold"
    return {} if moves else dict(features)


def _batches(
    method: Method,
    phase: Phase,
    part: Samples,
    steps: Sequence[Tensor],
    plan: Plan,
    client: str,
    compute: Compute,
    cached: Tensor | None,
) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    wanted = augment.wanted(method, phase)
    seeds = seeds_for(list(wanted), plan, client, phase)
    for number, positions in enumerate(steps):
        index = part.index[positions]
        x = pixels(part.images, index, compute.dtype) if cached is None else cached[positions.to(compute.device)]
        batch = {"x": x, "y": part.labels[index], "index": part.ids[index]}
        draws = draw(wanted, seeds, torch.arange(len(index)), compute.dtype, number) if wanted else {}
        yield len(index), {name: leaf.to(compute.device) for name, leaf in {**batch, **draws}.items()}


@torch.no_grad()
def features_of(method: Method, state: Tree, phase: Phase, part: Samples, compute: Compute) -> Tensor:
    """The frozen encoder's features of all of a client's samples."""
    chunks = part.index.split(EVALUATION_CHUNK)
    tensors = state[phase.slot]
    return torch.cat(
        [
            method.arch.encode(tensors, pixels(part.images, chunk, compute.dtype).to(compute.device))[0]
            for chunk in chunks
        ]
    )


@contextmanager
def seeded(method: Method, seed: int) -> Iterator[None]:
    """Layers that draw for themselves (dropout) get this client's own seed; other networks pay nothing."""
    if not method.arch.is_random:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


# ---- evaluation --------------------------------------------------------------------------------------------------------
def evaluate(
    adapter: Adapter, deployed: Tree, task: Task, client: Client, parts: Sequence[str], seed: int, compute: Compute
) -> dict[tuple[str, str], Score]:
    """Let an adapter run along a client's streams, in their order, and count its right answers."""
    scores: dict[tuple[str, str], Score] = {}
    state: Tree | None = None
    for part in parts:
        samples, setting = task.samples(client, part), task.setting(part)
        state = state if setting.reset == "never" else None
        correct, loss, broken = 0, 0.0, 0
        told: dict[str, list[Tensor]] = {name: [] for name in adapter.telemetry}
        logits: list[Tensor] = []
        for number in range(setting.passes):
            shown = predictions(adapter, deployed, samples, setting, seed, compute, state, fit=number == 0)
            for output, labels, current in shown:
                state = current
                beat(len(labels))
                if number == setting.passes - 1:
                    fine = sound(output.logits)
                    lost = len(labels) - int(fine.sum())
                    broken += lost
                    correct += int(((output.logits.argmax(1) == labels) & fine).sum())  # NaN has an argmax too
                    loss += math.inf if lost else float(F.cross_entropy(output.logits, labels, reduction="sum"))
                    told = {name: [*values, output.aux[name]] for name, values in told.items()}
                    logits.append(output.logits)
        telemetry = {name: Density.of(torch.cat(values)) for name, values in told.items() if values}
        answers = torch.cat(logits).log_softmax(-1).float().cpu() if logits else torch.zeros(0, 0)
        labels = samples.labels[samples.index].cpu()
        scores[client.name, part] = Score(len(samples), correct, loss, telemetry, broken, answers, labels)
    return scores


@torch.no_grad()
def predictions(
    adapter: Adapter,
    deployed: Tree,
    samples: Samples,
    setting: Setting,
    seed: int,
    compute: Compute,
    state: Tree | None = None,
    fit: bool = True,
) -> Iterator[tuple[Output, Tensor, Tree]]:
    """Outputs, labels and the adapter's state, piece by piece, in the order of the stream.

    ``state`` goes on from an earlier stream or pass. What an adapter may look at before it predicts (``fit``) is the whole
    stream, or what arrives together where its state is reset then.
    """
    fits = fit and adapter.fits
    anew = setting.reset == "chunk"
    arrivals = samples.index.split(setting.chunk or max(len(samples), 1))
    for number, arrival in enumerate(arrivals):
        if state is None or anew:
            state = adapter.init(deployed)
        if fits and (anew or number == 0):
            seen = arrival if anew else samples.index
            x = pixels(samples.images, seen, compute.dtype).to(compute.device)
            state = adapter.fit(state, x, draws_of(adapter, samples.ids[seen], seed, compute))
        for index in chunks(arrival, adapter.batch, _chunk_size(samples, compute)):
            x = pixels(samples.images, index, compute.dtype).to(compute.device)
            output, state = adapter.predict(state, x, draws_of(adapter, samples.ids[index], seed, compute))
            yield output, samples.labels[index].to(compute.device), state


def prepared(adapter: Adapter, tree: Tree, task: Task, client: Client, size: int, compute: Compute) -> Tree:
    """A deployed tree with what the adapter makes of the client's training data before (nothing, for most)."""
    if type(adapter).prepare is Adapter.prepare or not len(client.train):
        return tree
    batches = (
        {
            "x": pixels(task.images, index, compute.dtype).to(compute.device),
            "y": task.labels[index].to(compute.device),
        }
        for index in client.train.split(size)
    )
    return {**tree, **adapter.prepare(tree, batches)}


def _chunk_size(samples: Samples, compute: Compute) -> int:
    """How many samples a per-sample adapter is given at once: an accelerator wants many, memory not too many pixels."""
    most = 4096 if compute.device.type == "cuda" else EVALUATION_CHUNK
    return max(1, min(most, (1 << 26) // (4 * max(samples.images[0].numel(), 1)))) if len(samples) else most


def chunks(index: Tensor, batch: int | None, otherwise: int = EVALUATION_CHUNK) -> list[Tensor]:
    """Cut what arrives together into what an adapter is given at once (``otherwise``: if it does not care).

    An adapter that needs batches gets its own size, and a last sample that would be alone joins the batch before it.
    """
    if len(index) == 0:
        return []
    size = min(batch or otherwise, len(index))
    return list(index.split(batch_sizes(len(index), size, no_singles=batch is not None and size > 1)))


def draws_of(adapter: Adapter, ids: Tensor, seed: int, compute: Compute) -> dict[str, Tensor]:
    """An adapter's random tensors for these samples."""
    seeds: dict[str, int | Tensor] = {name: rng.seed_of(seed, "draw", name) for name in adapter.draws()}
    return {name: leaf.to(compute.device) for name, leaf in draw(adapter.draws(), seeds, ids, compute.dtype).items()}
