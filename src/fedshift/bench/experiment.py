"""An experiment: a TOML file (or the same in Python) that says what is run. Unknown keys are errors."""

from __future__ import annotations

import difflib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedshift.errors import UserError

PRESETS = resources.files("fedshift") / "experiments"
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


def _folder_name(value: str) -> str:
    """Labels and names are also names of folders and files."""
    if "/" in value or "\\" in value or value.startswith(".") or value != value.strip() or not value.isprintable():
        raise ValueError(f"{value!r} cannot name a folder: no slashes, no leading dot, no space around it")
    return value


Label = Annotated[str, AfterValidator(_folder_name)]


class DataSpec(Table):
    """``[data]``: where images come from."""

    source: str = "embedded:digits"
    columns: dict[str, str] = Field(default_factory=dict)
    size: Annotated[int, Field(ge=1)] | None = None
    channels: Literal[1, 3] = 3
    mean: list[float] = Field(default_factory=lambda: [0.5])
    std: list[Annotated[float, Field(gt=0)]] = Field(default_factory=lambda: [0.5])
    domains: list[str] = Field(default_factory=list)  # keep these only
    classes: list[str] = Field(default_factory=list)  # keep these only, in this order
    limit: Annotated[int, Field(ge=1)] | None = None  # a random subset of so many images
    seed: int | None = None  # of partition, split and shifts; default: the run's seed
    needs: str = ""  # for people: what this is and where to get it

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

    name: Label
    kind: str


class ModelSpec(Named):
    """``[model]``: the network."""

    name: str = "cnn"


class AdapterSpec(Named):
    """An entry of a method's ``adapters``: a name, or a table with options.

    >>> AdapterSpec(name="tent", lr=0.01).title
    'tent lr=0.01'
    """

    name: str
    label: Label = ""

    @property
    def title(self) -> str:
        """What its row and its file are called: its label, or its name with its options."""
        options = " ".join(f"{key}={value}" for key, value in self.options().items())
        return (self.label or f"{self.name} {options}".strip()).replace("/", "_")


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


class EvaluateSpec(Table):
    """``[evaluate]``: when and what is scored."""

    every: Annotated[int, Field(ge=0)] = 10  # validation every so many rounds; 0: at the end only
    oracle: bool = False  # also score test streams then, for the best-on-test bound nobody may choose by
    after_local: bool = False  # also score clients right after one more local round


class Experiment(Table):
    """Task x network x methods x adapters x seeds.

    >>> Experiment(rounds=2, method=[{"name": "fedavg"}]).method[0].title
    'fedavg'
    """

    title: str = ""
    name: Label = ""  # of the run folder; the file's name if it comes from a file
    rounds: Annotated[int, Field(ge=0)] = 10
    seeds: Annotated[list[int], Field(min_length=1)] = Field(default_factory=lambda: [0])
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of clients in a round
    precision: Literal["float32", "float64"] = "float32"
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    baselines: bool = True  # the rows local and finetune are always there, unless this is false
    scale: Literal["full", "small"] = "full"
    data: DataSpec = Field(default_factory=DataSpec)
    partition: PartitionSpec = Field(default_factory=PartitionSpec)
    split: dict[str, Any] = Field(default_factory=dict)
    rotation: dict[str, Any] = Field(default_factory=dict)
    stream: list[StreamSpec] = Field(default_factory=lambda: [StreamSpec(name="original", kind="original")])
    model: ModelSpec | list[ModelSpec] = Field(default_factory=ModelSpec)  # several: client i has number i mod n
    train: dict[str, Any] = Field(default_factory=dict)
    method: Annotated[list[MethodSpec], Field(min_length=1)] = Field(
        default_factory=lambda: [MethodSpec(name="fedavg")]
    )
    evaluate: EvaluateSpec = Field(default_factory=EvaluateSpec)
    sweep: dict[str, list[Any]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _distinct(self) -> Experiment:
        for what, names in (("streams", [s.name for s in self.stream]), ("methods", [m.title for m in self.method])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"two {what} are called {twice[0]!r}; give one of them another label")
        for name in (s.name for s in self.stream):
            if name in ("train", "val", "test", "public"):
                raise ValueError(f"a stream cannot be called {name!r}")
        return self

    @property
    def models(self) -> list[ModelSpec]:
        """The networks, one or several."""
        return self.model if isinstance(self.model, list) else [self.model]

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str = "the experiment") -> Experiment:
        """From nested dictionaries, with one sentence on the first thing that is wrong."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise UserError(f"{where}: {_sentence(error, cls)}") from None

    @classmethod
    def load(cls, source: str | Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
        """A TOML file, a preset's name, or nothing for the embedded default; with ``key=value`` overrides."""
        text, name = _read(source)
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{source} is not valid TOML: {error}") from None
        table.setdefault("name", name)
        changes = [_assignment(item) for item in overrides]
        scale = next((value for key, value in reversed(changes) if key == ["scale"]), table.get("scale", "full"))
        small, sweep = table.pop("small", {}), table.get("sweep", {})
        for name, value in (("small", small), ("sweep", sweep)):
            if not isinstance(value, dict):
                raise UserError(f"{source}: [{name}] must be a table")
        if scale == "small":
            for key, value in small.items():
                override(table, key.split("."), value)
        for key, value in changes:
            sweep.pop(".".join(key), None)  # what is asked for here is not swept over
            override(table, key, value)
        return cls.parse(table, str(source) if source else "the default experiment")

    @classmethod
    def of_data(cls, what: str, overrides: Sequence[str] = ()) -> Experiment:
        """An experiment to look at the data of: a preset, a TOML file, or the default's on a Parquet file or folder."""
        path = Path(what)
        if what in presets() or path.suffix == ".toml" or not path.exists():
            return cls.load(what, overrides)
        scheme = (
            "parquet" if path.suffix == ".parquet" or (path.is_dir() and any(path.rglob("*.parquet"))) else "folder"
        )
        source = [f"data.source={scheme}:{what}", f"name={path.stem}", f"title={what}", "data.needs="]
        return cls.load(None, [*source, *overrides])

    def variants(self) -> Iterator[tuple[dict[str, Any], Experiment]]:
        """One experiment for each point of the sweep, with the values that make it."""
        if not self.sweep:
            yield {}, self
            return
        base = self.model_dump(by_alias=True, exclude={"sweep"})
        for values in itertools.product(*self.sweep.values()):
            point = dict(zip(self.sweep, values, strict=True))
            table = _copied(base)
            for key, value in point.items():
                override(table, key.split("."), value)
            yield point, Experiment.parse(table, "sweep")


