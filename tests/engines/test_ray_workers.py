"""Who of Ray's workers gets which work, with as much of Ray as the engine asks for, in this process."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedshift.engines import ray as engines_ray
from fedshift.engines.base import Compute
from fedshift.engines.ray_worker import Answer, versions
from fedshift.errors import UserError


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class ActorDiedError(RayError):
    actor_init_failed = True


class Ref:
    """What will come of a call; it is made when it is asked for, so that an actor can be lost before."""

    def __init__(self, actor: Actor, made: Callable[[], Any], quick: bool) -> None:
        self.actor, self.made, self.quick = actor, made, quick


class Actor:
    def __init__(self, number: int) -> None:
        self.number, self.lost, self.why = number, False, RayError()
        self.made_of: object = versions()
        self.ready = SimpleNamespace(remote=lambda: Ref(self, lambda: self.made_of, True))
        self.work = SimpleNamespace(remote=lambda piece: Ref(self, lambda: Answer((self.number, *piece), 0, ()), False))


class Fake:
    """A cluster of so many CPUs and GPUs."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, room: int) -> None:
        self.room, self.made = room, list[Actor]()

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.room, "GPU": self.room}

    def remote(self, **_: Any) -> Any:
        def make(*_: Any) -> Actor:
            self.made.append(Actor(len(self.made)))
            return self.made[-1]

        return lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    def wait(self, refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        """Who is asked only whether he is there answers before anybody has done his work."""
        first, *rest = sorted(refs, key=lambda ref: not (ref.quick or ref.actor.lost))
        return [first], rest

    def get(self, ref: Ref) -> Any:
        if ref.actor.lost:
            raise ref.actor.why
        return ref.made()

    def kill(self, actor: Actor) -> None:
        actor.lost = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, Fake]]]:
    def start(room: int, device: str = "cpu") -> tuple[Any, Fake]:
        fake = Fake(room)
        monkeypatch.setitem(sys.modules, "ray", fake)
        return engines_ray.Ray(Compute(torch.device(device))), fake

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that workers are lost, which every test here is about
        yield start


def done(engine: Any, *names: str) -> list[tuple[int, str]]:
    """Who did each of these pieces."""
    answers: list[tuple[int, str]] = engine._run(lambda actor, piece: actor.work.remote(piece), [[n] for n in names])
    assert [name for _, name in answers] == list(names)
    return answers


def test_a_node_that_goes_between_two_rounds_is_nobodys_fault(started: Any) -> None:
    """Its workers are idle then, and a client that meets one of them after the other is not to blame."""
    engine, fake = started(8)
    done(engine, *"abcdefgh")
    for actor in fake.made[:7]:
        actor.lost = True
    fake.room = 1
    assert done(engine, "a", "b") == [(7, "a"), (7, "b")]
    assert len(fake.made) == 8  # there is no room for others


def test_work_that_takes_every_worker_with_it_is_given_up(started: Any) -> None:
    engine, fake = started(2)

    def fatal(actor: Actor, piece: list[str]) -> Ref:
        ref: Ref = actor.work.remote(piece)
        actor.lost = True
        return ref

    with pytest.raises(UserError, match=f"{engines_ray.LIVES} workers were lost with the work of a"):
        engine._run(fatal, [["a"]])
    assert len(done(engine, *"abcd")) == 4  # others are made
    assert len(fake.made) <= 2 + engines_ray.LIVES


def test_a_lost_worker_is_replaced_while_others_work(started: Any) -> None:
    """One that has a free seat beside its work is one worker, not two."""
    engine, fake = started(3)
    done(engine, *"abc")
    fake.made[0].lost = True
    done(engine, *"abcd")
    assert len(fake.made) == 4
    assert not any(actor.lost for actor in fake.made[1:])


def test_everybody_has_work(started: Any) -> None:
    engine, fake = started(3)
    names = [f"client {k}" for k in range(12)]
    shares = Counter(number for number, _ in done(engine, *names))
    assert len(shares) == len(fake.made) == 3


def test_a_worker_that_cannot_be_made_says_why(started: Any) -> None:
    """A node may lack fedshift, or its GPU a driver; Ray tells that when the actor is first asked for something."""
    engine, fake = started(1)
    engine._fill()
    told = "The actor died because of an error raised in its creation task, ray::Worker.__init__()\n  File ...\n"
    why = ActorDiedError(f"{told}ModuleNotFoundError: No module named 'fedshift'\n")
    fake.made[0].lost, fake.made[0].why = True, why
    with pytest.raises(UserError, match=r"cannot start: ModuleNotFoundError: No module named 'fedshift'$"):
        done(engine, "a")


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ("fedshift 0.1.9, torch 2.11.0", "has fedshift 0.1.9, torch 2.11.0, and here is"),
        (True, "has another version of"),
    ],
)
def test_a_node_with_another_version_is_refused(theirs: object, sentence: str, started: Any) -> None:
    """Its clients would end with other numbers, and nobody would know."""
    engine, fake = started(2)
    engine._fill()
    fake.made[1].made_of = theirs
    with pytest.raises(UserError, match=sentence):
        done(engine, "a", "b", "c")
    assert fake.made[1].lost
    assert fake.made[1] not in engine._idle


@pytest.mark.parametrize(("device", "kind"), [("cpu", "CPU"), ("cuda", "GPU")])
def test_a_cluster_without_what_a_worker_holds_says_so(device: str, kind: str, started: Any) -> None:
    """A head may take no work, and a program that has a GPU may join nodes that have none."""
    engine, _ = started(0, device)
    with pytest.raises(UserError, match=f"has no {kind} for a worker"):
        done(engine, "a")


def test_every_gpu_has_its_piece_whoever_comes_first(started: Any) -> None:
    """There are as many pieces as GPUs: the first worker to come would take two, and the second would have nothing."""
    engine, _ = started(2, "cuda")
    assert {number for number, _ in done(engine, "a", "b")} == {0, 1}
