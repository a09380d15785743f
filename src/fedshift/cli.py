"""The command line: ``fedshift run | data | list | show | advise | inspect | cost-to-target | join | export | doctor``."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.results.advice import Advice
    from fedshift.results.result import Result

app = typer.Typer(
    name="fedshift",
    help="Federated learning that survives distribution shift: any training method meets any test-time adapter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Format = Annotated[str, typer.Option("--format", help="table or json")]


@app.command()
def run(
    experiment: Annotated[
        str | None, typer.Argument(help="A TOML file or a preset; left out: five digit domains, no download.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", "-c", help="Override a key, for instance -c rounds=50 -c method.fedprox.mu=0.1."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    engine: Annotated[
        str,
        typer.Option(
            help="auto, sequential, parallel or vmapped; all give the same numbers up to rounding (float64: 1e-10)"
        ),
    ] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with interrupted runs.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin interrupted runs again.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="So many runs at the same time, a process for each.")] = 1,
) -> None:
    """Train every method of an experiment, test every adapter, print the table. Finished parts are not run again."""
    from fedshift.experiment.schema import Experiment
    from fedshift.results.plots.pictures import density_picture, map_picture, option_map, result_picture
    from fedshift.results.plots.task import task_picture
    from fedshift.runs.progress import Terminal
    from fedshift.runs.run import carry_out, plan

    console = _console()
    chosen = Experiment.load(experiment, change or [])
    if chosen.title:
        console.print(f"[bold]{_escaped(chosen.title)}", highlight=False)
    reporter = Terminal(console)
    try:
        planned = plan(chosen, out, reporter=reporter)
        result = carry_out(
            planned,
            engine=engine,
            device=device,
            resume=resume,
            restart=restart,
            processes=jobs,
            reporter=reporter,
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
    if option_map(result) is not None:
        pictures.append(folder / "map.png")
        map_picture(result, pictures[-1])
    _print_result(console, result, "best-val", rules=chosen.evaluate.oracle)
    if any(row.twins for row in result.rows):
        console.print("[bold]What to deploy[/] (fedshift advise has the table):")
        _print_advice(console, result.advice())
    console.print(f"Pictures: {', '.join(map(str, pictures))}. Again: fedshift show {folder}", highlight=False)


@app.command()
def data(
    what: Annotated[
        str, typer.Argument(metavar="PATH|PRESET", help="A preset, a TOML file, a Parquet file or a folder.")
    ],
    change: Annotated[list[str] | None, typer.Option("--set", "-c", help="Override a key, as in fedshift run.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for task.html, task.png and split.csv, default runs/NAME; or a .csv file for that list alone."
        ),
    ] = None,
    format: Format = "table",
) -> None:
    """What is in a task: clients, sizes, classes, groups, examples of every stream; a table, a page, a picture, a list."""
    from fedshift.data.audit import counted, write_list
    from fedshift.experiment.schema import Experiment
    from fedshift.results.pages.task import task_lines, task_page, task_table
    from fedshift.results.plots.task import task_picture
    from fedshift.runs.setup import make_task

    console = _console()
    as_json = _wants_json(format)
    chosen = Experiment.of_data(what, change or [])
    with console.status("making the task"):
        first = next(chosen.variants())[1]
        task = make_task(first, first.seeds[0])
    folder = out or Path("runs") / chosen.name
    written = [out] if out is not None and out.suffix.lower() == ".csv" else []
    if written:
        write_list(task, written[0])
    elif out is not None or not as_json:
        written = [folder / name for name in ("task.html", "task.png", "split.csv")]
        task_page(task, written[0], chosen.title or chosen.name, chosen.data.needs)
        task_picture(task, written[1])
        write_list(task, written[2])
    if as_json:
        print(json.dumps(counted(task), indent=1))
        return
    console.print(task_table(task))
    for line in task_lines(task):
        console.print(_escaped(line), highlight=False)
    console.print(f"Written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or any folder above some.")],
    select: Annotated[str, typer.Option(help="Selection rule: last, best-val or oracle.")] = "best-val",
    format: Format = "table",
    picture: Annotated[
        list[str] | None, typer.Option(help="Draw instead: results, densities, map, radar or tsne; into RUN.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Another headline: balanced-accuracy, macro-f1, auroc, auprc, loss, ece, ...")
    ] = "",
    classes: Annotated[bool, typer.Option("--classes", help="Recall and precision of every class instead.")] = False,
    by: Annotated[
        str, typer.Option(help="By subgroup instead: client, or a column of [data] attributes (scanner, sex, age).")
    ] = "",
) -> None:
    """Print the results of finished runs again, or draw them."""
    from fedshift.measures.measurement import MEASURES, measure_of
    from fedshift.results.collect import collect
    from fedshift.results.result import to_json
    from fedshift.store.folder import find_runs

    if metric and metric not in MEASURES:
        measure_of(metric)
        if not by:
            raise UserError(f"{metric} is measured from kept predictions: add --by client, or another column")
    if by:
        from fedshift.results.subgroups import subgroups, subgroups_table

        measure = metric or "balanced-accuracy"
        _console().print(subgroups_table(subgroups(find_runs(path), by, measure), by, measure))
        return
    result = collect(find_runs(path))
    if classes:
        table = result.classes_table(select)
        if table is None:
            raise UserError("there are too many classes for a table; --format json has them")
        _console().print(table)
        return
    if metric:
        _console().print(result.table(select, metric))
        return
    if picture:
        from fedshift.results.plots.pictures import draw

        drawn = [made for name in picture for made in draw(name, result, path, select)]
        _console().print(f"Pictures: {', '.join(map(str, drawn))}", highlight=False, soft_wrap=True)
    elif _wants_json(format):
        print(to_json(result))
    else:
        _print_result(_console(), result, select, rules=True)


@app.command()
def advise(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or any folder above some.")],
    metric: Annotated[str, typer.Option(help="Compare by this measure instead of the experiment's own.")] = "",
    format: Format = "table",
) -> None:
    """What to deploy: every method and adapter compared on validation images under the same shifts, never on a test."""
    from fedshift.results.collect import collect
    from fedshift.store.folder import find_runs

    as_json = _wants_json(format)
    advice = collect(find_runs(path)).advice(metric)
    if as_json:
        print(advice.to_json())
        return
    console = _console()
    console.print(advice.table())
    _print_advice(console, advice)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or any folder above some.")],
    out: Annotated[Path | None, typer.Option(help="Where page, numbers and pictures go; default RUN/inspect.")] = None,
    samples: Annotated[int, typer.Option(help="Images of each client whose features are compared.")] = 200,
    select: Annotated[str, typer.Option(help="Whose state: best-val or last.")] = "best-val",
    model: Annotated[
        str, typer.Option(help="deployed, or global: the model a new client would get, for everybody.")
    ] = "deployed",
    steps: Annotated[
        int, typer.Option(help="FedTTA: also follow so many steps of adaptation, as the paper's Fig. 2.")
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """What was learnt: distances between clients, local risks, confusions, t-SNE; a table, a page, pictures and JSON."""
    from fedshift.inspect.report import inspect as look_into
    from fedshift.inspect.report import steps_table, summary_table

    console = _console()
    with console.status("reading runs") as status:
        found = look_into(
            path, out, samples=samples, select=select, model=model, steps=steps, device=device, doing=status.update
        )
    for table in (summary_table(found["methods"]), steps_table(found["runs"])):
        if table is not None:
            console.print(table)
    own = [f"{entry['name']}: {note}" for entry in found["runs"] for note in entry["notes"]]
    for note in dict.fromkeys([*found["notes"], *own]):
        console.print(f"- {_escaped(note)}", highlight=False)
    folder = out or path / "inspect"
    console.print(
        f"Page: {folder / 'inspect.html'}, numbers: {folder / 'inspect.json'}", highlight=False, soft_wrap=True
    )


@app.command(name="cost-to-target")
def cost_to_target(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or any folder above some.")],
    target: Annotated[float, typer.Option(help="Accuracy in percent.")],
    format: Format = "table",
) -> None:
    """What every method took to reach an accuracy: rounds, compute, communication, memory."""
    from fedshift.inspect.overhead import overhead as measure
    from fedshift.inspect.overhead import to_json

    as_json = _wants_json(format)
    found = measure(path, target)
    if as_json:
        print(to_json(found))
    else:
        _console().print(found.table())


app.command(name="overhead", hidden=True)(cost_to_target)  # its name in earlier versions


@app.command()
def join(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a folder above some.")],
    data: Annotated[
        Path, typer.Option(help="Images without labels: a folder, one picture, Parquet; class folders are labels.")
    ],
    adapter: Annotated[str | None, typer.Option(help="An adapter of the run by its label, or any by its name.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default RUN/joined/DATA-ADAPTER.")] = None,
    method: Annotated[str | None, typer.Option(help="Which method, if RUN holds several.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which seed, if RUN holds several.")] = None,
    network: Annotated[
        str | None, typer.Option("--network", "--model", help="Which network, if the run mixes several.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="An image that cannot be read is an error.")] = False,
    format: Format = "table",
) -> None:
    """Give an unseen client a model of its own and predictions, from its unlabelled images."""
    from fedshift.join import join as join_run
    from fedshift.join.report import classes_table, headline, lines, summary

    as_json = _wants_json(format)
    console = _console()
    with Console(stderr=True).status("joining"):
        joined = join_run(
            path, data, adapter, out, method=method, seed=seed, model=network, device=device, strict=strict
        )
    if as_json:
        print(json.dumps({**joined.as_dict(), "files": [str(file) for file in joined.files]}, indent=1))
        return
    console.print(f"[bold]{_escaped(headline(joined))}", highlight=False, soft_wrap=True)
    console.print(summary(joined))
    if joined.report is not None:
        console.print(classes_table(joined.report))
    for line in lines(joined):
        console.print(_escaped(line), highlight=False, soft_wrap=True)


@app.command()
def export(
    path: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a folder above some; or that of an artefact.")
    ],
    client: Annotated[str | None, typer.Option(help="Whose model: a client of the run.")] = None,
    unseen: Annotated[
        bool,
        typer.Option(
            "--unseen",
            help="The model any unseen client would get: what the server sends and what clients gave away, before "
            "it shows an image (for one that has images: fedshift join).",
        ),
    ] = False,
    format: Annotated[
        str,
        typer.Option(
            help="artefact (for fedshift.load, can adapt), or the network alone with its normalisation inside: onnx, "
            "torch-export or safetensors."
        ),
    ] = "artefact",
    method: Annotated[str | None, typer.Option(help="Which method, if RUN holds several.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which seed, if RUN holds several.")] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Only this adapter of the run, by its label or name; none leaves all out. Default: all."),
    ] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="Which network, if the run mixes several; with --unseen.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default RUN/exported/CLIENT-FORMAT.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Write one client's model for use elsewhere: raw pixels in, probabilities out."""
    from fedshift.export import export as export_model
    from fedshift.export.report import headline, lines

    console = _console()
    with console.status("exporting"):
        exported = export_model(
            path,
            client,
            unseen=unseen,
            format=format,
            out=out,
            method=method,
            seed=seed,
            adapter=adapter,
            model=network,
            device=device,
        )
    console.print(f"[bold]{_escaped(headline(exported))}", highlight=False, soft_wrap=True)
    for line in lines(exported):
        console.print(_escaped(line), highlight=False, soft_wrap=True)


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, adapters, models, partitions, streams, presets or pairs")],
    format: Format = "table",
) -> None:
    """What there is to choose from."""
    from fedshift.catalogue import CATALOGUE

    if what not in CATALOGUE:
        raise UserError(f"there is no list of {what!r}; there are: {', '.join(CATALOGUE)}")
    rows = CATALOGUE[what]()
    if _wants_json(format):
        print(json.dumps(rows, indent=1))
        return
    table = Table()
    for column in rows[0]:
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for row in rows:
        table.add_row(*(_plain(value) for value in row.values()))
    _console().print(table)


