"""What a model says about some images: logits, and what people read in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to some images, in their order.

    >>> import torch
    >>> answers = Answers(torch.tensor([[0.0, 0.0], [9.0, -9.0]]), ("cat", "dog"))
    >>> answers.labels, answers.confidence.tolist()[0], answers.probabilities.shape
    (('cat', 'cat'), 0.5, torch.Size([2, 2]))
    """

    logits: Tensor  # [n, outputs]
    classes: tuple[str, ...]  # the name of every output

    @staticmethod
    def of(logits: Tensor, classes: Sequence[str]) -> Answers:
        """Answers of a network, which may have more outputs than there are classes."""
        return Answers(logits, names_of(classes, logits.shape[1]))

    @cached_property
    def probabilities(self) -> Tensor:
        """The softmax of the logits, in double precision: float64 [n, outputs]."""
        return self.logits.double().softmax(1)

    @cached_property
    def codes(self) -> Tensor:
        """The number of the likeliest class of each image."""
        return self.probabilities.argmax(1)

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of the likeliest class of each image."""
        return tuple(self.classes[code] for code in self.codes.tolist())

    @property
    def confidence(self) -> Tensor:
        """The probability of that class."""
        return self.probabilities.amax(1)


def names_of(classes: Sequence[str], outputs: int) -> tuple[str, ...]:
    """A name for every output of a network: its class, or its number where there are more outputs than classes.

    >>> names_of(["cat", "dog"], 3)
    ('cat', 'dog', '2')
    """
    return (*classes, *(str(i) for i in range(len(classes), outputs)))
