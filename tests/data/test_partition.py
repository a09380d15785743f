import time
from collections import Counter
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.data.partition import (
    PARTITIONS,
    Brfl,
    ByDomain,
    ByUser,
    Dirichlet,
    Iid,
    Partition,
    Pathological,
    Superclass,
    register,
)
from fedshift.data.pool import Pool
from fedshift.errors import UserError


def make_pool(labels: Tensor, classes: int = 10, **columns: object) -> Pool:
    """A pool of one-pixel images: partitions look at labels and columns only."""
    images = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    return Pool(images, labels, tuple(f"class-{c}" for c in range(classes)), **columns)  # type: ignore[arg-type]


@pytest.fixture
def pool() -> Pool:
    """3000 images, ten equal classes, three unequal domains, 30 users, five superclasses of two classes."""
    n = 3000
    labels = torch.arange(n) % 10
    domains = torch.bucketize(torch.arange(n), torch.tensor([600, 1400]), right=True)
    return make_pool(
        labels,
        domains=domains,
        domain_names=("photo", "art", "sketch"),
        users=torch.arange(n) // 100,
        user_names=tuple(f"writer-{i:02d}" for i in range(30)),
        supers=labels // 2,
        super_names=tuple(f"super-{i}" for i in range(5)),
    )


EVERY = [
    Iid(clients=20),
    Dirichlet(clients=20, alpha=0.3),
    Brfl(clients=20, alpha=0.3),
    Pathological(clients=20),
    Pathological(clients=20, distinct=False),
    ByDomain(),
    ByDomain(clients=11),
    ByDomain(clients_per_domain=4, inside="dirichlet", alpha=0.5),
    ByUser(),
    Superclass(),
]
ids = [f"{p.name}-{i}" for i, p in enumerate(EVERY)]


def sizes(owners: dict[str, Tensor]) -> list[int]:
    return [len(rows) for rows in owners.values()]


def histograms(pool: Pool, owners: dict[str, Tensor]) -> Tensor:
    return torch.stack([pool.labels[rows].bincount(minlength=len(pool.classes)) for rows in owners.values()])


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# --- what every partition promises ----------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", EVERY, ids=ids)
def test_owners_are_disjoint_sorted_and_complete(partition: Partition, pool: Pool) -> None:
    owners = partition.assign(pool, seed=3)
    for rows in owners.values():
        assert rows.dtype == torch.int64
        assert len(rows) > 0
        assert bool((rows.diff() > 0).all())
    assert torch.cat(list(owners.values())).sort().values.tolist() == list(range(len(pool)))


@pytest.mark.parametrize("partition", EVERY, ids=ids)
def test_same_seed_same_owners_and_pool_untouched(partition: Partition, pool: Pool) -> None:
    labels = pool.labels.clone()
    assert same(partition.assign(pool, seed=5), partition.assign(pool, seed=5))
    assert torch.equal(pool.labels, labels)


@pytest.mark.parametrize("partition", [p for p in EVERY if p not in (ByDomain(), ByUser())], ids=lambda p: p.name)
def test_other_seed_other_owners(partition: Partition, pool: Pool) -> None:
    assert not same(partition.assign(pool, seed=5), partition.assign(pool, seed=6))


@pytest.mark.parametrize("partition", EVERY, ids=ids)
def test_options_are_frozen(partition: Partition) -> None:
    field = next(iter(partition.__dataclass_fields__))
    with pytest.raises(FrozenInstanceError):
        setattr(partition, field, 7)


def test_answers_are_pinned() -> None:
    """The bytes must not change from one version to the next; if they must, the task format has to be raised."""
    pool = make_pool(torch.arange(24) % 3, classes=3)
    assert Iid(3).assign(pool, seed=0)["client-0"].tolist() == [6, 8, 9, 11, 12, 13, 15, 16]
    assert Pathological(3).assign(pool, seed=0)["client-0"].tolist() == [4, 5, 7, 8, 10, 11, 13, 17]
    assert Dirichlet(3, 1.0, min_size=2).assign(pool, seed=0)["client-0"].tolist() == [1, 4, 7, 9, 10, 11, 16, 22]
    assert Brfl(3, 1.0).assign(pool, seed=0)["client-0"].tolist() == [2, 7, 8, 9, 12, 15, 18, 21]


