"""How often each class comes, from unlabelled images: by expectation maximisation, BBSE and RLLS; and how far to go by it.

Expectation maximisation takes many clients side by side: leading dimensions are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedshift.blocks.calibration import Calibration, calibrated_log

STEPS = 200  # of expectation maximisation; their number is fixed, so that clients side by side agree with one alone
PSEUDO = 0.1  # images of every class that are taken to have been seen: a Dirichlet prior
INSIST = 10.0  # how many times the usual error a shift must be that no training client had anything like

Estimate: TypeAlias = Literal["em", "bbse", "rlls"]


def most_likely_prior(log_ratio: Tensor, prior: Tensor, steps: int = STEPS) -> Tensor:
    """The class prior under which images are most likely (Saerens et al. 2002): ``[..., n, classes] -> [..., classes]``.

    ``log_ratio`` is the log of ``p(y|x) / q(y)``, the model's probability over the ``prior`` q it was made for, which is
    ``log p(x|y)`` up to a number for each image; a row of ``-inf`` is no image. The likelihood is concave. A few images
    more, in the shares of q, keep classes possible that nobody has seen yet.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    >>> even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> most_likely_prior((p / even).log(), even).round(decimals=3)
    tensor([0.6880, 0.3120], dtype=torch.float64)
    """
    there = (log_ratio.amax(-1) > -torch.inf).sum(-1, keepdim=True)
    ratio = (log_ratio - log_ratio.amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
    pseudo = PSEUDO * prior.shape[-1] * prior
    found = prior
    for _ in range(steps):
        mixed = ratio @ found[..., None]  # [..., n, 1]
        found = ((ratio / mixed.clamp(min=1e-300)).sum(-2) * found + pseudo) / (there + pseudo.sum())
    return found.expand(*log_ratio.shape[:-2], prior.shape[-1])


def log_likelihood(log_ratio: Tensor, prior: Tensor) -> Tensor:
    """Of all images under a class prior, up to a number for each image: ``[..., n, classes] -> [...]``."""
    return (log_ratio + prior.log()[..., None, :]).logsumexp(-1).sum(-1)


def prior_by_confusion(calibration: Calibration, answered: Tensor, ridge: float) -> Tensor:
    """The class prior from the answers' confusion where there were labels, and how often each class is answered now.

    With joint shares ``J[a, y]`` of answers and classes there, answers now come in shares ``J w``, where ``w`` is how many
    times more frequent each class has become. BBSE (Lipton et al. 2018) solves that for w; RLLS (Azizzadenesheli et al.
    2019) keeps ``w - 1`` small by a ``ridge``, which matters where few images were counted.
    """
    joint = calibration.confusion.T / calibration.confusion.sum().clamp(min=1.0)
    gap = answered - joint.sum(1)
    eye = torch.eye(len(gap), dtype=joint.dtype, device=joint.device)
    change = torch.linalg.lstsq(joint.T @ joint + (ridge**2 + 1e-9) * eye, (joint.T @ gap)[:, None]).solution[:, 0]
    found = calibration.prior * (1 + change).clamp(min=0) + 1e-6
    shares: Tensor = found / found.sum()
    return shares


def _em(log_p: Tensor, calibration: Calibration) -> Tensor:
    return most_likely_prior(log_p - calibration.prior.log(), calibration.prior)


def _confused(ridge: float) -> Callable[[Tensor, Calibration], Tensor]:
    def estimate(log_p: Tensor, calibration: Calibration) -> Tensor:
        answers = torch.bincount(log_p.argmax(1), minlength=log_p.shape[1]).to(log_p)
        return prior_by_confusion(calibration, answers / max(len(log_p), 1), ridge)

    return estimate


ESTIMATES: Mapping[Estimate, Callable[[Tensor, Calibration], Tensor]] = {
    "em": _em,
    "bbse": _confused(0.0),
    "rlls": _confused(0.05),
}


def distance(one: Tensor, other: Tensor, prior: Tensor) -> Tensor:
    """Chi-squared distance of class shares in units of a prior: differences weigh more where a class is rare."""
    return ((one - other) ** 2 / prior).sum(-1)


def estimate_errors(log_p: Tensor, labels: Tensor, calibration: Calibration) -> Tensor:
    """How good an estimate was where there are labels: its squared error, that of none, and one client.

    That of none is how far the client's shares are from everybody's, less what so few images are away by chance.
    """
    classes = log_p.shape[1]
    if len(labels) == 0:
        return log_p.new_zeros(3, dtype=torch.float64)
    truth = torch.bincount(labels, minlength=classes).double() / len(labels)
    prior = calibration.prior
    none = (distance(truth, prior, prior) - (classes - 1) / len(labels)).clamp(min=0)
    return torch.stack([distance(_em(log_p, calibration), truth, prior), none, torch.ones_like(none)])


class Shift(NamedTuple):
    """A correction of logits: ``scale * logits + shift``."""

    shift: Tensor  # [classes]
    strength: Tensor  # 0-d, from 0 (none) to 1


def estimated_shift(logits: Tensor, calibration: Calibration, estimate: Estimate, guard: bool) -> Shift:
    """How a client's unlabelled images say its logits should be corrected: ``[n, classes] -> Shift``.

    The corrected log-probabilities are those for the prior ``q + s (pi - q)``: the training clients' prior q, moved by a
    strength s towards the estimate pi. With ``guard`` the strength is measured, not set:

    1. No more than the images say: where "no shift" is as likely (a likelihood-ratio test at 1 %), s is 0.
    2. As much as estimates are worth here: training clients estimated their own class shares as if they had no labels, and
       s is twice the part of the squared error that this took away, at most 1. Where clients are alike in their classes, or
       the model is too weak, or images differ so much that estimates are wrong, that part is nothing.
    3. Unless the data insist: a shift far beyond the usual error (:data:`INSIST` times) is believed all the same, in part.
    """
    log_p = calibrated_log(logits, calibration.fit)
    prior = calibration.prior
    pi = ESTIMATES[estimate](log_p, calibration)
    one = torch.ones_like(prior[0])
    strength = _strength(log_p, pi, calibration) if guard else one
    moved = prior + strength * (pi - prior)
    return Shift(strength * calibration.fit[1:] + (moved / prior).log(), strength)


def _strength(log_p: Tensor, pi: Tensor, calibration: Calibration) -> Tensor:
    prior, classes = calibration.prior, log_p.shape[1]
    log_ratio = log_p - prior.log()
    gain = 2 * (log_likelihood(log_ratio, pi) - log_likelihood(log_ratio, prior))
    free = classes - 1
    significant = gain > free + 2.33 * math.sqrt(2 * free)
    error, none, clients = calibration.skill.unbind()
    measured = torch.where(none > 0, 2 * (1 - error / none.clamp(min=1e-9)), torch.zeros_like(none))
    usual = error / clients.clamp(min=1)
    insisted = 1 - INSIST * usual / distance(pi, prior, prior).clamp(min=1e-9)
    # nobody measured: the images and the test alone decide
    strength = torch.where(clients > 0, torch.maximum(measured, insisted), torch.ones_like(error))
    return strength.clamp(0, 1) * significant
