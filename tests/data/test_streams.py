"""Streams: which images a client is shown under every shift, in which order, and how the evaluator walks along them."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedshift.adapters.none import NoAdaptation
from fedshift.adapters.tent import Tent
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.context import RandomSpec
from fedshift.core.tree import Tree
from fedshift.data import corruptions
from fedshift.data import task as task_module
from fedshift.data.partition import ByDomain
from fedshift.data.pool import Pool
from fedshift.data.streams import STREAMS, Corrupted, LeftOut, Mixture, Natural, Original, OutOfClient, StreamKind
from fedshift.data.task import Splitting, Task, build
from fedshift.engines.base import Compute, Score
from fedshift.engines.parallel import Parallel
from fedshift.engines.reference import chunks
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.methods.fedavg import FedAvg
from fedshift.runs.setup import make_task
from tests.conftest import tiny_arch, tiny_train
from tests.data.test_task import check_same, everyone, fingerprint, stream_bytes

CLASSES = ("ant", "bee", "cat", "dog")
SIZES = {"red": 60, "green": 45, "blue": 30, "grey": 25}
HALF = Splitting(train=0.5, val=0.0, test=0.5)


def random_images(count: int, seed: int, shape: tuple[int, int, int] = (3, 8, 8)) -> Tensor:
    """Distinct images."""
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def pool_of(sizes: Mapping[str, int] = SIZES, seed: int = 0) -> Pool:
    """Domains of different size that also differ in their classes; what a domain holds depends on its name alone."""
    images, labels, domains = [], [], []
    for code, (name, size) in enumerate(sizes.items()):
        own = sum(name.encode()) + 1000 * seed
        chances = torch.rand(len(CLASSES), generator=torch.Generator().manual_seed(own)) + 0.1
        images.append(random_images(size, own))
        labels.append(torch.multinomial(chances, size, replacement=True, generator=torch.Generator().manual_seed(own)))
        domains.append(torch.full((size,), code))
    columns = {"domains": torch.cat(domains), "domain_names": tuple(sizes)}
    return Pool(torch.cat(images), torch.cat(labels), CLASSES, **columns)  # type: ignore[arg-type]


def other_pool(count: int = 150, seed: int = 9, classes: tuple[str, ...] = CLASSES) -> Pool:
    """Another source with the same classes, which it mixes up."""
    labels = torch.randint(0, len(classes), (count,), generator=torch.Generator().manual_seed(seed))
    return Pool(random_images(count, seed), labels, classes)


def lend(pool: Pool) -> Callable[[str, Mapping[str, str]], Pool]:
    """A loader that knows one source."""
    return lambda _source, _columns: pool


def made(
    streams: Mapping[str, StreamKind],
    splitting: Splitting = HALF,
    pool: Pool | None = None,
    other: Pool | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Task:
    load = lend(other_pool() if other is None else other)
    return build(pool or pool_of(), ByDomain(), splitting, streams, seed, cache, load=load)


def shown(task: Task, client: str, stream: str) -> list[tuple[int, int]]:
    """Ids and labels in the order of arrival."""
    _, labels, ids = stream_bytes(task, client, stream)
    return list(zip(ids, labels, strict=True))


def ids_of(task: Task, client: str, stream: str) -> list[int]:
    return stream_bytes(task, client, stream)[2]


def by_id(task: Task, client: str, stream: str) -> dict[int, Tensor]:
    images, _, ids = stream_bytes(task, client, stream)
    return dict(zip(ids, images, strict=True))


def check_pairs(task: Task, truth: Pool, stream: str) -> None:
    """Every image arrives with its own pixels, label and id."""
    label_of = dict(zip(truth.content().tolist(), truth.labels.tolist(), strict=True))
    pixels_of = dict(zip(truth.content().tolist(), truth.images, strict=True))
    for client in everyone(task):
        images, labels, ids = stream_bytes(task, client.name, stream)
        assert labels == [label_of[i] for i in ids]
        assert all(torch.equal(image, pixels_of[i]) for image, i in zip(images, ids, strict=True))


# ---- natural ------------------------------------------------------------------------------------------------------------
def shared_out(task: Task, other: Pool) -> dict[str, list[int]]:
    """The floor formula in plain Python, with training labels where there are some: client -> rows of the other source."""
    truth: dict[str, list[int]] = {client.name: [] for client in everyone(task)}
    own = {client.name: client.train if len(client.train) else client.test for client in everyone(task)}
    histogram = {name: Counter(task.labels[rows].tolist()) for name, rows in own.items()}
    for c in range(len(other.classes)):
        rows = [row for row, label in enumerate(other.labels.tolist()) if label == c]
        total, start = sum(own[c] for own in histogram.values()), 0
        for name, own in histogram.items():
            count = own[c] * len(rows) // total if total else 0
            truth[name] += rows[start : start + count]
            start += count
    return truth


@pytest.mark.parametrize("unseen", [(), ("blue",)], ids=["all train", "one is unseen"])
def test_natural_shares_a_source_out_by_the_floor_formula(unseen: tuple[str, ...]) -> None:
    other = other_pool()
    task = made({"wild": Natural(source="x", order="stored")}, replace(HALF, unseen=unseen), other=other)
    truth, content = shared_out(task, other), other.content().tolist()
    for client in everyone(task):
        assert ids_of(task, client.name, "wild") == [content[row] for row in truth[client.name]]
    check_pairs(task, other, "wild")
    used = [i for client in everyone(task) for i in ids_of(task, client.name, "wild")]
    assert len(set(used)) == len(used)  # nobody is shown another one's image
    assert len(content) - 4 * len(truth) < len(used) < len(content)  # rounding drops something, but little
    counts = [len(rows) for rows in truth.values()]
    assert len(set(counts)) > 1  # and the shares are not simply equal


@pytest.mark.parametrize(("match", "red", "green"), [("test", 0, 1), ("train", 1, 0)])
def test_natural_counts_training_labels_or_test_labels(match: Any, red: int, green: int) -> None:
    """FedTHE's appendix D matches the training histogram, its authors' stand-alone benchmark the local test set."""
    pool = pool_of({"red": 40, "green": 40})
    splits = torch.tensor([0] * 20 + [2] * 20).repeat(2)
    labels = torch.tensor([1] * 20 + [0] * 20 + [0] * 20 + [1] * 20)  # red trains on bees and is tested on ants
    task = made(
        {"wild": Natural(source="x", match=match)},
        Splitting(from_file=True, val=0.0),
        replace(pool, labels=labels, splits=splits),
    )
    assert {label for _, label in shown(task, "red", "wild")} == {red}
    assert {label for _, label in shown(task, "green", "wild")} == {green}


def test_a_class_nobody_is_tested_on_is_shown_to_nobody() -> None:
    pool = pool_of({"red": 40, "green": 40})
    task = made({"wild": Natural(source="x")}, pool=replace(pool, labels=torch.arange(80) % 3))
    classes = {label for client in task.clients for _, label in shown(task, client.name, "wild")}
    assert classes == {0, 1, 2}


def test_natural_streams_are_shuffled_by_default() -> None:
    streams = {"mixed": Natural(source="x"), "stored": Natural(source="x", order="stored")}
    task = made(streams)
    for client in task.clients:
        mixed, stored = (shown(task, client.name, name) for name in streams)
        assert sorted(mixed) == sorted(stored)
        assert mixed != stored


def test_natural_needs_the_same_classes_and_a_source() -> None:
    with pytest.raises(
        UserError, match=r"stream natural: the classes of x \(ant, bee, cow, ...\) are not those of the"
    ):
        made({"wild": Natural(source="x")}, other=other_pool(classes=("ant", "bee", "cow", "dog")))
    with pytest.raises(UserError, match="are not those of the task"):  # the same names for other numbers
        made({"wild": Natural(source="x")}, other=other_pool(classes=("bee", "ant", "cat", "dog")))
    with pytest.raises(UserError, match='stream natural needs a source, for instance source = "parquet:'):
        made({"wild": Natural()})
    with pytest.raises(UserError, match="a stream wants the source 'x', but this task was built without a way to load"):
        build(pool_of(), ByDomain(), streams={"wild": Natural(source="x")})


def write_parquet(path: Path, pictures: Sequence[Image.Image], labels: Sequence[int]) -> None:
    """Pictures and class numbers in the hub's layout, under column names nobody would guess."""

    def png(picture: Image.Image) -> bytes:
        out = io.BytesIO()
        picture.save(out, format="PNG")
        return out.getvalue()

    table = pa.table({"picture": [png(p) for p in pictures], "what": list(labels)})
    features = {"what": {"names": list(CLASSES), "_type": "ClassLabel"}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), path)


