"""An unseen client joins a trained run: a model of its own, and predictions, from unlabelled images."""

from __future__ import annotations

from fedshift.join.joining import Joined, join
from fedshift.runs.artefact import Artefact, load

__all__ = ["Artefact", "Joined", "join", "load"]
