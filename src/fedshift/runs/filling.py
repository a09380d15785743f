"""How many runs are made at a time when nobody says: so many that a GPU is full, and never more than pays.

Kernels of several processes overlap on a GPU only under NVIDIA's Multi-Process Service (MPS). Where it is already running,
or its program is there and can be started for as long as we run, small federations fill the GPU together; without it
processes would take turns, so there is one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from fedshift.engines import shipping
from fedshift.engines.base import Compute
from fedshift.engines.cores import usable_cores
from fedshift.runs.plan import Job

MOST = 6  # processes; more than that gained nothing on an H200
PAYS = 50_000_000  # samples to work through, a minute or more, before it pays to start processes
FULL = 128  # stacked clients after which a GPU is busy with one run
ROOM = 6 << 30  # bytes of a GPU that a process needs beside its images
CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PATIENCE = 5.0  # seconds until the service must be up
# a client of the service: one that has no use of the GPU is told so here, before anything depends on it
PROBE = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
calls = [lambda: cuda.cuInit(0), lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
         lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)]
raise SystemExit(any(call() for call in calls))
"""


def processes_for(groups: Sequence[Sequence[Job]], engine: str, compute: Compute) -> int:
    """How many of these groups of runs to make at a time, given that kernels of processes overlap."""
    if engine != "vmapped" or compute.device.type != "cuda" or len(groups) < 2 or not _travel(groups):
        return 1
    if sum(samples_of(job) for group in groups for job in group) < PAYS:
        return 1
    room = torch.cuda.mem_get_info(compute.device)[0] // max(ROOM + _bytes(group[0]) for group in groups)
    idle = FULL // min(sum(len(job.task.clients) for job in group) for group in groups)
    return max(1, min(MOST, len(groups), usable_cores() // 2, room, idle))


def samples_of(job: Job) -> float:
    """About how many samples a run works through."""
    train, clients = job.setup.train, job.task.clients
    whole = sum(len(client.train) for client in clients) * train.local_epochs
    each = whole if train.local_steps is None else train.local_steps * train.batch_size * len(clients)
    return each * job.rounds * job.experiment.participation


def _bytes(job: Job) -> int:
    """Of a task's images, its streams' among them."""
    streams = [stream.images for stream in job.task.streams.values() if stream.images is not None]
    return sum(images.nbytes for images in (job.task.images, *streams))


def _travel(groups: Sequence[Sequence[Job]]) -> bool:
    """Whether what is trained can reach another process; a notebook's own method may not."""
    try:
        for group in groups:
            shipping.dumps(group[0].setup)
    except shipping.CANNOT_TRAVEL:
        return False
    return True


@contextmanager
def overlapping(compute: Compute) -> Iterator[bool]:
    """Whether kernels of other processes overlap meanwhile: MPS is there, or is started and ended here."""
    program = shutil.which(CONTROL)
    if compute.device.type != "cuda" or program is None or sys.platform != "linux":
        yield False
        return
    there = Path(os.environ.get(PIPES, "/tmp/nvidia-mps"), "control")
    if there.exists():
        yield _serves()
        return
    before = {name: os.environ.get(name) for name in (PIPES, LOGS)}
    with tempfile.TemporaryDirectory(prefix="fedshift-mps-") as folder:
        os.environ.update({PIPES: folder, LOGS: folder})  # for the service and everybody we start
        service = subprocess.Popen(
            [program, "-f"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_follow_parent,
        )
        try:
            yield _up(service, Path(folder, "control")) and _serves()
        finally:
            service.terminate()
            try:
                service.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _up(service: subprocess.Popen[bytes], control: Path) -> bool:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and service.poll() is None:
        if control.exists():
            return True
        time.sleep(0.02)
    return False


def _serves() -> bool:
    try:
        return (
            subprocess.run([sys.executable, "-c", PROBE], check=False, timeout=60, capture_output=True).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


def _follow_parent() -> None:
    """The service ends when we do, whatever ends us."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
