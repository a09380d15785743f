"""Unseen clients who are described by the images they are tested on (ODPFL-HN) have a model for every stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.core.tree import Tree, pick
from fedshift.data.streams import Setting, Stream
from fedshift.data.task import Task
from fedshift.methods import odpfl_hn
from fedshift.runs.described import as_shown, remade_by_stream
from fedshift.runs.session import Session
from tests.methods.federations import AWKWARD, equal_trees, far, federation, make_task, run
from tests.runs.test_run import SIZES, go, tiny

SMALL: dict[str, Any] = {"embedding": 8, "hidden": 20}


def streamed() -> Task:
    """Three unseen clients of four images, shown all of them backwards, two of them, and all of them darker."""
    task = replace(make_task((5, 9, 12), unseen=3), public=torch.tensor([25, 3, 11]))
    own = {client.name: client.test for client in (*task.clients, *task.unseen)}

    def stream(name: str, index: Mapping[str, torch.Tensor], images: torch.Tensor | None = None) -> Stream:
        return Stream(name, "original", Setting("stored"), images, task.labels, task.ids, index)

    return replace(
        task,
        streams={
            "original": stream("original", {name: index.flip(0) for name, index in own.items()}),
            "half": stream("half", {name: index[:2] for name, index in own.items()}),
            "dark": stream("dark", own, task.images // 2),
        },
    )


def test_a_streams_images_take_the_place_of_the_test_images() -> None:
    task = streamed()
    for name in task.streams:
        shown = as_shown(task, name)
        assert (shown.clients, dict(shown.streams)) == ((), {})
        assert shown.public is not None
        assert torch.equal(shown.ids[shown.public], task.ids[task.public])
        assert as_shown(replace(task, public=None), name).public is None
        for client in shown.unseen:
            theirs = task.samples(task.client(client.name), name)
            assert not len(client.train)
            assert torch.equal(shown.images[client.test], theirs.images[theirs.index])
            assert torch.equal(shown.ids[client.test], theirs.ids[theirs.index])


def test_unseen_clients_are_described_by_what_a_stream_shows() -> None:
    task = streamed()
    fed, _ = federation("odpfl-hn", task, **SMALL)
    state = run(fed)[0]
    deployment = fed.deploy(state)
    remade = remade_by_stream(fed, deployment, task)
    assert list(remade) == ["half", "dark"]  # original shows all of them, and the order says nothing
    whole, server = fed.unseen(deployment), state.server
    for name, make in remade.items():
        made = make()
        for client in task.unseen:
            samples = task.samples(client, name)
            x = AWKWARD.normalise(samples.images[samples.index].double() / 255)
            e = odpfl_hn.embedded(server["encoder"], x).mean(0)
            expected = odpfl_hn.made(server["hyper"], pick(server["model"], AWKWARD.parameters), e)
            assert far({k: made[client.name]["model"][k] for k in expected}, expected) < 1e-12
            assert not equal_trees(made[client.name], whole[client.name])


@pytest.mark.parametrize("name", ["fedavg", "ditto", "heterofedtta"])
def test_others_have_one_model_for_all_streams(name: str) -> None:
    task = streamed()
    fed, _ = federation(name, task)
    assert remade_by_stream(fed, fed.deploy(fed.start()), task) == {}


def test_a_run_scores_every_stream_with_its_own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Tree] = {}
    evaluate = Session.evaluate

    def watched(
        self: Session, adapters: Any, deployed: Mapping[str, Tree], parts: Sequence[str], task: Task | None = None
    ) -> Any:
        if "south" in deployed:
            seen.update(dict.fromkeys(parts, deployed["south"]))
        return evaluate(self, adapters, deployed, parts, task)

    monkeypatch.setattr(Session, "evaluate", watched)
    streams = [
        {"name": "original", "kind": "original"},
        {"name": "half", "kind": "original", "fraction": 0.5},
        {"name": "corrupted", "kind": "corrupted"},
    ]
    method = {"name": "odpfl-hn", **SMALL}
    settings = {"split": {"unseen": ["south"]}, "stream": streams, "method": [method], "evaluate": {"advice": False}}
    (row,) = go(tiny(**settings), tmp_path).rows
    counts = {name: row.scores(f"personal/{name}/unseen", "last")[0].by_client["south"][0] for name in seen}
    assert counts == {"original": SIZES["south"], "half": SIZES["south"] // 2, "corrupted": SIZES["south"]}
    assert not equal_trees(seen["half"], seen["original"])
    assert not equal_trees(seen["corrupted"], seen["original"])
