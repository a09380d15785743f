"""Orders for other processes: taken once each, and what runs have in common is sent once and read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.engines import shipping
from fedshift.engines.base import Compute
from fedshift.experiment.schema import Experiment
from fedshift.runs.orders import DATA, Data, Order, Orders, read_order, take, waiting
from fedshift.runs.run import plan

SMALL = {"data": {"size": 8}, "model": {"name": "mlp", "hidden": [4]}, "rounds": 1, "baselines": False}


@pytest.fixture
def orders(tmp_path: Path) -> list[Order]:
    """Two methods under two seeds."""
    methods = [{"name": "fedavg"}, {"name": "ditto", "adapters": ["none", "t3a"]}]
    experiment = Experiment.parse({**SMALL, "seeds": [0, 1], "method": methods})
    jobs = plan(experiment, tmp_path / "runs")
    return [Order.of([job], "sequential", Compute(torch.device("cpu")), resume=False) for job in jobs]


def test_every_order_is_taken_once(tmp_path: Path, orders: list[Order]) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    base.mkdir()
    own.mkdir()
    board = Orders(base, orders)
    assert board.offer(3)
    assert len(waiting(base)) == 3
    titles = [board.title(path.name) for path in iter(lambda: take(base, own), None)]
    assert titles == [order.title for order in orders[:3]]
    assert len(board.taken(own)) == 3
    assert board.offer(3)
    assert take(base, own) is not None
    assert not board.offer(3)


def test_data_are_sent_once_and_read_once(tmp_path: Path, orders: list[Order], monkeypatch: pytest.MonkeyPatch) -> None:
    own, read, data = tmp_path / "0", list[int](), dict[str, Data]()
    own.mkdir()
    loads = shipping.loads

    def counted(sent: bytes, *known: Any) -> Any:
        read.append(len(sent))
        return loads(sent, *known)

    monkeypatch.setattr(shipping, "loads", counted)
    board, found = Orders(tmp_path, orders), list[Order]()
    board.offer(len(orders))
    images = sorted(path.stat().st_size for path in (tmp_path / DATA).iterdir())
    assert len(images) == 2  # of two seeds
    while (path := take(tmp_path, own)) is not None:
        order, data = read_order(tmp_path, path, data)
        found.append(order)
        path.unlink()
    assert [size for size in read if size >= images[0]] == images
    assert max(size for size in read if size < images[0]) < images[0] / 2  # and none are in an order itself
    assert [order.title for order in found] == [order.title for order in orders]
    first, second, *_ = (order.jobs[0] for order in found)
    assert first.task is second.task
    assert first.twin() is second.twin()  # whose streams are made once for all runs of a process
    for mine, theirs in zip(orders, found, strict=True):
        assert mine.jobs[0].task.hash == theirs.jobs[0].task.hash
        assert torch.equal(mine.jobs[0].task.images, theirs.jobs[0].task.images)


def test_data_that_nobody_needs_are_removed(tmp_path: Path, orders: list[Order]) -> None:
    own = tmp_path / "0"
    own.mkdir()
    board = Orders(tmp_path, orders)
    there: list[int] = []
    while board.offer(1):
        path = take(tmp_path, own)
        assert path is not None
        board.offer(0)
        read_order(tmp_path, path, {})  # what is under way has its data
        there.append(len(list((tmp_path / DATA).iterdir())))
        path.unlink()
    assert there == [1, 1, 1, 1]
    assert list((tmp_path / DATA).iterdir()) == []
