"""Requests that nobody would write: bombs, half addresses, endless ids, images whose answers are no numbers."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.datastructures import Headers

from fedshift.serve import bodies
from fedshift.serve.app import _json, _labels
from fedshift.serve.bodies import Limits, Refused
from fedshift.serve.gate import Gate, Rules
from fedshift.serve.host import Host, Keeping
from fedshift.serve.numbers import Bin, Numbers
from fedshift.serve.opening import service_of
from fedshift.serve.service import Settings
from fedshift.serve.telling import UNKNOWN
from tests.serve.conftest import World
from tests.serve.servers import png


def told_by_the_gate(headers: Mapping[str, str], rules: Rules) -> tuple[int, dict[str, Any]]:
    """The status and the answer of a request that comes no further than the gate."""
    said: list[Mapping[str, Any]] = []

    async def inside(scope: object, receive: object, send: object) -> None:
        raise AssertionError("nobody should come so far")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {"type": "http", "path": "/status", "client": ("127.0.0.1", 1), "headers": [
        (key.encode(), value.encode()) for key, value in headers.items()
    ]}  # fmt: skip
    asyncio.run(Gate(inside, rules)(scope, receive, send))  # type: ignore[arg-type]
    return said[0]["status"], json.loads(said[1]["body"])


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"host": "["}, 421), ({"host": "[::1"}, 421), ({}, 421), ({"host": "localhost", "origin": "http://["}, 403)],
)
def test_half_an_address_is_a_bad_request(
    headers: dict[str, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    found, told = told_by_the_gate(headers, Rules(frozenset({"localhost", "::1"})))
    assert (found, set(told)) == (status, {"error"})
    assert not caplog.records  # no traceback either


def test_less_than_one_request_a_second_is_a_rate_too() -> None:
    gate = Gate(None, Rules(None, rate=0.5))  # type: ignore[arg-type]
    gate._spend("a")
    with pytest.raises(Refused):
        gate._spend("a")


def read(body: bytes, kind: str = "", limits: Limits | None = None, names: tuple[str, ...] = ()) -> list[Any]:
    headers = Headers({"content-type": kind} if kind else {})
    return asyncio.run(bodies.read(body, headers, list(names), limits or Limits()))[0]


def large(side: int) -> bytes:
    """A picture of few bytes and many pixels."""
    stream = io.BytesIO()
    Image.new("L", (side, side)).save(stream, "PNG")
    return stream.getvalue()


def form(pictures: list[bytes]) -> bytes:
    part = b'--b\r\nContent-Disposition: form-data; name="images"; filename="x.png"\r\n\r\n'
    return b"".join(part + picture + b"\r\n" for picture in pictures) + b"--b--\r\n"


def test_many_large_images_in_a_small_body_are_refused() -> None:
    """Each is within its limit; all of them would be more memory and time than anybody has."""
    limits, picture = Limits(pixels=10_000), large(100)
    multipart = "multipart/form-data; boundary=b"
    assert len(read(form([picture] * 4), multipart, limits)) == 4
    with pytest.raises(Refused, match="40000 pixels together") as refused:
        read(form([picture] * 5), multipart, limits)
    assert refused.value.status == 413


def test_what_was_decoded_is_let_go_of() -> None:
    images = [Image.open(io.BytesIO(large(50))) for _ in range(3)]
    assert bodies.fitted(images, [], (3, 8, 8)).pixels.shape == (3, 3, 8, 8)
    for image in images:
        with pytest.raises(ValueError, match="closed image"):
            image.getpixel((0, 0))


@pytest.mark.parametrize("name", ["x" * 257, "\ud800"])
def test_ids_that_cannot_be_remembered_are_refused(name: str) -> None:
    picture = png(np.zeros((3, 8, 8), dtype=np.uint8))
    for told in (
        lambda: read(picture, names=(name,)),
        lambda: read(json.dumps({"array": [[0]], "ids": [name]}).encode(), "application/json"),
        lambda: _labels(json.dumps({"id": name, "label": "3"}).encode()),
    ):
        with pytest.raises(Refused) as refused:
            told()
        assert refused.value.status == 400
        assert len(refused.value.sentence) < 80


# ---- answers that are no numbers ------------------------------------------------------------------------------------------
def test_what_is_no_number_is_null_and_no_class(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--fall-back never`` the adapter's answers are served whatever they are; nobody counts them as a class."""

    service = service_of(world.artefact("fedbn"), "t3a", {}, Settings(fall_back="never"))
    kind, sound = type(service.adapter), type(service.adapter).predict

    def broken(*arguments: Any) -> Any:
        output, after = sound(*arguments)
        nothing = torch.full_like(output.logits, math.nan)
        return output._replace(logits=nothing, aux={**output.aux, "e": nothing[:, 0]}), after

    monkeypatch.setattr(kind, "predict", broken)
    monkeypatch.setattr(kind, "telemetry", ("e",))
    host = Host(service, tmp_path, Keeping(seconds=3600))
    host.open()
    images, ids = world.stream()
    (told,) = host._answer([bodies.Sent(images[:1], ("a",), ids[:1])])
    answer = json.loads(_json(told).body)["answers"][0]
    assert (answer["label"], answer["class"], answer["unknown"]) == (UNKNOWN, UNKNOWN, True)
    assert (answer["confidence"], answer["telemetry"]) == (None, {"e": None})
    assert answer["frozen"] in service.classes
    assert not host.numbers.classes
    assert host.numbers.totals["images"] == 1
    assert math.isfinite(host.numbers.timeline()[0]["confidence"])
    accuracy = asyncio.run(host.feedback({"a": service.classes[0]}))["accuracy"]
    assert accuracy["adapted"]["accuracy"] == accuracy["served"]["accuracy"] == 0.0  # whatever class comes first
    host.close()


def test_counts_are_read_while_another_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is made in one thread, answers are counted in another, and a new bin may begin at any moment."""
    import threading

    numbers, begun = Numbers(), threading.Event()
    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr("fedshift.serve.numbers.time.time", lambda: next(clock))
    for _ in range(3):
        numbers.request(200, 0.1)
    real = Bin.to_json

    def slowly(one: Bin) -> dict[str, Any]:
        begun.set()
        threading.Event().wait(0.02)
        return real(one)

    monkeypatch.setattr(Bin, "to_json", slowly)
    other = threading.Thread(target=lambda: (begun.wait(), numbers.answers([0], 1.0, 0, 0, 0, {})))
    other.start()
    assert len(numbers.timeline()) == 3
    other.join()
    assert len(numbers.timeline()) == 4
