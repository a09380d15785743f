"""A real server process: the benchmark's answers over HTTP, a history that survives SIGKILL, and no way to bring it down."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift import UserError
from fedshift.core.registry import ADAPTERS
from fedshift.engines.reference import as_floats, draws_of, predictions
from fedshift.runs.artefact import ids_of
from fedshift.serve.history import History
from fedshift.serve.opening import open_service, service_of
from fedshift.serve.service import Service, Settings
from tests.data.test_dicom import RAMP, dicom
from tests.serve.conftest import METHODS, World
from tests.serve.servers import ROOT, Server, png, served, started

pytestmark = pytest.mark.system
PICTURE = {"Content-Type": "image/png"}


def follows(world: World, adapter: str) -> str:
    """The first method that this adapter can follow."""
    for method in METHODS:
        try:
            service_of(world.artefact(method), adapter, {}, Settings())
        except UserError:
            continue
        return method
    raise AssertionError(adapter)


@pytest.fixture(scope="module")
def everything(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One process with every registered adapter."""
    place = tmp_path_factory.mktemp("everything")
    images, _ = world.stream()
    (place / "fit").mkdir()
    for number, image in enumerate(images):
        (place / "fit" / f"{number:03}.png").write_bytes(png(image))
    folders = {name: str(world.folder(follows(world, name))) for name in ADAPTERS}
    script = str(Path(__file__).parent / "all_adapters.py")
    with started([script, json.dumps(folders), str(place / "state"), str(place / "fit")], place / "log.txt") as server:
        yield server


def benchmark(world: World, service: Service) -> torch.Tensor:
    """Probabilities from the benchmark's own loop; a set from a folder has the ids of its pixels."""
    samples = world.task.samples(world.task.client("paper"), "corrupted")
    artefact, adapter = service.artefact, service.adapter
    state = adapter.init(artefact.deployed)
    if adapter.fits:
        pixels = samples.images[samples.index]
        draws = draws_of(adapter, ids_of(pixels), artefact.seed, artefact.compute)
        with torch.no_grad():
            state = adapter.fit(state, as_floats(pixels, torch.float32), draws)
    setting = world.task.setting("corrupted")
    shown = predictions(adapter, artefact.deployed, samples, setting, artefact.seed, artefact.compute, state, fit=False)
    return torch.cat([output.logits for output, _, _ in shown]).double().softmax(1)


def test_a_stream_over_http_gets_the_benchmarks_answers(everything: Server, world: World) -> None:
    """One by one where answers are per sample, in micro-batches where an adapter wants them; ids travel with images."""
    images, ids = world.stream()
    pictures = [png(image) for image in images]
    for name in ADAPTERS:
        service = open_service(world.folder(follows(world, name)), name)
        wanted = benchmark(world, service)
        with contextlib.closing(everything.connect()) as connection:
            if service.together is None:
                found = []
                for picture, number in zip(pictures, ids.tolist(), strict=True):
                    status, told = everything.ask("POST", f"/{name}/predict?id={number}", picture, PICTURE, connection)
                    assert status == 200, told
                    assert told["answers"][0]["id"] == str(number)
                    found += told["answers"]
            else:
                size = min(service.together, len(images))
                array = {"array": images.permute(0, 2, 3, 1).tolist(), "ids": ids.tolist()}
                assert size
                status, told = everything.ask(
                    "POST",
                    f"/{name}/predict",
                    json.dumps(array).encode(),
                    {"Content-Type": "application/json"},
                    connection,
                )
                assert status == 200, told
                found = told["answers"]
        chances = torch.tensor([list(one["probabilities"].values()) for one in found]).double()
        assert torch.allclose(chances, wanted, atol=2e-4), name
        assert [one["class"] for one in found] == [service.classes[code] for code in wanted.argmax(1).tolist()], name
        assert all(set(one["telemetry"]) == set(service.adapter.telemetry) for one in found)