def test_registry_names_and_descriptions() -> None:
    assert set(PARTITIONS) == {
        "iid", "dirichlet", "dirichlet-new", "brfl", "pathological", "by-domain", "by-user", "superclass",
    }  # fmt: skip
    for name, cls in PARTITIONS.items():
        assert cls.name == name
        assert cls.describe().endswith(".")
        assert "\n" not in cls.describe()


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="two partitions are called iid"):
        register("iid")(Iid)


def test_names_are_padded_so_that_they_sort(pool: Pool) -> None:
    names = list(Iid(clients=12).assign(pool, seed=0))
    assert names[0] == "client-00"
    assert names == sorted(names)
    assert list(Iid(clients=5).assign(pool, seed=0))[-1] == "client-4"
    assert list(Iid(clients=101).assign(pool, seed=0))[7] == "client-007"


# --- iid ------------------------------------------------------------------------------------------------------------


def test_iid_sizes_differ_by_at_most_one_and_classes_are_mixed(pool: Pool) -> None:
    assert set(sizes(Iid(clients=7).assign(pool, seed=0))) == {428, 429}
    table = histograms(pool, Iid(clients=5).assign(pool, seed=0))  # 60 expected per cell, standard deviation about 6.6
    assert int((table - 60).abs().max()) < 33


def test_as_many_clients_as_images_is_allowed() -> None:
    assert sizes(Iid(clients=4).assign(make_pool(torch.arange(4)), seed=0)) == [1, 1, 1, 1]


# --- dirichlet ------------------------------------------------------------------------------------------------------


def test_dirichlet_large_alpha_is_nearly_uniform(pool: Pool) -> None:
    table = histograms(pool, Dirichlet(clients=10, alpha=1e6).assign(pool, seed=0))
    assert int((table - 30).abs().max()) <= 1


def test_dirichlet_small_alpha_is_concentrated(pool: Pool) -> None:
    largest = {}
    for alpha in (0.1, 1.0, 100.0):
        table = histograms(pool, Dirichlet(clients=10, alpha=alpha, min_size=1).assign(pool, seed=1)).double()
        largest[alpha] = float(
            (table / table.sum(0)).max(0).values.mean()
        )  # share of a class in its main owner's hands
    assert largest[0.1] > 0.5 > largest[1.0] > largest[100.0]
    assert largest[100.0] < 0.15


def test_dirichlet_moments_agree_with_the_law() -> None:
    """Share of a client in a class: mean 1/K, variance (K-1) / (K^2 (K alpha + 1)); every client alike."""
    clients, alpha = 5, 0.5
    pool = make_pool(torch.arange(20_000) % 40, classes=40)
    tables = [
        histograms(pool, Dirichlet(clients, alpha, min_size=0).assign(pool, seed)).double() / 500 for seed in range(25)
    ]
    shares = torch.stack(tables)  # [seeds, clients, classes]
    expected = (clients - 1) / clients**2 / (clients * alpha + 1)
    assert shares.mean((0, 2)).sub(1 / clients).abs().max() < 4 * (expected / 1000) ** 0.5
    assert shares.var((0, 2)).div(expected).sub(1).abs().max() < 0.2


