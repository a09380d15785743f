"""The server of the live page: this machine's own, read-only. It answers GET, on 127.0.0.1, to who asked for it there."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedshift.errors import UserError, reason_of
from fedshift.results.pages.watch import Memory, state_of, watch_page

HERE = "127.0.0.1"
LONGEST = 2  # seconds a connection may be silent
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class Live(ThreadingHTTPServer):
    """Serves the page of one folder until it is closed."""

    daemon_threads = True

    def __init__(self, path: Path, port: int = 0) -> None:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}")
        self._path, self._page = path, watch_page(path)
        self._memory, self._reading = Memory(), threading.Lock()
        try:
            super().__init__((HERE, port), Answer)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} cannot be used ({reason_of(error)}); choose another one with --port"
            ) from None

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HERE}:{self.server_port}/"

    def answer(self, path: str) -> tuple[str, str] | None:
        """Content and its type; nothing where there is nothing."""
        if path == "/":
            return self._page, "text/html; charset=utf-8"
        if path == "/state":
            with self._reading:
                return json.dumps(state_of(self._path, self._memory), allow_nan=False), "application/json"
        return None


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: Live
    timeout = LONGEST
    server_version, sys_version = "fedshift", ""

    def parse_request(self) -> bool:
        """Refuse whatever is not a GET for this very address: a page elsewhere may let a browser ask here."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._send(405, "Only GET is answered here.", "text/plain", {"Allow": "GET"})
            return False
        port = self.server.server_port
        if self.headers.get("Host", "") not in (f"{HERE}:{port}", f"localhost:{port}"):
            self._send(403, "This page is for this machine alone.", "text/plain")
            return False
        return True

    def do_GET(self) -> None:
        """The page or the state of the runs."""
        found = self.server.answer(self.path.partition("?")[0])
        if found is None:
            self._send(404, "There is nothing here.", "text/plain")
        else:
            self._send(200, *found)

    def _send(self, code: int, text: str, kind: str, more: dict[str, str] | None = None) -> None:
        content = text.encode()
        self.send_response(code)
        for key, value in {
            **HEADERS,
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            **(more or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads a line every two seconds."""
