"""New clients with a distribution of their own, unseen clients by pattern, and who gets how much of the data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedshift.data.partition import PARTITIONS, DirichletNew
from fedshift.data.pool import Pool
from fedshift.data.split import COPY, choose_unseen
from fedshift.data.streams import Original
from fedshift.data.task import Splitting, Task, build
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.runs.setup import make_task
from tests.data.test_task import everyone

CLASSES = tuple("abcdefghij")
TRAIN, VAL, TEST = 0, 1, 2
FEDTTA = Splitting(train=0.85, val=0.15, test=0.0, unseen=("new-*",))
LIMITED = DirichletNew(clients=4, alpha=0.5, new_clients=3, new_alpha=0.5)


def pool_of(train: int = 1000, test: int = 500, val: int = 0, splits: bool = True) -> Pool:
    """Distinct images; the file's own split comes in stretches that have nothing to do with the classes."""
    count = train + val + test
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 1, 4, 4), dtype=torch.uint8, generator=generator)
    parts = torch.tensor([TRAIN] * train + [VAL] * val + [TEST] * test)[torch.randperm(count, generator=generator)]
    return Pool(images, torch.arange(count) % 10, CLASSES, splits=parts if splits else None)


def rows_of(owners: dict[str, Tensor], stem: str) -> dict[str, Tensor]:
    return {name: rows for name, rows in owners.items() if name.startswith(f"{stem}-")}


def skew(pool: Pool, owners: dict[str, Tensor]) -> float:
    """The mean share of a client's most frequent class: 0.1 for equal shares, 1 for clients with one class."""
    shares = [float(pool.labels[rows].bincount(minlength=10).max() / len(rows)) for rows in owners.values()]
    return sum(shares) / len(shares)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# ---- dirichlet-new ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_training_rows_go_to_clients_and_test_rows_to_new_ones(seed: int) -> None:
    pool = pool_of(val=100)
    owners = DirichletNew(clients=12, alpha=0.3, new_clients=8, new_alpha=1.0).assign(pool, seed)
    seen, new = rows_of(owners, "client"), rows_of(owners, "new")
    assert list(owners) == [*(f"client-{i:02d}" for i in range(12)), *(f"new-{i}" for i in range(8))]
    assert pool.splits is not None
    for part, code in ((seen, TRAIN), (new, TEST)):
        dealt = torch.cat(list(part.values()))
        assert torch.equal(dealt.sort().values, (pool.splits == code).nonzero().flatten())  # all, and each once
        assert all(torch.equal(rows, rows.sort().values) for rows in part.values())
    assert min(len(rows) for rows in seen.values()) >= 10


def test_the_two_alphas_are_apart() -> None:
    pool = pool_of(4000, 4000)

    def owners(alpha: float, new_alpha: float) -> dict[str, Tensor]:
        return DirichletNew(clients=10, alpha=alpha, new_clients=10, new_alpha=new_alpha).assign(pool, 3)

    even_skewed, skewed_even = owners(1000.0, 0.1), owners(0.1, 1000.0)
    assert skew(pool, rows_of(even_skewed, "client")) < 0.15 < 0.35 < skew(pool, rows_of(even_skewed, "new"))
    assert skew(pool, rows_of(skewed_even, "new")) < 0.15 < 0.35 < skew(pool, rows_of(skewed_even, "client"))
    # a sweep over new-alpha leaves training as it is, and the other way round
    assert same(rows_of(even_skewed, "client"), rows_of(owners(1000.0, 1000.0), "client"))
    assert same(rows_of(skewed_even, "new"), rows_of(owners(1000.0, 1000.0), "new"))


def test_the_two_draws_are_not_one() -> None:
    """Equal options on equal data: a new client is not the twin of a training client."""
    labels = torch.arange(400) % 10
    pool = Pool(pool_of(800, 0).images, labels.repeat(2), CLASSES, splits=torch.tensor([TRAIN] * 400 + [TEST] * 400))
    owners = DirichletNew(clients=4, alpha=0.5, new_clients=4, new_alpha=0.5).assign(pool, 0)
    histograms = {n: tuple(pool.labels[rows].bincount(minlength=10).tolist()) for n, rows in owners.items()}
    assert not {histograms[f"client-{i}"] for i in range(4)} & {histograms[f"new-{i}"] for i in range(4)}


