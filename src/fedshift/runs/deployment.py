"""What a finished run keeps for clients nobody has seen: enough to serve one without the run's data or its clients.

``welcome.safetensors`` holds the server of the round chosen by validation after clients took their final phases and
published (which needs their data, so it cannot be made up for later), and what the run's settings do not say: the
classes, the shape of images, the names and shapes of the networks' entries. An adapter that chose a round of its own has
its own, ``welcome/ADAPTER.safetensors``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedshift.core.arch import Arch
from fedshift.core.method import Method, Now
from fedshift.core.tree import Tensors, Tree
from fedshift.data.task import Task
from fedshift.errors import UserError
from fedshift.runs.plan import Job
from fedshift.runs.session import Federation, Settled
from fedshift.store.folder import WELCOME
from fedshift.store.state import State
from fedshift.store.trees import load, save


@dataclass(frozen=True)
class Welcome:
    """A server that waits for newcomers, and what it knows about its run."""

    server: Tree
    public: Tensors  # ``images`` and ``ids`` everybody may see, where newcomers learn from them; otherwise empty
    now: Now
    seed: int
    task_hash: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # of an image: channels, height, width
    networks: Mapping[str, Mapping[str, tuple[int, ...]]]  # the names and shapes of their entries

    def save(self, folder: Path, adapter: str = "") -> None:
        """Into a run folder, all or nothing; ``adapter`` if it chose this round for itself."""
        target = folder / welcome_file(adapter)
        target.parent.mkdir(exist_ok=True)
        facts = {
            "now": asdict(self.now),
            "seed": self.seed,
            "task-hash": self.task_hash,
            "classes": self.classes,
            "shape": self.shape,
            "networks": self.networks,
        }
        save(target, {"server": self.server, "public": {"public": self.public}}, facts)

    @staticmethod
    def load(folder: Path, adapter: str = "") -> Welcome:
        """From a run folder, for this adapter if it chose its own round."""
        if not (folder / WELCOME).is_file():
            raise UserError(
                f"{folder} has no {WELCOME}, which older versions did not write: repeat its fedshift run to add it, "
                "finished rounds are not run again"
            )
        path = next(path for path in (folder / welcome_file(adapter), folder / WELCOME) if path.is_file())
        trees, stored = load(path)
        facts: Mapping[str, Any] = stored
        try:
            channels, height, width = facts["shape"]
            return Welcome(
                server=trees["server"],
                public=trees["public"]["public"],
                now=Now(**facts["now"]),
                seed=facts["seed"],
                task_hash=facts["task-hash"],
                classes=tuple(facts["classes"]),
                shape=(channels, height, width),
                networks={
                    network: {name: tuple(shape) for name, shape in entries.items()}
                    for network, entries in facts["networks"].items()
                },
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is damaged or of another version ({error!r})") from None


def welcome_file(adapter: str) -> str:
    """Where it lies in a run folder."""
    return f"welcome/{adapter}.safetensors" if adapter else WELCOME


def save_welcome(job: Job, federation: Federation, state: State, settled: Settled, adapter: str = "") -> None:
    """Keep what newcomers need of a state; ``adapter`` if it chose this round for itself."""
    methods = job.setup.methods
    Welcome(
        server=settled.server,
        public=_public(methods.values(), job.task),
        now=replace(federation.now(state), final=True),
        seed=job.seed,
        task_hash=job.task.hash,
        classes=job.task.classes,
        shape=job.task.shape,
        networks={name: entries_of(method.arch) for name, method in methods.items()},
    ).save(job.folder.path, adapter)


def entries_of(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a network: what must agree for weights to fit.

    >>> from torch import nn
    >>> entries_of(Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2)))
    {'1.weight': (2, 4), '1.bias': (2,)}
    """
    return {name: tuple(leaf.shape) for name, leaf in arch.init(0).items()}


def _public(methods: Iterable[Method], task: Task) -> Tensors:
    read = any(phase.data == "public" for method in methods for phase in method.joining_phases())
    if task.public is None or not read:
        return {}
    return {"images": task.images[task.public], "ids": task.ids[task.public]}
