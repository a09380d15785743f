"""The live page: what folders say now, read-only, on this machine alone."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedshift import UserError
from fedshift.results.pages.live import Live
from fedshift.results.pages.watch import Memory, state_of
from fedshift.store.lock import RunLock
from fedshift.store.seal import line_text
from tests.browser import browser, errors, faults, ready, resize, until
from tests.runs.test_run import go, lines, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    go(tiny(seeds=[0, 1], rounds=3), tmp_path)
    return tmp_path / "tiny"


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Live]:
    with Live(folder, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def unfinished(folder: Path, rounds: int = 2) -> Path:
    """One of the runs as if it had got so far."""
    run = sorted(folder.glob("fedavg/*"))[0]
    (run / "done").unlink()
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(text[: 2 * rounds]) + text[2 * rounds][:9])  # and half a line
    return run


def ask(server: Live, method: str, path: str = "/state", host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def by_name(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in state["runs"]}


def test_the_state_is_that_of_the_folders(folder: Path) -> None:
    run = unfinished(folder)
    memory = Memory()
    state = state_of(folder, memory)
    runs = by_name(state)
    assert runs["fedavg seed 1"]["state"] == "finished"
    assert (runs["fedavg seed 0"]["done"], runs["fedavg seed 0"]["rounds"]) == (2, 3)
    assert runs["fedavg seed 0"]["state"] == "stopped"
    assert any("--resume" in text for text in state["failures"])
    stored = [line for line in lines_of_whole(run) if "losses" in line]
    assert dict(runs["fedavg seed 0"]["losses"]) == pytest.approx(stored[-1]["losses"], abs=1e-5)
    with RunLock(run):
        state = state_of(folder, memory)
        assert by_name(state)["fedavg seed 0"]["state"] == "training"
        assert state["counts"] == "1 training, 1 finished"
        assert state["eta"].startswith("about ")
    (curve,) = [c for c in by_name(state)["fedavg seed 0"]["curves"] if c["title"] == "Training loss"]
    assert curve["x"] == [1, 2]
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def lines_of_whole(run: Path) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n")].splitlines()]


def test_losses_by_client_make_the_mean(folder: Path) -> None:
    line = lines(next(folder.rglob("metrics.jsonl")))[0]
    assert len(line["losses"]) == line["participants"]
    assert min(line["losses"].values()) <= line["train/loss"] <= max(line["losses"].values())


def test_planned_runs_wait_and_damaged_ones_are_named(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    assert [run["name"] for run in plan["runs"]] == ["fedavg seed 0", "fedavg seed 1"]
    plan["runs"].append({"name": "ditto seed 0", "seed": 0, "rounds": 9, "folder": "ditto/0-x"})
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "broken").mkdir()
    (folder / "broken" / "metrics.jsonl").write_text("{}\n")
    state = state_of(folder, Memory())
    assert by_name(state)["ditto seed 0"]["state"] == "waiting"
    assert by_name(state)["broken"]["state"] == "damaged"
    assert state["rounds"] == 3 + 3 + 9


def test_whatever_became_of_files_the_page_has_an_answer(folder: Path) -> None:
    run = sorted(folder.glob("fedavg/*"))[0]
    files = [folder / "plan.json", *(run / name for name in ("config.toml", "metrics.jsonl", "done"))]
    for path in files:
        content = path.read_bytes()
        for other in (
            b"",
            content[:-20],
            b"[1]\n",
            b'{"runs": [{"folder": "x"}]}\n',
            b"\xff",
            b'{"round": "x", "bytes-up": 1}\n',
        ):
            path.write_bytes(other)
            state = state_of(folder, Memory())
            assert len(state["runs"]) == 2, path
            assert json.loads(json.dumps(state, allow_nan=False)) == state
            if path.name in ("config.toml", "metrics.jsonl") and other != b"":
                assert state["counts"] == "1 damaged, 1 finished", (path, other)
        path.unlink()
        os.mkfifo(path)  # which never ends
        json.dumps(state_of(folder, Memory()), allow_nan=False)
        path.unlink()
        path.write_bytes(content)
    assert state_of(folder, Memory())["counts"] == "2 finished"


def test_only_get_and_only_this_machine(folder: Path) -> None:
    with serving(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, "GET")[0] == 200
        assert ask(server, "GET", host=f"localhost:{server.server_port}")[0] == 200
        assert ask(server, "GET", path="/../../etc/passwd")[0] == 404
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "ANYTHING"):
            assert ask(server, method)[0] == 405, method
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1.evil.example:80"):
            assert ask(server, "GET", host=host)[0] == 403, host
            assert ask(server, "GET", path="/", host=host)[0] == 403, host
        status, page = ask(server, "GET", "/")
        assert (status, "connect-src" in page) == (200, True)


def test_a_port_in_use_and_a_folder_that_is_not_there_are_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        Live(tmp_path / "nowhere")
    for port in (-1, 99999):
        with pytest.raises(UserError, match=f"port {port} cannot be used .* choose another one with --port"):
            Live(folder, port)
    with serving(folder) as server, pytest.raises(UserError, match="choose another one with --port"):
        Live(folder, server.server_port)


@pytest.mark.system
def test_the_page_follows_and_survives_restarts_of_either_side(folder: Path) -> None:
    run = unfinished(folder, 1)
    with browser() as driver:
        with serving(folder) as server:
            port = server.server_port
            driver.get(server.address)
            ready(driver)
            assert "1 stopped, 1 finished" in driver.execute_script("return document.body.innerText")
            assert "1 / 3" in driver.execute_script("return document.getElementById('runs').innerText")
            assert errors(driver) == []
            assert faults(driver) == []
            resize(driver, 390)
            time.sleep(0.3)
            assert driver.execute_script("return document.documentElement.scrollWidth") == 390
            resize(driver, 1280)
        until(lambda: driver.execute_script("return document.documentElement.dataset.connected") == "no")
        with serving(folder, port):
            until(lambda: driver.execute_script("return document.documentElement.dataset.connected") == "yes")
            with RunLock(run):  # the run goes on
                whole = "".join(json.dumps(line) + "\n" for line in lines_of_whole(run))
                (run / "metrics.jsonl").write_text(
                    whole + line_text({"round": 2, "bytes-up": 1, "train/loss": 0.25}, "3") + "\n"
                )
                until(lambda: "2 / 3" in driver.execute_script("return document.getElementById('runs').innerText"))
                assert "0.250" in driver.execute_script("return document.getElementById('runs').innerText")
                until(lambda: "1 training" in driver.execute_script("return document.body.innerText"))
