"""What options may be: the sentences, wherever a wrong one comes from, and that none is let through."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

import cloudpickle
import numpy as np
import pytest

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method, Train
from fedshift.core.optim import SGD, Adam
from fedshift.core.options import (
    BelowOne,
    Checked,
    Count,
    Factor,
    Finite,
    NonNegative,
    NonNegativeInt,
    Positive,
    Rule,
    Share,
    UnitInterval,
    Whole,
    at_least,
    options_of,
    parse_options,
)
from fedshift.core.registry import ADAPTERS, METHODS, with_options
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment, MethodSpec
from fedshift.methods.fedprox import FedProx
from fedshift.runs.setup import make_setup
from tests.conftest import ragged_task, tiny_arch


@dataclass(frozen=True)
class Every(Checked):
    """One option of each type."""

    any_number: Finite = 0.0
    mu: NonNegative = 0.1
    width: Positive = 1.0
    momentum: BelowOne = 0.0
    alpha: UnitInterval = 0.5
    fraction: Share = 1.0
    decay: Factor = 1.0
    whole: Whole = 0
    steps: NonNegativeInt = 1
    views: Count = 2
    batch: Annotated[Whole, at_least(2, "one has no statistics")] = 8
    lr: NonNegative | None = None
    size: Count | None = None
    mode: Literal["a", "b"] = "a"
    flag: bool = False
    colour: float = 1.0


WRONG: list[tuple[str, Any, str]] = [
    ("any_number", math.inf, "any-number must be finite, not inf"),
    ("any_number", -math.inf, "any-number must be finite, not -inf"),
    ("any_number", math.nan, "any-number must be finite, not nan"),
    ("mu", -1.0, "mu must not be negative, not -1.0"),
    ("mu", math.nan, "mu must not be negative, not nan"),
    ("mu", math.inf, "mu must be finite, not inf"),
    ("mu", True, "mu must be a number, not True"),
    ("mu", False, "mu must be a number, not False"),
    ("width", 0.0, "width must be positive, not 0.0"),
    ("width", math.inf, "width must be finite, not inf"),
    ("momentum", 1.0, "momentum must be below 1, not 1.0"),
    ("momentum", -0.5, "momentum must not be negative, not -0.5"),
    ("alpha", 1.5, "alpha must lie in [0, 1], not 1.5"),
    ("alpha", -0.1, "alpha must lie in [0, 1], not -0.1"),
    ("alpha", math.nan, "alpha must lie in [0, 1], not nan"),
    ("alpha", True, "alpha must be a number, not True"),
    ("fraction", 0.0, "fraction must be positive, not 0.0"),
    ("fraction", 1.5, "fraction must lie in [0, 1], not 1.5"),
    ("decay", 0.0, "decay must lie in (0, 1], not 0.0"),
    ("decay", 1.5, "decay must lie in (0, 1], not 1.5"),
    ("whole", True, "whole must be an integer, not True"),
    ("steps", -1, "steps must not be negative, not -1"),
    ("steps", True, "steps must be an integer, not True"),
    ("views", 0, "views must be positive, not 0"),
    ("batch", 1, "batch must be at least 2, not 1: one has no statistics"),
    ("lr", -1.0, "lr must not be negative, not -1.0"),
    ("lr", True, "lr must be a number, not True"),
    ("size", 0, "size must be positive, not 0"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), WRONG)
def test_the_sentence_is_the_same_from_a_file_and_from_python(name: str, value: Any, sentence: str) -> None:
    for make in (lambda: Every(**{name: value}), lambda: replace(Every(), **{name: value})):
        with pytest.raises(UserError) as said:
            make()
        assert str(said.value) == sentence
    for parse in (parse_options, with_options):
        with pytest.raises(UserError) as said:
            parse(Every, "method 'every'", {name.replace("_", "-"): value})  # type: ignore[operator]
        assert str(said.value) == f"method 'every': {sentence}"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("mu", "high", "mu must be a number, not 'high'"),
        ("mu", None, "mu must be a number, not None"),
        ("steps", 2.5, "steps must be an integer, not 2.5"),
        ("views", None, "views must be an integer, not None"),
    ],
)
def test_what_is_no_number_is_refused_in_python(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError) as said:
        Every(**{name: value})
    assert str(said.value) == sentence


@pytest.mark.parametrize(("key", "value"), [("mu", "high"), ("steps", 2.5), ("mode", "c"), ("flag", "perhaps")])
def test_what_is_of_another_type_is_refused_from_a_file(key: str, value: Any) -> None:
    with pytest.raises(UserError) as said:
        parse_options(Every, "method 'every'", {key: value})
    assert str(said.value).startswith(f"method 'every': {key} = {value!r} is not valid: input should be ")
    assert "\n" not in str(said.value)


def test_what_is_allowed() -> None:
    given = {"mu": 1, "alpha": 1, "lr": None, "size": None, "steps": 0, "mode": "b", "flag": True, "any-number": -3}
    values = parse_options(Every, "it", given)
    assert values == {"mu": 1.0, "alpha": 1.0, "lr": None, "size": None, "steps": 0, "mode": "b", "flag": True} | {
        "any_number": -3.0
    }
    assert isinstance(values["mu"], float)
    assert Every(**values) == with_options(Every, "it", given)
    assert Every(mu=np.float32(0.5), steps=np.int64(3)).steps == 3  # type: ignore[arg-type]


def test_other_names_of_an_option() -> None:
    assert parse_options(Every, "it", {"color": 0.5}) == {"colour": 0.5}
    assert parse_options(Train, "[train]", {"optimizer": "adam"}) == {"optimiser": "adam"}
    assert parse_options(METHODS["fedmd"].make, "it", {"newcomer-epochs": 3}, ("arch", "train")) == {"unseen_epochs": 3}
    with pytest.raises(UserError, match=r"^it: color is another name of colour; give one of them$"):
        parse_options(Every, "it", {"colour": 0.5, "color": 0.5})
    with pytest.raises(UserError, match=r"^\[train\]: optimiser must be one of sgd, adam, not 'lion'$"):
        parse_options(Train, "[train]", {"optimizer": "lion"})
    with pytest.raises(UserError, match=r"^it has no option 'optimizer'"):  # of a class that has no optimiser
        parse_options(Every, "it", {"optimizer": "adam"})

    @dataclass(frozen=True)
    class American:
        color: float = 1.0

    assert parse_options(American, "it", {"color": 2}) == {"color": 2.0}


def test_unknown_and_fixed_options() -> None:
    with pytest.raises(UserError, match=r"^it has no option 'vews'; did you mean 'views'"):
        parse_options(Every, "it", {"vews": 1})
    with pytest.raises(UserError, match=r"^it has no option 'arch'; it has: mu$"):
        parse_options(FedProx, "it", {"arch": 1}, ("arch", "train"))


def test_methods_and_adapters_are_checked_however_they_are_made() -> None:
    arch = tiny_arch("mlp", norm=True)
    with pytest.raises(UserError, match=r"^mu must not be negative, not -1.0$"):
        FedProx(arch, mu=-1.0)
    with pytest.raises(UserError, match=r"^mu must be finite, not inf$"):
        replace(FedProx(arch), mu=math.inf)
    with pytest.raises(UserError, match=r"^lr must be finite, not inf$"):
        Train(lr=math.inf)
    for rule in (SGD, Adam):
        with pytest.raises(UserError, match=r"^lr must be finite, not inf$"):
            rule(lr=math.inf)
    with pytest.raises(UserError, match=r"^batch-size must not be negative, not -1$"):
        ADAPTERS["tent"].make(arch, FedProx(arch).predict, batch_size=-1)  # type: ignore[call-arg]


def number_options() -> list[tuple[type, str]]:
    made: list[type] = [entry.make for registry in (METHODS, ADAPTERS) for entry in registry.values()]
    found = []
    for cls in (*made, Train, SGD, Adam):
        for name, option in options_of(cls).items():
            kinds = {getattr(part, "__origin__", part) for part in (option.hint, *get_args(option.hint))}
            if kinds & {int, float}:
                found.append((cls, name))
    return found


@pytest.mark.parametrize(("cls", "name"), number_options(), ids=lambda part: getattr(part, "__name__", part))
def test_every_number_of_the_catalogue_has_rules(cls: type, name: str) -> None:
    option = options_of(cls)[name]
    for wrong in (True, math.inf, math.nan):
        with pytest.raises(UserError, match=f"{name.replace('_', '-')} must|passes not negative"):
            option.check(name.replace("_", "-"), wrong)


def test_no_method_checks_its_ranges_by_hand() -> None:
    own = {e.name for r in (METHODS, ADAPTERS) for e in r.values() if "__post_init__" in vars(e.make)}  # type: ignore[attr-defined]
    assert own == {"scaffold", "heterofedtta", "ours"}
    assert Method.__post_init__ is Adapter.__post_init__ is Checked.__post_init__


def test_a_method_is_made_once_and_told_its_options_first() -> None:
    made: list[Any] = []
    told: list[Any] = []

    @dataclass(frozen=True)
    class Counted(Method):
        width: Count = 3

        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

        @classmethod
        def build(cls, backbone: Any, options: Any) -> Any:
            told.append(dict(options))
            return backbone

    METHODS.register("counted")(Counted)
    try:
        task = ragged_task((9, 4), unseen=0)
        setup = make_setup(Experiment(), MethodSpec(name="counted", width=4), task)  # type: ignore[call-arg]
        assert len(made) == 1
        assert setup.method is made[0]
        assert told == [{"width": 4}]
        with pytest.raises(UserError, match=r"^method 'counted': width must be positive, not 0$"):
            make_setup(Experiment(), MethodSpec(name="counted", width=0), task)  # type: ignore[call-arg]
        assert len(told) == 1
    finally:
        del METHODS._entries["counted"]


def test_a_methods_train_table_wins_whatever_it_calls_the_option() -> None:
    experiment = Experiment(train={"optimiser": "adam"})
    spec = MethodSpec(name="fedavg", train={"optimizer": "sgd"})
    assert make_setup(experiment, spec, ragged_task((9, 4), unseen=0)).train.optimiser == "sgd"


def test_a_scripts_own_class_is_checked_in_another_process() -> None:
    """Its types are names of the script, which the other process does not have."""
    script = (
        "from __future__ import annotations\n"
        "import sys\n"
        "from dataclasses import dataclass\n"
        "import cloudpickle\n"
        "from fedshift.core.options import Checked, Positive\n"
        "@dataclass(frozen=True)\n"
        "class Own(Checked):\n"
        "    width: Positive = 1.0\n"
        "Own()\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(Own))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    own = cloudpickle.loads(done.stdout)
    assert own.__module__ == "__main__"
    with pytest.raises(UserError, match="width must be positive"):
        own(width=0.0)
    assert pickle.loads(pickle.dumps(Every(mu=2.0))) == Every(mu=2.0)


def test_rules_of_several_fields_come_after_the_fields_own() -> None:
    with pytest.raises(UserError, match=r"^method 'scaffold' is defined for optimiser sgd, not adam$"):
        METHODS["scaffold"].make(tiny_arch("mlp"), Train(optimiser="adam"))
    with pytest.raises(UserError, match=r"^server-lr must not be negative, not -1.0$"):
        METHODS["scaffold"].make(tiny_arch("mlp"), Train(optimiser="adam"), server_lr=-1.0)  # type: ignore[call-arg]


def test_a_rule_of_ones_own() -> None:
    @dataclass(frozen=True)
    class Odd(Checked):
        kernel: Annotated[int, Rule(lambda k: k % 2 == 1, "{name} must be odd, not {value}")] = 3

    assert Odd().kernel == 3
    with pytest.raises(UserError, match=r"^kernel must be odd, not 4$"):
        Odd(4)
