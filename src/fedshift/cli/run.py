"""Train and test."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.cli.app import app, presets
from fedshift.cli.printing import Change, Clients, advised, console, print_advice, print_result

if TYPE_CHECKING:
    from fedshift.results.plain import Screen
    from fedshift.results.result import Result


@app.command()
def run(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="A TOML file or a preset; left out: five digit domains, no download.", autocompletion=presets
        ),
    ] = None,
    change: Change = None,
    out: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    engine: Annotated[
        str,
        typer.Option(
            help="auto, sequential, parallel, vmapped or ray. In float64 they agree to 1e-10; in float32 rounding differs "
            "and grows from round to round, so compare runs of one engine. Each run writes down its own."
        ),
    ] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with interrupted runs.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin interrupted runs again.")] = False,
    track: Annotated[
        list[str] | None, typer.Option(help="Also tell tensorboard[:FOLDER], mlflow[:URI] or wandb[:PROJECT].")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Also what takes longer than a week, or more memory than is free.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", help="So many runs at a time, a process each; left out: as many as fill a GPU."),
    ] = None,
    clients: Clients = False,
) -> None:
    """Train every method of an experiment, test every adapter, print the table, write the page. Finished parts stay."""
    from fedshift.engines.auto import compute_for
    from fedshift.experiment.schema import Experiment
    from fedshift.results.plots.pictures import density_picture, map_picture, option_map, result_picture
    from fedshift.results.plots.price import price_picture
    from fedshift.results.plots.task import task_picture
    from fedshift.results.tables import check_room
    from fedshift.runs.estimate import check_size
    from fedshift.runs.progress import Terminal
    from fedshift.runs.run import carry_out, plan
    from fedshift.track import tracker_of

    screen = console()
    chosen = Experiment.load(experiment, change or [])
    if chosen.title:
        screen.print(chosen.title, style="bold")
    trackers = [tracker_of(text) for text in track or []]
    reporter = Terminal(screen)
    try:
        planned = plan(chosen, out, reporter=reporter)
        if clients:  # said now, not after hours
            check_room(max(len(job.task.clients) + len(job.task.unseen) for job in planned))
        if not yes:
            check_size(planned, compute_for(device, chosen.precision).device)
        result = carry_out(
            planned,
            engine=engine,
            device=device,
            resume=resume,
            restart=restart,
            processes=jobs,
            reporter=reporter,
            trackers=trackers,
        )
    finally:
        reporter.close()
    folder = out / chosen.name
    pictures = [folder / "results.png", folder / "task.png"]
    result_picture(result, pictures[0])
    task_picture(planned[0].task, pictures[1])
    if any(row.telemetry() for row in result.rows):
        pictures.append(folder / "densities.png")
        density_picture(result, pictures[-1])
    if any("epsilon" in row.cost for row in result.rows):
        pictures.append(folder / "privacy.png")
        price_picture(result, pictures[-1])
    if option_map(result) is not None:
        pictures.append(folder / "map.png")
        map_picture(result, pictures[-1])
    print_result(screen, result, "best-val", rules=chosen.evaluate.oracle, clients=clients)
    if any(row.twins for row in result.rows):
        screen.print("What to deploy (fedshift advise has the table):", style="bold")
        print_advice(screen, advised(result))
    screen.print(f"Pictures: {', '.join(map(str, pictures))}. Again: fedshift show {folder}")
    _report(screen, result, chosen.title or chosen.name, folder / "report.html")


def _report(screen: Screen, result: Result, title: str, path: Path) -> None:
    """The page, where plotly is there to draw it; how to get it otherwise."""
    from fedshift.results.pages.report import HOW_TO_GET, report_page

    if find_spec("plotly") is None:
        screen.print(f"No page was written: {HOW_TO_GET}", soft_wrap=True)
        return
    report_page(result, title=title).write(path)
    screen.print(f"Everything on one page: {path}", soft_wrap=True)
