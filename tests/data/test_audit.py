"""What an auditor asks: groups in one part, every image with its true reason, counts that add up, subgroups."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.data import audit
from fedshift.data._division import BEYOND, HIDDEN, NOBODY
from fedshift.data.partition import ByDomain, ByUser, Iid
from fedshift.data.pool import Pool
from fedshift.data.sources import from_arrays
from fedshift.data.split import COPY, SIBLING
from fedshift.data.streams import Corrupted, LeftOut, Mixture, Natural, Original, OutOfClient, StreamKind
from fedshift.data.task import Splitting, Task, build
from fedshift.errors import UserError

SITES = ("berlin", "lima", "osaka", "quito")
CLASSES = ("nevus", "melanoma", "keratosis", "fibroma")


def lesions(seed: int, patients: int = 160, travel: float = 0.04, copies: int = 4, missing: float = 0.0) -> Pool:
    """Patients with one to six images, mostly of one class, at skewed sites; some travel, some images are copied."""
    rng = np.random.default_rng(seed)
    groups = np.arange(patients).repeat(rng.geometric(0.4, patients).clip(max=6))
    home = rng.choice(4, patients, p=[0.5, 0.25, 0.15, 0.1])
    home[:12] = np.arange(12) % 4  # everybody has some
    turn = [int((home[:g] == home[g]).sum()) for g in range(patients)]  # the how-manieth of the site
    own = rng.choice(4, patients, p=[0.6, 0.2, 0.15, 0.05])
    count = len(groups)
    sites = np.where(rng.random(count) < travel, rng.integers(0, 4, count), home[groups])
    labels = np.where(rng.random(count) < 0.2, rng.integers(0, 4, count), own[groups])
    images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    for a, b in rng.integers(0, count, (copies, 2)):
        images[a] = images[b]
    ids = [None if rng.random() < missing else f"P{group:03d}" for group in groups]
    sex = ["" if group % 7 == 0 else "fm"[group % 2] for group in groups]
    return from_arrays(
        images,
        [CLASSES[label] for label in labels],
        domains=[SITES[site] for site in sites],
        users=[f"u{group % 9}" for group in groups],
        groups=ids,
        splits=[
            ("train", "train", "train", "val", "test")[(turn[g] + (i % 20 == 0)) % 5] for i, g in enumerate(groups)
        ],
        classes=CLASSES,
        attributes={"sex": sex, "number": list(range(count))},
    )


SPLITTINGS: dict[str, Splitting] = {
    "plain": Splitting(),
    "stratified": Splitting(stratify=True),
    "no validation": Splitting(0.7, 0.0, 0.3, stratify=True),
    "the file's own": Splitting(from_file=True, stratify=True),
    "unseen": Splitting(unseen="quito", stratify=True),
    "public": Splitting(public=0.05, stratify=True),
    "limited": Splitting(train_limit=6, stratify=True),
    "tuning": Splitting(tune=True, unseen="quito", stratify=True),
}
STREAMS: dict[str, StreamKind] = {
    "original": Original(),
    "corrupted": Corrupted(severity=3, names=("contrast",)),
    "others": OutOfClient(),
    "mixed": Mixture(of=("original", "corrupted")),
    "rising": Corrupted(gradual=True, names=("contrast",), severity=2),
}


def made(splitting: Splitting, seed: int, **more: Any) -> Task:
    return build(lesions(seed), ByDomain(), splitting, seed=seed, **more)


# ---- groups -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", SPLITTINGS)
def test_no_group_is_in_two_parts(name: str, seed: int) -> None:
    """Random federations of patients who travel and images that are copied, counted here without the package."""
    pool, task = lesions(seed), made(SPLITTINGS[name], seed)
    parts: dict[str, set[int]] = {}
    for client in (*task.clients, *task.unseen):
        for part, rows in audit.parts_of(task, client).items():
            parts.setdefault(part.replace("unseen", "test"), set()).update(rows.tolist())
    parts["public"] = set() if task.public is None else set(task.public.tolist())
    where: dict[str, set[str]] = {}
    assert pool.groups is not None
    for part, rows in parts.items():
        for row in rows:
            where.setdefault(f"patient {int(pool.groups[row])}", set()).add(part)
            where.setdefault(f"pixels {pool.images[row].numpy().tobytes()!r}", set()).add(part)
    assert {len(found) for found in where.values()} == {1}
    assert audit.straddling(task) == 0
    assert "none in two parts" in audit.groups_line(task)


@pytest.mark.parametrize("seed", range(12))
def test_stratified_clients_can_be_tested_on_every_class_of_two_groups(seed: int) -> None:
    pool = lesions(seed, travel=0.0, copies=0)
    task = build(pool, ByDomain(), Splitting(stratify=True), seed=seed)
    lacking = audit.untestable(task)
    for client in task.clients:
        owned = torch.cat([client.train, client.val, client.test])
        for label, name in enumerate(CLASSES):
            rows = owned[task.labels[owned] == label]
            if len(task.groups[rows].unique()) > 1:
                assert name not in lacking.get(client.name, {})
                assert bool((task.labels[client.train] == label).any())
            elif len(rows) == 0:
                assert lacking[client.name][name] == "no image"


def test_a_straddling_group_would_be_counted() -> None:
    task = made(Splitting(), 0)
    first = task.clients[0]
    wrong = replace(task, clients=(replace(first, val=torch.cat([first.val, first.train[:1]])), *task.clients[1:]))
    assert audit.straddling(wrong) == 1
    assert "1 IN TWO PARTS" in audit.groups_line(wrong)


def test_what_is_said_of_groups() -> None:
    plain = build(lesions(0, copies=0), ByDomain())
    assert audit.groups_line(plain) == "160 groups, none in two parts"
    named = replace(plain, provenance={"source": {"group": "patient_id"}})
    assert audit.groups_line(named) == "160 groups (column patient_id), none in two parts"
    loose = build(lesions(0, copies=0, missing=0.1), ByDomain(), Splitting(missing_group="own"))
    assert "images without one stand for themselves" in audit.groups_line(loose)
    pool = lesions(0, copies=0)
    images = pool.images.clone()
    other = int((pool.groups != pool.groups[0]).nonzero()[0])  # type: ignore[index, union-attr]
    images[other] = images[0]
    joined = build(replace(pool, images=images), ByDomain())
    assert audit.groups_line(joined).endswith("; 1 joined to another, because the two share an image")
    alone = build(replace(pool, groups=None), ByDomain())
    assert audit.groups_line(alone) == "no groups: every image stands for itself"
    assert torch.equal(alone.groups.sort().values, torch.arange(len(pool)))
    copied = build(replace(pool, groups=None, images=images), ByDomain())
    assert audit.groups_line(copied).endswith("; 2 images have exact copies, none in two parts")


# ---- a missing group ----------------------------------------------------------------------------------------------------
def test_a_missing_group_is_refused_or_stands_for_itself() -> None:
    pool = lesions(3, missing=0.1, copies=0)
    assert pool.groups is not None
    lost = (pool.groups < 0).nonzero().flatten()
    expected = rf"of image {int(lost[0])} is missing, and of {len(lost) - 1} more: .* \[split\] missing-group = \"own\""
    with pytest.raises(UserError, match=expected):
        build(pool, ByDomain())
    named = replace(pool, names=tuple(f"{i}.png" for i in range(len(pool))), provenance={"group": "patient"})
    with pytest.raises(UserError, match=rf'the group \(column "patient"\) of {int(lost[0])}.png is missing'):
        build(named, ByDomain())
    task = build(pool, ByDomain(), Splitting(missing_group="own", stratify=True))
    numbers, counts = task.groups.unique(return_counts=True)
    assert set(counts[torch.isin(numbers, task.groups[lost])].tolist()) == {1}
    assert audit.straddling(task) == 0


def test_a_client_of_one_group_is_told_so() -> None:
    pool = from_arrays(
        np.arange(6 * 64, dtype=np.uint8).reshape(6, 8, 8),
        [0, 1] * 3,
        domains=["a"] * 3 + ["b"] * 3,
        groups=[1, 1, 1, 2, 3, 4],
    )
    with pytest.raises(UserError, match=r"client 'a' has no test images left \(its 3 images are 1 group\)"):
        build(pool, ByDomain())


# ---- true reasons -------------------------------------------------------------------------------------------------------
def test_reasons_are_true() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        pool, task = lesions(seed), made(Splitting(unseen="quito", train_limit=20, stratify=True), seed)
        assert pool.groups is not None
        checked = torch.cat([*(part for c in task.clients for part in (c.val, c.test)), *(c.test for c in task.unseen)])
        pixels = {pool.images[row].numpy().tobytes() for row in checked.tolist()}
        for left in task.left_out:
            seen[left.reason] += len(left.rows)
            for row in left.rows.tolist():
                assert SITES[int(pool.domains[row])] == left.client  # type: ignore[index]
                if left.reason in (COPY, SIBLING):
                    assert (pool.images[row].numpy().tobytes() in pixels) == (left.reason == COPY)
                    assert bool(torch.isin(task.groups[row], task.groups[checked]))
    assert set(seen) == {COPY, SIBLING, BEYOND}
    tuned = made(SPLITTINGS["tuning"], 0)
    assert {left.client for left in tuned.left_out if left.reason == HIDDEN} == set(SITES)
    few = build(lesions(0), ByUser(min_samples=45), seed=0)
    (nobodys,) = (left for left in few.left_out if left.reason == NOBODY)
    assert nobodys.client == ""
    assert "images left out: given to no client by the partition" in " ".join(audit.notes(few))


# ---- the list -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SPLITTINGS)
def test_the_list_has_every_image_once_and_every_stream(name: str, tmp_path: Path) -> None:
    streams = {**STREAMS, **({"unseen site": LeftOut()} if name == "unseen" else {})}
    task = made(SPLITTINGS[name], 1, streams=streams)
    audit.write_list(task, tmp_path / "x" / "split.csv")
    with (tmp_path / "x" / "split.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == audit.COLUMNS
    owned = [line for line in lines if line["part"] != audit.SHOWN]
    assert [line["image"] for line in owned] == [f"image {i}" for i in range(len(task.labels))]  # each exactly once
    assert len({(line["image"], line["client"]) for line in lines}) == len(lines)
    for i, line in enumerate(owned):
        assert line["class"] == task.classes[int(task.labels[i])]
        assert line["group"].startswith("P")
        assert (line["reason"] != "") == (line["part"] == audit.LEFT_OUT)
    for client in (*task.clients, *task.unseen):
        for part, rows in audit.parts_of(task, client).items():
            found = [int(x["image"][6:]) for x in lines if (x["client"], x["part"]) == (client.name, part)]
            assert found == rows.tolist()
        for stream in streams:
            shown = task.samples(client, stream).origin
            found = [
                int(x["image"][6:]) for x in lines if x["client"] == client.name and stream in x["streams"].split("; ")
            ]
            assert sorted(found) == sorted(set(shown.tolist()))
    groups = {line["group"]: set[str]() for line in owned}
    for line in owned:
        if line["part"] != audit.LEFT_OUT:
            groups[line["group"]].add(line["part"].replace("unseen", "test"))
    assert max(map(len, groups.values())) == 1


def test_images_of_another_source_are_listed_too() -> None:
    other = lesions(50)

    def load(source: str, columns: Mapping[str, str]) -> Pool:
        return other

    streams = {"natural": Natural(source="x"), "original": Original(), "both": Mixture(of=("natural", "original"))}
    task = build(lesions(1), ByDomain(), streams=streams, load=load)
    lines = [line for line in audit.listed(task) if line["image"].endswith("of natural")]
    assert len(lines) == sum(len(index) for index in task.streams["natural"].index.values())
    assert {(line["part"], line["group"], line["streams"]) for line in lines} == {(audit.SHOWN, "", "natural")}
    assert {line["class"] for line in lines} <= set(CLASSES)
    client = task.clients[0]
    samples = task.samples(client, "both")
    strange = samples.origin < 0
    assert int(strange.sum()) * 2 == len(samples)
    assert set(task.attribute("sex", replace(samples, index=samples.index[strange]))) == {""}
    numbers = task.groups_of(samples)[strange]
    assert len(numbers.unique()) == len(numbers)  # each for itself
    assert not set(numbers.tolist()) & set(task.groups.tolist())


# ---- counts -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SPLITTINGS)
def test_counts_add_up(name: str) -> None:
    task = made(SPLITTINGS[name], 2, streams=STREAMS)
    counts = audit.counted(task)
    parts = [part for client in counts["clients"].values() for part in client["parts"].values()]
    parts += [counts["public"]] if counts["public"] else []
    assert (
        sum(part["images"] for part in parts) + sum(counts["left-out"].values()) == counts["images"] == len(task.labels)
    )
    for part in parts:
        assert sum(part["classes"].values()) == part["images"]
        assert set(part["classes"]) <= set(CLASSES)
        assert part["groups"] <= part["images"]
    assert counts["groups"]["in-two-parts"] == 0
    assert counts["task"] == task.hash
    assert {name for name, client in counts["clients"].items() if client["unseen"]} == {c.name for c in task.unseen}
    for stream in STREAMS:
        assert counts["streams"][stream]["images"] == {k: len(i) for k, i in task.streams[stream].index.items()}


def test_a_warning_for_every_class_a_client_cannot_be_tested_on() -> None:
    pool = from_arrays(
        np.arange(24 * 64, dtype=np.int64).reshape(24, 8, 8).astype(np.uint8)
        + np.arange(24, dtype=np.uint8)[:, None, None] * 7,
        ["nevus"] * 10 + ["melanoma"] * 2 + ["nevus"] * 12,
        domains=["berlin"] * 12 + ["lima"] * 12,
        groups=[*range(10), 99, 99, *range(20, 32)],
    )
    task = build(pool, ByDomain(), Splitting(stratify=True), seed=0)
    lacking = audit.untestable(task)
    assert lacking["lima"] == {"melanoma": "no image"}
    assert "lima has no image of melanoma" in audit.notes(task)
    assert lacking["berlin"] == {"melanoma": "2 images of 1 group"}
    assert "berlin cannot be tested on melanoma (2 images of 1 group)" in audit.notes(task)
    assert "1 client (berlin) cannot be tested on a class of their own" in " ".join(audit.short_notes(task))


def test_only_some_clients_are_told_apart_on_a_screen() -> None:
    task = build(lesions(0, patients=80), Iid(clients=12), Splitting(stratify=True))
    lacking = audit.untestable(task)
    assert len(lacking) > 3
    told = [note for note in audit.notes(task, most=2) if "cannot be tested" in note or "has no image" in note]
    assert len(told) == 3
    assert told[-1].startswith(f"{len(lacking) - 2} more clients")
    everybody = audit.counted(task)["notes"]
    assert {note.split()[0] for note in everybody if note.startswith("client-")} == set(lacking)


# ---- subgroups ----------------------------------------------------------------------------------------------------------
def test_attributes_and_groups_reach_every_stream_and_survive_the_cache(tmp_path: Path) -> None:
    pool = lesions(4)
    tasks = [
        build(pool, ByDomain(), Splitting(unseen="quito"), STREAMS, seed=4, cache=cache)
        for cache in (None, tmp_path, tmp_path)
    ]
    assert len(list((tmp_path / "tasks").iterdir())) == 1
    content = pool.content()
    row_of = {int(i): row for row, i in reversed(list(enumerate(content.tolist())))}
    numbers = pool.attributes["number"]
    for task in tasks:
        assert task.hash == tasks[0].hash
        for client in (*task.clients, *task.unseen):
            for part in (*(["train", "val", "test"] if client in task.clients else ["test"]), *STREAMS):
                samples = task.samples(client, part)
                found = task.attribute("number", samples)
                assert len(found) == len(samples)
                if part == "mixed":  # ids of a mixture are its own
                    known = {numbers[row] for row in client.test.tolist()}
                    assert set(found) <= known
                else:
                    same = [
                        torch.equal(pool.images[int(a)], pool.images[row_of[int(i)]])
                        for a, i in zip(found, samples.ids[samples.index].tolist(), strict=True)
                    ]
                    assert all(same)
                origin = samples.origin
                assert torch.equal(task.groups_of(samples), task.groups[origin])
                assert task.attribute("sex", samples) == pool.attributes["sex"].at(origin)
        with pytest.raises(UserError, match='the task carries no attribute "age", but sex, number'):
            task.attribute("age", task.samples(task.clients[0], "train"))


def test_the_hash_does_not_know_of_attributes_names_and_missing_groups(tmp_path: Path) -> None:
    pool = lesions(4)
    bare = replace(pool, attributes={}, names=())
    hashes = {
        build(p, ByDomain(), Splitting(missing_group=rule), STREAMS, cache=tmp_path).hash  # type: ignore[arg-type]
        for p in (pool, bare, pool)
        for rule in ("error", "own")
    }
    assert len(hashes) == 1
    assert build(bare, ByDomain(), Splitting(), STREAMS, cache=tmp_path).attributes == {}
    assert set(build(pool, ByDomain(), Splitting(), STREAMS, cache=tmp_path).attributes) == {"sex", "number"}


def test_hints_are_those_of_the_source_that_was_asked(tmp_path: Path) -> None:
    pool = lesions(4)
    told = replace(pool, provenance={**pool.provenance, "hints": ["column x looks like a group"]})
    for source, expected in ((told, ["column x looks like a group"]), (pool, [])):
        task = build(source, ByDomain(), cache=tmp_path)
        assert [note for note in audit.notes(task) if "looks like" in note] == expected
