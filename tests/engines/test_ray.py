"""Ray's cluster: the sequential engine's numbers, also when a node is killed in the middle of a round."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

from fedshift.engines import ray_worker
from fedshift.engines.base import Compute, Reply
from fedshift.engines.dealing import apart, common_of, joined, pieces_of
from fedshift.engines.ray_worker import (
    KEPT,
    TASKS,
    Known,
    Outbox,
    SentReplies,
    Worker,
    _answered,
    arrays_of,
    boxed,
    tree_of,
    unboxed,
)
from tests.conftest import ragged_task


def test_what_travels_arrives_as_it_was() -> None:
    tree = {
        "model": {"w": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(3)},
        "empty": {},
        "flag": {"x": torch.tensor(True)},
    }
    back = tree_of(arrays_of(tree))
    assert back.keys() == tree.keys()
    assert all(torch.equal(back[slot][name], leaf) for slot, own in tree.items() for name, leaf in own.items())
    back["model"]["w"].zero_()  # memory of its own
    assert tree["model"]["w"].sum() == 15
    task = ragged_task()
    again = unboxed(boxed(task))
    assert torch.equal(again.images, task.images)
    assert again.hash == task.hash
    assert [client.name for client in again.clients] == [client.name for client in task.clients]


def test_replies_of_any_form_travel_together_and_what_is_kept_owns_its_memory() -> None:
    replies = {
        name: Reply(
            {"model": {"w": torch.full((width,), value), "n": torch.tensor(steps)}}, kept, value, steps, value < 3
        )
        for steps, (name, width, value, kept) in enumerate(
            (
                ("a", 2, 1.0, {}),
                ("b", 3, 2.0, {"head": {"v": torch.tensor(2.0)}}),
                ("c", 2, 3.0, {}),
                ("d", 3, 4.0, {"head": {"v": torch.tensor(4.0)}}),
                ("e", 3, 5.0, {"head": {}}),
            )
        )
    }
    sent = SentReplies.of(replies, Outbox(pinned=False))
    assert [group.clients for group in sent] == [("a", "c"), ("b", "d"), ("e",)]
    back = {name: reply for group in sent for name, reply in group.opened(torch.device("cpu")).items()}
    for name, reply in replies.items():
        found = back[name]
        assert (found.loss, found.steps, found.finite) == (reply.loss, reply.steps, reply.finite)
        for one, other in ((found.up, reply.up), (found.local, reply.local)):
            assert {slot: set(leaves) for slot, leaves in one.items()} == {
                s: set(leaves) for s, leaves in other.items()
            }
            assert all(torch.equal(one[s][n], leaf) for s, leaves in other.items() for n, leaf in leaves.items())
    kept = back["b"].local["head"]["v"]
    assert kept.untyped_storage().nbytes() == kept.nbytes  # not all of the others' with it


def test_replies_leave_by_the_same_memory_every_round() -> None:
    outbox, laid = Outbox(pinned=False), list[tuple[torch.Tensor, torch.Tensor]]()
    leaves = [
        torch.arange(5.0),
        torch.tensor(True),
        torch.zeros(3, 0),
        torch.arange(7),
        torch.arange(12.0).double().reshape(3, 4).T,
        torch.ones(2, requires_grad=True),
    ]

    def lay() -> list[int]:
        outbox.clear()
        laid[:] = [(outbox.stacked([leaf, leaf + leaf]), torch.stack([leaf, leaf + leaf])) for leaf in leaves]
        # also where the memory grew on the way
        assert all(torch.equal(found, wanted) and found.dtype == wanted.dtype for found, wanted in laid)
        return [found.data_ptr() for found, _ in laid if found.numel()]

    for _ in range(3):
        lay()
    places = lay()
    assert lay() == places
    assert len({*places}) == 5
    outbox.stacked([torch.ones(1000)])  # more than there is: what lies there already stays
    assert all(torch.equal(found, wanted) for found, wanted in laid)


def test_a_worker_says_what_any_process_would() -> None:
    def work() -> int:
        warnings.warn("the stack is cut", stacklevel=1)
        warnings.warn("numpy will change", DeprecationWarning, stacklevel=1)
        return 7

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)  # as Python does by itself
        answer = _answered(work)
        assert (answer.found, answer.warned) == (7, ("the stack is cut",))
        assert _answered(work).warned == ("the stack is cut",)  # who asks again hears it again


def test_everybody_is_dealt_once_and_what_is_common_once_for_all() -> None:
    pieces = pieces_of(list("abcdefg"), [9, 1, 1, 1, 1, 1, 1], 3)
    assert sorted(name for piece in pieces for name in piece) == list("abcdefg")
    assert pieces[0] == ["a"]
    shared = torch.ones(3)
    trees = [{"model": {"w": shared, "own": torch.tensor(k)}} for k in range(2)]
    common = common_of(trees)
    assert list(common["model"]) == ["w"]
    assert all(joined(apart(tree, common), common)["model"].keys() == {"w", "own"} for tree in trees)


def flags() -> tuple[int, bool, bool, bool]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return torch.get_num_threads(), cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32


@pytest.mark.parametrize("tf32", [False, True])
def test_torch_is_steady_as_long_as_a_worker_lives(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a GPU's convolutions round to TF32 where nobody asked for it, and have other bits each time."""
    monkeypatch.setattr(ray_worker, "_follow_parent", lambda: None)
    before = flags()
    torch.set_num_threads(2)
    try:
        worker = Worker(Compute(tf32=tf32))
        assert flags() == (1, True, tf32, tf32)
        assert worker.ready()
        del worker
    finally:
        torch.set_num_threads(before[0])
    assert flags() == before


