"""Where the time of a training round goes: the operations or GPU kernels that take most of it.

    python benchmarks/kernels.py pacs-personal FedAvg -c data.size=128 -c train.local-steps=20 -c precision=tf32

Two rounds warm up (and capture graphs), the third is profiled. What it prints: seconds of the round with and without the
profiler, the share of it in which kernels ran, FLOP/s by the cost ledger's count, and the longest kernels.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fedshift.engines.auto import compute_for, engine_for
from fedshift.engines.torch_flags import steady
from fedshift.experiment.schema import Experiment
from fedshift.runs.flops import count
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task
from fedshift.store.state import State


def timed(session: Session, state: State) -> tuple[State, float]:
    """A round, and its seconds once the device has done everything."""
    began = time.perf_counter()
    state, _ = session.step(state)
    if session.compute.device.type == "cuda":
        torch.cuda.synchronize()
    return state, time.perf_counter() - began


def main(
    preset: str,
    method: str,
    change: Annotated[list[str] | None, typer.Option("-c", help="Override a key, as in fedshift run.")] = None,
    device: str = "auto",
    rows: int = 15,
) -> None:
    experiment = Experiment.load(preset, overrides=change or [])
    spec = next(spec for spec in experiment.method if spec.title == method)
    compute = compute_for(device, experiment.precision)
    task = make_task(experiment, experiment.seeds[0])
    setup = make_setup(experiment, spec, task)
    on_gpu = compute.device.type == "cuda"
    with steady(compute.tf32):
        name, engine = engine_for("vmapped" if on_gpu else "sequential", compute, True, len(task.clients))
        session = Session(setup, task, engine, compute, experiment.seeds[0], experiment.rounds)
        costs = count(session, 3)
        state = session.start()
        for _ in range(2):
            state, _ = timed(session, state)
        state, plain = timed(session, state)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as found:
            _, watched = timed(session, state)
        engine.close()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in found.key_averages() if event.device_type == kind]
    taken = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6 for e in events}
    calls = {event.key: event.count for event in events}
    print(f"{method} of {preset}, engine {name} on {compute.device}: {plain:.3f} s a round, {watched:.3f} s watched")
    print(f"kernels ran for {sum(taken.values()):.3f} s")
    if costs.flops_round is not None:
        print(f"{costs.flops_round * len(task.clients) / plain / 1e12:.3f} TFLOP/s")
    for key in sorted(taken, key=lambda key: -taken[key])[:rows]:
        print(f"{taken[key]:8.4f} s {100 * taken[key] / plain:5.1f} % {calls[key]:7d} x  {key[:110]}")


if __name__ == "__main__":
    typer.run(main)
