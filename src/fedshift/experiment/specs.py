"""The tables of an experiment, one by one; :mod:`fedshift.experiment.schema` puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    field_validator,
    model_serializer,
    model_validator,
)

from fedshift.errors import UserError
from fedshift.experiment.files import assignment, setting
from fedshift.experiment.tables import Label, Name, Named, Names, Real, Seed, Table, Window, no_flag, without_privacy


class DataSpec(Table):
    """``[data]``: where images come from."""

    source: str = "embedded:digits"
    columns: dict[str, str] = Field(default_factory=dict)
    size: Annotated[StrictInt, Field(ge=1)] | None = None
    channels: Annotated[Literal[1, 3], BeforeValidator(no_flag)] = 3
    mean: list[Real] = Field(default_factory=lambda: [0.5])
    std: list[Annotated[Real, Field(gt=0)]] = Field(default_factory=lambda: [0.5])
    domains: Names = Field(default_factory=list)  # keep these only
    classes: Names = Field(default_factory=list)  # keep these only, in this order
    # of greys of more than eight bits, in the values of the files: a name, or centre and width; None: the file's own
    window: Window = None
    limit: Annotated[StrictInt, Field(ge=1)] | None = None  # a random subset of so many images
    seed: Seed | None = None  # of partition, split and shifts; default: the run's seed
    needs: str = ""  # for people: what this is and where to get it
    # columns that results can be told apart by; no dump has them: they decide nothing about a training
    attributes: Annotated[list[str], Field(exclude=True)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _lengths(self) -> DataSpec:
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ValueError(f"{name} must have 1 or {self.channels} values")
        return self


class PartitionSpec(Named):
    """``[partition]``: who owns which image."""

    kind: str = "by-domain"


class StreamSpec(Named):
    """``[[stream]]``: a named test stream."""

    name: Name
    kind: str


class ModelSpec(Named):
    """``[model]``: the network.

    Of several, each may have a ``label``, which ``join --model`` knows it by.

    >>> small = ModelSpec(name="lenet", width=16, label="small")
    >>> small.label, small.options()
    ('small', {'width': 16})
    """

    name: str = "cnn"

    # among the options, so that networks without one are written down as they always were
    @property
    def label(self) -> str:
        """What it is called, if not by its name."""
        return str((self.model_extra or {}).get("label", ""))

    def options(self) -> dict[str, Any]:
        """The other keys, kebab-case."""
        return {key: value for key, value in super().options().items() if key != "label"}


class AdapterSpec(Named):
    """An entry of a method's ``adapters``: a name, or a table with options.

    >>> AdapterSpec(name="tent", lr=0.01, family="tent", paper={"original": 81.3}).title
    'tent lr=0.01'
    """

    name: str
    label: Label = ""
    family: str = ""  # adapters of one family get one more row: for every client the best of them
    aside: StrictBool = False  # shown beside the published numbers and not ranked: an upper bound
    paper: dict[str, Any] = Field(default_factory=dict)  # published numbers by stream, or by condition and stream

    @field_validator("paper")
    @classmethod
    def _numbers(cls, value: dict[str, Any]) -> dict[str, Any]:
        _check_paper(value)
        return value

    @property
    def title(self) -> str:
        """What its row and its file are called: its label, or its name with its options."""
        options = " ".join(f"{key}={value}" for key, value in self.options().items())
        return (self.label or f"{self.name} {options}".strip()).replace("/", "_")

    def published(self, settings: Mapping[str, Any]) -> dict[str, float]:
        """The published numbers that hold for an experiment with these settings, by stream.

        >>> spec = AdapterSpec(name="none", paper={"mean": 70.0, "partition.alpha=1.0": {"original": 78.2}})
        >>> spec.published({"partition": {"kind": "brfl", "alpha": 0.1}})
        {'mean': 70.0}
        >>> spec.published({"partition": {"kind": "brfl", "alpha": 1}})
        {'mean': 70.0, 'original': 78.2}
        """
        return _holding(self.paper, settings)


class MethodSpec(Named):
    """``[[method]]``: a training method, its options, and the adapters its models meet."""

    name: str
    label: Label = ""
    adapters: list[AdapterSpec] = Field(default_factory=lambda: [AdapterSpec(name="none")])
    train: dict[str, Any] = Field(default_factory=dict)  # overrides of [train] for this method
    model: dict[str, Any] = Field(default_factory=dict)  # overrides of [model]
    privacy: dict[str, Any] = Field(default_factory=dict)  # overrides of [privacy]

    @model_serializer(mode="wrap")
    def _as_ever(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_privacy(handler(self))

    @field_validator("adapters", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if not isinstance(value, list) or not value:
            raise ValueError("adapters must be a list of names or tables, at least one")
        return [{"name": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _distinct(self) -> MethodSpec:
        titles = [adapter.title for adapter in self.adapters]
        twice = next((title for title in titles if titles.count(title) > 1), None)
        if twice is not None:
            raise ValueError(f"two adapters of {self.title!r} are called {twice!r}; give one of them another label")
        return self

    @property
    def title(self) -> str:
        """What the row is called."""
        return self.label or self.name

    def validated(self, evaluate: EvaluateSpec) -> list[AdapterSpec]:
        """The adapters that choose a round of their own."""
        return [adapter for adapter in self.adapters if evaluate.adapted and adapter.name != "none"]


class EvaluateSpec(Table):
    """``[evaluate]``: when and what is scored."""

    # the headline of every table, and what the round is chosen by on validation images; ties go to the lower loss
    metric: Literal["accuracy", "balanced-accuracy", "macro-f1", "auroc", "loss"] = "accuracy"
    every: Annotated[StrictInt, Field(ge=0)] = 10  # validation every so many rounds; 0: at the end only
    oracle: StrictBool = False  # also score test streams then, for the best-on-test bound nobody may choose by
    after_local: StrictBool = False  # also score clients right after one more local round
    adapted: StrictBool = False  # an adapter's round is the best on validation images after its own adaptation to them
    mean_of: list[str] = Field(default_factory=list)  # streams whose mean is one more column
    # features of so many test images of each client are saved; no dump has it: it decides nothing about a training
    features: Annotated[StrictInt, Field(ge=0, exclude=True)] = 0
    # whether an artefact is written for every client; left out: where they are few and small
    artefacts: Annotated[StrictBool | None, Field(exclude=True)] = None
    # whether the probabilities of every test image are kept beside the scores; left out: where they are not too many
    predictions: Annotated[StrictBool | None, Field(exclude=True)] = None
    # whether every adapter is also scored on validation images under the same shifts, which advice rests on
    advice: Annotated[StrictBool, Field(exclude=True)] = True

    def undumped(self) -> dict[str, Any]:
        """What no dump has."""
        return {name: getattr(self, name) for name in ("features", "artefacts", "predictions", "advice")}


def _check_paper(paper: Mapping[str, Any]) -> None:
    for key, value in paper.items():
        if isinstance(value, Mapping):
            try:
                assignment(key)
            except UserError:
                raise ValueError(f"{key!r} is no condition such as 'partition.alpha=0.1'") from None
            _check_paper(value)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"the number of stream {key!r} must be a number, not {value!r}")


def _holding(paper: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    found = {key: float(value) for key, value in paper.items() if not isinstance(value, Mapping)}
    for condition, inner in paper.items():
        if isinstance(inner, Mapping):
            key, wanted = assignment(condition)
            if setting(settings, key) == wanted:
                found |= _holding(inner, settings)
    return found
