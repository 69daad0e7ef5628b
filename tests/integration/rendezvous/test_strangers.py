"""Strangers at a server's Unix socket, and connections that somebody has recorded. Others are in test_attacks.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from elastic_driver.rendezvous.authentication import opening
from elastic_driver.rendezvous.server.peer_connection import ServerLimits
from tests.support.fakes.rendezvous_service import OPERATOR, PATIENCE_S, Peer, Service, request, serving

pytestmark = pytest.mark.integration

LOOPS = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
NOBODY = 65534
END = request("POST", "/v1/end", headers=("Connection: close",))
# Becomes who it is to be, sends what it is given, and says how many bytes it was answered.
ASKS = f"""
import ctypes, os, socket, sys
data, who, libc = sys.stdin.buffer.read(), sys.argv[2], ctypes.CDLL(None, use_errno=True)
if who:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
if who.startswith("namespace"):
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        sys.exit(3)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: since setuid() what is in /proc/self has been root's
    if who == "namespace, as root":
        with open("/proc/self/uid_map", "w") as file:
            file.write("0 {NOBODY} 1")
        assert os.getuid() == 0
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
heard = b""
try:
    connection.sendall(data)
    while piece := connection.recv(4096):
        heard += piece
except ConnectionError:
    pass
print(len(heard))
"""


@contextmanager
def local(path: Path) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
        yield connection


def rest_of(connection: socket.socket) -> bytes:
    said = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            said += piece
    return said


def asks(path: Path, who: str = "") -> int:
    """How many bytes another process is answered that says it is the operator, and asks for the job's end."""
    command = [sys.executable, "-S", "-c", ASKS, str(path), who]
    said = opening("operator") + END
    ran = subprocess.run(command, input=said, capture_output=True, check=False, timeout=PATIENCE_S)
    if ran.returncode == 3:
        pytest.skip("this system lets no user have a namespace of its own")
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


# --- other users -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("who", ["another user", "namespace, as root", "namespace, as nobody"])
def test_the_kernel_says_who_asks_whatever_the_folder_lets_through(who: str) -> None:
    """Folders of mode 0700 keep others out; this is what stands behind them. Nothing is said to such a peer.

    Root of a namespace of its own looks like root to itself alone; and where nobody is mapped all look alike.
    """
    with serving() as service:
        path = service.socket()
        assert asks(path) > 0
        assert service.handler.ends == 1
        path.parent.chmod(0o755)
        path.chmod(0o777)
        assert asks(path, who) == 0
        path.parent.chmod(0o700)
        assert service.handler.ends == 1
        service.until(lambda: not service.connections, "it has gone")


# --- many ------------------------------------------------------------------------------------------------------------


@LOOPS
def test_at_a_unix_socket_those_who_do_not_go_on_are_strangers_like_others(loop: str) -> None:
    """A program of this user that opens connections without end keeps neither its agent nor an operator away."""
    begun = (b"", b"\0", opening("operator")[:-1])
    with serving(loop=loop, limits=ServerLimits(strangers=4, stranger_s=0.1, connections=20)) as service:
        path = service.socket()
        with ExitStack() as stack:
            for number in range(40):
                connection = stack.enter_context(local(path))
                with suppress(BrokenPipeError):
                    connection.sendall(begun[number % 3])
            service.until(lambda: 1 <= len(service.connections) <= 4, "the oldest are cut")
            with local(path) as operator:
                operator.sendall(opening("operator") + END)
                assert rest_of(operator).startswith(b"HTTP/1.1 200 ")
        service.until(lambda: not service.connections, "all have gone")


def test_at_a_unix_socket_those_who_say_half_a_name_are_cut_in_time() -> None:
    with serving(limits=ServerLimits(request_s=0.5, idle_s=0.5)) as service:
        path = service.socket()
        with local(path) as silent, local(path) as half:
            half.sendall(opening("operator")[:7])
            assert (rest_of(silent), rest_of(half)) == (b"", b"")
        service.until(lambda: not service.connections, "both have gone")


# --- records ---------------------------------------------------------------------------------------------------------


class Recorder:
    """Passes connections on to a server as they are, and keeps what clients send.

    Args:
        port: of the server.

    Attributes:
        port: its own.
        pieces: all that was sent to the server.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.pieces: list[bytes] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(("127.0.0.1", self._to), PATIENCE_S) as server:
            back = threading.Thread(target=_pass_on, args=(server, client, []))
            back.start()
            _pass_on(client, server, self.pieces)
            back.join(PATIENCE_S)

    def close(self) -> None:
        self._thread.join(PATIENCE_S)
        self._listener.close()


def _pass_on(source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
    with suppress(OSError):
        while piece := source.recv(65536):
            kept.append(piece)
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)


def end_over(service: Service, port: int) -> None:
    """The operator ends the job, over a connection to this port."""
    with Peer(service, OPERATOR, address=("127.0.0.1", port)) as operator:
        operator.send(operator.request("POST", "/v1/end", headers=("Connection: close",)))
        assert operator.read().status == 200


@LOOPS
def test_a_recorded_connection_does_nothing_again(loop: str) -> None:
    """Whole or in the pieces in which it came: TLS's keys were of that one connection."""
    with serving(loop=loop) as service:
        with closing(Recorder(service.port)) as recorder:
            end_over(service, recorder.port)
        assert service.handler.ends == 1
        for pieces in ([b"".join(recorder.pieces)], recorder.pieces):
            with closing(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)) as thief:
                with suppress(OSError):  # whom it has cut off already is not even connected
                    for piece in pieces:
                        thief.sendall(piece)
                    thief.shutdown(socket.SHUT_WR)
                rest_of(thief)
        end_over(service, service.port)
        assert service.handler.ends == 2
        assert service.errors == []
        service.until(lambda: not service.connections, "all have gone")
