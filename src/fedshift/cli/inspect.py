"""What was learnt, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import Format, console, wants_json


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or any folder above some.")],
    out: Annotated[Path | None, typer.Option(help="Where page, numbers and pictures go; default RUN/inspect.")] = None,
    samples: Annotated[int, typer.Option(help="Images of each client whose features are compared.")] = 200,
    select: Annotated[str, typer.Option(help="Whose state: best-val or last.")] = "best-val",
    model: Annotated[
        str, typer.Option(help="deployed, or global: the model an unseen client would get, for everybody.")
    ] = "deployed",
    steps: Annotated[
        int, typer.Option(help="FedTTA: also follow so many steps of adaptation, as the paper's Fig. 2.")
    ] = 0,
    adapter: Annotated[
        str, typer.Option(help="Models that adapt to what they are shown: an adapter of the run, or any by its name.")
    ] = "",
    stream: Annotated[str, typer.Option(help="The stream they are shown; default original, or else the first.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """What was learnt: distances between clients, local risks, confusions, t-SNE; a table, a page, pictures and JSON."""
    from fedshift.inspect.report import inspect as look_into
    from fedshift.inspect.report import steps_table, summary_table

    screen = console()
    with screen.status("reading runs") as status:
        found = look_into(
            path,
            out,
            samples=samples,
            select=select,
            model=model,
            steps=steps,
            device=device,
            adapter=adapter,
            stream=stream,
            doing=status.update,
        )
    for table in (summary_table(found["methods"]), steps_table(found["runs"])):
        if table is not None:
            screen.print(table)
    own = [f"{entry['name']}: {note}" for entry in found["runs"] for note in entry["notes"]]
    for note in dict.fromkeys([*found["notes"], *own]):
        screen.print(f"- {note}")
    folder = out or path / "inspect"
    screen.print(f"Page: {folder / 'inspect.html'}, numbers: {folder / 'inspect.json'}", soft_wrap=True)


@app.command(name="cost-to-target")
def cost_to_target(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or any folder above some.")],
    target: Annotated[float, typer.Option(help="Accuracy in percent.")],
    format: Format = "table",
) -> None:
    """What every method took to reach an accuracy: rounds, compute, communication, memory."""
    from fedshift.inspect.overhead import overhead as measure
    from fedshift.inspect.overhead import to_json

    as_json = wants_json(format)
    found = measure(path, target)
    if as_json:
        print(to_json(found))
    else:
        console().print(found.table())


app.command(name="overhead", hidden=True)(cost_to_target)  # its name in earlier versions
