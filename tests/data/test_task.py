"""Tasks: nothing leaks, the same seed gives the same bytes, and the cache changes neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.data import corruptions
from fedshift.data.concept import Rotation
from fedshift.data.partition import ByDomain, Iid, Partition
from fedshift.data.pool import Pool
from fedshift.data.sources import load
from fedshift.data.split import COPY
from fedshift.data.streams import Corrupted, Original
from fedshift.data.task import Client, Splitting, Task, build
from fedshift.errors import UserError

STREAMS = {"original": Original(), "corrupted": Corrupted(severity=5)}
DOMAINS = ("red", "green", "blue", "grey")


def pool_of(count: int = 96, seed: int = 0, domains: tuple[str, ...] = DOMAINS, **columns: object) -> Pool:
    """Distinct random images, dealt to the domains in turn."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    codes = torch.arange(count) % len(domains)
    labels = (torch.arange(count) // len(domains)) % 3
    return Pool(images, labels, ("a", "b", "c"), domains=codes, domain_names=domains, **columns)  # type: ignore[arg-type]


def twinned() -> Pool:
    """Exact duplicates within and across domains, and photographs with several crops, some of them duplicated."""
    pool = pool_of(groups=torch.arange(96))
    images, groups = pool.images.clone(), pool.groups.clone()  # type: ignore[union-attr]
    for copy, original in [(4, 0), (8, 0), (1, 0), (2, 0), (13, 12), (21, 20), (29, 28), (37, 36), (45, 44), (53, 52)]:
        images[copy] = images[original]
    for crop, photograph in [(60, 61), (64, 61), (66, 67), (70, 71), (75, 72), (80, 72), (81, 72), (90, 91)]:
        groups[crop] = groups[photograph]
    images[84] = images[85] = images[61]  # a duplicate of a crop belongs to the photograph
    return replace(pool, images=images, groups=groups)


def everyone(task: Task) -> tuple[Client, ...]:
    return (*task.clients, *task.unseen)


def related(pool: Pool, some: Tensor, others: Tensor) -> list[tuple[int, int]]:
    """Pairs, one of each list, that are the same image, have the same pixels or come from one photograph."""
    pixels = pool.images.reshape(len(pool), -1).int()
    same = (pixels[some][:, None] == pixels[others][None]).all(-1)
    if pool.groups is not None:
        same |= pool.groups[some][:, None] == pool.groups[others][None]
    return [(int(some[i]), int(others[j])) for i, j in same.nonzero().tolist()]


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])


def stream_bytes(task: Task, client: str, stream: str) -> tuple[Tensor, list[int], list[int]]:
    """What a client is shown: images in the order of arrival, labels, ids."""
    samples = task.samples(task.client(client), stream)
    index = samples.index
    return samples.images[index], samples.labels[index].tolist(), samples.ids[index].tolist()


def check_same(a: Task, b: Task) -> None:
    """Equal in every byte a method can see."""
    assert a.hash == b.hash
    assert a.classes == b.classes
    assert [c.name for c in a.clients] == [c.name for c in b.clients]
    assert [c.name for c in a.unseen] == [c.name for c in b.unseen]
    for x, y in zip(everyone(a), everyone(b), strict=True):
        for part in ("train", "val", "test"):
            assert torch.equal(getattr(x, part), getattr(y, part))
            assert getattr(x, part).dtype == getattr(y, part).dtype == torch.int64
    assert list(a.streams) == list(b.streams)
    for name in a.streams:
        assert a.streams[name].setting == b.streams[name].setting
        assert a.streams[name].kind == b.streams[name].kind
        for client in everyone(a):
            images, labels, ids = stream_bytes(a, client.name, name)
            again, labels_again, ids_again = stream_bytes(b, client.name, name)
            assert images.dtype == again.dtype == torch.uint8
            assert torch.equal(images, again)
            assert (labels, ids) == (labels_again, ids_again)
    assert (a.public is None) == (b.public is None)
    if a.public is not None and b.public is not None:
        assert torch.equal(a.public, b.public)