def photographs(count: int = 40, size: tuple[int, int] = (13, 11)) -> list[Image.Image]:
    """Colour pictures of another size, neither square nor the task's."""
    draw = np.random.default_rng(3)
    return [Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)) for _ in range(count)]


def wild(path: Path, **stream: object) -> Experiment:
    columns = {"image": "picture", "label": "what"}
    natural = {"name": "wild", "kind": "natural", "source": f"parquet:{path}", "columns": columns, **stream}
    return Experiment.parse({"split": {"train": 0.5, "val": 0.0, "test": 0.5}, "stream": [natural]})


@pytest.mark.parametrize("channels", [1, 3])
def test_natural_images_are_brought_to_the_tasks_size_and_channels(channels: int, tmp_path: Path) -> None:
    pictures = photographs()
    labels = [i % 4 for i in range(len(pictures))]
    write_parquet(tmp_path / "wild.parquet", pictures, labels)
    pool = replace(pool_of(), images=pool_of().images[:, :channels])
    task = make_task(wild(tmp_path / "wild.parquet", order="stored"), 0, pool)
    mode = {1: "L", 3: "RGB"}[channels]
    small = [np.asarray(p.convert(mode).resize((8, 8), Image.Resampling.BICUBIC)) for p in pictures]
    truth = torch.from_numpy(np.stack(small).reshape(len(small), 8, 8, channels)).permute(0, 3, 1, 2)
    rows = shared_out(task, Pool(truth.contiguous(), torch.tensor(labels), CLASSES))
    assert task.streams["wild"].images is not None
    assert tuple(task.streams["wild"].images.shape[1:]) == task.shape == (channels, 8, 8)
    for client in task.clients:
        images, seen, _ = stream_bytes(task, client.name, "wild")
        assert torch.equal(images, truth[rows[client.name]])
        assert seen == [labels[row] for row in rows[client.name]]


def test_a_source_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Parquet file matches"):
        make_task(wild(tmp_path / "nowhere.parquet"), 0, pool_of())


