"""Who was taken for what: a confusion count, and the measures that follow from it exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedshift.measures.exact import divided
from fedshift.measures.predictions import NOTHING, Floats, Integers, Predictions

MOST = 1 << 48  # samples of a kind, of which so many sums are still exact


@dataclass(frozen=True)
class Confusion:
    """Counts of (class, predicted class), only those there are: a thousand classes cost what their samples do.

    >>> count = Confusion.of(Predictions(np.log([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1])))
    >>> count.recall().tolist(), round(count.balanced_accuracy, 2)
    ([1.0, 0.5], 0.75)
    >>> Confusion.of_json(count.to_json(), 2) == count
    True
    """

    classes: int
    cells: tuple[tuple[int, int, int], ...]  # class, predicted class (``NOTHING`` for no number), how many; in order

    @staticmethod
    def of(predictions: Predictions) -> Confusion:
        """Of these samples."""
        width = predictions.classes + 1
        codes = predictions.labels.astype(np.int64) * width + predictions.predicted + 1  # the first is NOTHING
        found, counts = np.unique(codes, return_counts=True)
        rows = zip((found // width).tolist(), (found % width - 1).tolist(), counts.tolist(), strict=True)
        return Confusion(predictions.classes, tuple(rows))

    @staticmethod
    def of_counts(counts: Integers) -> Confusion:
        """From a whole table [classes, classes].

        >>> Confusion.of_counts(np.array([[3, 0], [1, 2]])).cells
        ((0, 0, 3), (1, 0, 1), (1, 1, 2))
        """
        rows, columns = np.nonzero(counts)
        many = counts[rows, columns]
        return Confusion(len(counts), tuple(zip(rows.tolist(), columns.tolist(), many.tolist(), strict=True)))

    @staticmethod
    def summed(parts: Iterable[Confusion]) -> Confusion:
        """Of all of them together; at least one.

        >>> half = Confusion(2, ((0, 1, 3),))
        >>> Confusion.summed([half, half]).cells
        ((0, 1, 6),)
        """
        counts: dict[tuple[int, int], int] = {}
        classes = 0
        for part in parts:
            classes = part.classes
            for label, predicted, count in part.cells:
                counts[label, predicted] = counts.get((label, predicted), 0) + count
        return Confusion(classes, tuple((*key, count) for key, count in sorted(counts.items())))

    def to_json(self) -> list[int]:
        """As files hold it: class, predicted class, count, one after the other."""
        return [number for cell in self.cells for number in cell]

    @staticmethod
    def of_json(stored: Sequence[int], classes: int) -> Confusion:
        """From a file; a ValueError says that no such counts can be."""
        numbers = [int(number) for number in stored]
        cells = tuple(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        if not all(
            0 <= one < classes and NOTHING <= other < classes and 0 <= many < MOST for one, other, many in cells
        ):
            raise ValueError("these are no counts of its classes")
        return Confusion(classes, cells)

    @cached_property
    def _columns(self) -> tuple[Integers, Integers, Integers]:
        cells = np.array(self.cells, dtype=np.int64).reshape(-1, 3)
        return cells[:, 0], cells[:, 1], cells[:, 2]

    @property
    def samples(self) -> int:
        """How many."""
        return int(self._columns[2].sum())

    @cached_property
    def support(self) -> Integers:
        """How many samples of every class."""
        labels, _, counts = self._columns
        return np.bincount(labels, counts, self.classes).astype(np.int64)

    @cached_property
    def answered(self) -> Integers:
        """How often every class was predicted."""
        _, predicted, counts = self._columns
        real = predicted != NOTHING
        return np.bincount(predicted[real], counts[real], self.classes).astype(np.int64)

    @cached_property
    def right(self) -> Integers:
        """How often every class was predicted rightly."""
        labels, predicted, counts = self._columns
        same = labels == predicted
        return np.bincount(labels[same], counts[same], self.classes).astype(np.int64)

    @property
    def matrix(self) -> Integers:
        """Dense [classes, classes]; predictions that are no numbers are not in it."""
        labels, predicted, counts = self._columns
        real = predicted != NOTHING
        whole = np.zeros((self.classes, self.classes), dtype=np.int64)
        whole[labels[real], predicted[real]] = counts[real]
        return whole

    def recall(self) -> Floats:
        """Of every class; NaN where no sample belongs to it."""
        return divided(self.right, self.support)

    def precision(self) -> Floats:
        """Of every class; NaN where it was never predicted."""
        return divided(self.right, self.answered)

    @property
    def accuracy(self) -> float:
        """The share of right answers; NaN without samples."""
        return float(self.right.sum() / self.samples) if self.samples else float("nan")

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have samples."""
        present = self.support > 0
        return float(self.recall()[present].mean()) if present.any() else float("nan")

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that have samples or were predicted."""
        involved = (self.support + self.answered) > 0
        scores = 2 * self.right[involved] / (self.support + self.answered)[involved]
        return float(scores.mean()) if involved.any() else float("nan")

    @property
    def top_share(self) -> float:
        """The share of the most frequent prediction."""
        return float(self.answered.max(initial=0) / self.samples) if self.samples else float("nan")

    @property
    def top_class(self) -> int:
        """The most frequent prediction."""
        return int(self.answered.argmax())

    @property
    def present(self) -> int:
        """How many classes have samples."""
        return int((self.support > 0).sum())

    @property
    def collapsed(self) -> bool:
        """Whether one class is the answer to (nearly) everything, though it is not the truth.

        At least 95 % of the predictions are one class, and the mean recall is hardly above that of a constant answer. Of
        fewer than ten samples nobody can say.

        >>> Confusion(2, ((0, 0, 70), (1, 0, 30))).collapsed, Confusion(2, ((0, 0, 99), (1, 1, 1))).collapsed
        (True, False)
        """
        several = self.present > 1 and self.samples >= ENOUGH
        return several and self.top_share >= NEARLY and self.balanced_accuracy <= HARDLY / self.present


NEARLY, HARDLY, ENOUGH = 0.95, 1.2, 10
