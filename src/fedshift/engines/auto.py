"""Which engine to use when nobody says."""

from __future__ import annotations

import torch

from fedshift.engines.base import Compute, Engine
from fedshift.engines.cores import usable_cores
from fedshift.engines.parallel import Parallel
from fedshift.engines.ray import Ray
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.errors import UserError

ENGINES = ("auto", "sequential", "parallel", "vmapped", "ray")


def engine_for(name: str, compute: Compute, has_convolution: bool, clients: int) -> tuple[str, Engine]:
    """The engine of this name; ``auto`` picks by device and network.

    On a GPU vmapped is far ahead. On a CPU it pays for networks without convolutions only (1.8-4.8 times the loop,
    against 0.35-1.5 times with them), and several processes pay otherwise.

    >>> engine_for("auto", Compute(), has_convolution=False, clients=5)[0]
    'vmapped'
    """
    if name == "auto":
        if compute.device.type != "cpu" or not has_convolution:
            name = "vmapped"
        else:
            name = "parallel" if clients > 1 and usable_cores() > 1 else "sequential"
    makers = {"sequential": Sequential, "parallel": Parallel, "vmapped": Vmapped, "ray": Ray}
    if name not in makers:
        raise UserError(f"there is no engine {name!r}; there are: {', '.join(ENGINES)}")
    return name, makers[name](compute)


def compute_for(device: str, precision: str) -> Compute:
    """Where and how numbers are made: ``auto`` is TF32 on a GPU, as torch's own convolutions have it, float32 on a CPU.

    >>> compute_for("cpu", "auto")
    Compute(device=device(type='cpu'), dtype=torch.float32, tf32=False)
    """
    where = device_for(device)
    tf32 = precision in ("auto", "tf32") and where.type == "cuda"
    return Compute(where, torch.float64 if precision == "float64" else torch.float32, tf32)


def device_for(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` as a device that is really there.

    >>> device_for("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"there is no device {name!r}; there are: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, but this torch sees no GPU; leave --device out to use the CPU")
    return torch.device(name)