# ---- nothing leaks ------------------------------------------------------------------------------------------------------
SPLITTINGS = {
    "plain": Splitting(),
    "no validation": Splitting(train=0.7, val=0.0, test=0.3),
    "unseen by name": Splitting(unseen=("green",)),
    "half unseen": Splitting(unseen=0.5),
    "public": Splitting(public=0.2),
    "public and unseen": Splitting(public=0.15, unseen=("blue",)),
    "no test but of unseen clients": Splitting(train=0.8, val=0.2, test=0.0, unseen=("red",)),
}


@pytest.mark.parametrize("splitting", SPLITTINGS.values(), ids=SPLITTINGS)
def test_splits_are_disjoint_and_complete(splitting: Splitting) -> None:
    pool = twinned()
    removed = []
    for seed in range(8):
        task = build(pool, ByDomain(), splitting, seed=seed)
        placed = joined([p for c in everyone(task) for p in (c.train, c.val, c.test)])
        placed = placed if task.public is None else torch.cat([placed, task.public])
        assert len(placed.unique()) == len(placed)
        counts = task.provenance["counts"]
        left_over = set(range(len(pool))) - set(placed.tolist())
        if splitting.public:  # relatives of a public image are public, not removed
            assert related(pool, torch.tensor(sorted(left_over), dtype=torch.int64), task.public) == []
        gone = joined([left.rows for left in task.left_out]).tolist()
        assert sorted(gone) == sorted(left_over)
        assert len(placed) + len(gone) == counts["images"] == len(pool)
        assert (counts["clients"], counts["unseen"]) == (len(task.clients), len(task.unseen))
        for client in everyone(task):  # an owner keeps what is its own
            for part in (client.train, client.val, client.test):
                assert {DOMAINS[d] for d in pool.domains[part].tolist()} <= {client.name}  # type: ignore[index]
        removed.append(len(gone))
    assert max(removed) > 0


@pytest.mark.parametrize("partition", [ByDomain(), Iid(clients=5)], ids=["by-domain", "iid"])
@pytest.mark.parametrize("splitting", SPLITTINGS.values(), ids=SPLITTINGS)
def test_no_test_image_nor_twin_nor_sibling_is_trained_on(splitting: Splitting, partition: Partition) -> None:
    pool = twinned()
    if isinstance(splitting.unseen, tuple) and isinstance(partition, Iid):
        splitting = replace(splitting, unseen=("client-1",))
    for seed in range(8):
        task = build(pool, partition, splitting, seed=seed)
        train, val, test = (joined([getattr(c, p) for c in everyone(task)]) for p in ("train", "val", "test"))
        assert related(pool, train, test) == []
        assert related(pool, val, test) == []
        assert related(pool, train, val) == []
        if task.public is not None:
            assert related(pool, task.public, joined([train, val, test])) == []


def test_a_chain_of_duplicates_and_crops_stays_on_one_side() -> None:
    """b copies a's pixels, c is a crop of b's photograph, d copies c's pixels: a and d may not be separated."""
    pool = pool_of(24, domains=("one",), groups=torch.arange(24))
    images, groups = pool.images.clone(), pool.groups.clone()  # type: ignore[union-attr]
    images[7], groups[13], images[19] = images[2], groups[7], images[13]
    pool = replace(pool, images=images, groups=groups)
    chain, homes = {2, 7, 13, 19}, set()
    for seed in range(12):
        (client,) = build(pool, ByDomain(), seed=seed).clients
        held = [name for name in ("train", "val", "test") if chain & set(getattr(client, name).tolist())]
        assert len(held) == 1
        homes.add(held[0])
    assert homes > {"train"}  # also tested on, for some seed


def test_a_client_whose_training_data_are_all_somebody_elses_test_data_is_named() -> None:
    pool = pool_of(8, domains=("left", "right"))
    images = pool.images.clone()
    images[1::2] = images[0::2]  # right is a copy of left
    with pytest.raises(
        UserError, match=r"client 'left' has no training images left \(\d left out: copy of a test .*\); use fewer"
    ):
        build(replace(pool, images=images), ByDomain(), Splitting(unseen=("right",)))


