"""The program that commands join by being imported."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="fedshift",
    help="Federated learning that survives distribution shift: any training method meets any test-time adapter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
