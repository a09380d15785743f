"""The batch plan: what is seen how often, the three rules for a last batch, and what decides the order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedshift.core.arch import Arch
from fedshift.core.context import Context, Phase, RandomSpec
from fedshift.core.method import Train
from fedshift.engines.schedule import Plan, batches, draw, fitting, seeds_for


def steps_of(n: int, phase: Phase, train: Train, seed: int, no_singles: bool) -> list[Tensor]:
    """The positions of every step."""
    order, lengths = batches(n, phase, train, seed, no_singles)
    assert order.dtype == torch.int64
    assert len(order) == sum(lengths)
    assert all(length > 0 for length in lengths)
    return list(order.split(lengths)) if lengths else []


def sizes(plan: list[Tensor]) -> list[int]:
    return [len(batch) for batch in plan]


def seen(plan: list[Tensor]) -> Counter[int]:
    return Counter(torch.cat(plan).tolist()) if plan else Counter()


SMALL = [1, 2, 3, 7, 8, 9, 16, 17, 31]


@pytest.mark.parametrize("n", SMALL)
@pytest.mark.parametrize("size", [1, 2, 8, 100])
@pytest.mark.parametrize("alone", [False, True])
def test_every_epoch_covers_every_sample_exactly_once(n: int, size: int, alone: bool) -> None:
    train = Train(batch_size=size, local_epochs=3)
    plan = steps_of(n, Phase(), train, 5, alone)
    per_epoch = len(plan) // 3
    for epoch in range(3):
        part = plan[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert seen(part) == Counter(range(n))
    assert len(plan) == 3 * per_epoch
    joined = alone and n > size > 1 and n % size == 1
    assert per_epoch == -(-n // size) - joined
    assert all(len(batch) <= size + joined for batch in plan)


def test_epochs_differ_and_are_shuffled() -> None:
    plan = steps_of(50, Phase(epochs=2), Train(batch_size=50), 1, False)
    assert plan[0].tolist() != plan[1].tolist()
    assert plan[0].tolist() != list(range(50))


@pytest.mark.parametrize(("n", "rest"), [(8, []), (9, [1]), (15, [7]), (16, []), (3, [3]), (1, [1])])
def test_the_three_rules_for_a_last_batch(n: int, rest: list[int]) -> None:
    full = [8] * (n // 8)
    keep, drop, wrap = (
        steps_of(n, Phase(epochs=1), Train(batch_size=8, last_batch=rule), 3, False)  # type: ignore[arg-type]
        for rule in ("keep", "drop", "wrap")
    )
    assert sizes(keep) == full + rest
    assert sizes(drop) == (full or rest)  # unless it is the only one
    assert sizes(wrap) == (full + [8] * len(rest) if full else rest)
    assert max(seen(drop).values()) == 1
    assert set(seen(wrap)) == set(range(n))
    order = torch.cat(keep).tolist()
    filled = torch.cat(wrap).tolist()
    assert filled[:n] == order
    assert filled[n:] == order[: len(filled) - n]  # from the start of the epoch
    assert torch.cat(drop).tolist() == order[: len(torch.cat(drop))]


def test_a_single_last_sample_joins_the_batch_before_it_only_with_batch_norm() -> None:
    for rule, without, with_norm in (
        ("keep", [8, 8, 1], [8, 9]),
        ("drop", [8, 8], [8, 8]),
        ("wrap", [8, 8, 8], [8, 8, 8]),
    ):
        train = Train(batch_size=8, last_batch=rule)  # type: ignore[arg-type]
        assert sizes(steps_of(17, Phase(epochs=1), train, 3, False)) == without
        assert sizes(steps_of(17, Phase(epochs=1), train, 3, True)) == with_norm
    assert sizes(steps_of(18, Phase(epochs=1), Train(batch_size=8), 3, True)) == [8, 8, 2]
    assert sizes(steps_of(1, Phase(epochs=1), Train(batch_size=8), 3, True)) == [1]  # nothing to join
    assert sizes(steps_of(3, Phase(epochs=1), Train(batch_size=1), 3, True)) == [1, 1, 1]  # asked for


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 13])
@pytest.mark.parametrize("where", ["train", "phase"])
def test_steps_start_over_when_the_data_end(steps: int, where: str) -> None:
    train, phase = Train(batch_size=4, local_epochs=1), Phase()
    train, phase = (replace(train, local_steps=steps), phase) if where == "train" else (train, Phase(steps=steps))
    plan = steps_of(10, phase, train, 7, False)
    assert len(plan) == steps
    epochs = steps_of(10, Phase(epochs=5), Train(batch_size=4), 7, False)
    assert all(torch.equal(a, b) for a, b in zip(plan, epochs, strict=False))  # the first steps of an epoch plan
    counts = [seen(plan)[i] for i in range(10)]
    assert max(counts) - min(counts) <= 1


def test_which_length_wins() -> None:
    train = Train(batch_size=4, local_epochs=2, local_steps=5)
    assert len(steps_of(8, Phase(), train, 0, False)) == 5
    assert len(steps_of(8, Phase(), replace(train, local_steps=None), 0, False)) == 4
    assert len(steps_of(8, Phase(epochs=3), train, 0, False)) == 6  # a phase's own length comes first
    assert len(steps_of(8, Phase(steps=1), train, 0, False)) == 1
    assert steps_of(8, Phase(epochs=0), train, 0, False) == []
    assert steps_of(8, Phase(), Train(local_epochs=0), 0, False) == []


def test_a_client_without_samples_does_nothing() -> None:
    for phase in (Phase(), Phase(steps=3), Phase(kind="fold")):
        assert steps_of(0, phase, Train(), 0, True) == []


def test_a_fold_sees_everything_once_in_order() -> None:
    plan = steps_of(17, Phase(kind="fold", epochs=5, steps=2), Train(batch_size=8, last_batch="drop"), 3, True)
    assert torch.cat(plan).tolist() == list(range(17))
    assert sizes(plan) == [8, 8, 1]


def test_the_plan_is_a_function_of_its_seed() -> None:
    def made(seed: int) -> list[list[int]]:
        return [batch.tolist() for batch in steps_of(20, Phase(epochs=2), Train(batch_size=6), seed, False)]

    assert made(1) == made(1)
    assert made(1) != made(2)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    assert made(1) == made(1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_seeds_name_run_round_client_and_purpose() -> None:
    ctx = Context(3, 10, 5)
    base = Plan((Phase(),), ctx, 0)
    assert base.seed_for("a", "train") == Plan((), replace(ctx, rounds=99), 0).seed_for("a", "train")
    others = [
        base.seed_for("b", "train"),
        base.seed_for("a", "val"),
        base.seed_for("a"),
        Plan((), replace(ctx, round=4), 0).seed_for("a", "train"),
        Plan((), ctx, 1).seed_for("a", "train"),
        Plan((), replace(ctx, stage="final"), 0).seed_for("a", "train"),
    ]
    assert len({base.seed_for("a", "train"), *others}) == 7
    last = Plan((), replace(ctx, round=10, stage="final"), 0).seed_for("a", "train")
    assert last == others[-1]  # the final phases do not know how many rounds there were
    assert last == Plan((), replace(ctx, stage="unseen"), 0).seed_for("a", "train")  # and are an unseen client's too


def test_one_sample_alone_is_normalised_with_running_statistics() -> None:
    plain = Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2))
    norm = Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2)), (1, 2, 2))
    assert not fitting(Phase(), norm, 1).batch_stats
    assert fitting(Phase(), norm, 2).batch_stats
    assert fitting(Phase(), plain, 1).batch_stats
    assert fitting(Phase(name="x", epochs=4), norm, 1) == Phase(name="x", epochs=4, batch_stats=False)


def test_draws_are_functions_of_seed_step_and_id() -> None:
    wanted = {
        "noise": RandomSpec("normal", (2, 3)),
        "gate": RandomSpec("uniform"),
        "label": RandomSpec("integers", (2,), high=4),
        "other": RandomSpec("normal", (2, 3)),
    }
    plan = Plan((), Context(0, 1, 1), 0)
    seeds = seeds_for(list(wanted), plan, "a", Phase())
    assert len(set(seeds.values())) == 4
    assert seeds != seeds_for(list(wanted), plan, "b", Phase())
    assert seeds != seeds_for(list(wanted), plan, "a", Phase(name="head"))
    ids = torch.arange(5)
    drawn = draw(wanted, seeds, ids, torch.float64, 3)
    assert {n: t.shape for n, t in drawn.items()} == {
        "noise": (5, 2, 3),
        "gate": (5,),
        "label": (5, 2),
        "other": (5, 2, 3),
    }
    assert (drawn["noise"].dtype, drawn["gate"].dtype, drawn["label"].dtype) == (
        torch.float64,
        torch.float64,
        torch.int64,
    )
    assert 0 <= int(drawn["label"].min()) <= int(drawn["label"].max()) <= 3
    assert not torch.equal(drawn["noise"], drawn["other"])
    again = draw(wanted, seeds, ids[2:], torch.float64, torch.tensor(3))  # the step as a tensor, fewer neighbours
    assert all(torch.equal(again[name], drawn[name][2:]) for name in wanted)
    later = draw(wanted, seeds, ids, torch.float64, 4)
    assert not any(torch.equal(later[name], drawn[name]) for name in wanted)
    values = torch.cat([draw(wanted, seeds, ids, torch.float64, s)["noise"].flatten() for s in range(200)])
    assert len(values.unique()) > 0.999 * len(values)  # no step repeats another