def test_seeds() -> None:
    pool = pool_of()
    assert same(LIMITED.assign(pool, 1), LIMITED.assign(pool, 1))
    for stem in ("client", "new"):
        assert not same(rows_of(LIMITED.assign(pool, 1), stem), rows_of(LIMITED.assign(pool, 2), stem))


def test_new_clients_may_be_small_and_those_with_nothing_are_left_out() -> None:
    """FedTTA's alphas go down to 0.01, where some of fifty clients get no image at all."""
    pool = pool_of(1000, 1000)
    owners = DirichletNew(clients=5, alpha=1.0, new_clients=50, new_alpha=0.01).assign(pool, 0)
    new = rows_of(owners, "new")
    assert 5 < len(new) < 50
    assert min(len(rows) for rows in new.values()) > 0
    assert list(new) == [f"new-{i:02d}" for i in range(len(new))]  # numbered without gaps
    assert sum(len(rows) for rows in new.values()) == 1000


def test_min_size_is_for_training_clients() -> None:
    pool = pool_of(1000, 60)
    owners = DirichletNew(clients=5, alpha=0.5, new_clients=20, new_alpha=0.5, min_size=80).assign(pool, 0)
    assert min(len(rows) for rows in rows_of(owners, "client").values()) >= 80
    assert min(len(rows) for rows in rows_of(owners, "new").values()) < 10
    with pytest.raises(UserError, match="5 clients with min-size 201 need 1005 images, but there are 1000"):
        DirichletNew(clients=5, alpha=0.5, new_clients=2, new_alpha=0.5, min_size=201).assign(pool, 0)


def test_the_file_must_have_a_split() -> None:
    with pytest.raises(UserError, match="the partition dirichlet-new needs the file's own train and test split: say "):
        LIMITED.assign(pool_of(splits=False), 0)
    with pytest.raises(UserError, match=r"dirichlet-new needs the file's own .* columns = \{ split"):
        build(pool_of(splits=False), LIMITED, FEDTTA)


