"""Choose FedICON's settings on validation images only: its temperature and rates in training, head and adaptation.

    python benchmarks/tune_fedicon.py digits-covariate --device cuda

Every encoder is trained once; the head's rates go on from there, and the adaptations from the best head. Nothing here sees a
test image ([split] tune). What it prints is accuracy in per cent over the validation images, clean and corrupted.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from fedshift.data.task import Task
from fedshift.engines.auto import device_for, engine_for
from fedshift.engines.base import Compute, Engine
from fedshift.engines.torch_flags import steady
from fedshift.experiment.schema import AdapterSpec, Experiment, MethodSpec
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup, make_setup, make_task
from fedshift.store.state import State
from fedshift.store.summary import summarise


def numbers(text: str) -> list[float]:
    return [float(item) for item in text.split(",")]


def trained(experiment: Experiment, setup: Setup, task: Task, engine: Engine, compute: Compute) -> State:
    """The encoder after the experiment's rounds."""
    session = Session(setup, task, engine, compute, experiment.seeds[0], experiment.rounds)
    state = session.start()
    while state.round < experiment.rounds:
        state, report = session.step(state)
    print(f"    contrastive loss of the last round {report.loss:.3f}", flush=True)
    return state


def accuracies(session: Session, state: State, spec: AdapterSpec) -> tuple[float, float]:
    """Uniform means over the clients, clean and corrupted."""
    setup = session.setup
    scores = session.evaluate(setup.adapters(spec), session.deploy(state).trained(), ["original", "corrupted"])
    clean, corrupted = (
        summarise({client: score for (client, part), score in scores.items() if part == name}).client_mean
        for name in ("original", "corrupted")
    )
    assert clean is not None
    assert corrupted is not None  # every client has test images
    return clean, corrupted


def main(
    preset: str,
    device: str = "auto",
    rounds: int = 100,
    supervised: bool = True,
    temperatures: str = "0.07,0.1,0.5",
    rates: str = "0.01,0.05",
    momentum: float = 0.0,
    batch_size: int = 32,
    head_rates: str = "0.1,1.0,5.0",
    adapt_temperatures: str = "0.07,0.1,0.5",
    adapt_rates: str = "0.0001,0.001,0.01",
    adapt_epochs: str = "1,5",
    norm: Annotated[bool, typer.Option(help="BatchNorm after the convolutions")] = False,
    flip: bool = False,
    crop: float = 0.2,
    colour: float = 1.0,
    projection: bool = False,
    head_epochs: int = 5,
    fast: bool = False,
) -> None:
    views: dict[str, Any] = {"flip": flip, "crop": crop, "colour": colour}
    experiment = Experiment.load(preset, overrides=["split.tune=true", f"rounds={rounds}", "seeds=[0]"])
    compute = Compute(device_for(device), torch.float32)
    task = make_task(experiment, 0)
    adaptations = list(itertools.product(numbers(adapt_temperatures), numbers(adapt_rates), numbers(adapt_epochs)))
    with steady(fast):
        _, engine = engine_for("auto", compute, True, len(task.clients))
        for temperature, rate in itertools.product(numbers(temperatures), numbers(rates)):
            base = MethodSpec(
                name="fedicon",
                supervised=supervised,
                temperature=temperature,
                projection=projection,
                head_epochs=head_epochs,
                model={"norm": norm},
                train={"lr": rate, "momentum": momentum, "batch-size": batch_size},
                **views,
            )
            kind = "SupCon" if supervised else "NT-Xent"
            print(
                f"{kind} temperature {temperature:g} rate {rate:g} momentum {momentum:g} batch {batch_size} norm {norm} "
                f"projection {projection} {views} head epochs {head_epochs}",
                flush=True,
            )
            encoder = trained(experiment, make_setup(experiment, base, task), task, engine, compute)
            best: tuple[float, Session, State] | None = None
            for head_rate in numbers(head_rates):
                setup = make_setup(experiment, MethodSpec(**{**base.model_dump(), "head_lr": head_rate}), task)
                session = Session(setup, task, engine, compute, 0, experiment.rounds)
                state = replace(encoder)
                while state.round < experiment.rounds + setup.method.extra_rounds:
                    state, _ = session.step(state)
                clean, corrupted = accuracies(session, state, AdapterSpec(name="none"))
                print(f"    head rate {head_rate:g}: clean {clean:.2f} corrupted {corrupted:.2f}", flush=True)
                if best is None or corrupted > best[0]:
                    best = (corrupted, session, state)
            assert best is not None
            for tau, step, epochs in adaptations:
                spec = AdapterSpec(name="fedicon", temperature=tau, lr=step, epochs=int(epochs), **views)
                clean, corrupted = accuracies(best[1], best[2], spec)
                print(f"        adapt t {tau:g} lr {step:g} x{epochs:g}: {clean:.2f} {corrupted:.2f}", flush=True)
        engine.close()


if __name__ == "__main__":
    typer.run(main)
