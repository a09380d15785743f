"""A stream turns into noise, into one class, into another domain: alarms in time, and the frozen model's accuracy.

Images are made here, so that there are as many ordinary ones as it takes: ten patterns, and noise on them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedshift
from fedshift import Experiment
from fedshift.serve.opening import service_of
from fedshift.serve.service import Service, Settings, answered, frozen

CLASSES, SIDE = 10, 8
WITHIN = 48  # images in which an alarm must go off
ADAPTERS = ("tent", "t3a", *(pytest.param(name, marks=pytest.mark.grid) for name in ("none", "bn", "eata")))
PATTERNS = np.random.default_rng(1).normal(0, 1, (CLASSES, SIDE, SIDE, 3))


def images(count: int, seed: int, domain: str = "clinic", only: int | None = None) -> tuple[Tensor, Tensor]:
    """uint8 [n, 3, side, side] and their classes."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, count) if only is None else np.full(count, only)
    if domain == "noise":
        return torch.from_numpy(draw.integers(0, 256, (count, 3, SIDE, SIDE), dtype=np.uint8)), torch.from_numpy(labels)
    values = PATTERNS[labels] * 25 + draw.normal(0, 38, (count, SIDE, SIDE, 3)) + draw.normal(0, 8, (count, 1, 1, 1))
    values = values * 0.6 + 190 if domain == "elsewhere" else values + 110
    pixels = np.clip(values, 0, 255).astype(np.uint8).transpose(0, 3, 1, 2)
    return torch.from_numpy(pixels), torch.from_numpy(labels)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Artefact:
    parts = [images(700, seed) for seed in (1, 2)]
    pixels, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    pool = fedshift.from_arrays(pixels.numpy(), labels.numpy(), domains=["clinic"] * 700 + ["other"] * 700)
    experiment = Experiment.parse(
        {
            "name": "turned", "rounds": 3, "baselines": False, "evaluate": {"every": 0, "advice": False},
            "model": {"name": "mlp", "hidden": [32], "norm": True}, "train": {"lr": 0.05, "batch-size": 16, "momentum": 0.9},
            "partition": {"kind": "by-domain"}, "method": [{"name": "fedbn"}],
        }
    )  # fmt: skip
    (folder,) = fedshift.run(experiment, tmp_path_factory.mktemp("turned"), engine="sequential", data=pool).folders
    return fedshift.load(Path(folder) / "artefacts" / "clinic")


def shown(service: Service, pixels: Tensor, size: int = 16) -> tuple[Tensor, Tensor, list[str]]:
    """What was served, what the frozen model says, and the lines of the log."""
    condition, served, plain, events = service.begin(), [], [], []
    for number, some in enumerate(pixels.split(size)):
        pieces, condition = answered(service, condition, some, torch.arange(len(some)) + size * number)
        for piece in pieces:
            served.append(piece.logits.argmax(1))
            plain.append(piece.frozen.argmax(1))
            events += piece.events
    return torch.cat(served), torch.cat(plain), events


def first_alarm(events: list[str]) -> int:
    return min((int(line.rpartition(" ")[2]) for line in events if line.startswith("alarm")), default=1 << 30)


def test_the_model_is_worth_guarding(artefact: fedshift.Artefact) -> None:
    pixels, labels = images(1000, 77)
    assert (artefact.predict(pixels).codes == labels).double().mean() > 0.9
    assert artefact.known is not None


@pytest.mark.parametrize("name", ["t3a", "tent"])
def test_ten_thousand_ordinary_images_set_off_no_alarm(name: str, artefact: fedshift.Artefact) -> None:
    service = service_of(artefact, name, {"batch-size": 16} if name == "tent" else {}, Settings())
    pixels, labels = images(10_000, 100)
    served, plain, events = shown(service, pixels, 16 if name == "tent" else 250)
    assert events == []
    assert (served == labels).double().mean() >= (plain == labels).double().mean() - 0.01


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("turn", ["noise", "one class", "elsewhere"])
def test_a_turned_stream_is_noticed_and_the_frozen_model_answers(
    name: str, turn: str, artefact: fedshift.Artefact
) -> None:
    options = {"batch-size": 16} if name in ("tent", "bn", "eata") else {}
    service = service_of(artefact, name, options, Settings())
    before, _ = images(320, 5)
    turned, truth = images(800, 6, "clinic" if turn == "one class" else turn, 3 if turn == "one class" else None)
    back, labels = images(800, 7)
    served, plain, events = shown(service, torch.cat([before, turned, back]))
    assert 320 < first_alarm(events) <= 320 + WITHIN, events
    assert any("fell back to the frozen model" in line for line in events)
    where = {"noise": slice(1120, None), "one class": slice(320, 1120), "elsewhere": slice(320, 1120)}[turn]
    right = torch.cat([truth, labels])[where.start - 320 : None if where.stop is None else where.stop - 320]
    gap = (served[where] == right).double().mean() - (plain[where] == right).double().mean()
    assert gap >= -0.01
    if turn == "one class":  # what it would have been
        careless = replace(service, settings=Settings(fall_back="never"))
        unguarded, _, _ = shown(careless, torch.cat([before, turned]))
        lost = (plain[where] == right).double().mean() - (unguarded[where] == right).double().mean()
        assert lost > 0.1 or name in ("none", "t3a")


def test_adaptation_begins_again_when_images_are_ordinary(artefact: fedshift.Artefact) -> None:
    service = service_of(artefact, "tent", {"batch-size": 16}, Settings(patience=100))
    ordinary = images(600, 8)[0]
    *_, events = shown(service, torch.cat([ordinary[:200], images(100, 9, "noise")[0], ordinary[200:]]))
    said = [line.partition(" at image")[0] for line in events if not line.startswith("alarm")]
    assert said == ["fell back to the frozen model", "adapts again"]


def test_who_was_frozen_stays_frozen_and_the_frozen_model_answers_meanwhile(artefact: fedshift.Artefact) -> None:
    service = service_of(artefact, "t3a", {}, Settings(patience=50))
    condition = frozen(service.begin())
    did = []
    for part in (images(100, 13, "noise")[0], images(600, 14)[0]):
        for some in part.split(20):
            pieces, condition = answered(service, condition, some, torch.arange(20))
            did += [piece.did for piece in pieces]
            assert condition.mode == "frozen"
    assert did[4] == "doubted"
    assert did[-1] == "frozen"
    assert condition.learnt == 0


def test_a_model_without_knowledge_takes_its_first_images_for_usual(artefact: fedshift.Artefact) -> None:
    service = service_of(replace(artefact, known=None), "t3a", {}, Settings())
    pixels = torch.cat([images(1000, 10)[0], images(100, 11, "elsewhere")[0]])
    *_, events = shown(service, pixels)
    assert 1000 < first_alarm(events) <= 1000 + WITHIN


def test_broken_answers_are_never_served(artefact: fedshift.Artefact) -> None:
    service = service_of(artefact, "tent", {"batch-size": 16, "lr": 3e38}, Settings())
    pixels, _ = images(160, 12)
    served, plain, events = shown(service, pixels)
    assert any("no numbers" in line for line in events)
    assert torch.equal(served[16:], plain[16:])