def test_dirichlet_rounding_favours_nobody() -> None:
    """With few images per class, flooring the cuts would give the last client half an image per class too many."""
    pool = make_pool(torch.arange(1000) % 200, classes=200)
    total = torch.zeros(10)
    for seed in range(20):
        total += torch.tensor(sizes(Dirichlet(10, 1e6).assign(pool, seed)), dtype=torch.float32)
    for seed in range(60):
        total += torch.tensor(sizes(Dirichlet(10, 1.0).assign(pool, seed)), dtype=torch.float32)
    assert float((total / 80 - 100).abs().max()) < 12


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_keeps_the_minimum_size(pool: Pool, seed: int) -> None:
    assert min(sizes(Dirichlet(clients=20, alpha=0.2, min_size=20).assign(pool, seed))) >= 20


def test_dirichlet_gives_up_with_a_sentence(pool: Pool) -> None:
    start = time.perf_counter()
    with pytest.raises(
        UserError, match=r"in 100 draws of Dirichlet\(0.001\) for 100 clients the smallest .* at most 0 "
    ):
        Dirichlet(clients=100, alpha=0.001).assign(pool, seed=0)
    assert time.perf_counter() - start < 5
    with pytest.raises(
        UserError, match=r"min-size is 290: raise alpha or retries, or lower clients or min-size"
    ) as info:
        Dirichlet(clients=10, alpha=1.0, min_size=290, retries=7).assign(pool, seed=0)
    reached = int(str(info.value).split("at most ")[1].split()[0])
    assert 0 < reached < 290


def test_dirichlet_says_at_once_what_no_draw_can_reach(pool: Pool) -> None:
    with pytest.raises(UserError, match="20 clients with min-size 200 need 4000 images, but there are 3000"):
        Dirichlet(clients=20, alpha=1.0, min_size=200).assign(pool, seed=0)


def test_dirichlet_without_minimum_leaves_out_empty_clients(pool: Pool) -> None:
    owners = Dirichlet(clients=50, alpha=0.01, min_size=0).assign(pool, seed=0)
    assert 2 <= len(owners) < 50
    assert min(sizes(owners)) > 0
    assert sum(sizes(owners)) == len(pool)


def test_classes_without_images_do_no_harm() -> None:
    pool = make_pool(torch.arange(400) % 2 * 5)  # only classes 0 and 5 of ten occur
    for partition in (Dirichlet(4, 1.0), Brfl(4, 1.0), Pathological(4, 1), Pathological(4, 2), Iid(4)):
        assert sum(sizes(partition.assign(pool, seed=0))) == 400


