"""The folder of a service under damage: one sentence, or a fall-back that is said; nothing is lost or written over."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import UserError, cli
from fedshift.serve.bodies import Refused, Sent
from fedshift.serve.history import History
from fedshift.serve.host import Host, Keeping
from fedshift.serve.opening import service_of
from fedshift.serve.records import ANSWERS
from fedshift.serve.service import Service, Settings
from fedshift.store.lock import owner_of
from fedshift.store.trees import load, save
from tests.serve.conftest import World

NEWEST = "versions/00000003.safetensors"
FILES = ("service.json", "versions/00000002.safetensors", NEWEST, ANSWERS, f"{ANSWERS}-wal", f"{ANSWERS}-shm", ".lock")


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:: max(len(content) // 50, 1)] = b"\xfe" * len(content[:: max(len(content) // 50, 1)])
    path.write_bytes(bytes(content))


WAYS: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": cut,
    "garbled": garbled,
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a folder": as_folder,
    "other JSON": lambda path: path.write_text('{"a": {"b": [1, null]}}\n'),
    "a list": lambda path: path.write_text("[3]"),
    "nested": lambda path: path.write_text("[" * 5000),
}


def service(world: World, adapter: str = "t3a", method: str = "fedbn") -> Service:
    return service_of(world.artefact(method), adapter, {}, Settings(fall_back="never"))


@contextmanager
def serving(own: Service, folder: Path) -> Iterator[Host]:
    host = Host(own, folder, Keeping(seconds=3600))
    host.open()
    try:
        yield host
    finally:
        host.close()


def asked(host: Host, world: World, *names: str) -> list[dict[str, Any]]:
    """Answers to some images, by name."""
    images, ids = world.stream()
    count = len(names)
    (told,) = host._answer([Sent(images[:count], names, ids[:count])])
    return list(told["answers"])


def written(host: Host) -> None:
    host._write(host.condition, "kept", host._handed_over())


@pytest.fixture(scope="module")
def killed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server that was killed after three versions, with all that lies there then."""
    place = tmp_path_factory.mktemp("state")
    with serving(service(world), place / "live") as host:
        for name in "abc":
            asked(host, world, name)
            written(host)
        shutil.copytree(place / "live", place / "killed")
    assert all((place / "killed" / name).is_file() for name in FILES)
    return place / "killed"


@pytest.fixture
def state(killed: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(killed, tmp_path / "state"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "versions").iterdir() if path.is_file()}


REFUSED = {("service.json", "a folder"), (".lock", "a folder")}  # nobody but its owner may say what it is
TRIALS = [(name, way) for name in FILES for way in WAYS]


@pytest.mark.parametrize(("name", "way"), [trial for trial in TRIALS if trial not in REFUSED])
def test_every_file_in_every_way(name: str, way: str, world: World, state: Path) -> None:
    WAYS[way](state / name)
    before = contents(state)
    with serving(service(world), state) as host:
        said = "\n".join(host.numbers.lines)
        (answer,) = asked(host, world, "d")
        assert answer["did"] == "adapted"
        told = asyncio.run(host.feedback(dict.fromkeys("abd", answer["class"])))
    assert told["noted"] == 3 or "answers are gone" in said or "labels find no answer" in said
    healed = name == ".lock" or (name.startswith(ANSWERS) and way != "a folder")  # which SQLite can do
    assert healed or Path(name).name in said
    assert "fedshift run" not in said  # no run makes it again
    assert ("goes on from version 2" if name == NEWEST else "goes on from version 3") in said
    assert contents(state).items() >= before.items()  # nothing is written over, damaged or not
    with serving(service(world), state) as again:
        assert again.versions[-1].why == "stopped"
        assert again.condition.seen == (3 if name == NEWEST else 4)


@pytest.mark.parametrize(("name", "way"), sorted(REFUSED))
def test_what_is_refused_is_named(name: str, way: str, world: World, state: Path) -> None:
    WAYS[way](state / name)
    with pytest.raises(UserError) as refused:
        Host(service(world), state, Keeping()).open()
    assert str(refused.value).startswith(f"{state / name} is ")
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
    assert owner_of(state) is None


def test_a_damaged_version_is_passed_over_and_said(world: World, state: Path) -> None:
    WAYS["other JSON"](state / NEWEST)
    with serving(service(world), state) as host:
        said = [line.partition(" UTC ")[2] for line in host.numbers.lines]
        (line,) = [line for line in said if line.startswith(f"{state / NEWEST} is damaged (")]
        assert "put it back from a copy" in line
        assert "what was learnt after version 2 is lost, if no copy of a later version is put back" in said
        assert [version.number for version in host.versions] == [0, 1, 2]
        with pytest.raises(Refused, match=r"00000003\.safetensors is damaged"):
            asyncio.run(host.rollback(3))
        asyncio.run(host.freeze())
        assert host.versions[-1].number == 4
    assert (state / NEWEST).read_text().startswith('{"a"')