def test_another_content_of_the_other_source_is_another_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same settings and the same path: only what is in the file has changed."""
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    path, pictures, labels = tmp_path / "wild.parquet", photographs(), [i % 4 for i in range(40)]
    write_parquet(path, pictures, labels)
    before = make_task(wild(path, order="stored"), 0, pool_of())
    check_same(before, make_task(wild(path, order="stored"), 0, pool_of()))
    pictures[0].paste((255, 0, 0), (0, 0, 13, 11))  # the first ant, shown to the first client
    write_parquet(path, pictures, labels)
    after = make_task(wild(path, order="stored"), 0, pool_of())
    assert after.hash != before.hash
    assert stream_bytes(after, "red", "wild")[0][0].float().mean((1, 2)).tolist() == [255, 0, 0]
    write_parquet(path, pictures, labels[::-1])
    assert make_task(wild(path, order="stored"), 0, pool_of()).hash not in (before.hash, after.hash)


def test_other_class_names_are_noticed_although_the_task_is_cached(tmp_path: Path) -> None:
    streams = {"wild": Natural(source="x")}
    made(streams, cache=tmp_path)
    with pytest.raises(UserError, match="are not those of the task"):
        made(streams, other=other_pool(classes=("bee", "ant", "cat", "dog")), cache=tmp_path)


def test_natural_images_of_a_task_that_is_not_square(tmp_path: Path) -> None:
    write_parquet(tmp_path / "wild.parquet", photographs(size=(24, 8)), [i % 4 for i in range(40)])
    pool = replace(pool_of(), images=random_images(sum(SIZES.values()), 1, (3, 8, 24)))
    try:
        task = make_task(wild(tmp_path / "wild.parquet"), 0, pool)
    except UserError:
        return  # a sentence would do as well
    assert task.streams["wild"].images is not None
    assert tuple(task.streams["wild"].images.shape[1:]) == task.shape


def test_no_natural_test_image_is_a_duplicate_of_a_training_image() -> None:
    pool = pool_of()
    task = made({"wild": Natural(source="x")}, other=Pool(pool.images, pool.labels, pool.classes))
    trained = {i for client in task.clients for i in task.ids[client.train].tolist()}
    assert not trained & {i for client in task.clients for i in ids_of(task, client.name, "wild")}


# ---- out of client ------------------------------------------------------------------------------------------------------
def test_out_of_client_shows_other_training_clients_test_images() -> None:
    task = made({"ooc": OutOfClient()}, replace(HALF, unseen=("grey",)))
    tests = {client.name: set(task.ids[client.test].tolist()) for client in task.clients}
    trained = {i for client in task.clients for i in task.ids[client.train].tolist()}
    unseen = set(task.ids[task.client("grey").test].tolist())
    assert len(unseen) == 25
    for client in everyone(task):
        seen = ids_of(task, client.name, "ooc")
        others = set().union(*(own for name, own in tests.items() if name != client.name))
        assert len(set(seen)) == len(seen)  # without replacement
        assert len(seen) == min(len(client.test), len(others)) > 0
        assert set(seen) <= others
        assert not set(seen) & (set(task.ids[client.test].tolist()) | set(task.ids[client.train].tolist()))
        assert not set(seen) & (trained | unseen)
    check_pairs(task, pool_of(), "ooc")


def test_out_of_client_shows_all_others_if_those_are_few() -> None:
    task = made({"ooc": OutOfClient()}, pool=pool_of({"red": 80, "green": 10, "blue": 12}))
    assert [len(task.client(name).test) for name in ("red", "green", "blue")] == [40, 5, 6]
    few = [*task.client("green").test.tolist(), *task.client("blue").test.tolist()]
    assert sorted(ids_of(task, "red", "ooc")) == sorted(task.ids[few].tolist())
    assert len(ids_of(task, "green", "ooc")) == 5


def test_out_of_client_is_a_draw_of_every_clients_own() -> None:
    task = made({"ooc": OutOfClient()}, pool=pool_of(dict.fromkeys(SIZES, 40)))
    owner = {i: client.name for client in task.clients for i in task.ids[client.test].tolist()}
    drawn = {client.name: ids_of(task, client.name, "ooc") for client in task.clients}
    for name, ids in drawn.items():
        whose = Counter(owner[i] for i in ids)
        assert whose.total() == 20
        assert set(whose) == set(SIZES) - {name}
        assert min(whose.values()) >= 2  # of all others, not the first ones
    both = set(task.ids[task.client("blue").test].tolist()) | set(task.ids[task.client("grey").test].tolist())
    red, green = (set(drawn[name]) & both for name in ("red", "green"))
    assert red - green  # two clients, two draws: with one order for everybody one would be a part of the other
    assert green - red


def test_out_of_client_shows_no_duplicate_of_an_own_image() -> None:
    pool = pool_of({"red": 40, "green": 40, "blue": 40})
    images = pool.images.clone()
    images[40:60] = images[:20]  # green has twenty of red's pictures
    task = made({"ooc": OutOfClient()}, pool=replace(pool, images=images))
    for client in task.clients:
        assert not set(task.ids[client.test].tolist()) & set(ids_of(task, client.name, "ooc"))


@pytest.mark.parametrize("unseen", [(), ("green",)], ids=["alone", "alone in training"])
def test_one_client_has_nobody_to_draw_from(unseen: tuple[str, ...]) -> None:
    sizes = {"red": 20, **dict.fromkeys(unseen, 20)}
    with pytest.raises(UserError, match="stream out-of-client needs at least two training clients"):
        made({"ooc": OutOfClient()}, replace(HALF, unseen=unseen), pool_of(sizes))


# ---- corrupted ----------------------------------------------------------------------------------------------------------
def severities(task: Task, client: str, stream: str, clean: Mapping[int, Tensor]) -> list[int]:
    """The severity of every image of a stream of contrast alone, in the order of arrival; contrast draws nothing."""
    found = []
    for i, image in zip(ids_of(task, client, stream), stream_bytes(task, client, stream)[0], strict=True):
        looks = [corruptions.corrupt(clean[i][None], "contrast", s, 0, torch.tensor([0]))[0] for s in range(1, 6)]
        matches = [s for s, look in enumerate(looks, 1) if torch.equal(look, image)]
        assert len(matches) == 1
        found += matches
    return found


def clean_images(task: Task) -> dict[int, Tensor]:
    return dict(zip(task.ids.tolist(), task.images, strict=True))


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_one_severity_for_all(severity: int) -> None:
    task = made({"grey": Corrupted(severity=severity, names=("contrast",))}, pool=pool_of({"red": 20, "green": 20}))
    for client in task.clients:
        assert set(severities(task, client.name, "grey", clean_images(task))) == {severity}
        assert set(ids_of(task, client.name, "grey")) == set(task.ids[client.test].tolist())


def test_names_restrict_the_corruptions() -> None:
    names = ("contrast", "pixelate")
    task = made({"two": Corrupted(names=names)})
    clean, used = clean_images(task), Counter[str]()
    for client in task.clients:
        for i, image in by_id(task, client.name, "two").items():
            looks = [corruptions.corrupt(clean[i][None], name, 5, 0, torch.tensor([0]))[0] for name in names]
            found = [name for name, look in zip(names, looks, strict=True) if torch.equal(look, image)]
            assert len(found) == 1
            used.update(found)
    assert min(used[name] for name in names) > 0.3 * used.total()


def test_all_fifteen_corruptions_occur() -> None:
    task = made({"all": Corrupted()}, pool=pool_of({"red": 300, "green": 300}))
    apart = made(
        {name: Corrupted(names=(name,)) for name in corruptions.NAMES}, pool=pool_of({"red": 300, "green": 300})
    )
    looks = {name: by_id(apart, "red", name) for name in corruptions.NAMES}
    used = Counter(
        name
        for i, image in by_id(task, "red", "all").items()
        for name in corruptions.NAMES
        if torch.equal(image, looks[name][i])
    )
    assert set(used) == set(corruptions.NAMES)
    assert max(used.values()) < 0.2 * len(task.client("red").test)


def test_corrupted_out_of_client_corrupts_what_out_of_client_shows() -> None:
    streams = {"ooc": OutOfClient(), "own": Corrupted(severity=4), "both": Corrupted(severity=4, of="ooc")}
    task = made(streams, replace(HALF, unseen=("grey",)))
    corrupted = {i: image for client in task.clients for i, image in by_id(task, client.name, "own").items()}
    clean = clean_images(task)
    for client in everyone(task):
        assert shown(task, client.name, "both") == shown(task, client.name, "ooc")
        for i, image in by_id(task, client.name, "both").items():
            assert torch.equal(image, corrupted[i])  # the same picture is corrupted in the same way, whoever sees it
            assert not torch.equal(image, clean[i])


def test_corrupting_a_stream_keeps_its_choice() -> None:
    """Not only out-of-client: what an earlier stream leaves out stays out."""
    streams = {"few": Original(fraction=0.5, without=("ant",)), "bad": Corrupted(of="few", names=("contrast",))}
    task = made(streams)
    for client in task.clients:
        assert shown(task, client.name, "bad") == shown(task, client.name, "few")
        assert set(severities(task, client.name, "bad", clean_images(task))) == {5}


@pytest.mark.parametrize("order", ["shuffled", "stored", "by-class"])
@pytest.mark.parametrize("severity", [2, 5])
def test_gradual_severity_rises_along_the_stream(order: Any, severity: int) -> None:
    streams = {
        "slow": Corrupted(gradual=True, severity=severity, names=("contrast",), order=order),
        "plain": Original(order=order),
    }
    task = made(streams)
    for client in task.clients:
        steps = severities(task, client.name, "slow", clean_images(task))
        assert steps == sorted(steps)
        counts = Counter(steps)
        assert set(counts) == set(range(1, severity + 1))
        assert max(counts.values()) - min(counts.values()) <= 1  # in equal steps
        assert shown(task, client.name, "slow") == shown(task, client.name, "plain")


def test_gradual_images_are_those_of_the_fixed_severities() -> None:
    fixed = {f"at {s}": Corrupted(severity=s, of="ooc") for s in range(1, 6)}
    task = made({"ooc": OutOfClient(), **fixed, "slow": Corrupted(gradual=True, of="ooc")})
    for client in task.clients:
        images, _, ids = stream_bytes(task, client.name, "slow")
        assert ids == ids_of(task, client.name, "ooc")
        looks = [by_id(task, client.name, name) for name in fixed]
        for place, (i, image) in enumerate(zip(ids, images, strict=True)):
            assert torch.equal(image, looks[5 * place // len(ids)][i])


@pytest.mark.parametrize("order", ["shuffled", "stored", "by-class"])
def test_gradual_keeps_the_fraction_once(order: Any) -> None:
    streams = {
        "slow": Corrupted(gradual=True, fraction=0.5, names=("contrast",), order=order),
        "plain": Original(fraction=0.5, order=order),
    }
    task = made(streams)
    for client in task.clients:
        assert shown(task, client.name, "slow") == shown(task, client.name, "plain")
        assert set(severities(task, client.name, "slow", clean_images(task))) == {1, 2, 3, 4, 5}


def test_gradual_without_a_class_still_goes_from_the_first_severity_to_the_last() -> None:
    task = made({"slow": Corrupted(gradual=True, without=("ant",), names=("contrast",), order="by-class")})
    for client in task.clients:
        counts = Counter(severities(task, client.name, "slow", clean_images(task)))
        assert set(counts) == {1, 2, 3, 4, 5}
        assert max(counts.values()) - min(counts.values()) <= 1


BEFORE = {
    "plain": Original(),
    "bad": Corrupted(),
    "slow": Corrupted(gradual=True),
    "twice": Corrupted(severity=2, of="bad"),
    "mix": Mixture(of=("plain", "bad")),
    "few": Corrupted(fraction=0.3, order="by-class"),
}


def test_another_client_changes_no_byte_of_the_others_streams() -> None:
    before = made(BEFORE)
    after = made(BEFORE, pool=pool_of({"aaa": 33, **SIZES}))
    assert [client.name for client in after.clients] == ["aaa", *SIZES]
    for client, stream in itertools.product(SIZES, BEFORE):
        images, labels, ids = stream_bytes(before, client, stream)
        now, labels_now, ids_now = stream_bytes(after, client, stream)
        assert (labels, ids) == (labels_now, ids_now)
        assert torch.equal(images, now)


@pytest.mark.parametrize("changes", [{"chunk": 3}, {"passes": 4}, {"reset": "never"}, {"reset": "chunk", "chunk": 1}])
def test_how_a_stream_is_shown_does_not_change_its_bytes(changes: dict[str, Any]) -> None:
    kinds = {"bad": Corrupted(), "slow": Corrupted(gradual=True), "ooc": OutOfClient()}
    plain, other = made(kinds), made({name: replace(kind, **changes) for name, kind in kinds.items()})
    for client, stream in itertools.product(SIZES, kinds):
        images, labels, ids = stream_bytes(plain, client, stream)
        again, labels_again, ids_again = stream_bytes(other, client, stream)
        assert (labels, ids) == (labels_again, ids_again)
        assert torch.equal(images, again)
        setting = other.streams[stream].setting
        assert {key: getattr(setting, key) for key in changes} == changes
    assert plain.hash != other.hash  # but it is another task: the numbers mean something else


# ---- mixture ------------------------------------------------------------------------------------------------------------
PARTS = ("plain", "bad", "ooc", "wild")
FIVE = {
    "plain": Original(),
    "bad": Corrupted(),
    "ooc": OutOfClient(),
    "wild": Natural(source="x"),
    "mix": Mixture(of=PARTS),
}


def origins(task: Task, client: str, parts: Sequence[str] = PARTS) -> list[tuple[str, int]]:
    """The part and the id every image of the mixture came from, found by its pixels."""
    book: dict[bytes, tuple[str, int, int]] = {}
    for part in parts:
        images, labels, ids = stream_bytes(task, client, part)
        for image, label, i in zip(images, labels, ids, strict=True):
            assert image.numpy().tobytes() not in book
            book[image.numpy().tobytes()] = (part, i, label)
    images, labels, _ = stream_bytes(task, client, "mix")
    found = [book[image.numpy().tobytes()] for image in images]
    assert labels == [label for _, _, label in found]
    return [(part, i) for part, i, _ in found]


def test_a_mixture_has_equal_parts_of_every_stream() -> None:
    task = made(FIVE, replace(HALF, unseen=("grey",)), other=other_pool(60))
    smallest = []
    for client in everyone(task):
        found = origins(task, client.name)
        assert len(set(found)) == len(found)  # nothing is taken twice
        sizes = {part: len(ids_of(task, client.name, part)) for part in PARTS}
        assert Counter(part for part, _ in found) == dict.fromkeys(PARTS, min(sizes.values()))
        smallest.append(min(sizes, key=lambda part: sizes[part]))
        ids = ids_of(task, client.name, "mix")
        assert len(set(ids)) == len(ids)  # a clean picture and its corruption are two samples
        blocks = [part for part, _ in itertools.groupby(part for part, _ in found)]
        assert len(blocks) > 2 * len(PARTS)  # shuffled together
    assert set(smallest) == {"wild"}  # the natural part is there as a whole, the others are drawn from


def test_the_part_that_is_drawn_is_a_random_one() -> None:
    few = Corrupted(fraction=0.2, names=("contrast",))
    streams = {"plain": Original(), "bad": few, "mix": Mixture(of=("plain", "bad"))}
    task = made(streams, pool=pool_of({"red": 200, "green": 200}))
    for client in task.clients:
        taken = [i for part, i in origins(task, client.name, ("plain", "bad")) if part == "plain"]
        arrived = ids_of(task, client.name, "plain")
        assert len(taken) == 20
        places = sorted(arrived.index(i) for i in taken)
        assert places[0] < 25
        assert places[-1] > 75
        assert set(taken) != set(ids_of(task, client.name, "bad"))  # drawn for itself


def test_the_smallest_part_may_be_any() -> None:
    streams = {
        "plain": Original(fraction=0.2),
        "bad": Corrupted(without=("ant", "bee")),
        "ooc": OutOfClient(),
        "mix": Mixture(of=("ooc", "bad", "plain")),
    }
    task = made(streams)
    for client in task.clients:
        size = min(len(ids_of(task, client.name, part)) for part in streams if part != "mix")
        found = Counter(part for part, _ in origins(task, client.name, ("plain", "bad", "ooc")))
        assert found == {"plain": size, "bad": size, "ooc": size}


def test_earlier_streams_only() -> None:
    sentence = "stream mixture is made of stream 'bad', which must come before it; before it there are: plain$"
    with pytest.raises(UserError, match=sentence):
        made({"plain": Original(), "mix": Mixture(of=("plain", "bad")), "bad": Corrupted()})
    with pytest.raises(UserError, match="stream mixture is made of stream 'mix', which must come before it"):
        made({"plain": Original(), "mix": Mixture(of=("plain", "mix"))})
    with pytest.raises(UserError, match=r"stream corrupted is made of stream 'ooc', .* there are: none$"):
        made({"bad": Corrupted(of="ooc"), "ooc": OutOfClient()})
    for of in ((), ("plain",)):
        with pytest.raises(UserError, match="stream mixture needs at least two different earlier streams, for"):
            made({"plain": Original(), "mix": Mixture(of=of)})


def test_a_stateless_predictors_mixture_accuracy_is_the_mean_of_its_parts() -> None:
    """Methods 3.10: on the same samples."""
    task = made(FIVE, replace(HALF, unseen=("grey",)), other=other_pool(80))
    kept: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for client, part in itertools.product(everyone(task), PARTS):
        chosen = {i for origin, i in origins(task, client.name) if origin == part}
        index = task.streams[part].index[client.name]
        ids = task.streams[part].ids[index].tolist()
        kept[part][client.name] = index[[place for place, i in enumerate(ids) if i in chosen]]
    streams = {part: replace(task.streams[part], index=kept[part]) for part in PARTS}
    task = replace(task, streams={**streams, "mix": task.streams["mix"]})
    arch = tiny_arch()
    plain = NoAdaptation(arch, FedAvg(arch=arch, train=tiny_train()).predict)
    deployed = {client.name: {"model": arch.init(n)} for n, client in enumerate(everyone(task))}
    scores = Sequential().evaluate(plain, deployed, task, list(task.streams), seed=0)
    accuracies = set()
    for client in everyone(task):
        parts = [scores[client.name, part] for part in PARTS]
        accuracies |= {part.accuracy for part in parts}
        assert scores[client.name, "mix"].samples == sum(part.samples for part in parts)
        assert scores[client.name, "mix"].accuracy == pytest.approx(sum(part.accuracy for part in parts) / 4, abs=1e-12)
        assert scores[client.name, "mix"].loss == pytest.approx(sum(part.loss for part in parts), rel=1e-4)
    assert len(accuracies) > 3


# ---- left out -----------------------------------------------------------------------------------------------------------
def test_left_out_shows_everybody_the_unseen_clients_data() -> None:
    pool = pool_of()
    task = made({"gone": LeftOut()}, replace(HALF, unseen=("green", "grey")), pool)
    assert pool.domains is not None
    owned = ((pool.domains == 1) | (pool.domains == 3)).nonzero().flatten()
    for client in everyone(task):
        assert sorted(ids_of(task, client.name, "gone")) == sorted(pool.content()[owned].tolist())
        assert ids_of(task, client.name, "gone") == ids_of(task, "red", "gone")
    check_pairs(task, pool, "gone")


def test_left_out_needs_unseen_clients() -> None:
    with pytest.raises(UserError, match=r"stream left-out needs unseen clients; name the domain with \[split\] unseen"):
        made({"gone": LeftOut()})


# ---- options of every kind ----------------------------------------------------------------------------------------------
EVERY: dict[str, StreamKind] = {
    "original": Original(),
    "corrupted": Corrupted(names=("contrast", "pixelate")),
    "out-of-client": OutOfClient(),
    "natural": Natural(source="x"),
    "left-out": LeftOut(),
    "mixture": Mixture(of=("a", "b")),
}
FIRST = {"a": Original(), "b": OutOfClient()}
UNSEEN = replace(HALF, unseen=("grey",))


def variants(kind: str, **options: Sequence[Any]) -> Task:
    """One kind under several values of one option; streams are called after the values."""
    ((name, values),) = options.items()
    return made({**FIRST, **{str(value): replace(EVERY[kind], **{name: value}) for value in values}}, UNSEEN)


def test_every_kind_is_tested_here() -> None:
    assert set(EVERY) == set(STREAMS)


@pytest.mark.parametrize("kind", EVERY)
def test_orders_of_arrival(kind: str) -> None:
    task = variants(kind, order=("shuffled", "stored", "by-class"))
    for client in everyone(task):
        mixed, stored, sorted_ = (shown(task, client.name, order) for order in ("shuffled", "stored", "by-class"))
        assert sorted(mixed) == sorted(stored) == sorted(sorted_)
        assert mixed != stored
        labels = [label for _, label in sorted_]
        assert labels == sorted(labels)
        assert len(set(labels)) > 1
        assert [label for _, label in mixed] != labels
        for c in set(labels):  # within a class they come as in the shuffled stream
            assert [i for i, label in sorted_ if label == c] == [i for i, label in mixed if label == c]
        if kind in ("original", "corrupted"):
            assert [i for i, _ in stored] == task.ids[client.test].tolist()


@pytest.mark.parametrize("order", ["shuffled", "stored", "by-class"])
@pytest.mark.parametrize("kind", EVERY)
def test_a_fraction_is_part_of_a_larger_fraction(kind: str, order: Any) -> None:
    fractions = (0.001, 0.2, 0.5, 0.75, 1.0)
    streams = {str(f): replace(EVERY[kind], fraction=f, order=order) for f in fractions}
    task, again = made({**FIRST, **streams}, UNSEEN), made({**FIRST, **streams}, UNSEEN)
    for client in everyone(task):
        whole = shown(task, client.name, "1.0")
        assert len(whole) > 10
        for f in fractions:
            part = shown(task, client.name, str(f))
            assert len(part) == max(1, round(f * len(whole)))
            assert part == shown(again, client.name, str(f))
            assert part == [sample for sample in whole if sample in set(part)]  # in the order of the whole
        for smaller, larger in itertools.pairwise(fractions):
            assert set(shown(task, client.name, str(smaller))) <= set(shown(task, client.name, str(larger)))


@pytest.mark.parametrize("kind", EVERY)
def test_a_fraction_is_drawn_and_does_not_depend_on_the_order(kind: str) -> None:
    streams = {o: replace(EVERY[kind], fraction=0.4, order=o) for o in ("shuffled", "stored", "by-class")}  # type: ignore[arg-type]
    task = made({**FIRST, "all": replace(EVERY[kind], order="stored"), **streams}, UNSEEN)
    for client in everyone(task):
        kept = [set(shown(task, client.name, order)) for order in streams]
        assert kept[0] == kept[1] == kept[2]
        whole = shown(task, client.name, "all")
        assert kept[0] != set(whole[: len(kept[0])])  # drawn, not cut off


@pytest.mark.parametrize("kind", EVERY)
def test_classes_can_be_left_out(kind: str) -> None:
    task = variants(kind, without=((), ("bee",), ("dog", "ant")))
    for client in everyone(task):
        whole = shown(task, client.name, "()")
        for gone in (("bee",), ("dog", "ant")):
            codes = {CLASSES.index(name) for name in gone}
            assert shown(task, client.name, str(gone)) == [s for s in whole if s[1] not in codes]
    everything = {label for client in everyone(task) for _, label in shown(task, client.name, "()")}
    assert everything == {0, 1, 2, 3}


def test_the_fraction_is_one_of_the_classes_that_are_left() -> None:
    task = made({"some": Original(without=("cat",), fraction=0.5)})
    for client in task.clients:
        left = sum(label != 2 for label in task.labels[client.test].tolist())
        assert len(shown(task, client.name, "some")) == round(0.5 * left)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "class": (
        lambda: made({"x": Original(without=("cow",))}),
        "stream original: there is no class 'cow' to leave out; there are: ant, bee, cat, dog",
    ),
    "passes": (lambda: OutOfClient(passes=0), "stream out-of-client: passes must be at least 1 and chunk not negative"),
    "chunk": (lambda: LeftOut(chunk=-1), "stream left-out: passes must be at least 1 and chunk not negative"),
    "no fraction": (lambda: Natural(fraction=0.0), r"stream natural: fraction must lie in \(0, 1\], not 0.0"),
    "large fraction": (lambda: Corrupted(fraction=1.5), r"stream corrupted: fraction must lie in \(0, 1\], not 1.5"),
    "severity": (lambda: Corrupted(severity=6), "severity must be 1 to 5, not 6"),
    "no severity": (lambda: Corrupted(severity=0), "severity must be 1 to 5, not 0"),
    "corruption": (lambda: Corrupted(names=("hail",)), "there is no corruption 'hail'; there are: gaussian-noise, "),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_sentences(case: str) -> None:
    call, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence):
        call()


@pytest.mark.parametrize(("stream", "sentence"), [
    ({"kind": "original", "order": "random"}, "stream 's': order = 'random' is not valid"),
    ({"kind": "original", "reset": "always"}, "stream 's': reset = 'always' is not valid"),
    ({"kind": "original", "fractoin": 0.5}, "stream 's' has no option 'fractoin'; did you mean 'fraction'"),
    ({"kind": "origin"}, "there is no stream kind 'origin'; there are: corrupted, left-out, "),
])  # fmt: skip
def test_mistakes_in_a_file_are_sentences(stream: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_task(Experiment.parse({"stream": [{"name": "s", **stream}]}), 0, pool_of())


# ---- along the stream: reset, passes, chunk -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Tally(Adapter):
    """Answers with the number of chunks it has seen (modulo the classes), and remembers what it was given."""

    size: int | None = None
    log: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def batch(self) -> int | None:
        return self.size

    def init(self, deployed: Tree) -> Tree:
        return {**deployed, "tally": {"chunks": torch.zeros((), dtype=torch.int64)}}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        count = state["tally"]["chunks"]
        self.log.append((int(count), (x[:, 0, 0, 0] * 255).round().int().tolist()))
        logits = torch.zeros(len(x), len(CLASSES), dtype=x.dtype)
        logits[:, int(count) % len(CLASSES)] = 5.0
        return Output(logits, x, {}, {}), {**state, "tally": {"chunks": count + 1}}


DEPLOYED: Tree = {"model": {"w": torch.zeros(1)}}
LABELS = 3 * (0, 1, 2, 3, 1, 2, 3, 1, 0, 2, 2)


def numbered_task(streams: Mapping[str, StreamKind], count: int = 22) -> Task:
    """One client whose images say their own number, in the order of arrival; four train."""
    pool = pool_of({"red": count + 4})
    images = pool.images.clone()
    images[:, 0, 0, 0] = torch.arange(count + 4)
    labels = torch.tensor([0] * 4 + [LABELS[i % len(LABELS)] for i in range(count)])
    splits = torch.tensor([0] * 4 + [2] * count)
    pool = replace(pool, images=images, labels=labels, splits=splits)
    return build(pool, ByDomain(), Splitting(from_file=True, val=0.0), streams)


def walk(adapter: Adapter, task: Task) -> dict[str, Score]:
    scores = Sequential().evaluate(adapter, {"red": DEPLOYED}, task, list(task.streams), seed=0)
    return {part: score for (_, part), score in scores.items()}


def expected(streams: Mapping[str, StreamKind], cuts: Sequence[int], count: int = 22) -> tuple[list, dict[str, int]]:
    """Reset, passes and chunks in plain Python: what Tally is given, and how often it is right."""
    log, correct, seen = [], {}, 0
    for name, stream in streams.items():
        if stream.reset == "stream":
            seen = 0
        for _ in range(stream.passes):
            right, start = 0, 0
            for size in cuts:
                if stream.reset == "chunk":
                    seen = 0
                rows = range(start, min(start + size, count))
                log.append((seen, [4 + row for row in rows]))
                right += sum(LABELS[row % len(LABELS)] == seen % 4 for row in rows)
                seen, start = seen + 1, start + size
            correct[name] = right  # of the last pass
    return log, correct


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("reset", ["stream", "never", "chunk"])
def test_reset_and_passes(reset: Any, passes: int) -> None:
    one = Original(order="stored", reset=reset, passes=passes, chunk=5)
    streams = {"first": one, "second": one, "third": replace(one, passes=1)}
    adapter = Tally(tiny_arch(), None)  # type: ignore[arg-type]
    scores = walk(adapter, numbered_task(streams))
    log, correct = expected(streams, (5, 5, 5, 5, 2))
    assert adapter.log == log
    assert {part: score.correct for part, score in scores.items()} == correct
    assert {score.samples for score in scores.values()} == {22}  # counted once, however often they are shown


def test_only_the_last_pass_is_scored() -> None:
    """Wrong all through the first pass, right all through the second."""

    @dataclass(frozen=True)
    class Late(Tally):
        def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
            output, after = super().predict(state, x, draws)
            right = int(state["tally"]["chunks"]) >= 3
            logits = torch.tensor([[0.0, 9.0] if right else [9.0, 0.0]]).repeat(len(x), 1)
            return output._replace(logits=logits), after

    pool = replace(pool_of({"red": 20}), labels=torch.ones(20, dtype=torch.int64))
    streams = {str(n): Original(passes=n, chunk=4) for n in (1, 2)}
    task = build(pool, ByDomain(), HALF, streams)
    scores = walk(Late(tiny_arch(), None), task)  # type: ignore[arg-type]
    assert (scores["1"].correct, scores["1"].samples) == (0, 10)
    assert (scores["2"].correct, scores["2"].samples) == (10, 10)
    assert scores["1"].loss == pytest.approx(10 * 9.0, rel=1e-3)
    assert scores["2"].loss == pytest.approx(0.0, abs=0.01)


def test_a_stream_that_starts_anew_does_not_inherit_but_may_leave_a_state_behind() -> None:
    """The state that ``never`` carries on is that of the stream just before, whatever that one's own rule is."""
    kinds = {"a": "stream", "b": "never", "c": "stream", "d": "never", "e": "chunk", "f": "never"}
    streams = {name: Original(order="stored", reset=reset, chunk=11) for name, reset in kinds.items()}  # type: ignore[arg-type]
    adapter = Tally(tiny_arch(), None)  # type: ignore[arg-type]
    walk(adapter, numbered_task(streams))
    assert [seen for seen, _ in adapter.log] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 1, 2]


