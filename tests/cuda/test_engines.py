"""Clients stacked on a GPU end where the loop on a CPU does, in double precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from tests.conftest import ragged_task
from tests.cuda.fast import DOUBLE, GPU
from tests.test_engines_agree import CASES, check_equal, federate, make

THERE = Compute(GPU, torch.float64)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_vmapped_on_cuda_equals_sequential(name: str, norm: bool) -> None:
    method = make(name, norm)
    if method is None:
        return
    check_equal(federate(method, Sequential(DOUBLE), DOUBLE, 4), federate(method, Vmapped(THERE), THERE, 4), 1e-9)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("balance", ["weights", "sampler", "softmax"])
@pytest.mark.parametrize("name", ["fedavg", "finetune", "fedrod", "fedtta", "partialfed"])
def test_balanced_steps_can_be_captured_and_compiled(name: str, balance: str, compiled: bool) -> None:
    method = make(name, True, balance=balance)
    assert method is not None
    task = ragged_task((40, 33, 64, 20, 40, 16, 16, 48))
    task = replace(task, labels=torch.where(torch.arange(len(task.labels)) % 5 > 0, 1, task.labels % 3))
    reference = federate(method, Sequential(DOUBLE), DOUBLE, 4, task)
    check_equal(reference, federate(method, Vmapped(THERE, compile_step=compiled), THERE, 4, task), 1e-9)


@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_serve_rounds_with_other_clients(compiled: bool) -> None:
    method = make("scaffold", True)
    assert method is not None
    task = ragged_task((40, 33, 64, 20, 40, 16, 16, 48))
    reference = federate(method, Sequential(DOUBLE), DOUBLE, 8, task, 0.5)
    check_equal(reference, federate(method, Vmapped(THERE, compile_step=compiled), THERE, 8, task, 0.5), 1e-9)
