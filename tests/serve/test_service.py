"""The heart of serving: the benchmark's answers, from images that arrive in any pieces; guards; versions on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift import UserError
from fedshift.core.registry import ADAPTERS
from fedshift.engines.reference import predictions
from fedshift.serve.history import History
from fedshift.serve.opening import artefacts_in, open_service, service_of
from fedshift.serve.service import (
    Answered,
    Condition,
    Service,
    Settings,
    answered,
    fitted,
    frozen,
    reset,
    restored,
    resumed,
)
from tests.serve.conftest import METHODS, World

WATCH = Settings(fall_back="never")


def served_by(world: World, adapter: str, options: dict[str, Any] | None = None, settings: Settings = WATCH) -> Service:
    """A service with this adapter, of the first method it can follow."""
    for method in METHODS:
        try:
            return service_of(world.artefact(method), adapter, options or {}, settings)
        except UserError:
            continue
    raise AssertionError(f"no method here deploys what {adapter} needs")


def benchmark(world: World, service: Service) -> Tensor:
    """The logits of the benchmark's own loop over the client's stream."""
    client = world.task.client("paper")
    samples, setting = world.task.samples(client, "corrupted"), world.task.setting("corrupted")
    artefact = service.artefact
    parts = artefact.adapters.get(service.label)
    assert parts is None  # these are served by name
    shown = predictions(service.adapter, artefact.deployed, samples, setting, artefact.seed, artefact.compute)
    return torch.cat([output.logits for output, _, _ in shown])


def shown(
    service: Service, condition: Condition, images: Tensor, ids: Tensor, size: int
) -> tuple[list[Answered], Condition]:
    found: list[Answered] = []
    for pixels, own in zip(images.split(size), ids.split(size), strict=True):
        pieces, condition = answered(service, condition, pixels, own)
        found += pieces
    return found, condition


def logits_of(pieces: Sequence[Answered]) -> Tensor:
    return torch.cat([piece.logits for piece in pieces])


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_a_stream_gets_the_benchmarks_answers_from_every_adapter(name: str, world: World) -> None:
    service = served_by(world, name)
    images, ids = world.stream()
    condition = service.begin()
    if service.adapter.fits:
        condition = fitted(service, condition, images, ids)
    wanted = benchmark(world, service)
    sizes = [1, 7] if service.together is None else [len(images)]
    for size in sizes:
        pieces, after = shown(service, condition, images, ids, size)
        assert torch.allclose(logits_of(pieces).to(wanted), wanted, atol=2e-4), size
        assert after.seen == len(images)
        assert {key for piece in pieces for key in piece.telemetry} == set(service.adapter.telemetry)


@pytest.mark.parametrize("name", ["t3a", "tent"])
def test_the_frozen_model_is_asked_once(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that leave the network alone have asked it already; beside the others it is asked again."""
    service = served_by(world, name)
    images, ids = world.stream()
    calls = []
    real = type(service.artefact.method).predict
    monkeypatch.setattr(type(service.artefact.method), "predict", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    pieces, condition = answered(service, service.begin(), images[:4], ids[:4])
    first = len(calls)
    again, _ = answered(service, condition, images[4:8], ids[4:8])
    assert (first, len(calls) - first) == ((1, 1) if name == "t3a" else (2, 2))
    wanted = service.artefact(images[:8])
    assert torch.allclose(torch.cat([piece.frozen for piece in (*pieces, *again)]), wanted, atol=1e-5)


def test_an_adapter_that_looks_at_a_set_first_collects_one(world: World) -> None:
    service = served_by(world, "fedtta", settings=Settings(fall_back="never", fit_after=10))
    images, ids = world.stream()
    condition = service.begin()
    assert not condition.fitted
    pieces, condition = shown(service, condition, images[:12], ids[:12], 1)
    assert [piece.did for piece in pieces] == ["collecting"] * 10 + ["answered"] * 2
    assert "first 10 images" in pieces[9].events[0]
    wanted = fitted(service, service.begin(), images[:10], ids[:10])
    for name, leaf in wanted.tree["model"].items():
        assert torch.equal(condition.tree["model"][name], leaf)
    assert condition.collected == ()


def test_freeze_resume_reset_and_restore(world: World) -> None:
    service = served_by(world, "t3a")
    images, ids = world.stream()
    _, learnt = shown(service, service.begin(), images[:12], ids[:12], 5)
    (piece,), still = answered(service, frozen(learnt), images[12:16], ids[12:16])
    assert piece.did == "frozen"
    assert still.tree is learnt.tree
    (piece,), moved = answered(service, resumed(still), images[12:16], ids[12:16])
    assert piece.did == "adapted"
    assert moved.tree is not learnt.tree
    assert reset(service, moved).tree is service.start
    assert (reset(service, moved).seen, reset(service, moved).learnt) == (20, 0)
    assert restored(moved, learnt).tree is learnt.tree
    assert restored(moved, learnt).seen == moved.seen


@pytest.mark.parametrize("name", ["tent", "t3a", "the", "eata", "ttt", "fedicon"])
def test_a_version_on_disk_goes_on_to_the_bit(name: str, world: World, tmp_path: Path) -> None:
    service = served_by(world, name)
    images, ids = world.stream()
    _, condition = shown(service, service.begin(), images[:10], ids[:10], 5)
    history = History(tmp_path, service)
    history.claim()
    history.save(1, condition, "every")
    back = history.load(1)
    one, after = shown(service, condition, images[10:], ids[10:], 5)
    other, again = shown(service, back, images[10:], ids[10:], 5)
    assert torch.equal(logits_of(one), logits_of(other))
    assert np.array_equal(after.levels.sums, again.levels.sums)
    assert (after.seen, after.learnt, after.fitted) == (again.seen, again.learnt, again.fitted)


def test_the_history_keeps_some_versions_and_refuses_those_of_others(world: World, tmp_path: Path) -> None:
    service = served_by(world, "t3a")
    history = History(tmp_path, service, keep=3)
    history.claim()
    for number in range(1, 10):
        history.save(number, service.begin(), "every")
    assert [version.number for version in history.versions()] == [0, 4, 7, 8, 9]
    assert history.numbers() == {4, 7, 8, 9}
    with pytest.raises(UserError, match="there is no version 3; there are: 0, 4, 7, 8, 9"):
        history.load(3)
    history.claim()
    with pytest.raises(UserError, match="another artefact or adapter"):
        History(tmp_path, served_by(world, "tent")).claim()
    (tmp_path / "versions" / "00000009.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="damaged"):
        history.load(9)


def test_what_is_served_is_chosen_as_it_should(world: World) -> None:
    folder = world.folders["fedbn"] / "artefacts"
    names = sorted(client.name for client in (*world.task.clients, *world.task.unseen))
    assert [path.name for path in artefacts_in([folder])] == names
    assert open_service(folder / "paper").label == "none"
    service = open_service(folder / "paper", "tent", {"batch-size": 16})
    assert (service.label, service.together) == ("tent batch-size=16", 16)
    for wrong in ("nothing", "fedtta"):
        with pytest.raises(UserError):
            open_service(folder / "paper", wrong)
    with pytest.raises(UserError, match="neither an artefact nor"):
        artefacts_in([folder.parent / "adapters"])