@pytest.mark.parametrize(("options", "sentence"), [
    ({"clients": 0}, "clients must be a whole number of at least 1, not 0"),
    ({"new_clients": 0}, "clients must be a whole number of at least 1, not 0"),
    ({"alpha": 0.0}, "alpha must be a positive number"),
    ({"new_alpha": -1.0}, "alpha must be a positive number .* not -1.0"),
    ({"min_size": -1}, "min-size must be a whole number of at least 0, not -1"),
    ({"retries": 0}, "retries must be a whole number of at least 1, not 0"),
])  # fmt: skip
def test_options_that_cannot_be_meant(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        replace(LIMITED, **options)  # type: ignore[arg-type]


# ---- as a task ----------------------------------------------------------------------------------------------------------
def check_apart(task: Task, pool: Pool) -> None:
    """No index is shared by anybody, and new clients hold only the file's test rows."""
    assert pool.splits is not None
    parts = [part for client in everyone(task) for part in (client.train, client.val, client.test)]
    placed = torch.cat(parts)
    assert len(placed.unique()) == len(placed)
    for client in task.clients:
        assert set(pool.splits[torch.cat([client.train, client.val])].tolist()) == {TRAIN}
    for client in task.unseen:
        assert set(pool.splits[client.test].tolist()) == {TEST}


def test_fedttas_setting_shares_nothing_between_training_and_new_clients() -> None:
    pool = pool_of()
    task = build(pool, DirichletNew(clients=6, alpha=0.1, new_clients=5, new_alpha=0.5), FEDTTA, {"all": Original()})
    assert [client.name for client in task.clients] == [f"client-{i}" for i in range(6)]
    assert [client.name for client in task.unseen] == [f"new-{i}" for i in range(5)]
    check_apart(task, pool)
    for client in task.clients:
        size = len(client.train) + len(client.val)
        assert len(client.test) == 0
        assert abs(len(client.train) - 0.85 * size) <= 1
        assert len(task.samples(client, "all")) == 0
    for client in task.unseen:
        assert len(client.train) == len(client.val) == 0
        assert len(task.samples(client, "all")) == len(client.test)
    assert sum(len(client.test) for client in task.unseen) == 500


def test_duplicates_of_new_clients_images_are_not_trained_on() -> None:
    pool = pool_of()
    assert pool.splits is not None
    train, test = ((pool.splits == code).nonzero().flatten() for code in (TRAIN, TEST))
    images = pool.images.clone()
    images[train[:30]] = images[test[:30]]
    task = build(replace(pool, images=images), DirichletNew(6, 1.0, 5, 1.0), FEDTTA)
    check_apart(task, pool)
    held = set(torch.cat([torch.cat([client.train, client.val]) for client in task.clients]).tolist())
    assert held == set(train[30:].tolist())
    assert {left.reason for left in task.left_out} == {COPY}
    assert sum(len(left.rows) for left in task.left_out) == 30


def test_the_same_from_a_file() -> None:
    pool = pool_of()
    options = {"clients": 6, "alpha": 0.1, "new-clients": 5, "new-alpha": 0.5}
    split = {"train": 0.85, "val": 0.15, "test": 0, "unseen": ["new-*"]}
    table = {"partition": {"kind": "dirichlet-new", **options}, "split": split}
    task = make_task(Experiment.parse(table), 0, pool)
    own = replace(FEDTTA, stratify=True)  # as a pool of one's own is split
    assert task.hash == build(pool, DirichletNew(6, 0.1, 5, 0.5), own, {"original": Original()}).hash
    assert PARTITIONS["dirichlet-new"] is DirichletNew
    with pytest.raises(UserError, match="partition 'dirichlet-new' has no option 'beta'"):
        make_task(Experiment.parse({"partition": {"kind": "dirichlet-new", **options, "beta": 1}}), 0, pool)


# ---- unseen clients by pattern ------------------------------------------------------------------------------------------
NAMES = ["client-0", "new-0", "client-1", "new-1", "renew-0", "New-2"]


@pytest.mark.parametrize(("unseen", "chosen"), [
    (["new-*"], ("new-0", "new-1")),
    ("new-*", ("new-0", "new-1")),
    (["*new-*"], ("new-0", "new-1", "renew-0")),
    (["client-1", "new-*"], ("new-0", "client-1", "new-1")),  # in the order of the clients
    (["*-0", "New-2"], ("client-0", "new-0", "renew-0", "New-2")),
    (["new-*", "new-0"], ("new-0", "new-1")),
    (["c*-0"], ("client-0",)),
])  # fmt: skip
def test_patterns(unseen: list[str] | str, chosen: tuple[str, ...]) -> None:
    for seed in range(3):  # nothing is drawn
        assert choose_unseen(NAMES, unseen, seed) == chosen


def test_a_name_with_a_star_is_a_name() -> None:
    assert choose_unseen(["new-*", "new-1", "old"], ["new-*"], 0) == ("new-*",)


def test_somebody_has_to_train() -> None:
    with pytest.raises(UserError, match="all 6 clients are unseen: leave at least one to train on"):
        choose_unseen(NAMES, ["*"], 0)
    with pytest.raises(UserError, match="no client is called 'old', which unseen asks for"):
        choose_unseen(NAMES, ["new-*", "old"], 0)


@pytest.mark.parametrize("unseen", [["nwe-*"], ["nwe-*", "new-0"]])
def test_a_pattern_that_nobody_matches_is_said(unseen: list[str]) -> None:
    """Otherwise a slip of the pen trains on the clients that were to be new, in silence."""
    with pytest.raises(UserError, match=r"nwe-\*"):
        choose_unseen(NAMES, unseen, 0)


# ---- how much of the data -----------------------------------------------------------------------------------------------
def iid(limit: int | None = None, seed: int = 0, data_seed: int | None = None) -> Task:
    table = {"data": {"limit": limit, "seed": data_seed}, "partition": {"kind": "iid", "clients": 4}}
    return make_task(Experiment.parse(table), seed, pool_of())


def content(task: Task) -> list[int]:
    return task.ids.tolist()


def test_a_limit_takes_a_random_part_of_the_source() -> None:
    pool = pool_of()
    whole = pool.content().tolist()
    task = iid(200)
    kept = content(task)
    assert len(kept) == len(set(kept)) == len(task.images) == 200
    places = [whole.index(i) for i in kept]
    assert places == sorted(places)  # the source's order stays
    assert places[0] < 100 < 1400 < places[-1]  # drawn from everywhere
    assert torch.equal(task.images, pool.images[places])
    assert torch.equal(task.labels, pool.labels[places])
    assert content(iid(200)) == kept
    assert content(iid(200, seed=1)) != kept
    assert content(iid(200, seed=1, data_seed=0)) == kept  # [data] seed keeps the data fixed over runs
    assert set(content(iid(100))) < set(kept)  # a smaller limit takes a part of a larger one
    for many in (1500, 9999, None):
        assert content(iid(many)) == whole


def test_a_limit_takes_all_columns_along() -> None:
    pool = pool_of()
    table = {
        "data": {"limit": 300},
        "partition": {"kind": "dirichlet-new", "clients": 4, "alpha": 10.0, "new-clients": 3, "new-alpha": 10.0},
        "split": {"train": 0.85, "val": 0.15, "test": 0, "unseen": ["new-*"]},
    }
    task = make_task(Experiment.parse(table), 0, pool)
    assert pool.splits is not None
    split_of = dict(zip(pool.content().tolist(), pool.splits.tolist(), strict=True))
    for client in task.clients:
        assert {split_of[i] for i in task.ids[client.train].tolist()} == {TRAIN}
    for client in task.unseen:
        assert {split_of[i] for i in task.ids[client.test].tolist()} == {TEST}


def test_a_train_limit_keeps_so_many_training_images_and_all_others() -> None:
    pool = pool_of()

    def task(**split: object) -> Task:
        return build(pool, LIMITED, replace(FEDTTA, **split))  # type: ignore[arg-type]

    whole = task()
    sizes = {client.name: len(client.train) for client in whole.clients}
    assert min(sizes.values()) < 200 < max(sizes.values())
    limited, again, fewer = task(train_limit=200), task(train_limit=200), task(train_limit=7)
    for client in whole.clients:
        own = [limited.client(client.name), again.client(client.name), fewer.client(client.name)]
        assert [len(one.train) for one in own] == [min(200, sizes[client.name])] * 2 + [7]
        assert torch.equal(own[0].train, own[1].train)
        assert set(own[2].train.tolist()) < set(own[0].train.tolist()) <= set(client.train.tolist())
        assert own[2].train.tolist() != client.train[:7].tolist()  # drawn, not cut off
        for one, part in itertools.product(own, ("val", "test")):
            assert torch.equal(getattr(one, part), getattr(client, part))
    both = task(train_limit=200, train_fraction=0.5)
    for client in both.clients:
        assert len(client.train) == min(200, round(0.5 * sizes[client.name]))
    with pytest.raises(UserError, match=r"\[split\] train-limit must not be negative, not -1"):
        replace(FEDTTA, train_limit=-1)


def test_public_images_belong_to_no_client_old_or_new() -> None:
    pool = pool_of()
    images = pool.images.clone()
    images[700:800] = images[:100]  # duplicates of a public image are nobody's either
    task = build(replace(pool, images=images), LIMITED, replace(FEDTTA, public=0.2), {"all": Original()})
    assert task.public is not None
    assert 300 <= len(task.public) < 400
    public = set(task.ids[task.public].tolist())
    for client in everyone(task):
        held = torch.cat([client.train, client.val, client.test])
        assert not public & set(task.ids[held].tolist())
        rows = task.samples(client, "all")
        assert not public & set(rows.ids[rows.index].tolist())
        assert torch.equal(task.samples(client, "public").index, task.public)
    again = build(replace(pool, images=images), LIMITED, replace(FEDTTA, public=0.2))
    assert again.public is not None
    assert torch.equal(again.public, task.public)
    assert task.public.tolist() != list(range(len(task.public)))  # drawn
