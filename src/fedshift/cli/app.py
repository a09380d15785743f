"""The program that commands join by being imported."""

from __future__ import annotations

from typing import Annotated

import typer

import fedshift

app = typer.Typer(
    name="fedshift",
    help="Federated learning that survives distribution shift: any training method meets any test-time adapter.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedshift {fedshift.__version__}")
        raise typer.Exit


@app.callback()
def usual(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


def presets(incomplete: str) -> list[str]:
    """Names of presets, for shells that complete words; files are completed where none fits."""
    from fedshift.experiment.files import presets as known

    return [name for name in known() if name.startswith(incomplete)]
