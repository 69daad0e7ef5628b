"""Real servers of etcd, on ports of loopback, each with a folder of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.etcd.client import EtcdClient, EtcdError
from elastic_driver.etcd.place import EtcdPlace
from tests.support.fakes.etcd_jobs import until
from tests.support.network.namespaces import NamespaceHost
from tests.support.network.ports import free_port

ETCD = shutil.which("etcd") or "etcd"
needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here: scripts/install-etcd installs it")
HOST = "127.0.0.1"
PORT = 2379
"""Of a server on a machine of its own."""


@dataclass(frozen=True)
class Tls:
    """Files of a server that speaks TLS. With an authority it asks its clients for certificates of that."""

    certificate: Path
    key: Path
    ca: Path | None = None

    def flags(self) -> list[str]:
        """For etcd's command."""
        words = ["--cert-file", str(self.certificate), "--key-file", str(self.key)]
        return words if self.ca is None else [*words, "--trusted-ca-file", str(self.ca), "--client-cert-auth"]


class Server:
    """One of a cluster. It is not started by itself."""

    def __init__(self, name: str, folder: Path, *, tls: Tls | None, flags: Sequence[str]) -> None:
        self.name = name
        self.url = f"http{'s' if tls else ''}://{HOST}:{free_port()}"
        self.peer = f"http://{HOST}:{free_port()}"
        self._folder = folder
        self._flags = [*flags, *(tls.flags() if tls else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self.command: list[str] = []

    def start(self, cluster: str) -> None:
        """Starts it, again where it was killed."""
        self.command = [
            *(ETCD, "--name", self.name, "--data-dir", str(self._folder / self.name)),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer),
            *("--initial-cluster", cluster, *self._flags),
        ]
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """It is gone when this returns."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Cluster:
    """Servers that belong together.

    Attributes:
        servers: all of them.
    """

    def __init__(self, folder: Path, count: int, *, tls: Tls | None = None, flags: Sequence[str] = ()) -> None:
        self.servers = [Server(f"server{number}", folder, tls=tls, flags=flags) for number in range(count)]
        self._peers = ",".join(f"{server.name}={server.peer}" for server in self.servers)

    def place(self, prefix: str = "/jobs/a", **who: str) -> EtcdPlace:
        """Where a job may be."""
        return EtcdPlace(tuple(server.url for server in self.servers), prefix, **who)

    def start(self, *servers: Server) -> None:
        """Starts these, or all."""
        for server in servers or self.servers:
            server.start(self._peers)

    def wait(self, **who: str) -> None:
        """Blocks until it answers."""
        with EtcdClient(self.place(**who)) as client:
            until(lambda: _answers(client))

    def kill(self) -> None:
        """Kills all."""
        for server in self.servers:
            server.kill()

    def leader(self) -> Server:
        """The one that decides, once there is one."""
        found: list[Server] = []

        def ask() -> bool:
            for server in self.servers:
                with contextlib.suppress(OSError):
                    status = post(server.url, "/v3/maintenance/status", {})
                    if status.get("leader", "0") == status["header"]["member_id"]:
                        found.append(server)
            return bool(found)

        until(ask)
        return found[0]


def _answers(client: EtcdClient) -> bool:
    try:
        client.get("/anything")
    except EtcdError:
        return False
    return True


def post(url: str, path: str, body: dict[str, Any], context: ssl.SSLContext | None = None, token: str = "") -> Any:
    """A request that the client has not. Raises OSError."""
    headers = {"Authorization": token} if token else {}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return json.load(answer)


@contextlib.contextmanager
def cluster(folder: Path, count: int = 1, *, tls: Tls | None = None, flags: Sequence[str] = ()) -> Iterator[Cluster]:
    """Servers that answer while this lasts."""
    made = Cluster(folder, count, tls=tls, flags=flags)
    try:
        made.start()
        if tls is None:
            made.wait()
        yield made
    finally:
        made.kill()


@contextlib.contextmanager
def etcd_on(host: NamespaceHost, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server on a machine, for clients of all machines that reach it."""
    url = f"http://{host.ipv4}:{PORT}"
    words = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url]
    said = folder / "etcd.log"
    with said.open("wb") as log:
        server = host.popen([ETCD, *words], stdout=log, stderr=log)
    try:
        until(lambda: "ready to serve client requests" in said.read_text())
        yield server
    finally:
        server.kill()
        server.wait()
