"""Many test streams side by side: adapters that must go along a stream step by step go along all of them at once.

A lane is one client's stream. Lanes are independent, so their states are stacked and one ``vmap`` of the adapter takes a
step in each. Lanes whose next piece has one size move together and the others wait (``grouping.py``); a lane's own order
never changes, so the answers are the reference's. On CUDA a step that recurs is captured in a graph: what an adapter does
for one sample is hundreds of small kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedshift.core.adapter import Adapter
from fedshift.core.batching import at_once
from fedshift.core.tree import Tree, map_tree, shapes, stack
from fedshift.data.streams import Setting
from fedshift.data.task import Samples, Task
from fedshift.engines.base import Compute, Density, Score, sound
from fedshift.engines.cuda.graphs import Graphs
from fedshift.engines.pulse import beat
from fedshift.engines.reference import chunks, draws_of, pixels
from fedshift.engines.vmapped.grouping import joint_steps
from fedshift.engines.vmapped.memory import Stacks

LONGEST = 16  # samples of a piece, for adapters that work through them one by one: all of them are one graph
SAID = "said"  # the slot of what an adapter says beside the state it moves


def suited(adapter: Adapter, setting: Setting) -> bool:
    """Whether this adapter gains from company on such a stream, and the stream stands for itself."""
    steps = adapter.sequential or adapter.batch is not None
    return steps and adapter.stackable and not adapter.fits and setting.reset == "stream" and setting.passes == 1


@dataclass(frozen=True, eq=False)
class Lane:
    """A client's stream, cut into the pieces an adapter is given at once."""

    client: str
    part: str
    samples: Samples
    pieces: tuple[Tensor, ...]

    @staticmethod
    def of(adapter: Adapter, task: Task, client: str, part: str) -> Lane:
        """Pieces of the adapter's own size, or of few sizes where it does not matter."""
        samples, setting = task.samples(task.client(client), part), task.setting(part)
        pieces: list[Tensor] = []
        for arrival in samples.index.split(setting.chunk or max(len(samples), 1)):
            pieces += chunks(arrival, adapter.batch) if adapter.batch is not None else _powers(arrival)
        return Lane(client, part, samples, tuple(pieces))


def _powers(index: Tensor) -> list[Tensor]:
    """Pieces of 16 samples, then 8, 4, ...: whatever the lengths of the lanes, their ends can go together too."""
    full, rest = divmod(len(index), LONGEST)
    ends = [1 << bit for bit in reversed(range(LONGEST.bit_length())) if rest >> bit & 1]
    return list(index.split([LONGEST] * full + ends))


def evaluate_lanes(
    adapter: Adapter,
    deployed: Mapping[str, Tree],
    lanes: Sequence[Lane],
    seed: int,
    compute: Compute,
    stacks: Stacks | None = None,
) -> dict[tuple[str, str], Score]:
    """Scores by (client, part), for as many lanes together as memory likes."""
    stacks = stacks or Stacks()
    scores: dict[tuple[str, str], Score] = {}
    ready = {lane: adapter.init(deployed[lane.client]) for lane in lanes if lane.pieces}
    alike: dict[object, list[Lane]] = {}
    for lane, state in ready.items():
        own = lane.samples
        alike.setdefault((shapes(state), id(own.images), id(own.labels), id(own.ids)), []).append(lane)
    for group in alike.values():
        longest = max(len(piece) for lane in group for piece in lane.pieces)
        probe = pixels(group[0].samples.images, group[0].samples.index[:1], compute.dtype)
        width = at_once(ready[group[0]]["model"], probe, longest)
        group.sort(key=lambda lane: -len(lane.samples))  # lanes of one length start and end together

        def together(some: Sequence[Lane]) -> dict[tuple[str, str], Score]:
            graphs = Graphs(warm_up=1) if compute.device.type == "cuda" else None
            return _together(adapter, some, stack([ready[lane] for lane in some]), seed, compute, graphs)

        title = f"streams of {type(adapter).__name__}"
        scores |= stacks.work(title, (type(adapter), longest), group, width, together)
    for lane in lanes:
        scores.setdefault((lane.client, lane.part), Score(0, 0, 0.0))
    return scores


def _together(
    adapter: Adapter, lanes: Sequence[Lane], state: Tree, seed: int, compute: Compute, graphs: Graphs | None
) -> dict[tuple[str, str], Score]:
    predict = vmap(adapter.predict, randomness="different")

    def step(own: Tree, batch: Mapping[str, Tensor]) -> Tree:
        output, moved = predict(own, batch["x"], {name: batch[name] for name in batch if name != "x"})
        return {**moved, SAID: {"logits": output.logits, **{name: output.aux[name] for name in adapter.telemetry}}}

    images, labels, ids = (getattr(lanes[0].samples, name) for name in ("images", "labels", "ids"))
    correct, broken = (torch.zeros(len(lanes), dtype=torch.int64, device=compute.device) for _ in range(2))
    loss = torch.zeros(len(lanes), dtype=torch.float64, device=compute.device)
    told: dict[str, list[list[Tensor]]] = {name: [[] for _ in lanes] for name in adapter.telemetry}
    logits: list[list[Tensor]] = [[] for _ in lanes]
    taken = [0] * len(lanes)
    all_rows = torch.arange(len(lanes), device=compute.device)
    for size, members in joint_steps([[len(piece) for piece in lane.pieces] for lane in lanes]):
        index = torch.stack([lanes[k].pieces[taken[k]] for k in members])
        everyone = len(members) == len(lanes)
        rows = all_rows if everyone else torch.tensor(members, device=compute.device)  # this one makes the host wait
        own = state if everyone else map_tree(lambda leaf, rows=rows: leaf[rows], state)
        x = pixels(images, index, compute.dtype).to(compute.device)
        flat = draws_of(adapter, ids[index.flatten()], seed, compute)
        draws = {name: leaf.unflatten(0, index.shape) for name, leaf in flat.items()}
        batch = {**draws, "x": x}
        moved = step(own, batch) if graphs is None else graphs.step(len(members), size, step, own, batch, False)
        said = {name: leaf.clone() for name, leaf in moved[SAID].items()}  # a graph writes to the same tensors again
        moved = {slot: leaves for slot, leaves in moved.items() if slot != SAID}
        answers, outputs = labels[index].to(compute.device), said["logits"]
        fine = sound(outputs)
        broken.index_add_(0, rows, (~fine).sum(1))
        correct.index_add_(0, rows, ((outputs.argmax(-1) == answers) & fine).sum(1))
        nll = F.cross_entropy(outputs.flatten(0, 1), answers.flatten(), reduction="none")
        nll = nll.double().unflatten(0, index.shape).where(fine, torch.inf)
        loss.index_add_(0, rows, nll.sum(1))
        for name, lists in told.items():
            for k, values in zip(members, said[name], strict=True):
                lists[k].append(values)
        for k, own_logits in zip(members, outputs.unbind(), strict=True):
            logits[k].append(own_logits)
        state = moved if everyone else map_tree(lambda a, b, rows=rows: a.index_copy(0, rows, b), state, moved)
        for k in members:
            taken[k] += 1
        beat(index.numel())
    return {
        (lane.client, lane.part): Score(
            len(lane.samples),
            int(correct[k]),
            float(loss[k]),
            {name: Density.of(torch.cat(lists[k])) for name, lists in told.items()},
            int(broken[k]),
            torch.cat(logits[k]).log_softmax(-1).float().cpu(),
            labels[lane.samples.index].cpu(),
        )
        for k, lane in enumerate(lanes)
    }
