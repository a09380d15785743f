"""How far a model's probabilities can be believed, measured where there are labels and told in sums.

Every training client sums over its validation images; the server adds the sums up (a secure sum will do), and what follows
from them travels with the model. Nothing here is set by hand. Probabilities are ``softmax(scale * logits + bias)`` with the
scale (one over the temperature) and the bias of every class that make the labels of all clients together most likely: a
convex problem, solved by Newton's method, each step of which is one message of ``(classes + 1) (classes + 2)`` numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.blocks.mean_views import looks
from fedshift.blocks.refreshed_statistics import Refreshing
from fedshift.core.adapter import Adapter
from fedshift.core.tree import Tensors, Tree

SLOT = "calibration"
STEPS = 8  # of Newton's method
RIDGE = 1.0  # keeps the scale near one and the biases near zero, as if by a few images
NAMES = ("fit", "labels", "confusion", "skill")

Kind: TypeAlias = Literal["common", "own"]
"""Whose predictions: of the model that an unseen client gets, or of that of a client that trained."""


def start(classes: int) -> Tensor:
    """Scale and biases that change nothing: ``[1 + classes]``."""
    return torch.cat([torch.ones(1), torch.zeros(classes)]).double()


def first_guess(classes: int) -> Tensor:
    """Where Newton's method begins: below every scale one meets, from where its steps do not go too far."""
    return torch.cat([torch.full((1,), 0.1), torch.zeros(classes)]).double()


def newton_sums(logits: Tensor, labels: Tensor, fit: Tensor) -> Tensor:
    """What a client sends for a step: gradient and curvature of its loss, ``[1 + classes, 2 + classes]``.

    >>> newton_sums(torch.zeros(3, 2), torch.tensor([0, 0, 1]), start(2))[:, 0]
    tensor([ 0.0000, -0.5000,  0.5000], dtype=torch.float64)
    """
    z = logits.double()
    p = (fit[0] * z + fit[1:]).softmax(1)
    over = p - F.one_hot(labels, z.shape[1])
    pz = p * z
    mean = pz.sum(1, keepdim=True)
    gradient = torch.cat([(over * z).sum()[None], over.sum(0)])
    corner = ((pz * z).sum(1) - mean[:, 0] ** 2).sum()[None, None]
    side = (pz - p * mean).sum(0)
    curvature = torch.cat(
        [torch.cat([corner, side[None]], 1), torch.cat([side[:, None], torch.diag(p.sum(0)) - p.T @ p], 1)]
    )
    return torch.cat([gradient[:, None], curvature], 1)


def newton_step(sums: Tensor, fit: Tensor) -> Tensor:
    """Scale and biases after a step on the summed messages."""
    ridge = RIDGE * torch.eye(len(fit), dtype=fit.dtype, device=fit.device)
    pull = RIDGE * (fit - start(len(fit) - 1).to(fit))
    moved = fit - torch.linalg.solve(sums[:, 1:] + ridge, sums[:, 0] + pull)
    return torch.cat([moved[:1].clamp(0.05, 20.0), moved[1:]])


def calibrated_log(logits: Tensor, fit: Tensor) -> Tensor:
    """Log-probabilities after calibration, in double precision and never below ``e^-60``."""
    return (fit[0] * logits.double() + fit[1:]).log_softmax(1).clamp(min=-60.0)


def confusion_of(logits: Tensor, labels: Tensor) -> Tensor:
    """How many images of each class (rows) were given each answer.

    >>> confusion_of(torch.tensor([[2.0, 1.0], [2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 1, 1]))
    tensor([[1., 0.],
            [1., 1.]], dtype=torch.float64)
    """
    classes = logits.shape[1]
    flat = torch.bincount(labels * classes + logits.argmax(1), minlength=classes**2)
    return flat.reshape(classes, classes).double()


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the training clients found out about one kind of prediction."""

    fit: Tensor  # [1 + classes]: scale and biases
    labels: Tensor  # [classes]: how many validation images of each class there were
    confusion: Tensor  # [class, answer]: counts
    skill: Tensor  # [3]: squared errors of estimated class priors, of none, and of how many clients

    @staticmethod
    def none(classes: int) -> Calibration:
        """Nobody measured: probabilities are taken as they are, and every class as equally frequent.

        >>> Calibration.none(4).prior.tolist()
        [0.25, 0.25, 0.25, 0.25]
        """
        zero = torch.zeros(classes, dtype=torch.float64)
        return Calibration(start(classes), zero, torch.diag(zero), zero.new_zeros(3))

    @property
    def prior(self) -> Tensor:
        """The class prior that calibrated probabilities are made for: that of the images they were fitted to."""
        return (self.labels + 1) / (self.labels.sum() + len(self.labels))

    @property
    def right(self) -> Tensor:
        """The share of right answers, of all clients' images together; zero if nobody measured."""
        return self.confusion.diagonal().sum() / self.confusion.sum().clamp(min=1)

    def tensors(self) -> Tensors:
        """As it travels."""
        return {name: getattr(self, name) for name in NAMES}

    def to(self, device: torch.device) -> Calibration:
        """On a device, in double precision."""
        return Calibration(**{name: leaf.to(device, torch.float64) for name, leaf in self.tensors().items()})


def topic(kind: Kind, seen: str) -> str:
    """What is measured: whose predictions, and what they looked at.

    >>> topic("common", "8 views"), topic("own", "")
    ('common, 8 views', 'own')
    """
    return f"{kind}{seen and ', ' + seen}"


def entry_name(kind: Kind, seen: str, name: str) -> str:
    """What is called how in the slot.

    >>> entry_name("common", "8 views", "fit")
    'common, 8 views: fit'
    """
    return f"{topic(kind, seen)}: {name}"


def looks_refreshed(adapter: Refreshing) -> str:
    """What an adapter looks at, and how its statistics were refreshed before: answers with that are filed beside others."""
    return ", ".join(word for word in (looks(adapter), adapter.how) if word)


def with_refreshed_calibration(adapter: Refreshing, state: Tree) -> Tree | None:
    """A state that goes by what was measured with refreshed statistics; None unless more answers were right with them."""
    there, word = state.get(SLOT, {}), looks_refreshed(adapter)
    if entry_name("common", word, "fit") not in there:
        return None
    measured = {name: there[entry_name("common", word, name)] for name in NAMES}
    plain = calibration_of(adapter, state, "common")
    refreshed = Calibration(**measured).to(plain.labels.device)
    same_images = torch.allclose(refreshed.labels, plain.labels, rtol=0.0, atol=0.5)  # they are counts
    if not (same_images and refreshed.right > plain.right):
        return None
    return {**state, SLOT: {entry_name("common", looks(adapter), name): leaf for name, leaf in measured.items()}}


def calibration_of(adapter: Adapter, state: Tree, kind: Kind) -> Calibration:
    """What was measured for models of this kind and for what the adapter looks at; nothing, if nobody did."""
    there = state.get(SLOT, {})
    known = [(one, seen) for seen in (looks(adapter), "") for one in (kind, "common")]
    found = next((pair for pair in known if entry_name(pair[0], pair[1], "fit") in there), None)
    device = next(iter(state["model"].values())).device
    if found is None:
        return Calibration.none(adapter.arch.classes).to(device)
    return Calibration(**{name: there[entry_name(found[0], found[1], name)] for name in NAMES}).to(device)
