"""Results of finished runs, and what to deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import Clients, Format, advice_json, advised, console, print_advice, print_result, wants_json
from fedshift.errors import UserError


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or any folder above some.")],
    select: Annotated[str, typer.Option(help="Selection rule: last, best-val or oracle.")] = "best-val",
    format: Format = "table",
    picture: Annotated[
        list[str] | None, typer.Option(help="Draw instead: results, densities, map, radar, privacy or tsne; into RUN.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Another headline: balanced-accuracy, macro-f1, auroc, auprc, loss, ece, ...")
    ] = "",
    classes: Annotated[bool, typer.Option("--classes", help="Recall and precision of every class instead.")] = False,
    by: Annotated[
        str, typer.Option(help="By subgroup instead: client, or a column of \\[data] attributes (scanner, sex, age).")
    ] = "",
    clients: Clients = False,
) -> None:
    """Print the results of finished runs again, or draw them."""
    from fedshift.measures.measurement import MEASURES, measure_of
    from fedshift.results.collect import collect
    from fedshift.results.result import to_json
    from fedshift.store.found import find_runs

    if metric and metric not in MEASURES:
        measure_of(metric)
        if not by:
            raise UserError(f"{metric} is measured from kept predictions: add --by client, or another column")
    if by:
        from fedshift.results.subgroups import subgroups, subgroups_table

        measure = metric or "balanced-accuracy"
        console().print(subgroups_table(subgroups(find_runs(path), by, measure), by, measure))
        return
    result = collect(find_runs(path))
    if classes:
        table = result.classes_table(select)
        if table is None:
            raise UserError("there are too many classes for a table; --format json has them")
        console().print(table)
        return
    if metric:
        console().print(result.clients(select, metric) if clients else result.table(select, metric))
        return
    if picture:
        from fedshift.results.plots.pictures import draw

        drawn = [made for name in picture for made in draw(name, result, path, select)]
        console().print(f"Pictures: {', '.join(map(str, drawn))}", soft_wrap=True)
    elif wants_json(format):
        print(to_json(result))
    else:
        print_result(console(), result, select, rules=True, clients=clients)


@app.command()
def advise(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or any folder above some.")],
    metric: Annotated[str, typer.Option(help="Compare by this measure instead of the experiment's own.")] = "",
    format: Format = "table",
) -> None:
    """What to deploy: every method and adapter compared on validation images under the same shifts, never on a test."""
    from fedshift.results.collect import collect
    from fedshift.store.found import find_runs

    as_json = wants_json(format)
    found = advised(collect(find_runs(path)), metric)
    if as_json:
        print(advice_json(found))
        return
    print_advice(console(), found, compared=True)
