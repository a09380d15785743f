"""Federated learning that survives distribution shift: any training method meets any test-time adapter.

>>> import fedshift
>>> result = fedshift.run(fedshift.Experiment(rounds=20), out="runs")        # doctest: +SKIP
>>> print(result.accuracy("fedavg"))                                         # doctest: +SKIP

Names are imported when they are first asked for: ``fedshift --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedshift.core.adapter import Adapter
    from fedshift.core.arch import Arch, Output
    from fedshift.core.context import ClientInfo, Context, Phase, RandomSpec, ServerContext
    from fedshift.core.method import Method, Train
    from fedshift.core.registry import adapter, method, model
    from fedshift.core.tree import Tensors, Tree
    from fedshift.data.pool import Pool
    from fedshift.data.sources import from_arrays
    from fedshift.data.task import Task
    from fedshift.errors import UserError
    from fedshift.experiment.schema import Experiment
    from fedshift.results.result import Result
    from fedshift.runs.artefact import Artefact, load
    from fedshift.runs.open import open_run
    from fedshift.runs.run import run

__all__ = [
    "Adapter",
    "Arch",
    "Artefact",
    "ClientInfo",
    "Context",
    "Experiment",
    "Method",
    "Output",
    "Phase",
    "Pool",
    "RandomSpec",
    "Result",
    "ServerContext",
    "Task",
    "Tensors",
    "Train",
    "Tree",
    "UserError",
    "adapter",
    "from_arrays",
    "load",
    "method",
    "model",
    "open_run",
    "run",
]

# where each of them is: the imports above once more, which only type checkers carry out (tests/test_startup.py compares)
_PLACES = {
    "core.adapter": ("Adapter",),
    "core.arch": ("Arch", "Output"),
    "core.context": ("ClientInfo", "Context", "Phase", "RandomSpec", "ServerContext"),
    "core.method": ("Method", "Train"),
    "core.registry": ("adapter", "method", "model"),
    "core.tree": ("Tensors", "Tree"),
    "data.pool": ("Pool",),
    "data.sources": ("from_arrays",),
    "data.task": ("Task",),
    "errors": ("UserError",),
    "experiment.schema": ("Experiment",),
    "results.result": ("Result",),
    "runs.artefact": ("Artefact", "load"),
    "runs.open": ("open_run",),
    "runs.run": ("run",),
}


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            found = getattr(importlib.import_module(f"fedshift.{place}"), name)
            globals()[name] = found  # the next look finds it at once
            return found
    raise AttributeError(f"module 'fedshift' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
