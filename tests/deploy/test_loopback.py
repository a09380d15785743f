"""Any registered method, over Flower's own records and apps in one process, ends where the sequential engine ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedshift
from fedshift.core.registry import METHODS
from fedshift.errors import UserError
from tests.deploy.parties import InProcess
from tests.test_engines_agree import gap

pytestmark = pytest.mark.usefixtures("uncounted")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_where_the_sequential_engine_ends(name: str, tmp_path: Path) -> None:
    """Server states, local states on the parties' disks, and what they serve with."""
    federation = InProcess.of(tmp_path, name, norm=True)
    if name == "centralised":
        with pytest.raises(UserError, match="no federation can"):
            federation.run()
        return
    folder, log = federation.run()
    assert not [line for line in log if "left out" in line]
    session, state = federation.simulated()
    last = folder.last(torch.device("cpu"))
    assert last.round == state.round
    assert gap(state.server, last.server) <= 1e-6
    found = federation.locals(last)
    assert set(found) == set(state.locals)
    for client, tree in state.locals.items():
        assert gap(tree, found[client]) <= 1e-6
    if folder.best(torch.device("cpu")).round == state.round:
        for client, tree in session.deploy(state).trained().items():
            served = fedshift.load(federation.party(federation.task.client(client)).artefacts / "artefacts")
            assert gap(tree, served.deployed) <= 1e-6


@pytest.mark.parametrize(("name", "more"), [("fedavg", 0), ("fedbn", 1)])
def test_one_message_for_a_round_and_little_else(name: str, more: int, tmp_path: Path) -> None:
    """Flower starts a process for every message: hello, the rounds, what is given away if anything, scores, the artefact."""
    federation = InProcess.of(tmp_path, name, rounds=4, norm=True)
    grid = federation.grid()
    federation.run(grid=grid)
    assert grid.sent == 3 * (1 + 4 + more + 1 + 1)
