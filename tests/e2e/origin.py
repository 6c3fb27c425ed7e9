"""A small web server on loopback that counts its GETs: pictures, redirects, and one that drips."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Origin:
    """`files` by path, none of which may be kept; /redirect leads to `target`; /drip sends a byte
    every tenth of a second.

    Answers come after `pause` seconds.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    target: str = ""
    pause: float = 0.0
    gets: Counter[str] = field(default_factory=Counter)
    port: int = 0

    def url(self, path: str, host: str = "localhost") -> str:
        return f"http://{host}:{self.port}{path}"


@contextmanager
def serving_files() -> Iterator[Origin]:
    origin = Origin()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            origin.gets[self.path] += 1
            time.sleep(origin.pause)
            with suppress(ConnectionError):
                self.answer()

        def answer(self) -> None:
            if self.path == "/redirect":
                self.send_response(302)
                self.send_header("Location", origin.target)
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Cache-Control", "no-store")
            if self.path == "/drip":
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(b"\x89")
                    self.wfile.flush()
                    time.sleep(0.1)
                return
            self.send_header("Content-Length", str(len(origin.files[self.path])))
            self.end_headers()
            self.wfile.write(origin.files[self.path])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        origin.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield origin
        finally:
            server.shutdown()
            thread.join()