# --- brfl -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "n"), [(20, 3000), (20, 3007), (10, 3000), (25, 3000), (7, 3000), (3, 50)])
@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_brfl_clients_are_equally_large(clients: int, n: int, alpha: float) -> None:
    owners = Brfl(clients, alpha).assign(make_pool(torch.arange(n) % 10), seed=2)
    assert sizes(owners) == [n // clients] * clients
    assert len(torch.cat(list(owners.values())).unique()) == clients * (n // clients)


def test_brfl_groups_draw_from_their_own_chunk() -> None:
    """The first ten clients share the first half of the shuffled pool, whatever alpha deals to whom."""
    pool = make_pool(torch.arange(6000) % 10)
    halves = [torch.cat(list(Brfl(20, alpha).assign(pool, seed=0).values())[:10]) for alpha in (0.3, 10.0)]
    assert torch.equal(halves[0].sort().values, halves[1].sort().values)
    assert int((pool.labels[halves[0]].bincount() - 300).abs().max()) < 60  # a random half: all classes alike


def test_brfl_follows_the_reference_law() -> None:
    """Against the specification's own words (zero the full, renormalise), which need a redraw when nothing is left."""
    clients, per_class, alpha = 10, 60, 0.3
    pool = make_pool(torch.arange(10 * per_class) % 10)
    ours = torch.cat([histograms(pool, Brfl(clients, alpha).assign(pool, s)) for s in range(60)]).double()

    def reference(draw: np.random.Generator) -> Tensor:
        while True:
            bins: list[list[int]] = [[] for _ in range(clients)]
            for c in range(10):
                q = draw.dirichlet(np.full(clients, alpha))
                q = q * np.array([len(b) < per_class for b in bins])
                ends = (np.cumsum(q / q.sum()) * per_class).astype(int)
                ends[-1] = per_class
                for b, count in zip(bins, np.diff(ends, prepend=0), strict=True):
                    b += [c] * int(count)
            if min(map(len, bins)) >= 0.5 * per_class:
                order = torch.tensor([c for b in bins for c in b])
                return torch.stack([piece.bincount(minlength=10) for piece in order.reshape(clients, -1)])

    draw = np.random.Generator(np.random.PCG64(1))
    theirs = torch.cat([reference(draw) for _ in range(60)]).double()

    def facts(table: Tensor) -> tuple[float, float]:
        p = table / table.sum(1, keepdim=True)
        entropy = -(p * p.clamp(min=1e-12).log()).sum(1)
        return float(entropy.mean()), float(p.max(1).values.mean())

    (h_ours, top_ours), (h_theirs, top_theirs) = facts(ours), facts(theirs)
    assert abs(h_ours - h_theirs) < 0.08
    assert abs(top_ours - top_theirs) < 0.03


def test_brfl_skew_falls_with_alpha() -> None:
    pool = make_pool(torch.arange(6000) % 10)
    top = [
        float((histograms(pool, Brfl(20, alpha).assign(pool, seed=0)).double() / 300).max(1).values.mean())
        for alpha in (0.1, 1.0, 10.0, 1e6)
    ]
    assert top == sorted(top, reverse=True)
    assert top[0] > 0.45
    assert top[-1] < 0.15


@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_brfl_small_alpha_still_ends(alpha: float) -> None:
    assert set(sizes(Brfl(10, alpha).assign(make_pool(torch.arange(1000) % 10), seed=0))) == {100}


def test_brfl_gives_up_with_a_sentence() -> None:
    lonely = make_pool(torch.zeros(100, dtype=torch.int64))  # one class and a tiny alpha: somebody takes everything
    with pytest.raises(
        UserError, match=r"in 30 draws of Dirichlet\(0.01\) for a group of 10 clients .* at most \d+ images"
    ):
        Brfl(10, 0.01, retries=30).assign(lonely, seed=0)


# --- pathological ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_pathological_clients_see_few_classes(pool: Pool, seed: int, distinct: bool) -> None:
    owners = Pathological(100, distinct=distinct).assign(pool, seed)
    held = (histograms(pool, owners) > 0).sum(1)
    assert int(held.max()) <= 2
    assert sizes(owners) == [30] * 100  # ten equal classes, 20 shards each
    assert bool((held == 2).all()) is distinct


@pytest.mark.parametrize("per_client", [1, 2, 3, 5, 10])
def test_pathological_distinct_for_any_number_of_classes(pool: Pool, per_client: int) -> None:
    owners = Pathological(20, per_client).assign(pool, seed=0)
    assert set((histograms(pool, owners) > 0).sum(1).tolist()) == {per_client}


def test_pathological_unequal_classes_make_about_equal_clients() -> None:
    """MNIST's class sizes, a tenth: shards of one class only, near 35 images each."""
    counts = torch.tensor([690, 788, 699, 714, 682, 631, 688, 729, 682, 696])
    pool = make_pool(torch.arange(10).repeat_interleave(counts))
    owners = Pathological(100).assign(pool, seed=0)
    assert set((histograms(pool, owners) > 0).sum(1).tolist()) == {2}
    assert 64 <= min(sizes(owners)) <= max(sizes(owners)) <= 76


def test_pathological_a_dominant_class_is_shared_by_all_when_hands_are_distinct() -> None:
    pool = make_pool(torch.cat([torch.zeros(900), torch.arange(1, 10).repeat(12)]).long())
    owners = Pathological(20).assign(pool, seed=0)
    table = histograms(pool, owners) > 0
    assert set(table.sum(1).tolist()) == {2}
    assert bool(table[:, 0].all())
    assert int((histograms(pool, Pathological(20, distinct=False).assign(pool, 0)) > 0).sum(1).min()) == 1


def test_pathological_repeats_only_where_it_must() -> None:
    one = make_pool(torch.zeros(40, dtype=torch.int64))
    assert sizes(Pathological(5).assign(one, seed=0)) == [8] * 5
    rare = make_pool(torch.cat([torch.zeros(100), torch.ones(3)]).long())  # three clients can have two classes, no more
    owners = Pathological(10).assign(rare, seed=0)
    assert sorted((histograms(rare, owners) > 0).sum(1).tolist()) == [1] * 7 + [2] * 3


def test_pathological_every_pair_of_classes_occurs(pool: Pool) -> None:
    """The deal is random, not a fixed pattern: over some seeds every pair turns up, about equally often."""
    pairs: Counter[tuple[int, ...]] = Counter()
    for seed in range(30):
        for row in histograms(pool, Pathological(50).assign(pool, seed)):
            pairs[tuple(row.nonzero().flatten().tolist())] += 1
    assert len(pairs) == 45
    assert min(pairs.values()) > 10  # 33 expected
    assert max(pairs.values()) < 66


def test_pathological_scales_to_many_clients() -> None:
    start = time.perf_counter()
    owners = Pathological(5000).assign(make_pool(torch.arange(20_000) % 10), seed=0)
    assert sizes(owners) == [4] * 5000
    assert time.perf_counter() - start < 10


# --- columns --------------------------------------------------------------------------------------------------------


def test_by_domain_whole_domains(pool: Pool) -> None:
    owners = ByDomain().assign(pool, seed=0)
    assert dict(zip(owners, sizes(owners), strict=True)) == {"photo": 600, "art": 800, "sketch": 1600}
    assert pool.domains is not None
    for i, rows in enumerate(owners.values()):
        assert pool.domains[rows].unique().tolist() == [i]


def test_by_domain_spreads_clients_evenly_the_first_get_more(pool: Pool) -> None:
    owners = ByDomain(clients=11).assign(pool, seed=0)
    assert Counter(name.rsplit("-", 1)[0] for name in owners) == {"photo": 4, "art": 4, "sketch": 3}
    assert list(owners)[:5] == ["photo-0", "photo-1", "photo-2", "photo-3", "art-0"]
    assert sizes(owners)[:4] == [150] * 4


def test_by_domain_numbers_are_padded_and_names_never_collide() -> None:
    pool = make_pool(
        torch.zeros(60, dtype=torch.int64), domains=torch.arange(60) % 2, domain_names=("a", "a-0")
    )  # cut in two, "a" alone would make another "a-0"
    assert list(ByDomain(clients=3).assign(pool, seed=0)) == ["a-0", "a-1", "a-0-0"]
    names = list(ByDomain(clients_per_domain=11).assign(pool, seed=0))
    assert names[:2] == ["a-00", "a-01"]
    assert len(set(names)) == 22


def test_by_domain_dirichlet_inside(pool: Pool) -> None:
    skewed = ByDomain(clients_per_domain=5, inside="dirichlet", alpha=0.3).assign(pool, seed=0)
    even = ByDomain(clients_per_domain=5, inside="dirichlet", alpha=1e6).assign(pool, seed=0)
    assert min(sizes(skewed)) >= 10
    assert histograms(pool, skewed).double().std() > 3 * histograms(pool, even).double().std()
    assert pool.domains is not None
    assert all(len(pool.domains[rows].unique()) == 1 for rows in skewed.values())


def test_by_domain_a_domain_does_not_depend_on_the_others(pool: Pool) -> None:
    assert pool.domains is not None
    keep = (pool.domains != 1).nonzero().flatten()
    fewer = make_pool(pool.labels[keep], domains=pool.domains[keep], domain_names=pool.domain_names)
    a, b = (ByDomain(clients_per_domain=3).assign(p, seed=0) for p in (pool, fewer))
    assert [name for name in a if not name.startswith("art")] == list(b)  # a domain without images is no client
    assert all(torch.equal(a[name], keep[b[name]]) for name in b)


def test_by_domain_errors_name_the_domain(pool: Pool) -> None:
    with pytest.raises(UserError, match="in domain photo, 700 clients cannot share 600 images"):
        ByDomain(clients_per_domain=700).assign(pool, seed=0)
    with pytest.raises(UserError, match=r"in domain photo, in 3 draws of Dirichlet\(0.001\)"):
        ByDomain(clients_per_domain=30, inside="dirichlet", alpha=0.001, retries=3).assign(pool, seed=0)
    with pytest.raises(UserError, match="2 clients cannot cover 3 domains: ask for at least 3"):
        ByDomain(clients=2).assign(pool, seed=0)


def test_by_user_one_client_each_and_small_ones_left_out(pool: Pool) -> None:
    owners = ByUser().assign(pool, seed=0)
    assert list(owners) == list(pool.user_names)
    assert owners["writer-03"].tolist() == list(range(300, 400))
    uneven = replace(pool, users=(torch.arange(3000) >= 2990).long(), user_names=("many", "few"))
    assert list(ByUser(min_samples=11).assign(uneven, seed=0)) == ["many"]
    with pytest.raises(UserError, match="min-samples 5000: the largest of 2 has 2990"):
        ByUser(min_samples=5000).assign(uneven, seed=0)


def test_by_user_falls_back_to_domains(pool: Pool) -> None:
    assert list(ByUser().assign(replace(pool, users=None), seed=0)) == ["photo", "art", "sketch"]


def test_superclass_clients_hold_the_fine_classes_of_one_superclass() -> None:
    labels = torch.arange(100).repeat_interleave(30)  # the shape of CIFAR-100: fine classes scattered over superclasses
    pool = make_pool(labels, 100, supers=labels % 20, super_names=tuple(f"s{i:02d}" for i in range(20)))
    owners = Superclass().assign(pool, seed=0)
    assert sizes(owners) == [30] * 100
    assert list(owners)[:6] == ["s00-0", "s00-1", "s00-2", "s00-3", "s00-4", "s01-0"]
    for name, rows in owners.items():
        fine = set(labels[rows].tolist())
        assert len(fine) == 5
        assert {c % 20 for c in fine} == {int(name[1:3])}


def test_superclass_with_too_few_images(pool: Pool) -> None:
    with pytest.raises(UserError, match="in superclass super-0, 601 clients cannot share 600 images"):
        Superclass(clients_per_superclass=601).assign(pool, seed=0)


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Iid(clients=0), "clients must be a whole number of at least 1, not 0"),
        (lambda: Iid(clients=-3), "clients must be a whole number of at least 1, not -3"),
        (lambda: Iid(clients=2.5), "clients must be a whole number of at least 1, not 2.5"),
        (lambda: Iid(clients=True), "clients must be a whole number of at least 1, not True"),
        (lambda: Iid(clients="ten"), "clients must be a whole number of at least 1, not 'ten'"),
        (lambda: Dirichlet(0, 1.0), "clients must be"),
        (lambda: Dirichlet(5, 0), "alpha must be a positive number of at most 1e.09, not 0"),
        (lambda: Dirichlet(5, -0.1), "alpha must be a positive number .* not -0.1"),
        (lambda: Dirichlet(5, float("nan")), "alpha must be a positive number .* not nan"),
        (lambda: Dirichlet(5, float("inf")), "alpha must be a positive number .* not inf"),
        (lambda: Dirichlet(5, "0.1"), "alpha must be a positive number .* not '0.1'"),
        (lambda: Dirichlet(5, 1.0, min_size=-1), "min-size must be a whole number of at least 0, not -1"),
        (lambda: Dirichlet(5, 1.0, retries=0), "retries must be a whole number of at least 1, not 0"),
        (lambda: Brfl(0, 1.0), "clients must be"),
        (lambda: Brfl(5, 0.0), "alpha must be"),
        (lambda: Brfl(5, 1.0, group=0), "group must be a whole number of at least 1, not 0"),
        (lambda: Brfl(5, 1.0, retries=0), "retries must be"),
        (lambda: Pathological(0), "clients must be"),
        (lambda: Pathological(5, 0), "classes-per-client must be a whole number of at least 1, not 0"),
        (lambda: Pathological(5, 2, distinct="yes"), "distinct must be true or false, not 'yes'"),
        (lambda: ByDomain(clients_per_domain=0), "clients-per-domain must be"),
        (lambda: ByDomain(clients=0), "clients must be"),
        (lambda: ByDomain(clients=9, clients_per_domain=3), "either clients or clients-per-domain, not both"),
        (lambda: ByDomain(inside="shards"), "inside must be one of iid, dirichlet, not 'shards'"),
        (lambda: ByDomain(inside="dirichlet"), 'inside = "dirichlet" needs an alpha'),
        (lambda: ByDomain(inside="dirichlet", alpha=-1), "alpha must be"),
        (
            lambda: ByDomain(alpha=0.5),
            'alpha has no meaning inside an iid domain: remove it or say inside = "dirichlet"',
        ),
        (lambda: ByDomain(min_size=-1), "min-size must be"),
        (lambda: ByDomain(retries=0), "retries must be"),
        (lambda: ByUser(min_samples=0), "min-samples must be a whole number of at least 1, not 0"),
        (lambda: Superclass(clients_per_superclass=0), "clients-per-superclass must be"),
    ],
)
def test_impossible_options_get_a_sentence(make: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as info:
        make()  # type: ignore[operator]
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "partition", [Iid(31), Dirichlet(31, 1.0), Brfl(31, 1.0), Pathological(31)], ids=lambda p: p.name
)
def test_more_clients_than_images(partition: Partition) -> None:
    with pytest.raises(UserError, match="31 clients cannot share 30 images"):
        partition.assign(make_pool(torch.arange(30) % 10), seed=0)


