"""Runs of several tasks: rows of two are never compared, and each task has advice of its own."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedshift.cli.printing import advice_json, advised, print_advice
from fedshift.errors import UserError
from fedshift.results.by_task import tasks_of
from fedshift.results.plain import Screen
from fedshift.results.result import Result, Row
from fedshift.results.trouble import alarms
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow
from fedshift.store.summary import ClientScore, summarise
from tests.trust.worlds import go, skewed, skewed_pool


def scored(method: str, tasks: tuple[str, ...], right: int, **point: object) -> Row:
    """A row whose two clients have so many of a hundred right, under as many seeds as tasks."""
    clients = {"a": ClientScore(100, right, 1.0), "b": ClientScore(100, right + 1, 1.0)}
    metric = Metric("global", "s")
    scores = [ScoreRow(metric, summarise(clients), "best-val", task_hash=task, by_client=clients) for task in tasks]
    return Row(method, "none", tuple(point.items()), tuple(range(len(tasks))), {("best-val", metric): scores})


def test_rows_that_share_a_seeds_task_are_of_one() -> None:
    rows = [
        scored("a", ("t0", "t1"), 50),
        scored("b", ("u0", "u1"), 50),
        scored("a", ("t0",), 60, lr=1.0),  # one seed is not finished
        replace(scored("b", ("u0", "u1"), 50), adapter="bound", values={}, bound=True),
    ]
    assert tasks_of(rows) == (["t0", "u0"], [0, 1, 0, 1])
    linked = [scored(m, tasks, 1) for m, tasks in {"a": ("h0",), "b": ("h1",), "c": ("h0", "h1"), "d": ("h1",)}.items()]
    assert tasks_of(linked) == (["h0"], [0, 0, 0, 0])  # one that has both seeds joins them
    assert tasks_of([scored("a", ("h0",), 1), scored("b", ("h1",), 1), scored("c", ("h1", ""), 1)])[1] == [0, 1, 1]
    both = [scored("a", ("t",), 1), replace(scored("a", ("u",), 1), adapter="tent")]
    assert tasks_of(both) == (["t", "u"], [0, 1])


def test_what_nobody_knows_the_task_of_is_compared_with_nothing() -> None:
    old, new = scored("old", ("",), 50), scored("new", ("t",), 50)
    assert tasks_of([old]) == ([""], [0])
    assert tasks_of([new, old]) == (["t", ""], [0, 1])
    assert list(Result((new, old), ()).by_task()) == ["task t", "task unknown"]
    assert list(alarms([new, old], "accuracy")) == []
    assert len(list(alarms([old, replace(old, method="older")], "accuracy"))) == 1  # as ever


def test_rows_of_two_tasks_are_not_held_against_each_other() -> None:
    close = [scored("a", ("t",), 50, alpha=1), scored("b", ("t",), 50, alpha=1)]
    far = [replace(row, point=(("alpha", 2),)) for row in (scored("a", ("u",), 50), scored("b", ("u",), 90))]
    (said,) = alarms([*close, *far], "accuracy")
    assert said == "on s the best row (a, alpha = 1) cannot be told from b, alpha = 1: the difference is noise"
    parts = Result((*close, *far), ()).by_task()
    assert list(parts) == ["alpha = 1", "alpha = 2"]
    assert [row.point for part in parts.values() for row in part.rows] == [()] * 4  # it is in the name
    unnamed = Result((scored("a", ("t" * 9,), 50), scored("b", ("u" * 9,), 50)), ()).by_task()
    assert list(unnamed) == ["task tttttttt", "task uuuuuuuu"]


def test_a_row_of_one_client_says_nothing_about_others() -> None:
    close = [scored("a", ("t",), 50), scored("b", ("t",), 50)]
    alone = scored("c", ("t",), 99)
    ((key, (score,)),) = alone.values.items()
    one = {"a": ClientScore(100, 99, 1.0)}
    alone = replace(alone, values={key: [replace(score, summary=summarise(one), by_client=one)]})
    (said,) = alarms([*close, alone], "accuracy")
    assert said == "on s the best row (a) cannot be told from b: the difference is noise"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Result:
    experiment = skewed(
        method=[{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}], sweep={"split.train-limit": [20, 40]}, rounds=2
    )
    return go(experiment, tmp_path_factory.mktemp("swept"), data=skewed_pool())


def test_every_task_has_advice_of_its_own(swept: Result) -> None:
    with pytest.raises(UserError, match=r"advice is for one task, and these rows are of 2 \(split.train-limit = 20, "):
        swept.advice()
    found = advised(swept)
    assert list(found) == ["split.train-limit = 20", "split.train-limit = 40"]
    told = json.loads(advice_json(found))["tasks"]
    for name, part in swept.by_task().items():
        assert told[name] == json.loads(part.advice().to_json())
        assert {one["method"] for one in told[name]["candidates"]} == {"fedavg", "fedprox"}
    screen = Screen(file=io.StringIO(), width=100)
    print_advice(screen, found, compared=True)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("Accuracy on validation images") == 2
    assert "\nsplit.train-limit = 20: " in shown


def test_one_task_is_told_as_ever(swept: Result, tmp_path: Path) -> None:
    one, *_ = swept.by_task().values()
    assert list(one.by_task()) == [""]
    assert json.loads(advice_json(advised(one))) == json.loads(one.advice().to_json())
    bare = replace(one, rows=tuple(replace(row, twins={}) for row in one.rows))
    with pytest.raises(UserError, match="nothing to advise by"):
        advised(bare)
    mixed = replace(swept, rows=(*bare.rows, *swept.rows[len(bare.rows) :]))
    found = advised(mixed)
    assert sum(isinstance(advice, UserError) for advice in found.values()) == 1
