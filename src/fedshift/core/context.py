"""Where in a run we are, what a client knows about itself, and what it is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from fedshift.core.optim import Optim

if TYPE_CHECKING:
    from fedshift.core.method import Train

Stage: TypeAlias = Literal["round", "final", "unseen"]
Balance: TypeAlias = Literal["none", "weights", "sampler", "softmax"]  # of skewed classes, by a client's own counts


@dataclass(frozen=True)
class Context:
    """Where in a run we are, for the hooks that decide things in Python; tensors of it are in every state's ``now``.

    ``stage`` is a round; or ``final``, after the last aggregation, when clients make ready what they serve with; or
    ``unseen``, when a client arrives that took part in no round.
    """

    round: int  # from 0
    rounds: int
    clients: int  # of the whole task, not only this round's
    stage: Stage = "round"

    @property
    def ending(self) -> bool:
        """Whether training is over.

        >>> Context(3, 10, 5).ending, Context(10, 10, 5, "final").ending, Context(10, 10, 5, "unseen").ending
        (False, True, True)
        """
        return self.stage != "round"

    def decay(self, train: Train) -> float:
        """The factor on every learning rate in this round, or, when training is over, in the one that trained the model."""
        return train.lr_decay ** max(min(self.round - self.ending, self.rounds - 1), 0)


@dataclass(frozen=True, kw_only=True)
class ServerContext(Context):
    """What the server knows of a round beside its messages."""

    samples: Tensor  # [K], of the clients whose messages came, in their order
    seed: int  # of the server in this round, for :mod:`fedshift.core.rng`


@dataclass(frozen=True)
class ClientInfo:
    """What a client that starts now knows about itself."""

    client: str
    samples: int
    histogram: Tensor  # int64 [classes] of its training labels; zeros without labels
    seed: int  # of the run and this client
    public: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # ids of the images all hold
    unseen: bool = False  # took part in no round


@dataclass(frozen=True)
class RandomSpec:
    """Random tensors a step wants: ``[batch, *shape]`` of this kind (views, noise, a generator's labels)."""

    kind: Literal["uniform", "normal", "integers"]
    shape: tuple[int, ...] = ()
    high: int = 0  # for integers


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of a client's local work: what is trained, for how long, on what.

    A ``fold`` trains nothing: every batch is passed to :meth:`Method.fold` once, in order.
    """

    kind: Literal["train", "fold"] = "train"
    slot: str = "model"
    trainable: frozenset[str] | None = None  # None: every parameter of the arch
    epochs: int | None = None  # None: [train] local-epochs (or local-steps)
    steps: int | None = None
    optim: Optim | None = None  # None: [train]'s
    groups: tuple[tuple[frozenset[str], Optim], ...] = ()  # names with an optimiser of their own
    balance: Balance | None = None  # None: [train]'s; otherwise [train] has no say, and the run says so
    data: Literal["train", "val", "test", "public"] = "train"  # test: an unseen client's, in phases without labels
    inputs: Literal["x", "features"] = "x"
    batch_stats: bool = True  # False: normalisation layers keep their running statistics
    labelled: bool = True  # unseen clients skip phases that need labels
    name: str = "train"
