"""The routes: every client has its own under its name, and a client that is served alone has them at the top too."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import fedshift
from fedshift.serve import bodies
from fedshift.serve.bodies import Refused
from fedshift.serve.gate import Gate, Rules
from fedshift.serve.host import Host
from fedshift.serve.numbers import Exposition, expose
from fedshift.store.seal import finite_in

PAGE = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


def application(hosts: Sequence[Host], rules: Rules) -> ASGIApp:
    """The routes of some clients, behind the gate."""
    by_name = {host.service.name: host for host in hosts}
    only = hosts[0] if len(hosts) == 1 else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for host in hosts:
            host.start()
        try:
            yield
        finally:
            for host in hosts:
                host.stop()

    app = FastAPI(title="fedshift", version=fedshift.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    def host_of(request: Request) -> Host:
        name = request.path_params.get("client")
        host = only if name is None else by_name.get(name)
        if host is None:
            raise Refused(404, f"there is no client {name!r}; there are: {', '.join(by_name)}")
        return host

    def route(path: str, method: str, answer: Callable[[Host, Request], Awaitable[Any]]) -> None:
        async def endpoint(request: Request) -> Response:
            return _json(await answer(host_of(request), request))

        for prefix in ("/{client}", *([""] if only is not None else [])):
            name = f"{answer.__name__}{'-only' if not prefix else ''}"
            app.add_api_route(prefix + path, endpoint, methods=[method], name=name, description=answer.__doc__)

    async def predict(host: Host, request: Request) -> dict[str, Any]:
        """Answers to an image, several, or an array."""
        started, status = time.perf_counter(), 500
        try:
            found = await _predicted(host, request, rules.limits)
            status = 200
            return found
        except Refused as refused:
            status = refused.status
            raise
        finally:
            host.numbers.request(status, time.perf_counter() - started)

    async def rollback(host: Host, request: Request) -> dict[str, Any]:
        """Go back to a version."""
        to = request.query_params.get("to", "")
        if not to.isdecimal() or len(to) > 12:
            raise Refused(400, "say which version to go back to: /rollback?to=NUMBER")
        return (await host.rollback(int(to))).to_json()

    async def reset(host: Host, _: Request) -> dict[str, Any]:
        """Begin again as deployed."""
        return (await host.reset()).to_json()

    async def freeze(host: Host, _: Request) -> dict[str, Any]:
        """Answer with what was learnt, and learn nothing more."""
        return (await host.freeze()).to_json()

    async def resume(host: Host, _: Request) -> dict[str, Any]:
        """Adapt again."""
        return (await host.resume()).to_json()

    async def feedback(host: Host, request: Request) -> dict[str, Any]:
        """Labels that came later."""
        return await host.feedback(_labels(await request.body()))

    async def history(host: Host, _: Request) -> list[dict[str, Any]]:
        """The versions that are kept."""
        return [version.to_json() for version in host.versions]

    async def status(host: Host, _: Request) -> dict[str, Any]:
        """All that the page shows."""
        now = {"now": time.time(), "accuracy": await host.accuracies(), "timeline": host.numbers.timeline()}
        return {**described(host), **now}

    for answer in (predict, feedback, reset, freeze, resume, rollback):
        route(f"/{answer.__name__}", "POST", answer)
    for look in (history, status):
        route(f"/{look.__name__}", "GET", look)

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok", "version": fedshift.__version__, "token": bool(rules.token)})

    @app.get("/clients")
    async def clients() -> Response:
        return _json(
            {name: {"adapter": host.service.label, "mode": host.condition.mode} for name, host in by_name.items()}
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        text = Exposition()
        for host in hosts:
            _exposed(text, host)
        return Response(str(text), media_type="text/plain; version=0.0.4; charset=utf-8")

    def page(file: str, kind: str) -> Callable[[], Awaitable[Response]]:
        content = (resources.files("fedshift.serve") / "page" / file).read_bytes()

        async def shown() -> Response:
            return Response(content, media_type=f"{kind}; charset=utf-8")

        return shown

    for path, (file, kind) in PAGE.items():
        app.add_api_route(path, page(file, kind), methods=["GET"], include_in_schema=False)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return JSONResponse({"error": error.sentence}, error.status)

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        words = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not possible here"}
        return JSONResponse({"error": words.get(error.status_code, str(error.detail))}, error.status_code)

    return Gate(app, rules)


async def _predicted(host: Host, request: Request, limits: bodies.Limits) -> dict[str, Any]:
    artefact = host.service.artefact
    shape, window = artefact.method.arch.input_shape, artefact.window
    names = request.query_params.getlist("id")
    images, named = await bodies.read(await request.body(), request.headers, names, limits, window)
    if bodies.quick(images):
        sent = bodies.fitted(images, named, shape, window)
    else:
        sent = await asyncio.to_thread(bodies.fitted, images, named, shape, window)
    return await host.predict(sent)


def _labels(body: bytes) -> dict[str, str]:
    """The labels in a body: one, or a list of them."""
    try:
        given = json.loads(body)
        entries = given if isinstance(given, list) else [given]
        truth = {str(entry["id"]): str(entry["label"]) for entry in entries}
    except (ValueError, TypeError, LookupError, RecursionError):
        raise Refused(400, 'feedback is {"id": ..., "label": ...}, or a list of these') from None
    if not truth:
        raise Refused(400, "there are no labels")
    bodies.check_names(truth)
    return truth


def described(host: Host) -> dict[str, Any]:
    """How a client is, for people and their programs."""
    service, condition = host.service, host.condition
    guards = condition.judge.guards
    familiarity = condition.judge.familiarity
    return {
        "client": service.name,
        "method": service.artefact.setup.spec.title,
        "adapter": service.label,
        "telemetry": list(service.adapter.telemetry),
        "classes": list(service.classes),
        "input": dict(service.artefact.config["input"]),
        "origin": {key: str(value) for key, value in service.artefact.config["origin"].items()},
        "mode": condition.mode,
        "fitted": condition.fitted,
        "seen": condition.seen,
        "learnt": condition.learnt,
        "falls": condition.falls,
        "version": host.versions[-1].number,
        "versions": [version.to_json() for version in host.versions],
        "alarms": guards.by_alarm(condition.levels),
        "on": list(guards.names(condition.levels)),
        "fall-back": service.settings.fall_back,
        "false-alarms": service.settings.false_alarms,
        "unknown-rate": None if familiarity is None else familiarity.rate,
        "micro-batch": service.together,
        "deadline": host.keeping.deadline,
        "log": list(host.numbers.lines),
    }


def _exposed(text: Exposition, host: Host) -> None:
    condition = host.condition
    guards = condition.judge.guards
    on = set(guards.names(condition.levels))
    gauges = {
        "version": host.versions[-1].number,
        "images_seen": condition.seen,
        "images_learnt": condition.learnt,
        "adapting": int(condition.mode == "adapting"),
        "fallen_back": int(condition.mode == "fallen back"),
    }
    levels = [(name, level, name in on) for name, level in guards.by_alarm(condition.levels).items()]
    expose(text, host.service.name, host.numbers, host.service.classes, gauges, levels)


def _json(value: Mapping[str, Any] | Sequence[Any]) -> Response:
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:  # what is no number is null
        text = json.dumps(finite_in(value), allow_nan=False)
    return Response(text, media_type="application/json")
