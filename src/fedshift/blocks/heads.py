"""Training a head alone."""

from __future__ import annotations

from fedshift.core.context import Phase
from fedshift.core.method import Method


def head_phase(method: Method, slot: str, name: str, epochs: int, lr: float | None) -> Phase:
    """A head on the frozen extractor in a slot, whose features are computed once; ``lr`` in place of ``[train] lr``."""
    return Phase(
        slot=slot,
        name=name,
        trainable=method.arch.head,
        epochs=epochs,
        optim=method.train.optim(lr),
        inputs="features",
        batch_stats=False,
    )
