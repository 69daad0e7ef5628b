"""What is etcd enough to say who drives: one key, over HTTP, which the test sets."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.etcd.there import DriverThere, driver_key, encode

PREFIX = "/jobs/one"


class EtcdWord:
    """See above.

    Attributes:
        place: where it is.
        says: who drives; None for nobody.
        answers: whether it does.
        asked: how often it has answered.
        cluster: which it is.
    """

    cluster = "77"

    def __init__(self, place: EtcdPlace, says: DriverThere | None) -> None:
        self.place = place
        self.says = says
        self.answers = True
        self.asked = 0

    def answer(self, asked: Any) -> dict[str, Any] | None:
        """What a request for a range of keys is answered; None for nothing."""
        if not self.answers:
            return None
        self.asked += 1
        key = driver_key(self.place).encode()
        is_it = base64.b64decode(asked["key"]) == key
        document: dict[str, Any] = {"header": {"revision": "7", "cluster_id": self.cluster}}
        if self.says is not None and is_it:
            pair = {"key": key, "value": encode(self.says)}
            kv = {name: base64.b64encode(value).decode() for name, value in pair.items()}
            document |= {"kvs": [kv | {"create_revision": "5", "mod_revision": "6", "version": "1"}], "count": "1"}
        return document


@contextmanager
def etcd_word(says: DriverThere | None = None) -> Iterator[EtcdWord]:
    """One that listens on loopback for as long as this context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            document = word.answer(body) if self.path == "/v3/kv/range" else None
            if document is None:
                self.close_connection = True
                return
            text = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    word = EtcdWord(EtcdPlace((f"http://127.0.0.1:{server.server_port}",), PREFIX), says)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield word
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