def test_requests_of_many_are_answered_together_in_the_order_of_arrival(everything: Server, world: World) -> None:
    """Singles that arrive at the same time make micro-batches for Tent; the reported order gives the same answers."""
    images, ids = world.stream()
    service = open_service(world.folder(follows(world, "tent")), "tent")
    everything.ask("POST", "/tent/reset")

    def one(number: int) -> tuple[int, dict[str, Any]]:
        status, told = everything.ask("POST", f"/tent/predict?id={ids[number]}", png(images[number]), PICTURE)
        assert status == 200
        return number, told["answers"][0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    batches: dict[int, list[int]] = {}
    for number, answer in found:
        batches.setdefault(answer["batch"], []).append(number)
    assert sorted(map(len, batches.values())) == [8]  # within the deadline of this process, one second
    assert service.together == 32


def test_a_lone_request_waits_no_longer_than_the_deadline(everything: Server, world: World) -> None:
    images, _ = world.stream()
    with contextlib.closing(everything.connect()) as connection:
        before = time.perf_counter()
        status, told = everything.ask("POST", "/tent/predict", png(images[0]), PICTURE, connection)
        spent = time.perf_counter() - before
    assert (status, told["answers"][0]["did"]) == (200, "adapted")
    assert 0.95 < spent < 1.5  # the deadline of this process is a second, and Tent wants 32 images


def test_sigkill_loses_at_most_the_last_interval(world: World, tmp_path: Path) -> None:
    images, _ = world.stream()
    pictures = [png(image) for image in images]
    options = ("--adapter", "t3a", "--save-every", "20", "--save-seconds", "0.3", "--fall-back", "never")
    answered = 0
    with served(world.folder("fedbn"), tmp_path, *options) as server:
        ended = threading.Event()

        def load(_: int) -> int:
            count = 0
            with contextlib.closing(server.connect()) as connection:
                while not ended.is_set():
                    started_at = time.perf_counter()
                    try:
                        status, _ = server.ask("POST", "/predict", pictures[count % len(pictures)], PICTURE, connection)
                    except (OSError, http.client.HTTPException):
                        return count
                    count += status == 200
                    time.sleep(max(0.0, 0.04 - (time.perf_counter() - started_at)))
            return count

        with ThreadPoolExecutor(8) as pool:
            counts = [pool.submit(load, number) for number in range(8)]
            time.sleep(1.5)
            server.kill()
            ended.set()
            answered = sum(count.result() for count in counts)
    (folder,) = (tmp_path / "state").iterdir()
    service = open_service(world.folder("fedbn"), "t3a", settings=Settings())
    history = History(folder, service)
    versions = history.versions()
    assert len(versions) > 2
    for version in versions[1:]:
        history.load(version.number)
    last = versions[-1]
    lost = answered - last.seen
    assert lost <= 20 + 0.3 * 250 + 64  # the interval, and what was under way
    with served(world.folder("fedbn"), tmp_path, *options) as server:
        status, told = server.ask("GET", "/status")
        assert status == 200
        assert told["seen"] == last.seen
        assert any(f"after version {last.number} is lost" in line for line in told["log"])
        status, told = server.ask("POST", "/predict", pictures[0], PICTURE)
        assert told["answers"][0]["did"] == "adapted"
        assert server.ask("GET", "/status")[1]["seen"] == last.seen + 1
    files = {path.suffix or path.name for path in folder.rglob("*") if path.is_file()}
    assert files <= {".safetensors", ".json", ".sqlite", ".sqlite-wal", ".sqlite-shm", ".lock"}  # no image among them
    log = (tmp_path / "log.txt").read_text()
    assert "Traceback" not in log
    assert history.versions()[-1].why == "stopped"


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 40,000 x 40,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def test_bad_requests_get_one_sentence_and_the_server_lives(everything: Server, world: World) -> None:
    images, _ = world.stream()
    good, as_json = png(images[0]), {"Content-Type": "application/json"}
    huge_array = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    huge_array += b"{'descr': '|u1', 'fortran_order': False, 'shape': (999999999, 999, 9, 3), }".ljust(117) + b"\n"
    bad: list[tuple[str, str, bytes, dict[str, str], int]] = [
        ("POST", "/none/predict", b"", PICTURE, 400),
        ("POST", "/none/predict", b"no picture at all", PICTURE, 415),
        ("POST", "/none/predict", good[: len(good) // 2], PICTURE, 400),
        ("POST", "/none/predict", bomb(), PICTURE, 413),
        ("POST", "/none/predict", b"{", as_json, 400),
        ("POST", "/none/predict", b"[" * 100_000, as_json, 400),
        ("POST", "/none/predict", b'{"images": ["%%%"]}', as_json, 400),
        ("POST", "/none/predict", b'{"array": [[300]]}', as_json, 400),
        ("POST", "/none/predict", huge_array, {}, 400),
        ("POST", "/none/predict", np.lib.format.magic(1, 0) + b"cos\nsystem\n", {}, 400),
        ("POST", "/none/predict?id=1&id=2", good, PICTURE, 400),
        ("POST", "/none/predict", b"--x\r\n", {"Content-Type": "multipart/form-data"}, 400),
        ("POST", "/none/predict", bytes(128) + b"DICM nothing", {}, 400),
        ("POST", "/nobody/predict", good, PICTURE, 404),
        ("GET", "/none/predict", b"", {}, 405),
        ("POST", "/none/rollback?to=-1", b"", {}, 400),
        ("POST", "/none/rollback?to=99", b"", {}, 404),
        ("POST", "/none/feedback", b'{"id": 1}', as_json, 400),
        ("POST", "/none/feedback", b'{"id": "never", "label": "3"}', as_json, 404),
        ("GET", "/none/status", b"", {"Host": "evil.example"}, 421),
        ("POST", "/none/reset", b"", {"Origin": "https://evil.example"}, 403),
        ("GET", "/../../etc/passwd", b"", {}, 404),
    ]  # fmt: skip
    for method, path, body, headers, wanted in bad:
        status, told = everything.ask(method, path, body, headers)
        assert status == wanted, (method, path, body[:20], told)
        assert set(told) == {"error"}
        assert told["error"]
        assert not any(word in told["error"] for word in ("\n", "Traceback", 'File "', ".py"))
    assert everything.ask("POST", "/none/predict", good, PICTURE)[0] == 200
    assert "Traceback" not in everything.log.read_text()


def answered_or_sent_away(server: Server, picture: bytes) -> int | None:
    """The status, or None where the connection was closed."""
    try:
        return server.ask("POST", "/none/predict", picture, PICTURE)[0]
    except (OSError, http.client.HTTPException):
        return None


def test_oversized_and_slow_bodies_and_a_thousand_connections(everything: Server, world: World) -> None:
    host, port = everything.connect().host, everything.connect().port
    status, told = everything.ask("POST", "/none/predict", bytes(8), {"Content-Length": str(1 << 40), **PICTURE})
    assert (status, "bytes" in told["error"]) == (413, True)
    with socket.create_connection((host, port), 10) as slow:
        slow.sendall(b"POST /none/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx")
        assert b"408" in slow.recv(200)
    taken = 0
    with socket.create_connection((host, port), 10) as endless, contextlib.suppress(ConnectionError):
        endless.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        while taken < 64:
            endless.sendall(b"X-More: " + b"x" * (1 << 20) + b"\r\n")
            taken += 1
    assert taken < 16  # MiB, of which the system itself holds some
    crowd = []
    try:
        for _ in range(1000):
            crowd.append(socket.create_connection((host, port), 10))
        picture, end = png(world.stream()[0][0]), time.monotonic() + 10
        while (status := answered_or_sent_away(everything, picture)) != 200:  # those that say nothing are sent away
            assert status in (None, 503)
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        for one in crowd:
            one.close()
    assert everything.ask("GET", "/health")[0] == 200


def test_all_that_can_be_sent_gives_the_same_answer(everything: Server, world: World) -> None:
    images, _ = world.stream()
    array = images[:3].permute(0, 2, 3, 1).numpy()
    pictures = [png(image) for image in images[:3]]
    with_header = Path(everything.log).parent / "x.npy"
    np.save(with_header, array)
    numpy_file = with_header.read_bytes()
    form = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="images"; filename="x.png"\r\n\r\n' + picture + b"\r\n"
        for picture in pictures
    ) + b"--b--\r\n"  # fmt: skip
    text = json.dumps({"images": [base64.b64encode(picture).decode() for picture in pictures]}).encode()
    ways = [
        (numpy_file, {"Content-Type": "application/x-npy"}),
        (form, {"Content-Type": "multipart/form-data; boundary=b"}),
        (text, {"Content-Type": "application/json"}),
        (json.dumps({"array": array.tolist()}).encode(), {"Content-Type": "application/json"}),
    ]
    found = [everything.ask("POST", "/none/predict", body, headers)[1]["answers"] for body, headers in ways]
    plain = [[{k: v for k, v in one.items() if k != "batch"} for one in answers] for answers in found]
    assert plain[0] == plain[1] == plain[2] == plain[3]
    assert everything.ask("POST", "/none/predict", dicom(RAMP), {"Content-Type": "application/dicom"})[0] == 200
    jpeg = Path(everything.log).parent / "x.jpg"
    Image.fromarray(array[0]).save(jpeg)
    assert everything.ask("POST", "/none/predict", jpeg.read_bytes(), {"Content-Type": "image/jpeg"})[0] == 200


def test_the_client_of_the_documentation(everything: Server, world: World) -> None:
    text = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict[str, Any] = {}
    exec(code, names)
    told = names["predict"](png(world.stream()[0][0]), "scan-17", f"{everything.url}/none")
    assert (told["id"], told["label"] in (*world.task.classes, "unknown")) == ("scan-17", True)


def test_feedback_history_and_metrics(everything: Server, world: World) -> None:
    samples = world.task.samples(world.task.client("paper"), "corrupted")
    labels = [world.task.classes[code] for code in samples.labels[samples.index].tolist()]
    images, ids = world.stream()
    everything.ask("POST", "/t3a/reset")
    answers = []
    for image, number in zip(images, ids.tolist(), strict=True):
        answers += everything.ask("POST", f"/t3a/predict?id={number}", png(image), PICTURE)[1]["answers"]
    entries = [{"id": str(number), "label": label} for number, label in zip(ids.tolist(), labels, strict=True)]
    status, told = everything.ask("POST", "/t3a/feedback", json.dumps(entries).encode())
    assert (status, told["noted"], told["missing"]) == (200, len(set(ids.tolist())), [])
    by_id = {answer["id"]: answer for answer in answers}
    truth = {entry["id"]: entry["label"] for entry in entries}
    assert told["accuracy"]["adapted"] == told["accuracy"]["served"]  # it never falls back here
    assert set(told["accuracy"]["frozen"]["by-class"]) == set(labels)
    for who, key in (("served", "class"), ("frozen", "frozen")):
        right = np.mean([by_id[name][key] == label for name, label in truth.items()])
        assert told["accuracy"][who]["accuracy"] == pytest.approx(right)
    assert set(told["accuracy"]["served"]["by-class"]) == set(labels)

    number = everything.ask("POST", "/t3a/freeze")[1]["version"]
    assert everything.ask("POST", "/t3a/predict", png(images[0]), PICTURE)[1]["answers"][0]["did"] == "frozen"
    everything.ask("POST", "/t3a/resume")
    assert everything.ask("POST", "/t3a/predict", png(images[0]), PICTURE)[1]["answers"][0]["did"] == "adapted"
    everything.ask("POST", "/t3a/reset")
    assert everything.ask("GET", "/t3a/status")[1]["learnt"] == 0
    status, told = everything.ask("POST", f"/t3a/rollback?to={number}")
    assert (status, told["why"]) == (200, f"rolled back to {number}")
    assert everything.ask("GET", "/t3a/status")[1]["learnt"] == len(images)
    assert [version["why"] for version in everything.ask("GET", "/t3a/history")[1]][-1] == f"rolled back to {number}"

    status, text = everything.ask("GET", "/metrics")
    assert status == 200
    lines = text.splitlines()
    assert any(line.startswith('fedshift_images_total{client="t3a"} ') for line in lines)
    assert 'fedshift_alarm_on{client="t3a",alarm="features"} 0' in text or 'alarm="features"} 1' in text
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_other_addresses_need_a_token_and_tls(world: World, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    secret, key, certificate = tmp_path / "token", tmp_path / "key.pem", tmp_path / "certificate.pem"
    secret.write_text("0123456789abcdef0123\n")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    options = ("--token-file", str(secret), "--certificate", str(certificate), "--key", str(key), "--adapter", "none")
    trust = ssl.create_default_context(cafile=str(certificate))
    trust.check_hostname = False
    with served(world.folder("fedbn"), tmp_path, "--host", "0.0.0.0", *options) as server:
        port = server.url.rpartition(":")[2]

        def asked(path: str, token: str | None) -> tuple[int, Any]:
            request = urllib.request.Request(f"https://127.0.0.1:{port}{path}")
            if token is not None:
                request.add_header("Authorization", f"Bearer {token}")
            try:
                with urllib.request.urlopen(request, context=trust, timeout=20) as reply:
                    return reply.status, reply.read()
            except urllib.error.HTTPError as error:
                return error.code, json.loads(error.read())

        assert server.url.startswith("https://0.0.0.0:")
        for token in (None, "", "0123456789abcdef0124", "0123456789abcdef0123x", "é"):
            for path in ("/status", "/metrics", "/clients", "/nothing"):
                code, told = asked(path, token if token != "é" else "\xe9")
                assert code == 401
                assert set(told) == {"error"}
        large = urllib.request.Request(f"https://127.0.0.1:{port}/predict", bytes(8 << 20))  # nobody reads it
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(large, context=trust, timeout=20)
        assert asked("/status", "0123456789abcdef0123")[0] == 200
        assert asked("/health", None)[0] == 200
        assert asked("/", None)[0] == 200


def test_a_browser_opens_the_page_without_errors(everything: Server, world: World, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser")
    images, _ = world.stream()
    shown_first = next(iter(everything.ask("GET", "/clients")[1]))
    for image in images[:2]:
        everything.ask("POST", f"/{shown_first}/predict", png(image), PICTURE)
    shown = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}", "--enable-logging=stderr",
         "--virtual-time-budget=6000", "--dump-dom", f"{everything.url}/"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr, [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert "images answered" in shown.stdout
    assert 'id="seen"' in shown.stdout
    assert "<polyline" in shown.stdout or "<circle" in shown.stdout
    assert 'id="main" hidden' not in shown.stdout
