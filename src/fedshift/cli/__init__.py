"""The command line, a file for each group of commands; ``fedshift --help`` lists them in the order of the imports here."""

from __future__ import annotations

from fedshift.cli import run  # isort: skip
from fedshift.cli import data  # isort: skip
from fedshift.cli import tune  # isort: skip
from fedshift.cli import show  # isort: skip
from fedshift.cli import report  # isort: skip
from fedshift.cli import inspect  # isort: skip
from fedshift.cli import join  # isort: skip
from fedshift.cli import export  # isort: skip
from fedshift.cli import serve  # isort: skip
from fedshift.cli import deploy  # isort: skip
from fedshift.cli import listing  # isort: skip
from fedshift.cli import cache  # isort: skip
from fedshift.cli.app import app
from fedshift.cli.guard import guarded

__all__ = [
    "app",
    "cache",
    "data",
    "deploy",
    "export",
    "inspect",
    "join",
    "listing",
    "main",
    "report",
    "run",
    "serve",
    "show",
    "tune",
]


def main() -> None:
    """The entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    guarded(app)
