"""Which connections are those between workers, and whose a connection is."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys

import pytest

from elastic_driver.launch.agent.horovod import owner
from elastic_driver.launch.agent.horovod.connections import endpoints_of
from elastic_driver.launch.agent.horovod.owner import owner_of
from elastic_driver.launch.processes.sever import sever

pytestmark = pytest.mark.unit


def record(host: str, port: int, number: int = 7) -> bytes:
    head = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    return head.ljust(128, b"\0") + struct.pack("=Q", number)


def test_addresses_are_read_out_of_what_workers_put() -> None:
    six = (
        struct.pack("=H", socket.AF_INET6)
        + struct.pack("!H", 9)
        + bytes(4)
        + socket.inet_pton(socket.AF_INET6, "fe80::1")
    )
    body = record("10.0.0.1", 4000) + record("127.0.0.1", 4001) + six.ljust(136, b"\0")
    assert endpoints_of(body) == {("10.0.0.1", 4000), ("127.0.0.1", 4001), ("fe80::1", 9)}


@pytest.mark.parametrize(
    "body", [b"", b"host", record("1.2.3.4", 5)[:-1], bytes(136), b"\xff" * 272, record("1.2.3.4", 0)]
)
def test_anything_else_has_none(body: bytes) -> None:
    assert endpoints_of(body) == frozenset()


CLIENT = """
import socket, sys
ends = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
print("connected", flush=True)
sys.stdin.read()
"""


def test_only_connections_with_such_an_end_are_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.create_server(("127.0.0.1", 0)) as database:
        ports = [listener.getsockname()[1] for listener in (peer, database)]
        command = [sys.executable, "-c", CLIENT, *map(str, ports)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"connected\n"
            (to_peer, _), (to_database, _) = peer.accept(), database.accept()
            with to_peer, to_database:
                assert sever([process.pid], {("127.0.0.1", ports[0])}) == 1
                to_peer.settimeout(10)
                assert to_peer.recv(1) == b""
                to_database.setblocking(False)
                with pytest.raises(BlockingIOError):
                    to_database.recv(1)
            process.communicate()


@pytest.mark.parametrize("way", [owner_of, owner._by_diag, owner._by_table])
def test_whose_a_connection_is(way: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as mine:
        near, far = listener.accept()
        with near:
            assert way(near.getsockname(), far) == os.getuid()  # type: ignore[operator]
        assert mine.getsockname() == far


def test_nobody_has_one_that_is_not_there() -> None:
    assert owner_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