def test_clients_start_anew_whatever_the_reset() -> None:
    task = made({"a": Original(reset="never", chunk=4), "b": Original(reset="never", chunk=4)})
    adapter = Tally(tiny_arch(), None)  # type: ignore[arg-type]
    Sequential().evaluate(adapter, dict.fromkeys(SIZES, DEPLOYED), task, ["a", "b"], seed=0)
    per_client = [2 * -(-len(client.test) // 4) for client in task.clients]
    assert [seen for seen, _ in adapter.log] == [n for count in per_client for n in range(count)]


@pytest.mark.parametrize(("chunk", "batch", "sizes"), [
    (0, None, [22]),
    (1, None, [1] * 22),
    (5, None, [5, 5, 5, 5, 2]),
    (7, None, [7, 7, 7, 1]),  # what arrives alone is answered alone
    (50, None, [22]),
    (0, 8, [8, 8, 6]),
    (0, 7, [7, 7, 8]),  # a last one alone joins the batch before it
    (5, 8, [5, 5, 5, 5, 2]),  # what arrives together is less than the adapter would like
    (16, 8, [8, 8, 6]),
    (1, 8, [1] * 22),
    (7, 8, [7, 7, 7, 1]),  # also where the adapter would like batches
])  # fmt: skip
def test_chunks(chunk: int, batch: int | None, sizes: list[int]) -> None:
    streams = {"s": Original(order="stored", chunk=chunk)}
    adapter = Tally(tiny_arch(), None, batch)  # type: ignore[arg-type]
    scores = walk(adapter, numbered_task(streams))
    log, correct = expected(streams, sizes)
    assert [len(rows) for _, rows in adapter.log] == sizes
    assert adapter.log == log
    assert scores["s"].correct == correct["s"]
    arrivals = torch.arange(22).split(chunk or 22)
    assert [len(part) for arrival in arrivals for part in chunks(arrival, batch)] == sizes


@pytest.mark.parametrize(("chunk", "batch", "count"), [(8, 4, 16), (600, None, 1200)])
def test_a_chunk_larger_than_the_adapters_batch_is_one_chunk_all_the_same(
    chunk: int, batch: int | None, count: int
) -> None:
    """``reset = "chunk"`` is about what arrives together, which is the stream's setting and not the adapter's."""
    task = numbered_task({"s": Original(order="stored", reset="chunk", chunk=chunk)}, min(count, 22))
    index = task.streams["s"].index["red"].repeat(-(-count // 22))[:count]
    task = replace(task, streams={"s": replace(task.streams["s"], index={"red": index})})
    adapter = Tally(tiny_arch(), None, batch)  # type: ignore[arg-type]
    walk(adapter, task)
    place, resets = 0, []
    for seen, rows in adapter.log:
        resets += [place] if seen == 0 else []
        place += len(rows)
    assert resets == [0, chunk]


@dataclass(frozen=True)
class Fitted(Tally):
    """Sees the whole stream first, and tells how much of it it had seen when it answered."""

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        before = int(state["fitted"]["samples"]) if "fitted" in state else 0
        return {**state, "fitted": {"samples": torch.tensor(before + len(x))}}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        output, after = super().predict(state, x, draws)
        fitted = int(state["fitted"]["samples"]) if "fitted" in state else 0
        self.log[-1] = (fitted, self.log[-1][1])
        return output, after


@pytest.mark.parametrize("passes", [1, 2])
def test_adapters_that_fit_see_the_whole_stream_first_and_once(passes: int) -> None:
    task = numbered_task({"s": Original(chunk=6, passes=passes), "few": Original(chunk=6, fraction=0.5, passes=passes)})
    adapter = Fitted(tiny_arch(), None)  # type: ignore[arg-type]
    walk(adapter, task)
    assert [fitted for fitted, _ in adapter.log] == [22] * 4 * passes + [11] * 2 * passes


def test_adapters_that_fit_are_fitted_when_they_answer() -> None:
    adapter = Fitted(tiny_arch(), None)  # type: ignore[arg-type]
    walk(adapter, numbered_task({"s": Original(chunk=6, reset="chunk")}))
    assert min(fitted for fitted, _ in adapter.log) > 0


@dataclass(frozen=True)
class Noisy(Adapter):
    """Guesses: its answers are draws, one for each sample."""

    def draws(self) -> dict[str, RandomSpec]:
        return {"guess": RandomSpec("normal", (len(CLASSES),))}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        return Output(draws["guess"], x, {}, {}), state


def test_draws_belong_to_samples_and_not_to_chunks() -> None:
    streams = {str(chunk): Corrupted(chunk=chunk, passes=1 + chunk % 2) for chunk in (0, 1, 5)}
    task = made({**streams, "sorted": Corrupted(order="by-class")})
    scores = {}
    for seed in (0, 1):
        scores[seed] = Sequential().evaluate(
            Noisy(tiny_arch(), None),  # type: ignore[arg-type]
            dict.fromkeys(SIZES, DEPLOYED),
            task,
            list(task.streams),
            seed,
        )
    for client in SIZES:
        for stream in task.streams:
            assert scores[0][client, stream].correct == scores[0][client, "0"].correct
            assert scores[0][client, stream].loss == pytest.approx(scores[0][client, "0"].loss, rel=1e-5)
        assert scores[1][client, "0"].loss != pytest.approx(scores[0][client, "0"].loss, rel=1e-5)


# ---- the same for every engine, process and cache -----------------------------------------------------------------------
RESETS: dict[str, StreamKind] = {
    **FIVE,
    "again": Original(reset="never", passes=2, chunk=3),
    "bits": Corrupted(reset="chunk", chunk=4, gradual=True),
    "gone": LeftOut(order="by-class", reset="never", fraction=0.7),
    "rest": OutOfClient(without=("ant",), order="stored", passes=2),
}


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    engine = Parallel(Compute(), workers=2)
    yield engine
    engine.close()


@pytest.mark.grid
@pytest.mark.parametrize("which", ["tally", "tent", "noisy"])
def test_engines_give_the_same_scores(which: str, parallel: Parallel) -> None:
    task = made(RESETS, UNSEEN)
    arch = tiny_arch(norm=True)
    predict = FedAvg(arch=arch, train=tiny_train()).predict
    adapters = {
        "tally": Tally(arch, predict),
        "tent": Tent(arch, predict, lr=0.05, batch_size=8),
        "noisy": Noisy(arch, predict),
    }
    adapter: Adapter = adapters[which]
    deployed = {client.name: {"model": arch.init(n)} for n, client in enumerate(everyone(task))}
    reference = Sequential().evaluate(adapter, deployed, task, list(RESETS), seed=4)
    assert list(reference) == [(client.name, part) for client in everyone(task) for part in RESETS]
    assert len({score.accuracy for score in reference.values()}) > 10
    assert parallel.evaluate(adapter, deployed, task, list(RESETS), seed=4) == reference
    stacked = Vmapped(Compute()).evaluate(adapter, deployed, task, list(RESETS), seed=4)
    assert list(stacked) == list(reference)
    for key, score in reference.items():  # stacked streams round the last digits of a loss otherwise
        assert (stacked[key].samples, stacked[key].correct) == (score.samples, score.correct)
        assert stacked[key].loss == pytest.approx(score.loss, rel=1e-6)


def example(cache: Path | None = None) -> Task:
    return made(RESETS, replace(UNSEEN, public=0.1), seed=3, cache=cache)


@pytest.mark.system
def test_same_bytes_in_another_process_with_another_hash_seed() -> None:
    code = "from tests.data.test_streams import example, fingerprint; print(fingerprint(example()))"
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(example())


def test_streams_of_a_cached_task_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, first = example(), example(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("made again instead of read")

    monkeypatch.setattr(task_module, "_make", refuse)
    second = example(tmp_path)
    check_same(fresh, first)
    check_same(first, second)
    assert fingerprint(first) == fingerprint(second) == fingerprint(fresh)
    with pytest.raises(AssertionError, match="made again"):
        made({**RESETS, "rest": OutOfClient(without=("bee",))}, replace(UNSEEN, public=0.1), seed=3, cache=tmp_path)


def test_every_stream_depends_on_the_seed() -> None:
    kinds = {**FIVE, "gone": LeftOut(), "slow": Corrupted(gradual=True)}
    one, two = made(kinds, UNSEEN, seed=0), made(kinds, UNSEEN, seed=1)
    for stream in kinds:
        assert shown(one, "red", stream) != shown(two, "red", stream)


def test_making_streams_leaves_the_sources_alone() -> None:
    pool, other = pool_of(), other_pool()
    copies = pool.images.clone(), other.images.clone()
    made(RESETS, UNSEEN, pool, other)
    assert torch.equal(pool.images, copies[0])
    assert torch.equal(other.images, copies[1])


def test_no_stream_shows_a_training_or_public_image() -> None:
    """The other source aside, which has images of its own."""
    task = made(RESETS, replace(UNSEEN, public=0.15))
    assert task.public is not None
    kept = set(task.ids[task.public].tolist()) | {i for c in task.clients for i in task.ids[c.train].tolist()}
    for client, stream in itertools.product(everyone(task), RESETS):
        if stream != "mix":
            assert not kept & set(ids_of(task, client.name, stream))
    images = {image.numpy().tobytes() for image in task.images[[*task.public.tolist()]]}
    for client in everyone(task):
        assert not images & {image.numpy().tobytes() for image in stream_bytes(task, client.name, "mix")[0]}