def presets() -> list[str]:
    """The names ``fedshift run`` knows without a file.

    >>> "default" in presets()
    True
    """
    return sorted(entry.name.removesuffix(".toml") for entry in PRESETS.iterdir() if entry.name.endswith(".toml"))


def _read(source: str | Path | None) -> tuple[str, str]:
    if source is None:
        source = DEFAULT
    if str(source) in presets():
        return (PRESETS / f"{source}.toml").read_text(), str(source)
    path = Path(source)
    if not path.is_file():
        close = difflib.get_close_matches(str(source), presets(), 1)
        hint = f"did you mean {close[0]!r}?" if close else f"presets are: {', '.join(presets())}"
        raise UserError(f"there is neither a file nor a preset {str(source)!r}; {hint}")
    try:
        return path.read_text(), path.stem
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} cannot be read ({error})") from None


def _assignment(item: str) -> tuple[list[str], Any]:
    key, equals, text = item.partition("=")
    if not equals or not re.fullmatch(r"[\w.-]+", key.strip()):
        raise UserError(f"an override has the form key=value, for instance train.lr=0.1, not {item!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    return key.strip().split("."), value


def override(table: dict[str, Any], key: Sequence[str], value: Any) -> None:
    """Set a dotted key. In a list of named tables the next part is a name (``method.fedprox.mu``) or an option of all.

    >>> table = {"method": [{"name": "fedprox"}, {"name": "fedavg"}]}
    >>> override(table, ["method", "fedprox", "mu"], 0.1)
    >>> table["method"][0]
    {'name': 'fedprox', 'mu': 0.1}
    """
    head, *rest = key
    if not rest:
        table[head] = value
        return
    inner = table.setdefault(head, {})
    if isinstance(inner, list):
        inner[:] = [{"name": item} if item == rest[0] else item for item in inner]  # a bare name becomes a table
        named = [item for item in inner if rest[0] in _names(item)]
        if named and len(rest) > 1:
            inner, rest = named, rest[1:]
        for item in inner:
            if not isinstance(item, dict):
                raise UserError(f"{'.'.join(key)} cannot be set: {head!r} has no table called {rest[0]!r}")
            override(item, rest, value)
    elif isinstance(inner, dict):
        override(inner, rest, value)
    else:
        raise UserError(f"{'.'.join(key)} cannot be set, because {head!r} is not a table")


def _names(item: Any) -> tuple[Any, ...]:
    return (item.get("label"), item.get("name")) if isinstance(item, dict) else ()


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _sentence(error: ValidationError, cls: type[BaseModel]) -> str:
    """The first problem in plain words."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [field.alias or name for name, field in cls.model_fields.items()]
        close = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
        return f"unknown key {where!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    message = first["msg"].removeprefix("Value error, ")
    given = f", not {first['input']!r}" if first["type"] not in ("value_error", "missing") else ""
    return f"{where}: {message[0].lower()}{message[1:]}{given}" if where else f"{message}{given}"
