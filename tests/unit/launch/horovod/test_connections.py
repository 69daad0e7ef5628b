"""Which ends Gloo's addresses name; and that only connections with these ends are shut."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.launch.agent.horovod.connections import endpoints_of
from elastic_driver.launch.processes.sever import sever


def record(family: int, port: int, address: bytes) -> bytes:
    body = struct.pack("=H", family) + struct.pack("!H", port)
    body += address if family == socket.AF_INET else bytes(4) + address
    return body.ljust(136, b"\0")


IPV4 = record(socket.AF_INET, 4000, socket.inet_aton("10.0.0.7"))
IPV6 = record(socket.AF_INET6, 4001, socket.inet_pton(socket.AF_INET6, "fe80::1"))
MAPPED = record(socket.AF_INET6, 4002, socket.inet_pton(socket.AF_INET6, "::ffff:10.0.0.8"))


@pytest.mark.unit
def test_the_ends_that_records_name() -> None:
    assert endpoints_of(IPV4 + IPV4 + IPV6 + MAPPED) == {("10.0.0.7", 4000), ("fe80::1", 4001), ("10.0.0.8", 4002)}


@pytest.mark.unit
@pytest.mark.parametrize(
    "body", [b"", b"a host's name", IPV4[:-1], IPV4 + b"x", bytes(136), IPV4 + bytes(136), b"\xff" * 136]
)
def test_anything_else_names_none(body: bytes) -> None:
    assert endpoints_of(body) == frozenset()


@pytest.mark.unit
def test_a_port_of_zero_is_none() -> None:
    assert endpoints_of(record(socket.AF_INET, 0, b"\x7f\0\0\x01")) == frozenset()


@pytest.mark.property
@given(st.binary(max_size=300) | st.binary(min_size=136, max_size=136))
def test_any_bytes_name_ends_or_none(body: bytes) -> None:
    assert all(isinstance(host, str) and 0 < port < 1 << 16 for host, port in endpoints_of(body))


# --- connections of a real process ---------------------------------------------------------------------------------

# Connects to each port that it is given, says so, and tells which of the connections end, as they do.
_HOLDER = """
import select, socket, sys
held = {socket.create_connection(("127.0.0.1", int(port))): port for port in sys.argv[1:]}
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    one, _ = listener.accept()
    held[one] = "accepted"
    print("all", flush=True)
    while held:
        for end in select.select(list(held), [], [])[0]:
            end.recv(1)
            print(held.pop(end), flush=True)
"""


@contextlib.contextmanager
def holder(*ports: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", _HOLDER, *map(str, ports)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.integration
def test_a_users_own_connections_stay() -> None:
    with contextlib.ExitStack() as stack:
        peer, users = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        ends = [server.getsockname()[:2] for server in (peer, users)]
        process, listens_at = stack.enter_context(holder(ends[0][1], ends[1][1]))
        assert process.stdout is not None
        from_user = stack.enter_context(users.accept()[0])
        stack.enter_context(peer.accept()[0])
        stack.enter_context(socket.create_connection(("127.0.0.1", listens_at)))
        assert process.stdout.readline() == "all\n"

        assert sever([process.pid], [("127.0.0.1", 9), ("10.0.0.1", ends[0][1])]) == 0
        assert sever([process.pid], [ends[0]]) == 1
        assert process.stdout.readline() == f"{ends[0][1]}\n"
        assert sever([process.pid], [("127.0.0.1", listens_at)]) == 1
        assert process.stdout.readline() == "accepted\n"
        from_user.sendall(b"x")  # that one still goes
        assert process.stdout.readline() == f"{ends[1][1]}\n"
        assert sever([process.pid], []) == 0


@pytest.mark.integration
def test_who_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert sever([process.pid], [("127.0.0.1", 9)]) == 0
