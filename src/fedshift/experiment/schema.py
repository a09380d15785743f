"""An experiment: a TOML file (or the same in Python) that says what is run. Unknown keys are errors."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from fedshift.errors import UserError
from fedshift.experiment.files import assignment, copied, extended, merged, override, presets, source_of
from fedshift.experiment.specs import (
    AdapterSpec,
    DataSpec,
    EvaluateSpec,
    MethodSpec,
    ModelSpec,
    PartitionSpec,
    StreamSpec,
)
from fedshift.experiment.tables import Name, Real, Seed, Table, folder_name, kebab, not_empty, without_privacy

__all__ = ["AdapterSpec", "EvaluateSpec", "Experiment", "MethodSpec", "ModelSpec"]
DEFAULT = "default"


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
    scale: Literal["full", "small", "paper"] = "full"  # which of the file's own tables of changes is taken
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
    privacy: dict[str, Any] = Field(default_factory=dict)  # what uploads go through
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    # where fedshift tune looks for settings; no dump has it: it decides nothing about a training
    tune: Annotated[dict[str, Any], Field(exclude=True)] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _as_ever(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_privacy(handler(self))

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
            folder_name(label)
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
        scales = {name: table.pop(name, {}) for name in ("small", "paper")}
        if scale == "paper" and not scales["paper"]:
            raise UserError(f"{source} has no [paper] table: its settings are the paper's, or its notes say why not")
        chosen = scales.get(scale, {}) if isinstance(scale, str) else {}  # what is no word is refused below
        for key, value in chosen.items():
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
            name = not_empty(folder_name(path.resolve().stem))
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
        return Experiment.parse(merged({**self.whole(), "sweep": self.sweep}, _spelt(changes)))

    def whole(self) -> dict[str, Any]:
        """All keys but the sweep's, also those that no dump has: a file with them is this experiment."""
        base = self.model_dump(by_alias=True, exclude={"sweep"})
        base["evaluate"] |= self.evaluate.undumped()
        base["data"] |= {"attributes": self.data.attributes}
        return {**base, "tune": self.tune}

    def variants(self) -> Iterator[tuple[dict[str, Any], Experiment]]:
        """One experiment for each point of the sweep, with the values that make it."""
        if not self.sweep:
            yield {}, self
            return
        base = self.whole()
        for values in itertools.product(*self.sweep.values()):
            point = dict(zip(self.sweep, values, strict=True))
            table = copied(base)
            for key, value in point.items():
                override(table, key.split("."), value)
            yield point, Experiment.parse(table, "sweep")


def _spelt(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as Python spells them, as files do: ``checkpoint_every`` is ``checkpoint-every``."""
    return {kebab(key): value for key, value in changes.items()}


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
