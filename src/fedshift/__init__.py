"""Federated learning that survives distribution shift: any training method meets any test-time adapter.

>>> import fedshift
>>> result = fedshift.run(fedshift.Experiment(rounds=20), out="runs")        # doctest: +SKIP
>>> print(result.accuracy("fedavg"))                                         # doctest: +SKIP
"""

from __future__ import annotations

__version__ = "0.2.0"

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