def test_pathological_needs_enough_images_and_enough_hands() -> None:
    with pytest.raises(UserError, match="20 clients with 2 shards each need 40 images, but there are 30"):
        Pathological(20).assign(make_pool(torch.arange(30) % 10), seed=0)
    with pytest.raises(UserError, match="4 clients with 2 classes each cannot hold all 10 classes: ask for at least 5"):
        Pathological(4).assign(make_pool(torch.arange(30) % 10), seed=0)


@pytest.mark.parametrize(
    ("partition", "what", "key"),
    [(ByDomain(), "domain", "client"), (ByUser(), "user", "client"), (Superclass(), "superclass", "super")],
)
def test_a_missing_column_is_named(partition: Partition, what: str, key: str) -> None:
    with pytest.raises(UserError, match=f"the partition {partition.name} needs the {what} of every image") as info:
        partition.assign(make_pool(torch.arange(30) % 10), seed=0)
    assert f'columns = {{ {key} = "..." }}' in str(info.value)


def test_columns_that_cannot_be_right(pool: Pool) -> None:
    with pytest.raises(UserError, match=r"domain codes must lie in 0..1 because there are 2 domain names, found 0..2"):
        ByDomain().assign(replace(pool, domain_names=("a", "b")), seed=0)
    with pytest.raises(UserError, match="the domain name 'a' occurs twice"):
        ByDomain().assign(replace(pool, domain_names=("a", "b", "a")), seed=0)
    with pytest.raises(UserError, match=r"3000 images need as many user codes, not \[10\]"):
        ByUser().assign(replace(pool, users=torch.zeros(10, dtype=torch.int64)), seed=0)
