"""The composition: what it becomes with its parts left out, who keeps what, and what an unseen client does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fedshift.blocks import views
from fedshift.blocks.calibration import SLOT, Calibration, calibration_of, entry_name
from fedshift.core.context import Phase
from fedshift.core.method import Train
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.runs.calibrate import calibrated
from fedshift.systems.ours.method import Composition
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    HEAD,
    NORM,
    PLAIN,
    SHAPE,
    TRAIN,
    equal,
    federation,
    make_task,
    ran,
    run,
    watching,
)

SIZED = make_task((5, 9, 12))
WHOLE = Train(lr=0.3, batch_size=64, local_epochs=3)  # all of a client's images in a batch, so that no order matters
BARE: dict[str, Any] = {"control": False, "crop": 1.0, "colour": 0.0, "tempered": 1.0, "clip": 1e9}
SHARED = Phase(name="shared")


def close(one: Tree | Any, other: Tree | Any) -> bool:
    return set(one) == set(other) and all(torch.allclose(one[n], other[n], rtol=1e-9, atol=1e-12) for n in one)


def test_without_its_parts_it_trains_what_fedthe_trains() -> None:
    found, expected = (ran(name, SIZED, WHOLE, PLAIN, **how) for name, how in (("ours", BARE), ("fedthe", {})))
    assert close(found.server["model"], expected.server["model"])
    for client in "abc":
        assert close(found.locals[client]["personal"], expected.locals[client]["personal"])
        assert set(found.locals[client]) == {"personal"}


@pytest.mark.parametrize("more", [{}, {"momentum": 0.5, "lr_decay": 0.7, "lr": 0.05}])
def test_its_shared_part_without_balance_is_scaffolds(more: dict[str, Any]) -> None:
    train = replace(WHOLE, weights="uniform", **more)
    how = {**BARE, "control": True, "tempered": 0.0}
    found, expected = (ran(name, SIZED, train, PLAIN, **own) for name, own in (("ours", how), ("scaffold", {})))
    for slot in ("model", "c"):
        assert close(found.server[slot], expected.server[slot])
    for client in "abc":
        assert close(found.locals[client]["ci"], expected.locals[client]["ci"])
        assert any(bool(leaf.any()) for leaf in found.locals[client]["ci"].values())
    for name, leaf in found.server["c"].items():
        own = torch.stack([found.locals[client]["ci"][name] for client in "abc"])
        assert torch.allclose(leaf, own.mean(0), rtol=1e-9, atol=1e-12)


def test_half_of_the_balance_is_between_none_and_all() -> None:
    counts = torch.tensor([7.0, 1.0, 0.0])
    batch = {"y": torch.tensor([0, 1]), "log-prior": (counts + 1).log()}
    logits = torch.tensor([[1.0, 0.5, -0.5], [0.0, 0.2, 0.1]])
    for share in (0.0, 0.5, 1.0):
        method = Composition(arch=PLAIN, train=TRAIN, tempered=share)
        expected = torch.nn.functional.cross_entropy(logits + share * (counts + 1).log(), batch["y"])
        assert torch.allclose(method.cross_entropy(logits, batch), expected)


def test_gradients_are_clipped_after_the_correction() -> None:
    method = Composition(arch=PLAIN, train=TRAIN, clip=1.0)
    grads = {name: torch.ones(3) for name in ("hidden.weight", "out.weight")}
    state = {"c": {name: 100 * leaf for name, leaf in grads.items()}, "ci": {name: 0 * g for name, g in grads.items()}}
    moved = method.transform_grads(state, grads, SHARED)
    assert torch.stack([leaf.square().sum() for leaf in moved.values()]).sum().sqrt() == pytest.approx(1.0)
    assert equal(method.transform_grads(state, grads, Phase(name="personal")), grads)  # the private head has no drift
    told = replace(method, train=replace(TRAIN, clip=2.0)).transform_grads(state, grads, SHARED)
    assert torch.stack([leaf.square().sum() for leaf in told.values()]).sum().sqrt() == pytest.approx(2.0)


def test_the_shared_part_sees_views_and_the_private_head_images() -> None:
    kind, steps = watching(Composition)
    run(federation(kind, SIZED, TRAIN, PLAIN)[0])
    assert {phase.name for _, _, phase in steps} == {"shared", "personal"}
    assert all(("view" in batch) == (phase.name == "shared") for _, batch, phase in steps)
    state, batch, phase = next(step for step in steps if step[2].name == "shared")
    method = Composition(arch=PLAIN, train=TRAIN)
    seen = views.contrastive_views(batch["x"], batch["view"], True, method.crop, method.colour)
    plain = {name: leaf for name, leaf in batch.items() if name != "view"}
    by_view, _ = method.loss(state, state["model"], batch, phase)
    assert torch.equal(by_view, method.loss(state, state["model"], {**plain, "x": seen}, phase)[0])
    assert not torch.equal(by_view, method.loss(state, state["model"], plain, phase)[0])
    assert Composition(arch=PLAIN, train=TRAIN, crop=1.0, colour=0.0).draws(SHARED) == {}


def test_normalisation_stays_at_home_and_unseen_clients_start_from_its_mean() -> None:
    fed, watch = federation("ours", make_task((5, 9, 12), unseen=1))
    state, _ = run(fed)
    for reply in watch.replies[0].values():
        assert not NORM & (set(reply.up["model"]) | set(reply.up["dc"]))
        assert set(reply.local["model"]) == NORM
    deployment = fed.deploy(state)
    (unseen,) = fed.unseen(deployment).values()
    for entry in NORM:
        own = torch.stack([state.locals[client]["model"][entry].double() for client in "abc"])
        expected = own.amax(0) if entry.endswith("tracked") else own.mean(0)
        assert torch.allclose(unseen["model"][entry].double(), expected)
    assert equal(pick(unseen["model"], HEAD), unseen["generic"])
    for client, tree in deployment.trained().items():
        assert equal(pick(tree["model"], NORM), state.locals[client]["model"])
        assert equal(tree["generic"], pick(state.server["model"], HEAD))
        assert not equal(pick(tree["model"], HEAD), tree["generic"])


def test_who_is_absent_keeps_what_it_had() -> None:
    fed, watch = federation("ours", SIZED, participation=0.34)
    before, _ = run(fed, 1)
    after, _ = fed.step(before)
    (present,) = watch.downs[-1]
    for name in set(before.locals) - {present}:
        assert all(equal(after.locals[name][slot], before.locals[name][slot]) for slot in before.locals[name])
    change = watch.replies[-1][present].up["dc"]
    for name, delta in change.items():  # of all clients, those absent included
        assert torch.allclose(after.server["c"][name], before.server["c"][name] + delta / 3)


def test_the_servers_control_variate_is_the_mean_of_all_clients() -> None:
    """Whoever takes part, whatever their sizes weigh, with momentum, and with normalisation layers at home."""
    train = replace(TRAIN, weights="size", momentum=0.5, weight_decay=0.01)
    fed, watch = federation("ours", make_task((5, 9, 12, 7, 8)), train, participation=0.4)
    state, _ = run(fed, 12)
    assert len({name for downs in watch.downs for name in downs}) == 5  # in the end everybody was there
    for name, leaf in state.server["c"].items():
        own = torch.stack([state.locals[client]["ci"][name] for client in "abcde"])
        assert torch.allclose(leaf, own.mean(0), rtol=1e-9, atol=1e-12)
        assert bool(leaf.any())


def test_control_variates_need_sgd() -> None:
    adam = replace(TRAIN, optimiser="adam")
    with pytest.raises(UserError, match="method 'ours' with control is defined for optimiser sgd, not adam"):
        Composition(arch=PLAIN, train=adam)
    assert Composition(arch=PLAIN, train=adam, control=False).control is False


def measured(right: float, word: str) -> Tensors:
    """What training clients found: of a hundred images so many were answered right."""
    confusion = torch.full((CLASSES, CLASSES), (100 - right) / (CLASSES**2 - CLASSES), dtype=torch.float64)
    confusion.fill_diagonal_(right / CLASSES)
    found = replace(Calibration.none(CLASSES), confusion=confusion, labels=torch.full((CLASSES,), 7.0).double())
    return {entry_name("common", word, name): leaf for name, leaf in found.tensors().items()}


def test_an_unseen_client_refreshes_its_statistics_if_that_was_right_elsewhere() -> None:
    method = Composition(arch=AWKWARD, train=TRAIN)
    make = partial(ADAPTERS["ours"].make, arch=AWKWARD, predict_with=method.predict)
    adapter = make(passes=2, batch_size=8)
    model = {name: leaf.double() for name, leaf in AWKWARD.init(0).items()}
    deployed: Tree = {"model": model, "generic": pick(model, HEAD)}
    better: Tree = {**deployed, SLOT: {**measured(60, ""), **measured(70, adapter.how)}}
    worse: Tree = {**deployed, SLOT: {**measured(70, ""), **measured(60, adapter.how)}}
    x = torch.rand(20, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    align = ADAPTERS["fedbn-align"].make(arch=AWKWARD, predict_with=method.predict, passes=2, batch_size=8)
    moved = adapter.fit(adapter.init(better), x, {})
    assert equal(moved["model"], align.fit(deployed, x, {})["model"])
    assert not equal(pick(moved["model"], NORM), pick(model, NORM))
    # classes are found by the same models
    assert float(calibration_of(adapter, moved, "own").right) == pytest.approx(0.7)
    fewer = {**measured(70, adapter.how), entry_name("common", adapter.how, "labels"): torch.full((CLASSES,), 6.0)}
    others: Tree = {**deployed, SLOT: {**measured(60, ""), **fewer}}  # somebody's answers were no numbers there
    for still in (worse, others, deployed):  # and where nobody measured
        assert equal(adapter.fit(adapter.init(still), x, {})["model"], model)
    for other in (make(passes=0), make(passes=3, batch_size=8)):  # what was measured is not of these
        assert equal(other.fit(other.init(better), x, {})["model"], model)
    at_home: Tree = {**better, "home": {"labels": torch.ones(CLASSES, dtype=torch.float64)}}
    assert equal(adapter.fit(adapter.init(at_home), x, {})["model"], model)


def test_training_clients_measure_what_refreshing_is_worth() -> None:
    fed, _ = federation("ours", make_task((8, 9, 12), unseen=1))
    state, _ = run(fed)
    deployment = calibrated(fed, fed.deploy(state), [AdapterSpec(name="ours", **{"batch-size": 2})])
    (unseen,) = fed.unseen(deployment).values()
    kinds = {name.partition(":")[0] for name in unseen[SLOT]}
    assert kinds == {"common", "common, refreshed 5 times by 2"}
    bare = calibrated(fed, fed.deploy(state), [AdapterSpec(name="ours", passes=0)])
    assert not any("refreshed" in name for name in fed.unseen(bare)["new0"][SLOT])
    assert deployment.given_bytes > bare.given_bytes  # it is counted
