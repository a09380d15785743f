"""Look for better settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.app import app, presets
from fedshift.cli.printing import Change, console


@app.command()
def tune(
    experiment: Annotated[
        str | None, typer.Argument(help="A TOML file or a preset, as of fedshift run.", autocompletion=presets)
    ] = None,
    trials: Annotated[int, typer.Option(help="So many settings are tried with each method.")] = 20,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="What is searched, beside \\[tune]: --over 'train.lr={low=0.001, high=1.0, log=true}' or "
            "--over 'method.fedprox.mu=[0.01, 0.1, 1.0]'. Left out: train.lr around its value."
        ),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this method; once for each.")] = None,
    sampler: Annotated[
        str, typer.Option(help="random, or tpe, which learns from earlier trials (extra tune).")
    ] = "random",
    seed: Annotated[int, typer.Option(help="Of the search; runs have the experiment's own.")] = 0,
    change: Change = None,
    out: Annotated[Path, typer.Option(help="Where run folders go; NAME-tune in it.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    engine: Annotated[str, typer.Option(help="auto, sequential, parallel, vmapped or ray")] = "auto",
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", help="So many runs at a time, a process each; left out: as many as fill a GPU."),
    ] = None,
    show: Annotated[int, typer.Option(help="So many trials of each method are printed.")] = 5,
) -> None:
    """Search settings by validation images, never by a test label. Interrupted: the same command goes on."""
    from fedshift.experiment.files import assignment
    from fedshift.experiment.schema import Experiment
    from fedshift.runs.progress import Terminal
    from fedshift.tune import tune as search
    from fedshift.tune.report import lines

    screen = console()
    chosen = Experiment.load(experiment, change or [])
    found = search(
        chosen,
        out,
        trials=trials,
        over={".".join(key): value for key, value in map(assignment, over or [])},
        sampler=sampler,
        seed=seed,
        methods=method or [],
        engine=engine,
        device=device,
        processes=jobs,
        reporter=Terminal(screen),
    )
    screen.print(found.table(show))
    for line in lines(found):
        screen.print(line, soft_wrap=True)
