"""A client's model for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import console


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
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder, or a file if it ends as the format's do; default RUN/exported/CLIENT-FORMAT."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Write one client's model for use elsewhere: raw pixels in, probabilities out."""
    from fedshift.export import export as export_model
    from fedshift.export.report import headline, lines

    screen = console()
    with screen.status("exporting"):
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
    screen.print(headline(exported), style="bold", soft_wrap=True)
    for line in lines(exported):
        screen.print(line, soft_wrap=True)