def test_without_any_sound_version_it_begins_as_deployed(world: World, state: Path) -> None:
    for number in (1, 2, 3):
        WAYS["cut"](state / "versions" / f"{number:08}.safetensors")
    with serving(service(world), state) as host:
        assert (host.condition.seen, host.versions[-1].number, host.history.next) == (0, 0, 4)
        assert any("after version 0 is lost" in line for line in host.numbers.lines)


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


FACTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {  # sealed anew, and of another shape
    "none": lambda _: {},
    "no time": lambda facts: without(facts, "time"),
    "no falls": lambda facts: without(facts, "falls"),
    "a word for a time": lambda facts: {**facts, "time": "x"},
    "a time nobody can show": lambda facts: {**facts, "time": 1e300},
    "half an image": lambda facts: {**facts, "seen": 0.5},
    "a truth for a number": lambda facts: {**facts, "quiet": True},
    "fewer than none": lambda facts: {**facts, "learnt": -1},
    "another mode": lambda facts: {**facts, "mode": ["adapting"]},
    "a number for a reason": lambda facts: {**facts, "why": 3},
}
TREES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no tree": lambda trees: without(trees, "tree"),
    "no levels": lambda trees: {**trees, "levels": {}},
    "too few levels": lambda trees: {**trees, "levels": {"levels": {"sums": torch.zeros(2), "on": torch.zeros(2)}}},
    "half a knowledge": lambda trees: {**trees, "known": {"known": {"means": torch.zeros(2, 2)}}},
}


@pytest.mark.parametrize("way", [*FACTS, *TREES])
def test_a_version_of_another_shape_is_damaged(way: str, world: World, state: Path) -> None:
    trees, facts = load(state / NEWEST)
    same: Callable[[dict[str, Any]], dict[str, Any]] = dict
    save(state / NEWEST, TREES.get(way, same)(trees), FACTS.get(way, same)(facts))
    with serving(service(world), state) as host:
        assert any(str(state / NEWEST) in line and "is damaged" in line for line in host.numbers.lines)
        assert host.condition.seen == 2


def test_what_another_artefact_has_learnt_is_refused(world: World, state: Path, tmp_path: Path) -> None:
    for number, other in enumerate((service(world, method="ditto"), service(world, "tent"))):
        with serving(other, tmp_path / f"other-{number}") as host:
            asked(host, world, "x")
        foreign = state / "versions" / "00000009.safetensors"
        shutil.copy(tmp_path / f"other-{number}" / "versions" / "00000001.safetensors", foreign)
        with pytest.raises(UserError, match=r"9\.safetensors is what another artefact or adapter has learnt; move it"):
            Host(service(world), state, Keeping()).open()
        with pytest.raises(UserError, match="another artefact or adapter"):
            History(state, service(world)).load(9)
        (state / "service.json").write_text("{")  # nobody vouches for it any more
        with pytest.raises(UserError, match=r"service\.json is damaged"):
            Host(service(world), state, Keeping()).open()
        foreign.unlink()
        with serving(service(world), state) as host:
            assert any("service.json was damaged" in line for line in host.numbers.lines)


def test_files_of_other_names_are_left_alone(world: World, state: Path) -> None:
    for name in ("00000003 (copy).safetensors", "3.safetensors", "x.safetensors"):
        shutil.copy(state / NEWEST, state / "versions" / name)
    (state / "versions" / f".{Path(NEWEST).name}.123").write_bytes(b"half a file")
    with serving(service(world), state) as host:
        assert [version.number for version in host.versions] == [0, 1, 2, 3]
    assert len(list((state / "versions").iterdir())) == 7


