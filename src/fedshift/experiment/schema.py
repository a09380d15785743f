"""An experiment: a TOML file (or the same in Python) that says what is run. Unknown keys are errors."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from fedshift.errors import UserError
from fedshift.experiment.files import assignment, copied, extended, merged, override, presets, setting, source_of

DEFAULT = "default"


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Table(BaseModel):
    """A TOML table: kebab-case keys, nothing unknown."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=_kebab, populate_by_name=True, frozen=True, protected_namespaces=()
    )


class Named(BaseModel):
    """A table that names a registered thing; its other keys are that thing's options, checked when it is made."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def options(self) -> dict[str, Any]:
        """The other keys, kebab-case."""
        return {_kebab(key): value for key, value in (self.model_extra or {}).items()}


# what lies beside the folders that labels name, and what marks a run folder
_TAKEN = frozenset({"artefacts", "adapters", "done", "exported", "inspect", "joined", "snapshots"})
_FILES = (".csv", ".html", ".json", ".jsonl", ".png", ".safetensors", ".toml")
_LONGEST = 100  # characters of four bytes, with an ending, are more than some disks take; nobody reads more either


def _folder_name(value: str) -> str:
    """Labels and names are also names of folders and files."""
    if "/" in value or "\\" in value or value.startswith(".") or value != value.strip() or not value.isprintable():
        raise ValueError(f"{value!r} cannot name a folder: no slashes, no leading dot, no space around it")
    if value.lower() in _TAKEN or value.lower().endswith(_FILES):
        raise ValueError(f"{value!r} cannot name a folder: files of fedshift are called so")
    if len(value) > _LONGEST:
        raise ValueError(f"{value[:20] + '...'!r} cannot name a folder: it has more than {_LONGEST} characters")
    return value


def _named(value: str) -> str:
    if not value:
        raise ValueError("it must have a name")
    return value


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"input should be a number, not {value!r}")
    return value


def _distinct_names(value: list[str]) -> list[str]:
    twice = next((name for name in value if value.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is named twice")
    return value


Label = Annotated[str, AfterValidator(_folder_name)]
Name = Annotated[Label, AfterValidator(_named)]
Names = Annotated[list[str], AfterValidator(_distinct_names)]
Real = Annotated[float, Strict(), AllowInfNan(False)]
Seed = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]


class DataSpec(Table):
    """``[data]``: where images come from."""

    source: str = "embedded:digits"
    columns: dict[str, str] = Field(default_factory=dict)
    size: Annotated[StrictInt, Field(ge=1)] | None = None
    channels: Annotated[Literal[1, 3], BeforeValidator(_no_flag)] = 3
    mean: list[Real] = Field(default_factory=lambda: [0.5])
    std: list[Annotated[Real, Field(gt=0)]] = Field(default_factory=lambda: [0.5])
    domains: Names = Field(default_factory=list)  # keep these only
    classes: Names = Field(default_factory=list)  # keep these only, in this order
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


class Experiment(Table):
    """Task x network x methods x adapters x seeds.

    >>> Experiment(rounds=2, method=[{"name": "fedavg"}]).method[0].title
    'fedavg'
    >>> Experiment(ruonds=2)
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: unknown key 'ruonds'; did you mean 'rounds'?
    """

    def __init__(self, **values: Any) -> None:
        """From keys and tables as a TOML file has them, with one sentence on the first thing that is wrong."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_sentence(error, type(self))) from None

    title: str = ""
    name: Name = "experiment"  # of the run folder; the file's name if it comes from a file
    rounds: Annotated[StrictInt, Field(ge=0)] = 10
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(default_factory=lambda: [0])
    participation: Annotated[Real, Field(gt=0, le=1)] = 1.0  # share of clients in a round
    precision: Literal["auto", "float32", "tf32", "float64"] = "auto"  # auto: TF32 on a GPU, float32 on a CPU
    checkpoint_every: Annotated[StrictInt, Field(ge=1)] = 10
    baselines: StrictBool = True  # the rows majority, local and finetune are always there, unless this is false
    scale: Literal["full", "small"] = "full"
    notes: list[str] = Field(default_factory=list)  # for people, under the table: why numbers differ from the paper's
    data: DataSpec = Field(default_factory=DataSpec)
    partition: PartitionSpec = Field(default_factory=PartitionSpec)
    split: dict[str, Any] = Field(default_factory=dict)
    rotation: dict[str, Any] = Field(default_factory=dict)
    stream: Annotated[list[StreamSpec], Field(min_length=1)] = Field(
        default_factory=lambda: [StreamSpec(name="original", kind="original")]
    )
    model: ModelSpec | list[ModelSpec] = Field(default_factory=ModelSpec)  # several: client i has number i mod n
    train: dict[str, Any] = Field(default_factory=dict)
    method: Annotated[list[MethodSpec], Field(min_length=1)] = Field(
        default_factory=lambda: [MethodSpec(name="fedavg")]
    )
    evaluate: EvaluateSpec = Field(default_factory=EvaluateSpec)
    sweep: dict[str, list[Any]] = Field(default_factory=dict)

    @field_validator("precision", mode="before")
    @classmethod
    def _renamed(cls, value: Any) -> Any:
        return "tf32" if value == "fast" else value  # its name in earlier versions

    @field_validator("model", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if value == []:
            raise ValueError("it must have at least one network")
        return value

    @field_validator("notes", mode="before")
    @classmethod
    def _sentences(cls, value: Any) -> Any:
        """A list, or a table of named notes, whose names let a file that extends this one replace or empty them."""
        notes = list(value.values()) if isinstance(value, Mapping) else value
        if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
            raise ValueError("notes must be a list of sentences, or a table of named ones")
        return [" ".join(note.split()) for note in notes if note.strip()]

    @model_validator(mode="after")
    def _distinct(self) -> Experiment:
        called = {
            "streams": [stream.name for stream in self.stream],
            "methods": [method.title for method in self.method],
            "networks": [model.label for model in self.models if model.label],
        }
        for label in called["networks"]:
            _folder_name(label)
        for what, names in called.items():
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"two {what} are called {twice[0]!r}; give one of them another label")
        for name in (s.name for s in self.stream):
            if name in ("train", "val", "test", "public", "mean"):
                raise ValueError(f"a stream cannot be called {name!r}")
        mean, known = self.evaluate.mean_of, [s.name for s in self.stream]
        for name in mean:
            if name not in known:
                raise ValueError(f"[evaluate] mean-of: there is no stream {name!r}; there are: {', '.join(known)}")
            if mean.count(name) > 1:
                raise ValueError(f"[evaluate] mean-of: stream {name!r} is named twice")
        return self

    @property
    def models(self) -> list[ModelSpec]:
        """The networks, one or several."""
        return self.model if isinstance(self.model, list) else [self.model]

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str = "the experiment") -> Experiment:
        """From nested dictionaries, with one sentence on the first thing that is wrong."""
        try:
            return cls(**table)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @classmethod
    def load(
        cls,
        source: str | Path | None = None,
        overrides: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
    ) -> Experiment:
        """A TOML file, a preset's name, or nothing for the embedded default; with ``key=value`` overrides.

        ``changes`` are keys and tables on top of it, as a file that extends it would have them.

        >>> Experiment.load("brfl", changes={"rounds": 5, "train": {"lr": 0.1}}).rounds
        5
        """
        return cls._changed(source, overrides, {}, _spelt(changes or {}))

    @classmethod
    def _changed(
        cls,
        source: str | Path | None,
        overrides: Sequence[str],
        before: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
    ) -> Experiment:
        """A file with tables of one's own on top, then values by dotted key, then the overrides."""
        for text in (str(source or ""), *overrides):
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(f"{text!r} is not UTF-8")
        table = extended(str(source) if source is not None else DEFAULT)
        table = merged(table, copied(own)) if own else table
        changes = [*((key.split("."), value) for key, value in before.items()), *map(assignment, overrides)]
        scale = next((value for key, value in reversed(changes) if key == ["scale"]), table.get("scale", "full"))
        small = table.pop("small", {})
        if scale == "small":
            for key, value in small.items():
                override(table, key.split("."), value)
        for key, value in changes:
            if key == ["extends"]:
                raise UserError("extends belongs into a file, not on the command line")
            if isinstance(table.get("sweep"), dict):
                table["sweep"].pop(".".join(key), None)  # what is asked for here is not swept over
            override(table, key, value)
        if isinstance(table.get("sweep"), dict):
            table["sweep"] = {key: values for key, values in table["sweep"].items() if values != []}
        return cls.parse(table, str(source) if source else "the default experiment")

    @classmethod
    def of_data(cls, what: str, overrides: Sequence[str] = ()) -> Experiment:
        """An experiment to look at the data of: a preset, a TOML file, or the default's on a Parquet file or folder."""
        path = Path(what)
        if what in presets() or path.suffix == ".toml" or not path.exists():
            return cls.load(what, overrides)
        try:
            name = _named(_folder_name(path.resolve().stem))
        except ValueError:
            name = "data"
        named = {"data.source": source_of(path), "name": name, "title": what, "data.needs": ""}
        # the default's unseen domain is its own; the split is as a file of the user's own has it
        plain = {"split.unseen": 0.0, "split.train-limit": 0, "split.stratify": True}
        return cls._changed(None, overrides, {**named, **plain})

    def changed(self, changes: Mapping[str, Any]) -> Experiment:
        """The same with other keys; tables merge, as in a file that extends another.

        >>> Experiment(rounds=2, train={"lr": 0.1}).changed({"rounds": 5, "train": {"momentum": 0.9}}).train
        {'lr': 0.1, 'momentum': 0.9}
        """
        return Experiment.parse(merged({**self._whole(), "sweep": self.sweep}, _spelt(changes)))

    def _whole(self) -> dict[str, Any]:
        """All keys but the sweep's, also those that no dump has."""
        base = self.model_dump(by_alias=True, exclude={"sweep"})
        base["evaluate"] |= self.evaluate.undumped()
        base["data"] |= {"attributes": self.data.attributes}
        return base

    def variants(self) -> Iterator[tuple[dict[str, Any], Experiment]]:
        """One experiment for each point of the sweep, with the values that make it."""
        if not self.sweep:
            yield {}, self
            return
        base = self._whole()
        for values in itertools.product(*self.sweep.values()):
            point = dict(zip(self.sweep, values, strict=True))
            table = copied(base)
            for key, value in point.items():
                override(table, key.split("."), value)
            yield point, Experiment.parse(table, "sweep")


def _spelt(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as Python spells them, as files do: ``checkpoint_every`` is ``checkpoint-every``."""
    return {key.replace("_", "-"): value for key, value in changes.items()}


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


def _table_of(cls: type[BaseModel], where: Sequence[int | str]) -> type[BaseModel]:
    """The model of the table that a key stands in."""
    for part in where:
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if part in fields:
            kinds = [fields[part].annotation, *get_args(fields[part].annotation)]
            cls = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), cls)
    return cls


def _sentence(error: ValidationError, cls: type[BaseModel]) -> str:
    """The first problem in plain words."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [field.alias or name for name, field in _table_of(cls, first["loc"][:-1]).model_fields.items()]
        close = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
        return f"unknown key {where!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    message = first["msg"].removeprefix("Value error, ")
    given = f", not {first['input']!r}" if first["type"] not in ("value_error", "missing") else ""
    return f"{where}: {message[0].lower()}{message[1:]}{given}" if where else f"{message}{given}"
