"""Rotations: every client is turned by its own angle, counter-clockwise, and nobody else's data are touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from fedshift.data import corruptions
from fedshift.data import task as task_module
from fedshift.data.concept import Rotation, rotate
from fedshift.data.partition import ByDomain
from fedshift.data.pool import Pool
from fedshift.data.streams import Corrupted, LeftOut, Original, OutOfClient
from fedshift.data.task import Splitting, Task, build
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.runs.setup import make_task
from tests.data.test_task import check_same, everyone, fingerprint, stream_bytes

SIDE = 12
DOMAINS = ("a", "b", "c", "d", "e", "f", "g")
SEEN, UNSEEN = (0.0, 30.0, 60.0), (15.0, 45.0)
ANGLES = {"a": 0.0, "c": 30.0, "d": 60.0, "e": 0.0, "g": 30.0, "b": 15.0, "f": 45.0}  # b and f are unseen
SPLIT = Splitting(train=0.5, val=0.2, test=0.3, unseen=("b", "f"))


def pool_of(per_domain: int = 10, height: int = SIDE, width: int = SIDE, **columns: object) -> Pool:
    """Random images, dealt to the domains in turn."""
    count = per_domain * len(DOMAINS)
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)
    domains = torch.arange(count) % len(DOMAINS)
    return Pool(images, torch.arange(count) // 7 % 2, ("x", "y"), domains=domains, domain_names=DOMAINS, **columns)  # type: ignore[arg-type]


def reference(images: Tensor, degrees: float) -> Tensor:
    """Scipy turns rows towards columns: counter-clockwise as seen when rows go down, as in every picture."""
    turned = ndimage.rotate(
        images.numpy().astype(np.float64), degrees, axes=(3, 2), reshape=False, order=1, mode="grid-constant"
    )
    return torch.from_numpy(turned.round().clip(0, 255).astype(np.uint8))


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.float() - b.float()).abs().max())


def rotated(rotation: Rotation | None = None, splitting: Splitting = SPLIT, cache: Path | None = None) -> Task:
    streams = {"plain": Original(), "ooc": OutOfClient(), "bad": Corrupted(names=("contrast",)), "gone": LeftOut()}
    return build(pool_of(), ByDomain(), splitting, streams, 1, cache, rotation or Rotation(SEEN, UNSEEN))


# ---- one rotation -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("degrees", [5.0, 15.0, 30.0, 45.0, 60.0, 75.0, 100.0, 200.0, -30.0, 333.3])
@pytest.mark.parametrize("side", [9, 12])
def test_rotation_equals_scipys(degrees: float, side: int) -> None:
    images = pool_of(height=side, width=side).images[:20]
    assert gap(rotate(images, degrees), reference(images, degrees)) <= 1
    assert gap(rotate(images, degrees), reference(images, -degrees)) > 50  # random pixels: another angle is far off


@pytest.mark.parametrize("degrees", [10.0, 30.0, 60.0, -45.0])
def test_rotation_equals_pillows(degrees: float) -> None:
    """Another judge of the direction; a smooth picture, because Pillow keeps to itself how it rounds coordinates."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    blob = (200 * torch.exp(-((x - 21) ** 2 + (y - 13) ** 2) / 18)).to(torch.uint8)
    turned = Image.fromarray(blob.numpy()).rotate(degrees, Image.Resampling.BILINEAR)
    assert gap(rotate(blob[None, None], degrees)[0, 0], torch.from_numpy(np.asarray(turned).copy())) <= 3


@pytest.mark.parametrize("degrees", [15.0, -45.0])
def test_bicubic_is_pillows_channel_by_channel(degrees: float) -> None:
    images = pool_of().images[:3]
    turned = rotate(images, degrees, "bicubic")
    for image, ours in zip(images, turned, strict=True):
        for plane, got in zip(image, ours, strict=True):
            theirs = Image.fromarray(plane.numpy()).rotate(degrees, Image.Resampling.BICUBIC)
            assert np.array_equal(got.numpy(), np.asarray(theirs))
    assert gap(turned, rotate(images, degrees)) > 1
    assert torch.equal(rotate(images, 90.0, "bicubic"), rotate(images, 90.0))


