"""Stacks that do not fit are cut by themselves, say so, and change no result."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch

from fedshift.engines.vmapped import Vmapped
from fedshift.engines.vmapped.memory import Stacks
from fedshift.errors import UserError
from tests.conftest import ragged_task
from tests.test_engines_agree import DOUBLE, check_equal, federate, make

TASK = ragged_task((40, 33, 20, 20, 16, 16))


class Small(Vmapped):
    """An engine whose device holds so many clients at once."""

    def __init__(self, room: int) -> None:
        super().__init__(DOUBLE)
        self.room, self.stacked = room, list[int]()

    def _cohort(self, method, downs, locals, clients, task, plan):  # type: ignore[no-untyped-def]
        self.stacked.append(len(clients))
        if len(clients) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._cohort(method, downs, locals, clients, task, plan)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_clients_that_do_not_fit_together_are_stacked_in_parts(name: str) -> None:
    method, engine = make(name, True), Small(2)
    assert method is not None
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = federate(method, engine, DOUBLE, 2, TASK)
    said = [str(one.message) for one in given if "fit into memory" in str(one.message)]
    assert [sentence.split()[0] for sentence in said] == ["6", "3"]  # once for each cut, not for each round
    assert said[-1].endswith("from now on at most 2 are stacked")
    assert engine.stacked == [6, 3, 2, 2, 2, 2, 2, 2]
    check_equal(federate(method, Vmapped(DOUBLE), DOUBLE, 2, TASK), found, 1e-10)


def test_one_client_that_does_not_fit_is_said() -> None:
    method = make("fedavg", False)
    assert method is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match="not enough memory for one of the clients of FedAvg"):
            federate(method, Small(0), DOUBLE, 1, TASK)


def test_what_was_found_out_is_known_until_it_is_forgotten() -> None:
    freed: list[int] = []
    stacks, sizes = Stacks(lambda: freed.append(1)), list[int]()

    def work(some: Sequence[int]) -> dict[int, int]:
        sizes.append(len(some))
        if len(some) > 3:
            raise torch.OutOfMemoryError
        return dict.fromkeys(some, 0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(stacks.work("things", "a", range(8), 8, work)) == list(range(8))
        stacks.work("things", "a", range(3), 8, work)
        stacks.work("things", "b", range(2), 8, work)
        stacks.clear()
        stacks.work("things", "a", range(4), 8, work)
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 1, 2, 4, 2, 2]
    assert len(freed) == 3


def test_an_error_that_hides_want_of_memory_is_that() -> None:
    def work(some: Sequence[int]) -> dict[int, int]:
        try:
            if len(some) > 1:
                raise torch.OutOfMemoryError
        except torch.OutOfMemoryError:
            raise RuntimeError("capture was invalidated")  # noqa: B904
        if some[0] == 3:
            raise RuntimeError("something else")
        return dict.fromkeys(some, 0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Stacks().work("things", "a", [1, 2], 2, work) == {1: 0, 2: 0}
    with pytest.raises(RuntimeError, match="something else"):
        Stacks().work("things", "a", [3], 1, work)
