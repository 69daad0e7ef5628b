"""A metadata endpoint of a cloud, on loopback: answers as the test says, and keeps what it was asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_S = 150.0


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Says:
    """An answer; ``date`` None for none, "" for the present."""

    status: int = 200
    body: str | bytes = ""
    headers: dict[str, str] = field(default_factory=dict)
    date: str | None = ""


Answers = Callable[[Asked], "Says | None"]


@dataclass
class FakeCloud:
    """A server. ``answers`` may be changed at any time; None from it: the request is never answered."""

    answers: Answers
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)  # ends those that are never answered
    _news: threading.Condition = field(default_factory=threading.Condition)

    @property
    def place(self) -> str:
        return self.url.removeprefix("http://")

    def take(self, request: Asked) -> Says | None:
        with self._news:
            self.asked.append(request)
            self._news.notify_all()
        return self.answers(request)

    def wait_for(self, what: str, holds: Callable[[list[Asked]], Any]) -> None:
        """Blocks until it was asked that."""
        with self._news:
            assert self._news.wait_for(lambda: holds(self.asked), PATIENCE_S), f"not asked: {what}"


@contextlib.contextmanager
def fake_cloud(answers: Answers, host: str = "127.0.0.1") -> Iterator[FakeCloud]:
    cloud = FakeCloud(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            says = cloud.take(Asked(self.command, self.path, dict(self.headers.items()), body))
            if says is None:
                cloud.released.wait()
                self.close_connection = True
                return
            data = says.body.encode() if isinstance(says.body, str) else says.body
            self.send_response_only(says.status)
            if says.date is not None:
                self.send_header("Date", says.date or self.date_time_string())
            for name, value in {"Content-Length": str(len(data)), **says.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    cloud.url = f"http://{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield cloud
    finally:
        cloud.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
