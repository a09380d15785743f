"""Many clients as one: states stacked along a new first dimension, ``torch.func.vmap`` over the step.

Clients of different sizes are handled without a single padded sample. Each client has a queue of batches; those whose
next batch has one size move together and the others wait (``grouping.py``). A client's own order of batches never
changes, so the result is the sequential engine's.

On CUDA a step that recurs is captured into a graph and replayed (``graphs.py``). A graph has a fixed number of clients,
so a smaller group is filled up with copies of one of its members, whose results are thrown away. Clients who do not fit
into memory together are stacked in parts (``memory.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import vmap

from fedshift.core.adapter import Adapter
from fedshift.core.context import Phase
from fedshift.core.method import Method
from fedshift.core.tree import Tree, map_tree, shapes, stack, to, unstack
from fedshift.data.task import Client, Task
from fedshift.engines import augment
from fedshift.engines.base import Compute, Reply, Score
from fedshift.engines.cuda.convolutions import StackedConvolutions, implicit_pays, pair, shape_of
from fedshift.engines.cuda.graphs import Graphs, Step
from fedshift.engines.cuda.trilinear import has_kernels
from fedshift.engines.pulse import beat
from fedshift.engines.reference import (
    Placement,
    as_floats,
    features_of,
    hand_over,
    now_of,
    seeded,
    start_phase,
    still_valid,
)
from fedshift.engines.schedule import Plan, fitting
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped.grouping import joint_steps
from fedshift.engines.vmapped.memory import Stacks
from fedshift.engines.vmapped.queues import Group, Queues
from fedshift.engines.vmapped.streams import Lane, evaluate_lanes, suited

# Samples a run works through before compiling its steps pays: it takes about half a minute and saves a fifth, but for
# convolutions that kernels of our own are faster at, and which no compiler knows. A function of the settings and the
# machine, never of the clock, so that a resumed run takes the same kernels.
COMPILE_PAYS = 50_000_000
MANY_PRODUCTS = 4  # layers that are a product, for each convolution: CCT-4 has 9, a CNN one
MOST_METHODS = 4  # whose graphs are kept


class Vmapped:
    """Stacks up to ``max_clients`` clients; ``compile_step`` compiles from the first step, otherwise when it pays."""

    def __init__(self, compute: Compute | None = None, max_clients: int = 256, compile_step: bool = False) -> None:
        self.compute = compute or Compute()
        self.max_clients = max_clients
        self._placement = Placement(self.compute.device)
        self._compile = compile_step
        self._graphs = Graphs() if self.compute.device.type == "cuda" else None
        self._stacks = Stacks(self.close)
        self._task: Task | None = None
        self._compiles: dict[Method, bool] = {}  # methods of this task, and whether their steps are compiled
        self._convolutions: set[str] = set()
        self._ours = has_kernels(self.compute)  # tried here, before any transform

    @property
    def convolutions(self) -> frozenset[str]:
        """Which ways (``convolutions.WAYS``) training went so far; those of compiled steps and of a CPU are torch's."""
        return frozenset(self._convolutions)

    def train(
        self, method: Method, downs: Mapping[str, Tree], locals: Mapping[str, Tree], task: Task, plan: Plan
    ) -> dict[str, Reply]:
        """The local work of every client in ``downs``."""
        here = self._placement(task)
        if self._graphs is not None:
            self._remember(self._graphs, method, task, _work(method, task, len(downs), plan))
        alike: dict[object, list[str]] = {}  # clients that can be stacked
        for name, down in downs.items():
            alike.setdefault((shapes(down), shapes(locals.get(name, {}))), []).append(name)

        def cohort(some: Sequence[str]) -> dict[str, Reply]:
            clients = [here.client(name) for name in some]
            received, kept = [downs[name] for name in some], [locals.get(name, {}) for name in some]
            return self._cohort(method, received, kept, clients, here, plan)

        replies: dict[str, Reply] = {}
        for form, names in alike.items():
            title = f"clients of {type(method).__name__}"
            replies |= self._stacks.work(title, (method, form), names, self.max_clients, cohort)
        return {name: replies[name] for name in downs}

    def evaluate(
        self, adapter: Adapter, deployed: Mapping[str, Tree], task: Task, parts: Sequence[str], seed: int
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part): streams that must be gone along side by side, the others as one large batch each."""
        here = self._placement(task)
        # a stream that the next one goes on from is not alone
        carried = {part for part, later in pairwise(parts) if here.setting(later).reset == "never"}
        side_by_side = [part for part in parts if part not in carried and suited(adapter, here.setting(part))]
        others = [part for part in parts if part not in side_by_side]
        lanes = [Lane.of(adapter, here, client, part) for client in deployed for part in side_by_side]
        around = StackedConvolutions(None, ours=self._ours) if self._graphs is not None else nullcontext()
        with around:  # adapters stack clients, or samples that each get weights of their own
            scores = Sequential(self.compute, self._placement).evaluate(adapter, deployed, task, others, seed)
            if lanes:
                with torch.no_grad():
                    scores |= evaluate_lanes(adapter, deployed, lanes, seed, self.compute, self._stacks)
        return {(client, part): scores[client, part] for client in deployed for part in parts}

    def close(self) -> None:
        """Let go of captured graphs."""
        if self._graphs is not None:
            self._graphs.clear()

    def _cohort(
        self,
        method: Method,
        downs: Sequence[Tree],
        locals: Sequence[Tree],
        clients: Sequence[Client],
        task: Task,
        plan: Plan,
    ) -> dict[str, Reply]:
        """Stacked clients through all phases, and apart again."""
        count = len(clients)
        started = [method.begin(down, local) for down, local in zip(downs, locals, strict=True)]
        common = {slot: leaves for slot, leaves in started[0].items() if slot in method.common}
        received = {slot: leaves for slot, leaves in downs[0].items() if slot in method.common}
        state = stack([_without(one, common) for one in started])
        features: dict[tuple[str, str], list[Tensor]] = {}
        with seeded(method, plan.seed_for(clients[0].name, "layers")):
            for phase in plan.phases:
                features = still_valid(features, phase)
                key = (phase.slot, phase.data)
                if phase.inputs == "features" and key not in features:
                    parts = [task.samples(client, phase.data) for client in clients]
                    singles = zip(unstack(state, count), parts, strict=True)
                    features[key] = [features_of(method, one, phase, part, self.compute) for one, part in singles]
                cached = features[key] if phase.inputs == "features" else None
                queues = Queues(method, phase, clients, task, plan, self.compute, cached)
                here = Compute(dtype=self.compute.dtype)  # many small tensors: stacked first, moved once
                nows = [
                    now_of(method, task, client, plan, length, here)
                    for client, length in zip(clients, queues.lengths, strict=True)
                ]
                begun = _begin(method, state, phase, nows, self.compute.device)
                state = self._phase(method, begun, phase, queues, common)
        if not plan.phases:  # nothing to train: nothing was logged
            nothing = torch.zeros(count, dtype=self.compute.dtype, device=self.compute.device)
            state = {**state, "log": {"loss": nothing, "steps": nothing}}
        apart = vmap(
            lambda s, d, m: hand_over(method, {**s, **common}, {**d, **received}, m, plan), randomness="different"
        )
        ups, kept = apart(state, stack([_without(down, received) for down in downs]), stack(locals))
        sound = (_finite(ups, count, state) & _finite(kept, count, state)).tolist()
        steps = state["log"]["steps"].tolist()
        losses = (state["log"]["loss"] / state["log"]["steps"].clamp(min=1)).tolist()
        own = unstack(kept, count)
        if count < len(task.clients):  # a view would keep the whole stack alive until its last client trains again
            own = [map_tree(torch.clone, local) for local in own]
        rows = zip(clients, unstack(ups, count), own, losses, steps, sound, strict=True)
        return {
            client.name: Reply(up, local, loss, int(taken), bool(fine) and loss - loss == 0)
            for client, up, local, loss, taken, fine in rows
        }

    def _phase(self, method: Method, state: Tree, phase: Phase, queues: Queues, common: Tree) -> Tree:
        """Run all queues dry."""
        common = common if phase.kind == "fold" else {}  # a captured step would read an old round's
        group = Group(state, queues.count, borrowed=self._graphs is not None)
        form = tuple((slot, name, leaf.shape[1:]) for slot, leaves in state.items() for name, leaf in leaves.items())
        for size, members in joint_steps(queues.sizes):
            rows = self._filled(members, queues.count)
            group.choose(members, rows)
            suited = fitting(phase, method.arch, size)
            order = queues.take(members, rows, size)
            our_way = self._graphs is not None and not self._compiles[method]
            around = partial(StackedConvolutions, len(rows), self._convolutions, self._ours) if our_way else nullcontext
            step = _stacked_step(method, suited, queues, common, around)
            if self._graphs is None or phase.kind == "fold":  # a fold is over before a graph would pay
                group.state = step(group.state, order)
            else:
                key = (method, suited, queues.signature, form, len(rows))
                group.state = self._graphs.step(key, size, step, group.state, order, self._compiles[method])
            beat(size * len(members))
        return group.everyone()

    def _remember(self, graphs: Graphs, method: Method, task: Task, work: float) -> None:
        """Graphs hold memory: another task, or more methods than a mixed federation has, and the old ones go."""
        if task is not self._task or (method not in self._compiles and len(self._compiles) >= MOST_METHODS):
            graphs.clear()
            self._stacks.clear()
            self._task, self._compiles = task, {}
        self._compiles.setdefault(method, self._compile or compiling_pays(method, work, self.compute))

    def _filled(self, members: list[int], count: int) -> list[int]:
        """On CUDA groups come in few widths, so that few graphs are needed."""
        if self._graphs is None or len(members) == count:
            return members
        width = min(count, 1 << (len(members) - 1).bit_length())
        return members + members[:1] * (width - len(members))


def compiling_pays(method: Method, samples: float, compute: Compute) -> bool:
    """Whether the steps of a run over so many samples are compiled."""
    if samples <= COMPILE_PAYS:
        return False
    layers = [layer for layer in method.arch.convolutions() if layer.groups == 1]
    ours = any(implicit_pays(shape_of(layer.weight), pair(layer.stride)) for layer in layers)
    return not (ours and has_kernels(compute)) or _mostly_products(method)


def _mostly_products(method: Method) -> bool:
    """Whether a network with few convolutions is a transformer: what is between its products a compiler joins."""
    kinds = Counter(leaf.dim() for leaf in method.arch.init(0).values())
    return kinds[2] > MANY_PRODUCTS * kinds[4]


def _work(method: Method, task: Task, clients: int, plan: Plan) -> float:
    """About how many samples a run of such rounds works through."""
    mean = sum(len(client.train) for client in task.clients) / len(task.clients)
    total = 0.0
    for phase in plan.phases:
        steps = phase.steps if phase.steps is not None or phase.epochs is not None else method.train.local_steps
        epochs = method.train.local_epochs if phase.epochs is None else phase.epochs
        total += mean * epochs if steps is None else steps * method.train.batch_size
    return total * clients * plan.ctx.rounds


def _begin(
    method: Method, state: Tree, phase: Phase, nows: Sequence[Mapping[str, Tensor]], device: torch.device
) -> Tree:
    """Fresh optimiser memory for every client: made for one, then repeated."""
    first = {slot: {name: leaf[0] for name, leaf in leaves.items()} for slot, leaves in state.items()}
    single = start_phase(method, first, phase, dict(nows[0]))
    fresh = {slot: single[slot] for slot in ("optim", "log") if slot == "optim" or slot not in state}
    repeated = map_tree(lambda leaf: leaf.expand(len(nows), *leaf.shape).clone(), fresh)
    return {**state, **to({**repeated, **stack([{"now": dict(now)} for now in nows])}, device)}


def _without(tree: Tree, slots: Tree) -> Tree:
    return {slot: leaves for slot, leaves in tree.items() if slot not in slots}


def _stacked_step(
    method: Method, phase: Phase, queues: Queues, common: Tree, around: Callable[[], AbstractContextManager[object]]
) -> Step:
    """A step from positions in the long index to moved states: gathering images is part of it, and of its graph."""

    def one(state: Tree, batch: Mapping[str, Tensor]) -> Tree:
        return _without(augment.step(method, {**state, **common}, batch, phase), common)

    stacked = vmap(one, randomness="different")
    part, dtype = queues.part, queues.compute.dtype

    def step(state: Tree, order: Mapping[str, Tensor]) -> Tree:
        span, where, features = order["span"], order["where"], order.get("features")
        index = where[span]
        x = as_floats(part.images[index], dtype) if features is None else features[span]
        draws = {name: leaf for name, leaf in order.items() if name not in ("span", "where", "features")}
        with around():
            result: Tree = stacked(state, {"x": x, "y": part.labels[index], "index": part.ids[index], **draws})
        return result

    return step


def _finite(tree: Tree, count: int, like: Tree) -> Tensor:
    """One flag per stacked client: no NaN or infinity in its part of the tree."""
    flags = [
        leaf.isfinite().reshape(count, -1).all(1)
        for leaves in tree.values()
        for leaf in leaves.values()
        if leaf.is_floating_point()
    ]
    return torch.stack(flags).all(0) if flags else torch.ones_like(like["log"]["loss"], dtype=torch.bool)