def test_unseen_clients_have_only_test_data() -> None:
    pool = pool_of()
    task = build(pool, ByDomain(), Splitting(unseen=("green", "grey")), STREAMS)
    assert [c.name for c in task.clients] == ["red", "blue"]
    assert [c.name for c in task.unseen] == ["green", "grey"]
    for client in task.unseen:
        owned = (pool.domains == DOMAINS.index(client.name)).nonzero().flatten()  # type: ignore[union-attr]
        assert len(client.train) == len(client.val) == 0
        assert torch.equal(client.test, owned)
        assert int(task.histogram(client).sum()) == 0
        assert len(task.samples(client, "corrupted")) == len(owned)
    assert task.client("grey") is task.unseen[1]
    with pytest.raises(UserError, match="the task has no client 'pink'"):
        task.client("pink")


def test_the_public_set_belongs_to_nobody() -> None:
    pool = twinned()
    task = build(pool, ByDomain(), Splitting(public=0.25))
    assert task.public is not None
    assert 0.25 * len(pool) <= len(task.public) < 0.5 * len(pool)
    owned = joined([p for c in task.clients for p in (c.train, c.val, c.test)])
    assert related(pool, task.public, owned) == []
    rows = task.samples(task.clients[0], "public")
    assert torch.equal(rows.index, task.public)
    assert torch.equal(rows.images[rows.index], pool.images[task.public])
    assert rows.index is task.samples(task.clients[1], "public").index  # the same for everybody


# ---- the settings of a split --------------------------------------------------------------------------------------------
def test_without_validation() -> None:
    task = build(pool_of(), ByDomain(), Splitting(train=0.75, val=0.0, test=0.25))
    assert [(len(c.train), len(c.val), len(c.test)) for c in task.clients] == [(18, 0, 6)] * 4


def test_train_fraction_keeps_a_part_of_training_and_all_of_the_rest() -> None:
    whole = build(pool_of(), ByDomain())
    part = build(pool_of(), ByDomain(), Splitting(train_fraction=0.25))
    for a, b in zip(whole.clients, part.clients, strict=True):
        assert len(a.train) == 14
        assert len(b.train) == 4  # 3.5 rounded
        assert set(b.train.tolist()) < set(a.train.tolist())
        assert b.train.tolist() != a.train[:4].tolist()  # drawn, not cut off
        assert torch.equal(a.val, b.val)
        assert torch.equal(a.test, b.test)
    tiny = build(pool_of(), ByDomain(), Splitting(train_fraction=0.001))
    assert [len(c.train) for c in tiny.clients] == [1] * 4


def test_the_files_own_split_is_honoured() -> None:
    splits = torch.tensor([0, 0, 0, 2]).repeat_interleave(4).repeat(6)
    pool = pool_of(splits=splits)
    task = build(pool, ByDomain(), Splitting(from_file=True, val=0.5))
    for client in task.clients:
        own = pool.domains == DOMAINS.index(client.name)
        assert torch.equal(client.test, (own & (splits == 2)).nonzero().flatten())
        assert torch.equal(joined([client.train, client.val]).sort().values, (own & (splits == 0)).nonzero().flatten())
        assert (len(client.train), len(client.val), len(client.test)) == (9, 9, 6)
    with_val = torch.where(torch.arange(96) % 24 < 4, 1, splits)
    task = build(pool_of(splits=with_val), ByDomain(), Splitting(from_file=True, val=0.5))
    for part, code in (("train", 0), ("val", 1), ("test", 2)):  # the file says who validates: nothing is drawn
        found = joined([getattr(client, part) for client in task.clients]).sort().values
        assert torch.equal(found, (with_val == code).nonzero().flatten())


def test_a_files_split_with_a_leak_is_purged() -> None:
    splits = torch.tensor([0, 0, 0, 2]).repeat_interleave(4).repeat(6)
    pool = pool_of(splits=splits)
    images = pool.images.clone()
    images[1] = images[12]  # a test image of red, to train green with
    task = build(replace(pool, images=images), ByDomain(), Splitting(from_file=True, val=0.0))
    assert 12 in task.client("red").test.tolist()
    assert 1 not in task.client("green").train.tolist()
    assert [(left.client, left.reason, left.rows.tolist()) for left in task.left_out] == [("green", COPY, [1])]


