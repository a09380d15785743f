"""What was measured: which model, on which stream, of whom, by which measure."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

MODELS = ("global", "personal", "after-local")
POPULATIONS = ("clients", "unseen")
RULES = ("last", "best-val", "oracle")  # which round's state counts
ACCURACY, VALIDATION = "accuracy", "val"
Part: TypeAlias = Literal["client_mean", "pooled", "std", "worst10", "loss"]


class Metric(NamedTuple):
    """What was measured: which model, on which stream, of whom; its text names the measure only if it is another one.

    Without a model it stands for the one a method deploys, global or personal: rows of both share a column.

    >>> metric = Metric.parse("global/original/clients")
    >>> metric.stream, str(metric), str(metric.column)
    ('original', 'global/original/clients', 'original/clients')
    >>> [str(full) for full in metric.column.full()]
    ['global/original/clients', 'personal/original/clients']
    """

    model: str  # global, personal or after-local; "" for the deployed one
    stream: str  # a test stream, "val", or "mean" over streams
    population: str = "clients"  # clients who trained, or unseen ones
    name: str = ACCURACY

    @staticmethod
    def parse(text: str | Metric) -> Metric:
        """From its text; a metric stays what it is.

        >>> Metric.parse("after-local/a/b/unseen"), Metric.parse("val/clients").model
        (Metric(model='after-local', stream='a/b', population='unseen', name='accuracy'), '')
        """
        if isinstance(text, Metric):
            return text
        parts = text.split("/")
        name = ACCURACY if parts[-1] in POPULATIONS else parts.pop()
        population = parts.pop() if parts else ""
        if not parts or population not in POPULATIONS:
            raise ValueError(f"{text!r} is no metric: it must be model/stream/population")
        model = parts.pop(0) if len(parts) > 1 and parts[0] in MODELS else ""
        return Metric(model, "/".join(parts), population, name)

    def __str__(self) -> str:
        named = [] if self.name == ACCURACY else [self.name]
        return "/".join([*([self.model] if self.model else []), self.stream, self.population, *named])

    @property
    def is_validation(self) -> bool:
        """Whether it is of validation images."""
        return self.stream == VALIDATION

    @property
    def plain(self) -> Metric:
        """What was predicted, whatever is measured of it."""
        return self._replace(name=ACCURACY)

    @property
    def column(self) -> Metric:
        """The column of a table it belongs to: the model's name is left out, unless it was trained on after the rounds."""
        return self if self.model == "after-local" else self._replace(model="")

    def full(self) -> tuple[Metric, ...]:
        """The metrics a column may hold, each with its model; a row has scores of one of them."""
        return (self,) if self.model else tuple(self._replace(model=model) for model in ("global", "personal"))
