"""The gate before the application: who may come in, how large and how slow a request may be, and what leaves.

It speaks ASGI, because bodies must be refused before anybody has read them.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedshift.serve.bodies import Limits, Refused

log = logging.getLogger("fedshift.serve")
OPEN = frozenset({"/", "/health", "/page.js", "/page.css"})  # they tell nothing about a client
ADDRESSES = 4096  # whose rates are remembered
HELD = 16  # bodies of the largest size that may be in memory together
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


@dataclass(frozen=True)
class Rules:
    """Whom the gate lets in."""

    hosts: frozenset[str] | None  # names this server may be called by; None for any
    token: str = ""
    rate: float = 1000.0  # requests a second from one address
    limits: Limits = field(default_factory=Limits)


class Gate:
    """The application behind its rules."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app, self._rules = app, rules
        self._budgets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by address: requests left, and when
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it with one sentence."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
            await send(message)

        held = 0
        try:
            headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
            self._admit(scope, headers)
            body = await self._body(headers, receive)
            held = len(body)
            await self._app(scope, _replayed(body, receive), sent)
        except Refused as refused:
            if not begun:
                await _refuse(sent, refused.status, refused.sentence)
        except Exception:
            log.exception("a request failed")
            if not begun:
                await _refuse(sent, 500, "something went wrong here; the log of the server says what")
        finally:
            self._held -= held

    def _admit(self, scope: Scope, headers: Mapping[str, str]) -> None:
        rules, host = self._rules, headers.get("host", "")
        if rules.hosts is not None and _name(host) not in rules.hosts:
            raise Refused(421, "this server is not called by that name")
        origin = headers.get("origin")
        if origin is not None and _place(origin) != host:
            raise Refused(403, "pages of other servers may not ask this one")
        self._spend((scope.get("client") or ("", 0))[0])
        if rules.token and scope["path"] not in OPEN:
            given = headers.get("authorization", "")
            wanted = f"Bearer {rules.token}"
            if not hmac.compare_digest(given.encode(), wanted.encode()):
                raise Refused(401, "a token is needed: Authorization: Bearer TOKEN")

    def _spend(self, address: str) -> None:
        """Take a request from an address's budget, which fills up again with time."""
        rate, now = self._rules.rate, time.monotonic()
        most = max(rate, 1.0)  # fewer than one a second would never make a whole one
        left, then = self._budgets.pop(address, (most, now))
        left = min(most, left + (now - then) * rate)
        self._budgets[address] = (max(left - 1, 0.0), now)
        if len(self._budgets) > ADDRESSES:
            self._budgets.popitem(last=False)
        if left < 1:
            raise Refused(429, f"more than {rate:g} requests a second; try again in a moment")

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """The whole body, if it is small and quick enough."""
        limits = self._rules.limits
        large = Refused(413, f"a body may have {limits.body} bytes")
        try:
            announced = int(headers.get("content-length", "0"))
        except ValueError:
            raise Refused(400, "the length of the body is no number") from None
        if announced > limits.body:
            raise large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(limits.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "the request ended before its body did")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held += len(parts[-1])
                    if size > limits.body:
                        raise large
                    if self._held > HELD * limits.body:
                        raise Refused(503, "too many large requests at once; try again in a moment")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except BaseException as error:
            self._held -= size
            if isinstance(error, TimeoutError):
                raise Refused(408, f"the body did not arrive within {limits.seconds:g} seconds") from None
            raise


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, and then what else may come."""
    waiting = True

    async def replay() -> Message:
        nonlocal waiting
        if waiting:
            waiting = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _name(host: str) -> str:
    """A host without its port.

    >>> _name("localhost:8080"), _name("[::1]:8080"), _name(""), _name("[")
    ('localhost', '::1', '', '')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # half an address
        return ""


def _place(origin: str) -> str | None:
    """Host and port of an origin; None if it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"error": sentence}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"www-authenticate", b"Bearer")] if status == 401 else []),
        *([(b"retry-after", b"1")] if status in (429, 503) else []),
        *([(b"connection", b"close")] if status in (408, 413) else []),  # nobody reads the rest of it
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