@app.command()
def doctor() -> None:
    """Versions, device, threads, and what is missing with the command that installs it."""
    from fedshift.doctor import report

    console = _console()
    for line in report():
        console.print(line, highlight=False)


def _print_result(console: Console, result: Result, rule: str, rules: bool) -> None:
    """The table, the other measures, the costs, what adapters tell, the three rules side by side, and the notes."""
    console.print(result.table(rule))
    measures = result.measures_table(rule)
    if measures is not None:
        console.print(measures)
    console.print(result.costs_table())
    told = result.telemetry_table(rule)
    if told is not None:
        console.print(told)
    if rules:
        console.print(result.rules_table())
    if result.notes:
        console.print("Notes:")
    for note in result.notes:
        console.print(f"- {_escaped(note)}", highlight=False)


def _print_advice(console: Console, advice: Advice) -> None:
    head, *reasons = advice.lines()
    console.print(f"[bold]{_escaped(head)}[/]", highlight=False, soft_wrap=True)
    for reason in reasons:
        console.print(f"- {_escaped(reason)}", highlight=False, soft_wrap=True)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _wants_json(format: str) -> bool:
    if format not in ("table", "json"):
        raise UserError(f"--format must be table or json, not {format!r}")
    return format == "json"


def _console() -> Console:
    console = Console()
    # piped output keeps whole rows instead of wrapping them at a width nobody chose
    return console if console.is_terminal else Console(width=240)


class _Stopped(BaseException):
    """Somebody wants the program to end. Not a KeyboardInterrupt: typer keeps those to itself."""

    def __init__(self, number: int) -> None:
        self.code = 128 + number  # as shells say it


@contextmanager
def _stoppable() -> Iterator[None]:
    """A request to end (SIGTERM) is handled like Ctrl-C: what was begun is put away. A second one ends at once."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _Stopped(number)

    # one that somebody chose stays (nohup ignores signals), and only this thread may choose
    chosen = threading.current_thread() is not threading.main_thread()
    mine = {} if chosen else {n: old for n, old in handlers.items() if signal.getsignal(n) is old}
    for number in mine:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, old in mine.items():
            signal.signal(number, old)


def _guarded(command: Callable[[], Any]) -> NoReturn:
    try:
        with _stoppable():
            command()
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False)
        sys.exit(2)
    except _Stopped as stopped:
        Console(stderr=True).print("stopped; add --resume to go on from the last checkpoint", highlight=False)
        sys.exit(stopped.code)
    sys.exit(0)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def main() -> None:
    """The entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    _guarded(app)


if __name__ == "__main__":
    main()
