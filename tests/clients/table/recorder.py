"""Stands between a client and the server, and keeps what the client asked and the status that it got.

Bodies are what `tests/clients/recorded/` holds: requests as clients really send them, replayed by the test suite.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_WITHIN_S = 300.0
_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "host", "accept-encoding"}
_KEPT = ("anthropic-beta", "anthropic-version", "content-type", "openai-beta")
"""Headers that may change how a body is read. Others say who and where the client was."""


class Recorder:
    """`requests`: {method, path, headers, body, status}, in order of their end. `url`: for the client."""

    def __init__(self, server_url: str) -> None:
        self.requests: list[dict[str, Any]] = []
        target = urlsplit(server_url)
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def relay(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if "chunked" in self.headers.get("transfer-encoding", ""):
                    body = self._chunks()
                server = http.client.HTTPConnection(str(target.hostname), target.port, timeout=_WITHIN_S)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
                try:
                    server.request(self.command, self.path, body, headers)
                    answer = server.getresponse()
                    recorder.keep(self.command, self.path, dict(self.headers.items()), body, answer.status)
                    self._answer(answer)
                finally:
                    server.close()

            def _answer(self, answer: http.client.HTTPResponse) -> None:
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                while piece := answer.read1(65536):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

            def _chunks(self) -> bytes:
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            do_GET = do_POST = do_DELETE = do_PUT = do_OPTIONS = relay

            def do_HEAD(self) -> None:
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: object) -> None:
                pass  # a client that hangs up

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def keep(self, method: str, path: str, headers: dict[str, str], body: bytes, status: int) -> None:
        lower = {name.lower(): value for name, value in headers.items()}
        kept = {name: lower[name] for name in _KEPT if name in lower}
        try:
            read = json.loads(body) if body else None
        except ValueError:
            read = body.decode("utf-8", "replace")
        self.requests.append({"method": method, "path": path, "headers": kept, "body": read, "status": status})

    @contextmanager
    def running(self) -> Iterator[Recorder]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