MISTAKES = {
    "no split column": (Splitting(from_file=True), "from-file needs a split column in the data"),
    "nobody trains": (Splitting(unseen=DOMAINS), "all 4 clients are unseen: leave at least one to train on"),
    "unknown unseen client": (Splitting(unseen=("gren",)), "no client is called 'gren', .* did you mean green"),
    "all public": (Splitting(public=1.0), "client 'red' has no training images left; use fewer or larger clients"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_cannot_be_built_is_said_in_a_sentence(case: str) -> None:
    splitting, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence):
        build(pool_of(), ByDomain(), splitting)


def test_clients_without_test_or_training_images_are_named() -> None:
    alone = pool_of(5, domains=DOMAINS)  # red has two images, the others one
    with pytest.raises(UserError, match="client 'green' has no test images left; use fewer or larger clients"):
        build(alone, ByDomain())
    no_train = pool_of(splits=torch.where(torch.arange(96) % 4 == 1, 2, torch.arange(96) // 48 * 2))
    with pytest.raises(UserError, match="client 'green' has no training images left"):
        build(no_train, ByDomain(), Splitting(from_file=True))
    no_test = pool_of(splits=torch.where(torch.arange(96) % 4 == 2, 0, torch.arange(96) // 48 * 2))
    with pytest.raises(UserError, match="client 'blue' has no test images left"):
        build(no_test, ByDomain(), Splitting(from_file=True))


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"train": 0.5}, r"train \+ val \+ test must be 1, not 0\.9 \(0\.5 \+ "),
    ({"train": 1.2, "val": 0.0, "test": 0.0}, r"train must lie in 0..1, not 1.2"),
    ({"train_fraction": -0.1}, r"train-fraction must lie in 0..1, not -0.1"),
    ({"train_fraction": 0.0}, "train and train-fraction must be positive"),
    ({"train": 0.0, "val": 0.5, "test": 0.5}, "train and train-fraction must be positive"),
    ({"train": 0.8, "val": 0.2, "test": 0.0}, "test = 0 leaves nothing to test on"),
    ({"public": 2.0}, r"public must lie in 0..1, not 2.0"),
])  # fmt: skip
def test_fractions_that_cannot_be_meant(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Splitting(**settings)  # type: ignore[arg-type]


def test_samples_of_every_part() -> None:
    pool = pool_of()
    task = build(pool, ByDomain(), streams=STREAMS)
    client = task.client("blue")
    for part in ("train", "val", "test"):
        rows = task.samples(client, part)
        assert torch.equal(rows.index, getattr(client, part))
        assert rows.images is task.images  # shared, not copied
        assert torch.equal(rows.labels[rows.index], pool.labels[getattr(client, part)])
        assert torch.equal(rows.ids[rows.index], pool.content()[getattr(client, part)])
    original = task.samples(client, "original")
    assert sorted(original.index.tolist()) == client.test.tolist()
    assert original.images is task.images
    corrupted = task.samples(client, "corrupted")
    assert len(corrupted) == len(client.test)
    label_of = dict(zip(pool.content().tolist(), pool.labels.tolist(), strict=True))
    ids = corrupted.ids[corrupted.index].tolist()
    assert sorted(ids) == sorted(pool.content()[client.test].tolist())
    assert corrupted.labels[corrupted.index].tolist() == [label_of[i] for i in ids]
    with pytest.raises(UserError, match=r"needs a public set .* add \[split\] public = 0.1"):
        task.samples(client, "public")


# ---- streams ------------------------------------------------------------------------------------------------------------
def test_stream_orders() -> None:
    streams = {order: Corrupted(order=order) for order in ("stored", "shuffled", "by-class")}  # type: ignore[arg-type]
    task = build(pool_of(200), ByDomain(), streams=streams)
    for client in task.clients:
        seen = {name: stream_bytes(task, client.name, name) for name in streams}
        own = task.ids[client.test].tolist()
        assert seen["stored"][2] == own
        assert seen["shuffled"][2] != own
        assert sorted(seen["shuffled"][2]) == sorted(own)
        assert seen["by-class"][1] == sorted(seen["by-class"][1])
        assert len(set(seen["by-class"][1])) == 3
        arrived = [i for i in seen["shuffled"][2] if task.labels[task.ids == i].item() == 0]
        assert [i for i, label in zip(seen["by-class"][2], seen["by-class"][1], strict=True) if label == 0] == arrived
        by_id = [dict(zip(ids, images, strict=True)) for images, _, ids in seen.values()]
        for i in own:  # the order of arrival changes nothing about an image
            assert torch.equal(by_id[0][i], by_id[1][i])
            assert torch.equal(by_id[0][i], by_id[2][i])
    orders = {tuple(stream_bytes(task, c.name, "shuffled")[0].float().mean((1, 2, 3)).argsort()) for c in task.clients}
    assert len(orders) > 1
    assert {s.setting.order for s in task.streams.values()} == {"stored", "shuffled", "by-class"}


def test_corrupted_images_are_the_clients_own_corrupted() -> None:
    task = build(pool_of(), ByDomain(), streams={"soft": Corrupted(severity=1), "hard": Corrupted(severity=5)})
    clean = dict(zip(task.ids.tolist(), task.images.float(), strict=True))
    distances: dict[str, float] = {}
    for name in task.streams:
        images, _, ids = stream_bytes(task, "red", name)
        away = [float((image.float() - clean[i]).abs().mean()) for image, i in zip(images, ids, strict=True)]
        others = [float((image.float() - clean[i]).abs().mean()) for image, i in zip(images, ids[1:], strict=False)]
        assert sum(away) / len(away) < 0.8 * sum(others) / len(others)
        distances[name] = sum(away)
    assert 0 < distances["soft"] < distances["hard"]


def grown(pool: Pool, count: int = 40) -> Pool:
    """The same pool with one more domain, whose images come first, so that no other image keeps its place."""
    more = pool_of(count, seed=77, domains=("new",))
    columns = {
        "images": more.images,
        "labels": more.labels,
        "domains": torch.full((count,), len(pool.domain_names)),
        "groups": torch.arange(count) + 1000,
        "splits": torch.arange(count) % 3,
    }
    both = {
        name: torch.cat([column, getattr(pool, name)])
        for name, column in columns.items()
        if getattr(pool, name) is not None
    }
    return replace(pool, **both, domain_names=(*pool.domain_names, "new"))


@pytest.mark.parametrize("grouped", [False, True], ids=["single images", "photographs"])
@pytest.mark.parametrize("split", ["file", "drawn"])
def test_another_client_changes_nothing_for_those_who_were_there(split: str, grouped: bool) -> None:
    """Neither what a client trains on nor the bytes of its streams."""
    groups = torch.arange(96) // 8 if grouped else None
    pool = pool_of(splits=torch.arange(96) // 24 % 3, groups=groups)
    splitting = Splitting(from_file=split == "file")
    before = build(pool, ByDomain(), splitting, STREAMS)
    after = build(grown(pool), ByDomain(), splitting, STREAMS)
    assert [c.name for c in after.clients] == [*DOMAINS, "new"]
    for client in before.clients:
        now = after.client(client.name)
        for part in ("train", "val", "test"):
            own, own_now = getattr(client, part), getattr(now, part)
            assert before.ids[own].tolist() == after.ids[own_now].tolist(), part
            assert torch.equal(before.images[own], after.images[own_now])
        for stream in STREAMS:
            images, labels, ids = stream_bytes(before, client.name, stream)
            images_now, labels_now, ids_now = stream_bytes(after, client.name, stream)
            assert torch.equal(images, images_now)
            assert (labels, ids) == (labels_now, ids_now)


# ---- the same seed, the same bytes --------------------------------------------------------------------------------------
def example() -> Task:
    return build(twinned(), ByDomain(), Splitting(unseen=("grey",), public=0.1), STREAMS, seed=5)


def test_same_seed_same_bytes() -> None:
    check_same(example(), example())
    assert len(example().hash) == 16


@pytest.mark.system
def test_same_bytes_in_another_process_with_another_hash_seed() -> None:
    code = "from tests.data.test_task import example, fingerprint; print(fingerprint(example()))"
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(example())


def fingerprint(task: Task) -> str:
    """The hash, and the bytes it stands for."""
    import hashlib

    state = hashlib.sha256()
    for client in everyone(task):
        state.update(
            client.name.encode() + b"".join(getattr(client, p).numpy().tobytes() for p in ("train", "val", "test"))
        )
        for stream in task.streams:
            images, labels, ids = stream_bytes(task, client.name, stream)
            state.update(images.numpy().tobytes() + str((labels, ids)).encode())
    return f"{task.hash} {state.hexdigest()}"


def one_changed(tensor: Tensor, where: int) -> Tensor:
    changed = tensor.clone()
    flat = changed.reshape(-1)
    flat[where] = (flat[where] + 1) % 3
    return changed


Made = tuple[Pool, Partition, Splitting, Mapping[str, Original | Corrupted], int]
CHANGES: dict[str, Callable[[Pool], Made]] = {
    "one pixel": lambda p: (replace(p, images=one_changed(p.images, 5000)), ByDomain(), Splitting(), STREAMS, 0),
    "one label": lambda p: (replace(p, labels=one_changed(p.labels, 50)), ByDomain(), Splitting(), STREAMS, 0),
    "the seed": lambda p: (p, ByDomain(), Splitting(), STREAMS, 1),
    "a fraction": lambda p: (p, ByDomain(), Splitting(train=0.7, val=0.1), STREAMS, 0),
    "train fraction": lambda p: (p, ByDomain(), Splitting(train_fraction=0.5), STREAMS, 0),
    "a public set": lambda p: (p, ByDomain(), Splitting(public=0.1), STREAMS, 0),
    "an unseen client": lambda p: (p, ByDomain(), Splitting(unseen=("red",)), STREAMS, 0),
    "severity": lambda p: (p, ByDomain(), Splitting(), {**STREAMS, "corrupted": Corrupted(severity=4)}, 0),
    "corruptions": lambda p: (p, ByDomain(), Splitting(), {**STREAMS, "corrupted": Corrupted(names=("fog",))}, 0),
    "order of arrival": lambda p: (p, ByDomain(), Splitting(), {**STREAMS, "original": Original(order="stored")}, 0),
    "one stream less": lambda p: (p, ByDomain(), Splitting(), {"original": Original()}, 0),
    "a stream's name": lambda p: (p, ByDomain(), Splitting(), {"first": Original(), "corrupted": Corrupted()}, 0),
    "order of streams": lambda p: (p, ByDomain(), Splitting(), dict(reversed(STREAMS.items())), 0),
    "the clients": lambda p: (p, Iid(clients=4), Splitting(), STREAMS, 0),
    "a client's name": lambda p: (replace(p, domain_names=("rot", *DOMAINS[1:])), ByDomain(), Splitting(), STREAMS, 0),
    "one client more": lambda p: (grown(p), ByDomain(), Splitting(), STREAMS, 0),
    "a class name": lambda p: (replace(p, classes=("a", "b", "d")), ByDomain(), Splitting(), STREAMS, 0),
    "the shape": lambda p: (replace(p, images=p.images.reshape(-1, 1, 8, 24)), ByDomain(), Splitting(), STREAMS, 0),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Task]:
    """A cache that holds the unchanged task."""
    cache = tmp_path_factory.mktemp("warm")
    return cache, build(pool_of(), ByDomain(), Splitting(), STREAMS, 0, cache)


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_changes_with_everything_and_so_does_the_place_in_the_cache(
    change: str, warm: tuple[Path, Task]
) -> None:
    cache, plain = warm
    pool, partition, splitting, streams, seed = CHANGES[change](pool_of())
    fresh = build(pool, partition, splitting, streams, seed)
    assert fresh.hash != plain.hash
    if [*streams.items()] == [*STREAMS.items()]:  # the change is not only seen through what a stream shows
        assert build(pool, partition, splitting, seed=seed).hash != build(pool_of(), ByDomain()).hash
    check_same(build(pool, partition, splitting, streams, seed, cache), fresh)


@dataclass(frozen=True)
class HalfOwned(Partition):
    """Two clients own the first half, nobody the second."""

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        return {"left": torch.arange(24), "right": torch.arange(24, 48)}


def test_the_hash_changes_with_the_public_set_alone() -> None:
    pool = pool_of(splits=torch.arange(96) % 3)
    hashes: dict[int, set[str]] = {}
    for seed in range(12):
        task = build(pool, HalfOwned(), Splitting(from_file=True, public=1 / 96), seed=seed)
        (public,) = task.public.tolist()  # type: ignore[union-attr]
        if public >= 48:  # nothing else differs between these tasks
            assert sum(len(p) for c in task.clients for p in (c.train, c.val, c.test)) == 48
            hashes.setdefault(public, set()).add(task.hash)
    assert len(hashes) > 2
    assert all(len(own) == 1 for own in hashes.values())
    assert len(set.union(*hashes.values())) == len(hashes)


# ---- the cache ----------------------------------------------------------------------------------------------------------
def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing can be corrupted, only read."""

    def refuse(*_: object) -> None:
        raise AssertionError("made again instead of read")

    monkeypatch.setattr(corruptions, "corrupt_mixed", refuse)


def cached(cache: Path) -> Task:
    return build(twinned(), ByDomain(), Splitting(unseen=("grey",), public=0.1), STREAMS, 5, cache)


def test_the_second_build_reads_what_the_first_one_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached(tmp_path)
    forbid(monkeypatch)
    second = cached(tmp_path)
    check_same(first, second)
    assert json.loads(json.dumps(first.provenance, default=str)) == json.loads(
        json.dumps(second.provenance, default=str)
    )
    assert len(list((tmp_path / "tasks").iterdir())) == 1  # nothing temporary is left behind
    with pytest.raises(AssertionError, match="made again"):
        build(twinned(), ByDomain(), Splitting(unseen=("grey",), public=0.1), STREAMS, 6, tmp_path)


@pytest.mark.parametrize("splitting", [Splitting(), Splitting(train_fraction=0.5)], ids=["plain", "small"])
def test_turned_images_are_read_back_too(splitting: Splitting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some images belong to no split any more."""
    turned = Rotation(seen=(0, 30, 90))
    first = build(twinned(), ByDomain(), splitting, STREAMS, cache=tmp_path, rotation=turned)
    assert first.hash != build(twinned(), ByDomain(), splitting, STREAMS).hash
    forbid(monkeypatch)
    second = build(twinned(), ByDomain(), splitting, STREAMS, cache=tmp_path, rotation=turned)
    check_same(first, second)
    for client in first.clients:
        assert torch.equal(first.images[client.train], second.images[client.train])


def truncated(name: str, share: float) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, int(share * (folder / name).stat().st_size))


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def flipped(name: str) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-100] ^= 0x40
        (folder / name).write_bytes(bytes(data))

    return flip


def without(array: str) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        with np.load(folder / "arrays.npz") as file:
            kept = {key: file[key] for key in file.files if key != array}
        np.savez(folder / "arrays.npz", **kept)

    return rewrite


def shortened(array: str) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        with np.load(folder / "arrays.npz") as file:
            changed = {key: file[key][:-1] if key == array else file[key] for key in file.files}
        np.savez(folder / "arrays.npz", **changed)

    return rewrite


DAMAGES = {
    "half of the arrays": truncated("arrays.npz", 0.5),
    "no byte of the arrays": truncated("arrays.npz", 0.0),
    "no arrays": removed("arrays.npz"),
    "other arrays": without("clients/joined"),
    "fewer indices": shortened("clients/joined"),
    "a wrong byte in the arrays": flipped("arrays.npz"),
    "half a stream": truncated("stream-1.npy", 0.5),
    "no byte of a stream": truncated("stream-1.npy", 0.0),
    "no stream": removed("stream-1.npy"),
    "a wrong byte in a stream": flipped("stream-1.npy"),
    "half of the json": truncated("task.json", 0.5),
    "no byte of the json": truncated("task.json", 0.0),
    "no json": removed("task.json"),
    "json of something else": written("task.json", "[1, 2]"),
    "json without streams": written("task.json", '{"hash": "0", "clients": []}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached(tmp_path)
    (entry,) = (tmp_path / "tasks").iterdir()
    assert {path.name for path in entry.iterdir()} == {"arrays.npz", "stream-1.npy", "task.json"}
    DAMAGES[damage](entry)
    check_same(first, cached(tmp_path))
    forbid(monkeypatch)
    check_same(first, cached(tmp_path))  # and is whole from then on


# ---- real photographs ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    folder = os.environ.get("FEDSHIFT_DATA")
    if not folder:
        pytest.skip("FEDSHIFT_DATA is not set: it names the folder with office_caltech10.parquet")
    if not (Path(folder) / "office_caltech10.parquet").is_file():
        pytest.skip(f"there is no office_caltech10.parquet in {folder}")
    columns = {"image": "image", "label": "label", "client": "domain", "split": "split"}
    return load(f"parquet:{folder}/office_caltech10.parquet", columns, 32, 3, tmp_path_factory.mktemp("office"))


def duplicate_sets(pool: Pool) -> list[list[int]]:
    """Images with equal bytes, found without the package."""
    found: dict[bytes, list[int]] = {}
    for i, image in enumerate(pool.images.numpy()):
        found.setdefault(image.tobytes(), []).append(i)
    return [rows for rows in found.values() if len(rows) > 1]


@pytest.mark.parametrize("partition", [ByDomain(), Iid(clients=20)], ids=["by-domain", "iid"])
def test_duplicates_of_office_caltech_never_cross_a_split(office: Pool, partition: Partition) -> None:
    twins = duplicate_sets(office)
    assert (len(twins), sum(map(len, twins))) == (18, 44)
    removed_by_seed = []
    for seed in range(3):
        task = build(office, partition, seed=seed)
        side = {i: part for c in task.clients for part in ("train", "val", "test") for i in getattr(c, part).tolist()}
        for rows in twins:
            held = {side[i] for i in rows if i in side}
            assert len(held) == 1
        removed = sum(len(left.rows) for left in task.left_out if left.reason == COPY)
        assert len(side) + removed == len(office) == 2533
        removed_by_seed.append(removed)
    if isinstance(partition, Iid):
        assert min(removed_by_seed) > 0  # dealt to different clients, so some had to go
    else:
        assert removed_by_seed == [0, 0, 0]  # never across domains, so whole sets are placed together
        assert [c.name for c in task.clients] == ["amazon", "caltech10", "dslr", "webcam"]


# --- choosing settings ----------------------------------------------------------------------------------------------------


def test_tuning_shows_validation_images_and_no_test_image() -> None:
    plain = build(pool_of(), ByDomain(), Splitting(), STREAMS, seed=3)
    tuned = build(pool_of(), ByDomain(), Splitting(tune=True), STREAMS, seed=3)
    for before, after in zip(plain.clients, tuned.clients, strict=True):
        assert torch.equal(before.train, after.train)
        assert torch.equal(after.test, before.val)
        for name in STREAMS:
            shown = tuned.samples(after, name)
            assert len(shown) == len(before.val)
            assert set(shown.ids[shown.index].tolist()).isdisjoint(plain.ids[before.test].tolist())
    assert plain.hash != tuned.hash


def test_tuning_has_no_unseen_clients_because_all_their_images_are_test_images() -> None:
    tuned = build(pool_of(), ByDomain(), Splitting(tune=True, unseen="red"), STREAMS, seed=3)
    assert tuned.unseen == ()
    assert "red" not in {client.name for client in tuned.clients}


def test_tuning_without_validation_images_is_refused() -> None:
    with pytest.raises(UserError, match="tune shows validation images, but val is 0"):
        Splitting(train=0.8, val=0.0, test=0.2, tune=True)
