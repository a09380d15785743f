"""A client nobody has seen joins a trained run: a model of its own, and predictions, from unlabelled images."""

from __future__ import annotations

from fedshift.join.artefact import Artefact, load
from fedshift.join.joining import Joined, join

__all__ = ["Artefact", "Joined", "join", "load"]