def test_positive_is_counter_clockwise_as_seen() -> None:
    """A light at three o'clock goes up to noon, not down to six."""
    image = torch.zeros(1, 1, 21, 21, dtype=torch.uint8)
    image[0, 0, 10, 18] = 255
    for degrees, row, column in [(30, 6, 17), (60, 3, 14), (90, 2, 10), (-30, 14, 17), (-90, 18, 10)]:
        brightest = int(rotate(image, degrees).flatten().argmax())
        assert abs(brightest // 21 - row) <= 1
        assert abs(brightest % 21 - column) <= 1


@pytest.mark.parametrize("quarters", [-5, -1, 0, 1, 2, 3, 4, 6])
def test_quarter_turns_are_exact(quarters: int) -> None:
    images = pool_of().images[:8]
    assert torch.equal(
        rotate(images, 90.0 * quarters), torch.from_numpy(np.rot90(images.numpy(), quarters, (2, 3)).copy())
    )


def test_what_comes_in_from_outside_is_black() -> None:
    turned = rotate(torch.full((1, 3, 16, 16), 255, dtype=torch.uint8), 45.0)
    for row, column in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        assert turned[0, :, row, column].tolist() == [0, 0, 0]
    assert turned[0, :, 8, 8].tolist() == [255, 255, 255]


def test_images_that_are_not_square_are_refused() -> None:
    with pytest.raises(UserError, match=r"rotations need square images; set \[data\] size"):
        rotate(pool_of(height=8, width=12).images, 30.0)
    with pytest.raises(UserError, match=r"rotations need square images; set \[data\] size"):
        build(pool_of(height=8, width=12), ByDomain(), rotation=Rotation(seen=(0.0, 90.0)))


# ---- every client its own -----------------------------------------------------------------------------------------------
def test_every_client_is_turned_by_its_own_angle() -> None:
    """Late-binding closures gave every client of the reference code the last angle."""
    pool, task = pool_of(), rotated()
    assert task.provenance["angles"] == ANGLES
    assert [client.name for client in task.unseen] == ["b", "f"]
    for client in everyone(task):
        for part in ("train", "val", "test"):  # training and test data share the angle
            index = getattr(client, part)
            assert len(index) > 0 or client in task.unseen
            turned, plain = task.images[index], pool.images[index]
            assert len(index) == 0 or gap(turned, reference(plain, ANGLES[client.name])) <= 1
            for other in {*ANGLES.values()} - {ANGLES[client.name]}:
                assert len(index) == 0 or gap(turned, reference(plain, other)) > 50
    assert len(task.client("b").test) == 10


def test_unturned_clients_keep_every_byte() -> None:
    pool, task = pool_of(), rotated()
    for name in ("a", "e"):
        own = (pool.domains == DOMAINS.index(name)).nonzero().flatten()  # type: ignore[union-attr]
        assert torch.equal(task.images[own], pool.images[own])


@pytest.mark.parametrize(("rotation", "angles"), [
    (Rotation(seen=(90.0,)), {"a": 90, "c": 90, "d": 90, "e": 90, "g": 90, "b": 0, "f": 0}),
    (Rotation(unseen=(90.0, 180.0)), {"a": 0, "c": 0, "d": 0, "e": 0, "g": 0, "b": 90, "f": 180}),
    (Rotation(seen=tuple(90.0 * i for i in range(9))), {"a": 0, "c": 90, "d": 180, "e": 270, "g": 360, "b": 0, "f": 0}),
])  # fmt: skip
def test_one_list_or_the_other(rotation: Rotation, angles: dict[str, float]) -> None:
    pool, task = pool_of(), rotated(rotation)
    assert task.provenance["angles"] == angles
    for client in everyone(task):
        own = torch.cat([client.train, client.val, client.test])
        turned = np.rot90(pool.images[own].numpy(), int(angles[client.name]) // 90, (2, 3)).copy()
        assert torch.equal(task.images[own], torch.from_numpy(turned))


def test_the_angle_belongs_to_the_client_not_to_the_domain_number() -> None:
    """Training clients are counted without the unseen ones."""
    task = rotated(splitting=replace(SPLIT, unseen=("a",)))
    assert task.provenance["angles"] == {"b": 0.0, "c": 30.0, "d": 60.0, "e": 0.0, "f": 30.0, "g": 60.0, "a": 15.0}


def test_no_rotation_is_no_rotation() -> None:
    pool = pool_of()
    task = build(pool, ByDomain())
    assert torch.equal(task.images, pool.images)
    assert "angles" not in task.provenance
    same = build(pool, ByDomain(), rotation=Rotation())
    assert same.hash == task.hash
    assert not Rotation()
    assert Rotation(seen=(0.0,))


def test_the_source_is_left_alone() -> None:
    pool = pool_of()
    before = pool.images.clone()
    task = build(pool, ByDomain(), SPLIT, {}, 1, None, Rotation(SEEN, UNSEEN))
    assert torch.equal(pool.images, before)
    assert not torch.equal(task.images, before)
    assert torch.equal(task.labels, pool.labels)
    assert torch.equal(task.ids, pool.content())  # a sample's id is that of its picture, however it is turned


def test_public_images_are_nobodys_and_stay_upright() -> None:
    pool = pool_of()
    task = build(pool, ByDomain(), replace(SPLIT, public=0.2), {}, 1, None, Rotation((30.0,), (45.0,)))
    assert task.public is not None
    assert torch.equal(task.images[task.public], pool.images[task.public])


# ---- streams of rotated clients -----------------------------------------------------------------------------------------
def test_streams_show_images_as_their_owners_see_them() -> None:
    pool, task = pool_of(), rotated()
    owner = {i: client for client in everyone(task) for i in task.ids[client.test].tolist()}
    upright = dict(zip(pool.content().tolist(), pool.images, strict=True))
    for client in everyone(task):
        for stream in ("plain", "ooc", "gone"):
            images, _, ids = stream_bytes(task, client.name, stream)
            for image, i in zip(images, ids, strict=True):
                assert stream != "plain" or owner[i] is client
                assert gap(image[None], reference(upright[i][None], ANGLES[owner[i].name])) <= 1


def test_corruption_comes_after_rotation() -> None:
    task = rotated()
    turned = dict(zip(task.ids.tolist(), task.images, strict=True))
    for client in everyone(task):
        images, _, ids = stream_bytes(task, client.name, "bad")
        own = torch.stack([turned[i] for i in ids])
        assert torch.equal(images, corruptions.corrupt(own, "contrast", 5, 0, torch.arange(len(own))))


# ---- the cache ----------------------------------------------------------------------------------------------------------
def refuse(*_: object) -> None:
    raise AssertionError("made again instead of read")


def test_a_rotated_task_from_the_cache_is_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, first = rotated(), rotated(cache=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(task_module, "_make", refuse)
        second = rotated(cache=tmp_path)
    for task in (first, second):
        check_same(fresh, task)
        assert fingerprint(task) == fingerprint(fresh)
        assert torch.equal(task.images, fresh.images)
        assert torch.equal(task.ids, fresh.ids)
        assert task.provenance["angles"] == ANGLES
    upright = build(pool_of(), ByDomain(), SPLIT, {}, 1, tmp_path)  # neither finds the other's entry
    assert torch.equal(upright.images, pool_of().images)
    other = rotated(Rotation(SEEN, (15.0, 46.0)), cache=tmp_path)
    assert other.hash != fresh.hash
    assert other.provenance["angles"]["f"] == 46.0


SMALLER = {
    "train-limit": replace(SPLIT, train_limit=2),
    "train-fraction": replace(SPLIT, train_fraction=0.5),
}


@pytest.mark.parametrize("case", SMALLER)
def test_a_rotated_task_with_less_training_data_is_the_same_with_a_cache(case: str, tmp_path: Path) -> None:
    fresh = rotated(splitting=SMALLER[case])
    for _ in range(2):
        task = rotated(splitting=SMALLER[case], cache=tmp_path)
        check_same(fresh, task)
        assert torch.equal(task.images, fresh.images)


@pytest.mark.parametrize("case", SMALLER)
def test_the_cache_serves_rotated_tasks_with_less_training_data(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rotated(splitting=SMALLER[case], cache=tmp_path)
    monkeypatch.setattr(task_module, "_make", refuse)
    assert torch.equal(made.images, rotated(splitting=SMALLER[case], cache=tmp_path).images)


# ---- from a file --------------------------------------------------------------------------------------------------------
def test_a_file_says_it_in_a_table() -> None:
    table = {
        "split": {"train": 0.5, "val": 0.2, "test": 0.3, "unseen": ["b", "f"]},
        "rotation": {"seen": [0, 30, 60], "unseen": [15, 45]},
    }
    task = make_task(Experiment.parse(table), 1, pool_of())
    assert task.provenance["angles"] == ANGLES
    assert torch.equal(task.images, rotated().images)
    with pytest.raises(UserError, match=r"\[rotation\] has no option 'angles'; it has: seen, unseen"):
        make_task(Experiment.parse({"rotation": {"angles": [1]}}), 1, pool_of())
    with pytest.raises(UserError, match=r"\[rotation\]: seen = 'left' is not valid"):
        make_task(Experiment.parse({"rotation": {"seen": "left"}}), 1, pool_of())