def test_the_command_ends_with_one_sentence(
    world: World, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_folder(state / "service.json")
    state.rename(state.parent / "paper-t3a")
    folder = str(world.folder("fedbn"))
    words = ["serve", folder, "--adapter", "t3a", "--port", "0", "--state", str(state.parent)]
    monkeypatch.setattr("sys.argv", ["fedshift", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert "service.json is damaged (it is a folder)" in said
    assert len(said.splitlines()) == 1


def test_one_server_at_a_time(world: World, tmp_path: Path) -> None:
    with serving(service(world), tmp_path), pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on "):
        Host(service(world), tmp_path, Keeping()).open()
    with serving(service(world), tmp_path) as host:
        assert host.versions[-1].why == "stopped"


def test_what_waits_for_the_model_is_bounded(world: World, tmp_path: Path) -> None:
    own = service(world)
    method = own.artefact.setup.method
    for shape, most in (((3, 8, 8), 4096), ((3, 224, 224), 1783), ((3, 4096, 4096), 256)):
        larger = replace(method, arch=replace(method.arch, input_shape=shape))
        setup = replace(own.artefact.setup, methods={"cnn": larger})
        host = Host(replace(own, artefact=replace(own.artefact, setup=setup)), tmp_path, Keeping())
        assert host._batcher._most == most


def test_a_wish_comes_between_batches(world: World, tmp_path: Path) -> None:
    """Images that wait for company are answered as the operator wishes, within their deadline, and a version tells it."""
    images, ids = world.stream()

    async def wished(host: Host) -> tuple[list[dict[str, Any]], float]:
        host.start()
        begun = time.monotonic()
        asking = [asyncio.create_task(host.predict(Sent(images[k : k + 1], (str(k),), ids[k : k + 1]))) for k in (0, 1)]
        await asyncio.sleep(0.01)
        frozen = await host.freeze()
        told = [(await one)["answers"][0] for one in asking]
        spent = time.monotonic() - begun
        back = await host.rollback(0)
        host.stop()
        assert (frozen.number, back.number) == (1, 2)
        return told, spent

    host = Host(service(world, "tent"), tmp_path, Keeping(seconds=3600, deadline=0.3))
    host.open()
    told, spent = asyncio.run(wished(host))
    host.close()
    assert [one["did"] for one in told] == ["frozen", "frozen"]
    assert told[0]["batch"] == told[1]["batch"]
    assert 0.25 < spent < 2.0
    assert (host.condition.mode, host.condition.learnt) == ("frozen", 0)


# ---- the disk says no ---------------------------------------------------------------------------------------------------
def test_what_could_not_be_written_is_tried_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with serving(service(world), tmp_path) as host:
        (answer,) = asked(host, world, "a")
        with monkeypatch.context() as patch:
            patch.setattr("fedshift.store.trees.save_file", full)
            written(host)
            with pytest.raises(Refused, match="not written down yet") as refused:
                asyncio.run(host.freeze())
            assert refused.value.status == 503
        assert host.condition.mode == "frozen"
        assert "make room" not in host.numbers.lines[-1]
        assert [version.number for version in host.versions] == [0]
        host.keeping = Keeping(seconds=0.0)
        host._keep()  # though no image came
        assert host._saving is not None
        host._saving.result()
        assert [version.mode for version in host.versions] == ["adapting", "frozen"]
        assert asyncio.run(host.feedback({"a": answer["class"]}))["noted"] == 1


def test_answers_wait_for_a_disk_that_takes_them(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(service(world), tmp_path) as host:
        (answer,) = asked(host, world, "a")
        real = host.records._file
        host.records._file = sqlite3.connect(f"file:{tmp_path / ANSWERS}?mode=ro", uri=True, check_same_thread=False)
        written(host)
        assert host.versions[-1].number == 1  # the version is there all the same
        assert "1 answers could not be written" in host.numbers.lines[-1]
        with pytest.raises(Refused, match="cannot be looked up now"):
            asyncio.run(host.feedback({"a": answer["class"]}))
        host.records._file.close()
        assert asyncio.run(host.accuracies()) == {}  # the page is shown without them
        host.records._file = real
        assert asyncio.run(host.feedback({"a": answer["class"]}))["noted"] == 1


def test_a_wish_is_written_once(world: World, tmp_path: Path) -> None:
    with serving(service(world), tmp_path) as host:
        asked(host, world, "a")
        version = asyncio.run(host.freeze())
        host.keeping = Keeping(seconds=0.0)
        host._keep()
        assert (version.number, host._saving, len(host.versions)) == (1, None, 2)


@pytest.mark.parametrize("way", WAYS)
def test_damaged_answers_are_set_aside(way: str, world: World, tmp_path: Path) -> None:
    """Of a server that ended in order, so that SQLite has nothing to mend them with."""
    with serving(service(world), tmp_path) as host:
        asked(host, world, *"abcdefgh")
    assert sorted(path.name for path in tmp_path.glob(f"{ANSWERS}*")) == [ANSWERS]
    WAYS[way](tmp_path / ANSWERS)
    before = (tmp_path / ANSWERS).read_bytes() if (tmp_path / ANSWERS).is_file() else None
    with serving(service(world), tmp_path) as host:
        (line,) = [line for line in host.numbers.lines if ANSWERS in line]
        assert f"{tmp_path / ANSWERS} is damaged (" in line
        assert f"is called damaged-1-{ANSWERS} from now on" in line
        (answer,) = asked(host, world, "a")
        assert asyncio.run(host.feedback({"a": answer["class"], "b": answer["class"]}))["missing"] == ["b"]
    aside = tmp_path / f"damaged-1-{ANSWERS}"
    assert (aside.read_bytes() if aside.is_file() else None) == before
