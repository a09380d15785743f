"""Compression: what is left out of one message is in a later one, and the ledger weighs what is sent."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from fedshift.core.tree import Tree
from fedshift.errors import UserError
from fedshift.privacy.compression import COMPRESSORS, message_bytes
from fedshift.privacy.frame import Frame
from fedshift.privacy.settings import Privacy
from fedshift.privacy.upload import UPDATE, packed, unpacked

KINDS = [{"compress": "top-k", "keep": 0.25}, {"compress": "int8"}]


def least_squares(privacy: Privacy | None, agree: bool, feedback: bool = True) -> float:
    """How far federated gradient descent ends from the solution of a convex task: four clients' least squares.

    Where clients ``agree`` one solution is everybody's own. Where they do not, their updates never end, only the mean does,
    and the rate decays as the theory of error feedback has it.
    """
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(4, 30, 20, generator=generator, dtype=torch.float64)
    truth = torch.randn(20, generator=generator, dtype=torch.float64)
    targets = matrices @ truth + (0.0 if agree else torch.randn(4, 30, generator=generator, dtype=torch.float64))
    best = torch.linalg.lstsq(matrices.flatten(0, 1), targets.flatten()[:, None]).solution.flatten()
    w, locals_ = torch.zeros(20, dtype=torch.float64), [dict[str, dict[str, torch.Tensor]]() for _ in range(4)]
    for number in range(500):
        down: Tree = {"model": {"w": w}}
        updates = []
        rate = 0.1 if agree else 0.1 / (1 + number / 20)
        for k in range(4):
            gradient = matrices[k].T @ (matrices[k] @ w - targets[k]) / 30
            up: Tree = {"model": {"w": w - rate * gradient}}
            if privacy is None:
                updates.append(up["model"]["w"] - w)
                continue
            frame = Frame.of(up, down)
            message, kept = packed(privacy, frame, up, locals_[k])
            locals_[k] = kept if feedback else {}
            updates.append(unpacked(privacy, frame, message).double())
        w = w + torch.stack(updates).mean(0)
    return float((w - best).norm() / best.norm())


@pytest.mark.parametrize("options", KINDS, ids=lambda o: o["compress"])
def test_with_error_feedback_a_convex_task_ends_where_it_ends_uncompressed(options: dict[str, object]) -> None:
    assert least_squares(None, agree=True) < 1e-6
    assert least_squares(Privacy(**options), agree=True) < 1e-6


@pytest.mark.parametrize("options", KINDS, ids=lambda o: o["compress"])
def test_where_clients_disagree_it_is_as_near_as_uncompressed(options: dict[str, object]) -> None:
    error = least_squares(Privacy(**options), agree=False)
    assert error == pytest.approx(least_squares(None, agree=False), abs=2e-3)


def test_without_error_feedback_it_is_not() -> None:
    lost = least_squares(Privacy(**KINDS[0]), agree=False, feedback=False)
    assert lost > 3 * least_squares(None, agree=False)


@pytest.mark.parametrize("kind", list(COMPRESSORS))
@pytest.mark.parametrize("size", [1, 7, 1024, 2500])
def test_what_was_said_and_what_was_not_are_all_of_it(kind: str, size: int) -> None:
    privacy = Privacy(compress=kind, keep=0.3)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    up: Tree = {"model": {"w": vector}}
    frame = Frame.of(up, {})
    message, kept = packed(privacy, frame, up, {})
    left = kept["unsent"][UPDATE] if kept else torch.zeros(size)
    torch.testing.assert_close(unpacked(privacy, frame, message) + left, vector)
    assert float(unpacked(privacy, frame, message).norm()) <= float(vector.norm()) * (1 + 1e-6)


def test_messages_weigh_what_they_are() -> None:
    up: Tree = {"model": {"w": torch.randn(10_000)}}
    frame = Frame.of(up, {})
    weights = {}
    for kind in COMPRESSORS:
        message, _ = packed(Privacy(compress=kind, keep=0.05), frame, up, {})
        written = save({name: leaf.contiguous() for name, leaf in message[UPDATE].items()})
        header = 8 + int.from_bytes(written[:8], "little")
        assert message_bytes(message) == len(written) - header  # the tensors of a file, byte for byte
        weights[kind] = message_bytes(message)
    assert weights == {"none": 40_000, "top-k": 500 * 8, "int8": 10_000 + 4 * 10}


@pytest.mark.parametrize("places", [[-1, 3], [0, 4], [2, 2], [3, 1]])
def test_places_that_cannot_be_are_refused_in_a_sentence(places: list[int]) -> None:
    message = {UPDATE: {"places": torch.tensor(places, dtype=torch.int32), "values": torch.ones(2)}}
    with pytest.raises(UserError, match="places that it cannot have"):
        unpacked(Privacy(compress="top-k", keep=0.5), Frame.of({"model": {"w": torch.zeros(4)}}, {}), message)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_scales_that_no_number_holds_are_refused_in_a_sentence(clip: float | None) -> None:
    """Each is finite, and what they say is not."""
    message = {UPDATE: {"scales": torch.full((1,), 1e38), "values": torch.full((4,), 127, dtype=torch.int8)}}
    with pytest.raises(UserError, match="not finite"):
        unpacked(Privacy(clip=clip, compress="int8"), Frame.of({"model": {"w": torch.zeros(4)}}, {}), message)


def test_no_update_is_longer_than_agreed_also_with_what_was_left_before() -> None:
    privacy = Privacy(clip=1.0, compress="top-k", keep=0.5)
    up: Tree = {"model": {"w": torch.tensor([3.0, 4.0, 1.0, 0.0])}}
    frame = Frame.of(up, {})
    local: Tree = {}
    for _ in range(5):
        message, local = packed(privacy, frame, up, local)
        assert float(unpacked(privacy, frame, message).norm()) <= 1.0 + 1e-6
        assert float(local["unsent"][UPDATE].norm()) <= 1.0  # it cannot pile up
