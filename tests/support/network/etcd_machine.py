"""A real server of etcd on a machine of its own, or beside others."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.network.machines import wait_for
from tests.support.network.namespaces import NamespaceHost
from tests.support.processes.etcd import ETCD

PORT = 2379


@contextlib.contextmanager
def etcd_on(host: NamespaceHost, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server there, for clients of all machines."""
    url = f"http://{host.ipv4}:{PORT}"
    words = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url]
    with (folder / "etcd.log").open("wb") as log:
        server = host.popen([ETCD, *words], stdout=log, stderr=log)
    try:
        wait_for("etcd serves", lambda: "ready to serve client requests" in (folder / "etcd.log").read_text())
        yield server
    finally:
        server.kill()
        server.wait()
