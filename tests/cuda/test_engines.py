"""Clients stacked on a GPU end where the loop on a CPU does, in double precision."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from fedshift.core.arch import Arch
from fedshift.core.tree import map_tree
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.methods.fedavg import FedAvg
from fedshift.models.cnn import CNN
from fedshift.store.state import State
from tests.conftest import ragged_task, tiny_train
from tests.cuda.fast import DOUBLE, GPU
from tests.test_engines_agree import CASES, check_equal, federate, make

THERE = Compute(GPU, torch.float64)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_vmapped_on_cuda_equals_sequential(name: str, norm: bool) -> None:
    method = make(name, norm)
    if method is None:
        return
    check_equal(federate(method, Sequential(DOUBLE), DOUBLE, 4), federate(method, Vmapped(THERE), THERE, 4), 1e-9)


CAPTURED = list(product(["fedavg", "finetune", "fedrod", "fedtta", "partialfed"], ["weights", "sampler", "softmax"]))
COMPILED = [("fedavg", "weights"), ("fedavg", "softmax"), ("partialfed", "sampler")]  # half a minute each


@pytest.mark.parametrize(
    ("name", "balance", "compiled"), [*((*one, False) for one in CAPTURED), *((*one, True) for one in COMPILED)]
)
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


def test_stacks_that_do_not_fit_are_cut() -> None:
    """With a cap on this process's memory, clients who had one stack have several, and end where they did."""
    arch = Arch.of(lambda: CNN(width=64, hidden=6).make((3, 32, 32), 4), (3, 32, 32), "cnn")
    method = FedAvg(arch=arch, train=tiny_train(lr=0.01, batch_size=64, local_epochs=2))
    task = ragged_task((256,) * 24, side=32)
    compute = Compute(GPU)
    gc.collect()  # what tests before left behind
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # what tests before still hold
    whole = federate(method, Vmapped(compute), compute, 1, task)
    needed, total = torch.cuda.max_memory_allocated() - before, torch.cuda.get_device_properties(GPU).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.6 * needed) / total)
        with pytest.warns(UserWarning, match="do not fit into memory together"):
            cut = federate(method, Vmapped(compute), compute, 1, task)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    check_equal(_on_cpu(whole), _on_cpu(cut), 1e-4)


def _on_cpu(found: tuple) -> tuple:
    state, scores, losses = found
    deployed = {name: map_tree(Tensor.cpu, tree) for name, tree in scores["deployed"].items()}
    own = {name: map_tree(Tensor.cpu, tree) for name, tree in state.locals.items()}
    return State(state.round, map_tree(Tensor.cpu, state.server), own), {**scores, "deployed": deployed}, losses
