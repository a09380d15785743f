"""The server process: addresses, TLS, patience with connections, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedshift.data._walk import is_picture
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.runs.artefact import ids_of
from fedshift.runs.raw_images import as_bytes
from fedshift.serve.app import application
from fedshift.serve.bodies import Limits
from fedshift.serve.gate import Rules
from fedshift.serve.host import Host, Keeping
from fedshift.serve.service import Service

FILES = 65536
HEAD = 1 << 16  # bytes of a request's first line and headers
SHORTEST = 16  # characters of a token


@dataclass(frozen=True)
class Address:
    """Where the server listens, and what protects it."""

    host: str = "127.0.0.1"
    port: int = 8080
    token_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def local(self) -> bool:
        """Whether nobody but this machine can reach it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def token(self) -> str:
        """The secret, or nothing; anything that would leave the server open is refused."""
        protected = self.token_file is not None and self.certificate is not None and self.key is not None
        if not self.local and not protected:
            raise UserError(
                f"{self.host} can be reached from elsewhere: it needs --token-file, --certificate and --key, "
                "or leave --host out"
            )
        if (self.certificate is None) != (self.key is None):
            raise UserError("--certificate and --key belong together")
        if self.certificate is not None and self.key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            except (OSError, ssl.SSLError) as error:
                raise UserError(f"{self.certificate} and {self.key} are no certificate and key ({error})") from None
        if self.token_file is None:
            return ""
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.token_file} cannot be read ({error})") from None
        if len(token) < SHORTEST or not token.isascii() or not token.isprintable():
            raise UserError(f"the token in {self.token_file} must be one line of at least {SHORTEST} plain characters")
        return token


@dataclass(frozen=True)
class Options:
    """Everything about a server that is not about a client."""

    address: Address = field(default_factory=Address)
    state: Path = Path("serving")
    keeping: Keeping = field(default_factory=Keeping)
    limits: Limits = field(default_factory=Limits)
    rate: float = 1000.0
    connections: int = 512
    fit_on: Path | None = None
    threads: int = 1


class Impatient(HttpToolsProtocol):
    """A connection that is closed when there are too many, or when it takes too long or too much to say what it wants."""

    most = 512
    seconds = 10.0
    _head, _heading = 0, False  # bytes of headers that are not complete, and whether there are some
    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """Half a request must become a whole one in time; nobody else counts its headers, and a token is one of them."""
        super().data_received(data)
        self._head = self._head + len(data) if self._heading else 0
        if self._head > HEAD and not self.transport.is_closing():
            self.transport.abort()
        self._watch()

    def on_message_begin(self) -> None:
        """The first line comes."""
        self._heading = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """What comes now is a body, which others count."""
        self._heading = False
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits any more."""
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self._idle and self._end is None:
            self._end = self.loop.call_later(self.seconds, self._late)
        elif not self._idle and self._end is not None:
            self._end.cancel()
            self._end = None

    def _late(self) -> None:
        self._end = None
        if self._idle and not self.transport.is_closing():
            self.transport.close()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


class _Server(uvicorn.Server):
    """Ends in order when it is asked to, and that is no failure."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(services: Sequence[Service], options: Options, ready: Callable[[str], None] = print) -> None:
    """Serve some clients until somebody ends it; ``ready`` is told the address."""
    token = options.address.token()
    logging.basicConfig(format="%(asctime)s %(message)s")
    names = [service.name for service in services]
    if len(set(names)) < len(names):
        raise UserError(f"several artefacts are of client {max(names, key=names.count)!r}; serve them on two ports")
    with steady(), _listening(options.address) as listener, contextlib.ExitStack() as opened:
        torch.set_num_threads(options.threads)
        hosts = []
        for service in services:
            host = Host(service, options.state / folder_of(service), options.keeping)
            host.open(None if options.fit_on is None else lambda own: images_in(options.fit_on, own))
            opened.callback(host.close)
            hosts.append(host)
        _more_files()
        scheme = "http" if options.address.certificate is None else "https"
        host_name, port = listener.getsockname()[:2]
        shown = f"[{host_name}]" if ":" in host_name else host_name
        ready(f"{scheme}://{shown}:{port}")
        _Server(_config(hosts, token, options)).run(sockets=[listener])


@contextlib.contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """The socket, taken before anything else is."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot listen on {address.host}:{address.port} ({error}); choose another with --port"
        ) from None
    with listener:
        yield listener


def folder_of(service: Service) -> str:
    """Where a service's state lies: one folder for each client and adapter."""
    words = "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in service.label)
    digest = hashlib.sha256(service.label.encode()).hexdigest()[:6]
    return f"{service.name}-{words if words == service.label else f'{words}-{digest}'}"


def images_in(folder: Path | None, service: Service) -> tuple[torch.Tensor, torch.Tensor]:
    """The pictures of a folder in the order of their names, as bytes, and their ids."""
    files = sorted(path for path in (folder or Path()).rglob("*") if path.is_file() and is_picture(path))
    if not files:
        raise UserError(f"{folder} holds no pictures to adapt to")
    pixels = as_bytes([*files], service.artefact.method.arch.input_shape, service.artefact.window)
    return pixels, ids_of(pixels)


def _config(hosts: Sequence[Host], token: str, options: Options) -> uvicorn.Config:
    address = options.address
    names = frozenset({"localhost", "127.0.0.1", "::1", address.host}) if address.local else None
    rules = Rules(names, token, options.rate, options.limits)
    protocol: Any = type("Connection", (Impatient,), {"most": options.connections, "seconds": options.limits.seconds})
    return uvicorn.Config(
        application(hosts, rules),
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=10,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.key,
    )


def _more_files() -> None:
    """As many open connections as the system allows."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
