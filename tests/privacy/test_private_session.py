"""The chain in a session: sums mean what single uploads meant, noise is where it must be, and the ledger knows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.core.compatibility import missing_for_method
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tree, float_bytes
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment, MethodSpec
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedbn import FedBN
from fedshift.privacy.accountant import Accountant
from fedshift.privacy.noise import seeded
from fedshift.privacy.settings import Privacy
from fedshift.privacy.upload import UNSENT
from fedshift.runs.private import check_counted, told_by
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup, make_setup, placeholder
from fedshift.runs.uploads import Sent, Uploads
from fedshift.store.state import State
from fedshift.store.trees import load, save
from tests.conftest import ragged_task, some_of, tiny_arch, tiny_train

TASK = ragged_task((9, 7, 5, 8, 6))
DOUBLE = Compute(dtype=torch.float64)
LINEAR = [name for name, entry in METHODS.items() if entry.make.linear]


def session(name: str, privacy: Privacy | None, participation: float = 1.0, rounds: int = 2) -> Session:
    cls = METHODS[name].make
    arch = cls.build(tiny_arch("mlp", norm=bool(missing_for_method(name, cls.requires, tiny_arch("mlp")))), {})
    method = cls(arch=arch, train=tiny_train(weights="uniform", local_epochs=1))
    setup = Setup(MethodSpec(name=name), {"net": method}, method.train, privacy)
    return Session(setup, TASK, Sequential(DOUBLE), DOUBLE, 3, rounds, participation)


def federated(own: Session) -> tuple[State, list[Any]]:
    state, reports = own.start(), []
    for _ in range(own.rounds + own.setup.method.extra_rounds):
        state, report = own.step(state)
        reports.append(report)
    return state, reports


def assert_close(one: Tree, other: Tree, tolerance: float) -> None:
    assert {slot: list(leaves) for slot, leaves in one.items()} == {
        slot: list(leaves) for slot, leaves in other.items()
    }
    for slot, leaves in one.items():
        for name, leaf in leaves.items():
            if not leaf.is_floating_point():  # counters do not travel
                continue
            torch.testing.assert_close(leaf, other[slot][name], atol=tolerance, rtol=0, msg=f"{slot}/{name}")


@pytest.mark.parametrize("name", some_of(LINEAR))
def test_a_linear_method_needs_no_more_than_the_mean(name: str) -> None:
    """``linear`` is a promise: a server that sees secure sums only ends where one that sees every upload does."""
    plain, blind = session(name, None), session(name, Privacy(clip=1e4, secure=True))
    (one, _), (other, _) = federated(plain), federated(blind)
    assert_close(one.server, other.server, 1e-3)  # words of a sum up to 10,000 are 2e-5 apart
    given = [own.deploy(state).server for own, state in ((plain, one), (blind, other))]
    assert_close(given[0], given[1], 1e-3)


def test_clipping_shortens_and_compression_is_remembered() -> None:
    own = session("fedavg", Privacy(clip=0.01, compress="top-k", keep=0.1), rounds=1)
    state, (report,) = federated(own)
    before, after = own.start().server["model"], state.server["model"]
    moved = torch.cat([(after[name] - leaf).flatten() for name, leaf in before.items()])
    assert 0 < float(moved.norm()) <= 0.01
    assert set(state.locals) == {client.name for client in TASK.clients}
    assert all(list(local) == [UNSENT] for local in state.locals.values())
    size = sum(leaf.numel() for leaf in before.values())
    assert report.bytes_up == 5 * 8 * -(-size // 10)


def test_bytes_of_an_open_run_are_what_they_were() -> None:
    own = session("fedavg", None, rounds=1)
    _, (report,) = federated(own)
    assert report.bytes_up == report.bytes_down == 5 * float_bytes(own.start().server)


def test_noise_has_the_size_that_is_counted() -> None:
    """Beside a run without noise: clipped sums differ by noise * clip / clients, in every entry alike."""
    quiet = session("fedavg", Privacy(clip=0.5, noise=1e-9), rounds=1)
    loud = session("fedavg", Privacy(clip=0.5, noise=3.0), rounds=1)
    blind = session("fedavg", Privacy(clip=0.5, noise=3.0, secure=True, least=5), rounds=1)
    (base, _), (noisy, reports), (summed, _) = map(federated, (quiet, loud, blind))
    for state in (noisy, summed):
        apart = torch.cat([(state.server["model"][n] - leaf).flatten() for n, leaf in base.server["model"].items()])
        assert float(apart.std()) == pytest.approx(3.0 * 0.5 / 5, rel=0.1)
        assert abs(float(apart.mean())) < 0.05
    assert reports[0].server["epsilon"] == Accountant(3.0, 1.0, 1e-5).epsilon(1)
    again, _ = federated(session("fedavg", Privacy(clip=0.5, noise=3.0), rounds=1))
    assert_close(again.server, noisy.server, 0.0)  # a study can be repeated


def test_noise_on_gifts_makes_no_variance_negative() -> None:
    """FedBN keeps BatchNorm at home while it trains, and gives it away in the end: unseen clients start from it."""
    own = session("fedbn", Privacy(clip=1.0, noise=20.0), rounds=1)
    assert own.setup.method.arch.has_batch_norm
    state, _ = federated(own)
    gifts = own.deploy(state).server["gifts"]
    variances = torch.cat([leaf for name, leaf in gifts.items() if name.endswith("running_var")])
    assert float(variances.min()) == 0.0  # noise of this size would have made some negative
    assert any(bool((leaf < 0).any()) for name, leaf in gifts.items() if name.endswith("running_mean"))


def test_poisson_sampling_takes_everybody_alike_and_sometimes_nobody() -> None:
    own = session("fedthe", Privacy(clip=1.0, noise=1.0, sampling="poisson"), participation=0.2)
    rounds = [[client.name for client in own.participants(number)] for number in range(400)]
    assert [] in rounds
    for client in TASK.clients:
        assert sum(client.name in names for names in rounds) / 400 == pytest.approx(0.2, abs=0.07)
    alone = next(number for number, names in enumerate(rounds) if not names)
    state = replace(own.start(), round=alone)
    after, report = own.step(state)  # there is noise all the same
    assert report.participants == report.bytes_up == 0
    assert not torch.equal(after.server["descriptor"]["global"], state.server["descriptor"]["global"])


def test_a_counter_alone_does_not_travel_either() -> None:
    up, down = ({"model": {"batches": torch.tensor(count)}} for count in (5, 1))
    delivered = Uploads(Privacy(clip=1.0, noise=1.0), seeded(0), 1).delivered(Sent({"a": up}, {"a": down}), (0,))
    assert delivered.ups == {"a": down}
    assert not delivered.noisy


def experiment(**more: Any) -> Experiment:
    table = {"train": {"weights": "uniform"}, "evaluate": {"every": 0}, "model": {"name": "mlp", "hidden": [4]}}
    return Experiment(**{**table, "privacy": {"clip": 1.0, "noise": 2.0}, **more})


REFUSED = {
    "needs no more than a mean": {"method": [{"name": "scaffold"}]},
    "set .train. weights = .uniform.": {"train": {}},
    "set .evaluate. every = 0": {"evaluate": {}},
    "participation = 1": {"participation": 0.5},
    "BatchNorm's statistics would travel": {"model": {"name": "mlp", "hidden": [4], "norm": True}},
    "delta = 0.3 would allow": {"privacy": {"clip": 1.0, "noise": 2.0, "delta": 0.3}},
    "not enough for one round": {"privacy": {"clip": 1.0, "noise": 0.5, "epsilon": 0.5}},
    "needs its last ones": {"privacy": {"clip": 1.0, "noise": 2.0, "epsilon": 5}, "method": [{"name": "fedicon"}]},
    "noise is measured in units of clip": {"privacy": {"noise": 2.0}},
    "epsilon is a budget for noise": {"privacy": {"clip": 1.0, "epsilon": 2}},
    "whose range is clip": {"privacy": {"secure": True}},
    "secure or compress, not both": {"privacy": {"clip": 1.0, "secure": True, "compress": "int8"}},
    "sampling hides nobody": {"privacy": {"clip": 1.0, "noise": 1.0, "secure": True, "sampling": "poisson"}},
    "so sampling hides": {"privacy": {"clip": 1.0, "secure": True, "sampling": "poisson"}, "participation": 0.9},
    "least must be 3 or more, more than half": {"privacy": {"clip": 1.0, "secure": True, "least": 2}},
    "has no option 'clipping'": {"privacy": {"clipping": 1.0}},
    "to which none is added": {"method": [{"name": "fedavg", "adapters": ["prior-em"]}]},
}


@pytest.mark.parametrize("words", list(REFUSED))
def test_what_would_travel_unprotected_is_refused_in_a_sentence(words: str) -> None:
    made = experiment(**REFUSED[words])
    with pytest.raises(UserError, match=words) as said:
        made_and_counted(made)
    assert str(said.value).count(". ") == 0


def made_and_counted(made: Experiment) -> Setup:
    """As whoever trains does it before he begins."""
    setup = make_setup(made, made.method[0], TASK)
    check_counted(setup.privacy, setup.method, made, made.method[0].title)
    return setup


def test_who_cannot_count_finds_out_before_training_and_parties_need_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    made = experiment(privacy={"clip": 1.0, "noise": 2.0625})  # which nobody has counted before
    with pytest.raises(UserError, match="noise is counted by Opacus: pip install"):
        made_and_counted(made)
    budget = experiment(privacy={"clip": 1.0, "noise": 2.0625, "epsilon": 5.0})
    assert make_setup(budget, budget.method[0], TASK).privacy is not None


def test_no_rounds_need_no_budget() -> None:
    assert made_and_counted(experiment(rounds=0, privacy={"clip": 1.0, "noise": 2.0, "epsilon": 5.0})).privacy


@pytest.mark.parametrize("noise", [1e-300, 1e300])
def test_noise_that_nobody_can_count_is_a_sentence_before_training(noise: float) -> None:
    with pytest.raises(UserError, match=r"\[privacy\] noise = .* cannot be counted by accountant 'rdp'"):
        made_and_counted(experiment(privacy={"clip": 1.0, "noise": noise}))


@pytest.mark.parametrize("privacy", [{"clip": 1.0, "secure": True}, {"clip": 1.0, "noise": 1.0, "epsilon": 0.01}])
def test_what_has_been_trained_is_not_asked_for_promises(privacy: dict[str, Any]) -> None:
    """An unseen client opens a run without its clients; it trains nobody, and needs neither parties nor a budget."""
    made, nobody = experiment(privacy=privacy), placeholder((1, 8, 8), ["a", "b"])
    assert make_setup(made, made.method[0], nobody, trains=False).privacy is not None


def test_no_sum_of_two_is_ever_learnt() -> None:
    """Of two survivors each could take itself off their sum: the mean is published."""
    assert [Privacy(clip=1.0, secure=True).threshold(parties) for parties in (1, 2, 3, 4, 5, 9)] == [3, 3, 3, 3, 4, 6]
    made = experiment(privacy={"clip": 1.0, "secure": True, "least": 2})
    with pytest.raises(UserError, match="3 or more"):
        make_setup(made, made.method[0], ragged_task((9, 7, 5)))  # two are more than half of three


def test_every_row_of_the_preset_keeps_what_it_promises() -> None:
    preset = Experiment.load("private")
    setups = [make_setup(preset, spec, TASK, clients=100) for spec in preset.method]
    assert [setup.privacy is not None for setup in setups] == [False] + [True] * 8
    assert {setup.privacy.noise for setup in setups if setup.privacy} == {0.0, 1.0, 2.0, 4.0, 8.0, 16.0}


def test_who_changes_what_is_settled_gives_something_unless_it_says_otherwise() -> None:
    own = type("Own", (FedAvg,), {"settle": FedBN.settle})
    assert own(arch=tiny_arch("mlp")).gives
    assert not FedAvg(arch=tiny_arch("mlp")).gives


@pytest.mark.parametrize("name", some_of(LINEAR))
def test_a_method_gives_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, or one more message: that is what is counted and, in a federation, refused."""
    plain = session(name, None, rounds=1)
    method, seen = plain.setup.method, list[dict[str, Tree]]()
    take = type(method).take_gifts
    monkeypatch.setattr(
        type(method), "take_gifts", lambda self, server, gifts: seen.append(gifts) or take(self, server, gifts)
    )
    state, _ = federated(plain)
    seen.clear()  # some take what comes in a round by the same way
    plain.deploy(state)
    (gifts,) = seen
    assert any(any(gift.values()) for gift in gifts.values()) == method.gives
    messages = 1 + method.extra_rounds + method.gives
    privacy = Privacy(clip=1.0, noise=2.0)
    assert told_by(privacy, 1.0, 1 + method.extra_rounds, method)["epsilon"] == privacy.accounted(1.0).epsilon(messages)