def test_what_is_in_use_stays_known_and_what_is_not_goes() -> None:
    """Every validation ships adapters of its own; with the task a GPU would lose its images and captured graphs."""
    known, made = Known(), list[object]()

    def make() -> object:
        made.append(object())
        return made[-1]

    method, task = known.thing("method", make), known.task("task", make)
    for number in range(3 * KEPT):
        known.thing(f"adapter {number}", make)
        assert known.thing("method", make) is method
        assert known.task("task", make) is task
    assert len(made) == 2 + 3 * KEPT
    for number in range(TASKS):  # those of other seeds
        known.task(number, make)
    assert known.task("task", make) is not task


PROGRAM = """
    import os, threading, time, warnings
    import torch
    from ray.cluster_utils import Cluster

    quick = {"health_check_period_ms": 200, "health_check_timeout_ms": 500, "health_check_failure_threshold": 2}
    head = {"num_cpus": 1, "_system_config": quick, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address

    from dataclasses import dataclass
    from pathlib import Path
    from fedshift.core.method import Method
    from fedshift.engines.base import Compute, Reply
    from fedshift.engines.ray import Ray
    from fedshift.engines.sequential import Sequential
    from fedshift.experiment.schema import MethodSpec
    from fedshift.runs.session import Session
    from fedshift.runs.setup import Setup
    from tests.conftest import ragged_task, tiny_arch, tiny_train

    marks, here = Path(MARKS), os.getpid()

    @dataclass(frozen=True)
    class Slow(Method):  # a class of a script; it says which process works, and takes its time
        def begin(self, down, local):
            if os.getpid() != here:
                (marks / str(os.getpid())).touch()
                while len(list(marks.iterdir())) < 2:  # until the other node's worker has come, who may need a minute
                    time.sleep(0.05)
                warnings.warn("work is slow here")
                time.sleep(0.4)
            return super().begin(down, local)

    compute, task = Compute(dtype=torch.float64), ragged_task((9, 7, 1, 8, 12, 5, 6, 3))

    def ended(engine):
        method = Slow(arch=tiny_arch("mlp"), train=tiny_train())
        session = Session(Setup(MethodSpec(name="x"), {"net": method}, method.train), task, engine, compute, 3, 3)
        state = session.start()
        for number in range(3):
            if number == 1 and isinstance(engine, Ray):  # one node goes in the middle of the second round
                threading.Timer(0.7, cluster.remove_node, [node], {"allow_graceful": False}).start()
            state, _ = session.step(state)
        return state.server["model"]

    engine = Ray(compute)
    assert engine.workers == 2, engine.workers
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        far = ended(engine)
    assert any("was lost" in str(one.message) for one in said), "nobody was lost"
    assert sum(str(one.message) == "work is slow here" for one in said) == 1  # every worker said so, every round
    assert len(list(marks.iterdir())) >= 2  # both nodes worked
    assert engine.workers == 1
    engine.close()
    near = ended(Sequential(compute))
    assert far.keys() == near.keys()
    assert all(torch.equal(far[name], leaf) for name, leaf in near.items())
    (marks / "equal").touch()  # Ray has words of its own for the screen
    import ray
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.system
def test_a_node_killed_in_mid_round_changes_nothing(tmp_path) -> None:
    program = tmp_path / "program.py"
    marks = tmp_path / "marks"
    marks.mkdir()
    program.write_text(textwrap.dedent(PROGRAM).replace("MARKS", repr(str(marks))))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    path = ":".join([str(p) for p in sys.path if p])
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (marks / "equal").exists()


ENDED = """
    import os, signal
    from fedshift.cli.guard import guarded
    from fedshift.engines.ray import Ray
    from fedshift.engines.stopping import unbroken

    def command():
        engine = Ray(workers=1)
        try:
            with unbroken():
                os.kill(os.getpid(), signal.SIGTERM)
                print("whole", flush=True)
        finally:
            engine.close()
        print("never")

    guarded(command)
"""


@pytest.mark.system
def test_a_request_to_end_is_still_heard_when_ray_is_there(tmp_path) -> None:
    """Ray puts a handler of its own in the place of ours."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(ENDED))
    environment = {**os.environ, "PYTHONPATH": ":".join([str(p) for p in sys.path if p])}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 143, done.stderr[-2000:]
    assert done.stdout.split() == ["whole"]
    assert "stopped" in done.stderr
