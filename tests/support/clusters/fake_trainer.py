"""Kubeflow Trainer's status server, on loopback: HTTPS with an authority of its own, and a token that changes."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.clusters.kubernetes_fake.certificate import write_certificate

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/train/status"
PATIENCE_S = 150.0
# Of TrainerStatus, as the custom resource's schema has it.
_FIELDS = {"progressPercentage": 100, "estimatedRemainingSeconds": (1 << 31) - 1}


@dataclass
class FakeTrainer:
    """What it was told. ``status`` other than 200: what it answers to everything; 0: nothing at all."""

    folder: Path
    token: str = "first.token"
    status: int = 200
    url: str = ""
    told: list[dict[str, Any]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    news: threading.Condition = field(default_factory=threading.Condition)

    @property
    def environment(self) -> dict[str, str]:
        """As its pods have it."""
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"{self.url}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.folder / "token"),
        }

    def give_token(self, text: str) -> None:
        """As kubelet does it: another file takes the place."""
        new = self.folder / "token.new"
        new.write_text(text)
        new.replace(self.folder / "token")

    def wait_for(self, what: str, holds: Any) -> None:
        with self.news:
            assert self.news.wait_for(lambda: holds(self), PATIENCE_S), f"{what}: {self.told} {self.refused}"

    def answer(self, path: str, authorization: str, body: bytes) -> int:
        """As pkg/statusserver does it, and the resource's schema."""
        with self.news:
            status = self.status or 200
            if path != PATH:
                status = 404
            elif authorization != f"Bearer {self.token}":
                status = 403
            elif status == 200:
                told = json.loads(body)["trainerStatus"]
                assert set(told) <= {*_FIELDS, "metrics", "lastUpdatedTime"}
                datetime.datetime.strptime(told["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
                for name, most in _FIELDS.items():
                    assert type(told.get(name, 0)) is int
                    assert 0 <= told.get(name, 0) <= most
                for metric in told["metrics"]:
                    assert set(metric) == {"name", "value"}
                    assert all(isinstance(text, str) and 1 <= len(text) <= 64 for text in metric.values())
                self.told.append(told)
            if status != 200:
                self.refused.append(status)
            self.news.notify_all()
            return status


@contextlib.contextmanager
def fake_trainer(folder: Path) -> Iterator[FakeTrainer]:
    folder.mkdir(exist_ok=True)
    write_certificate(folder / "ca.crt")
    trainer = FakeTrainer(folder)
    trainer.give_token(trainer.token)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = trainer.answer(self.path, self.headers.get("Authorization", ""), body)
            if not trainer.status:
                trainer.released.wait(PATIENCE_S)
                return
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Who does not trust the certificate hangs up."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    trainer.url = f"https://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield trainer
    finally:
        trainer.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