def test_an_experiment_without_privacy_is_written_down_as_ever() -> None:
    assert "privacy" not in Experiment().model_dump(by_alias=True)
    assert "privacy" not in MethodSpec(name="fedavg").model_dump()
    made = Experiment(privacy={"clip": 1.0}, method=[{"name": "fedavg", "privacy": {"noise": 1.0}}])
    assert made.model_dump(by_alias=True)["privacy"] == {"clip": 1.0}
    assert made.model_dump()["method"][0]["privacy"] == {"noise": 1.0}


def test_a_run_that_was_interrupted_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """What compression left and the noise of a round are where they would have been."""
    privacy = Privacy(clip=0.1, noise=0.5, compress="top-k", keep=0.1)
    whole, _ = federated(session("fedbn", privacy, rounds=3))
    first = session("fedbn", privacy, rounds=3)
    state, _ = first.step(first.start())
    save(tmp_path / "state", {"server": state.server, **{f"own {name}": own for name, own in state.locals.items()}})
    trees, _ = load(tmp_path / "state")
    server, own = trees.pop("server"), {name.removeprefix("own "): tree for name, tree in trees.items()}
    later, state = session("fedbn", privacy, rounds=3), State(1, server, own)
    for _ in range(2):
        state, _ = later.step(state)
    assert_close(state.server, whole.server, 0.0)
    for name, local in whole.locals.items():
        assert set(local) == {"model", UNSENT}
        assert_close(state.locals[name], local, 0.0)
