"""What Horovod 0.28.1 does on the wire, in Python: its store's requests, its Gloo contexts, its notification service.

Owns the form of each, as facts tell it; not when what happens: that is ``horovod_worker.py``. Nothing of the package
under test is used here, so that a mistake in it is not made twice.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import hmac
import json
import os
import pickle
import select
import socket
import socketserver
import struct
import sys
import threading
import time
import types
from typing import Any

TRIES, PAUSE_S, POLL_S = 3, 0.5, 0.01
_RECORD = struct.Struct("=H2s4s120xQ")
_LENGTH = struct.Struct("i")
_SIOCGIFADDR = 0x8915


class InternalError(Exception):
    """A collective has failed."""


class InitError(Exception):
    """Horovod's background thread would throw, and the process abort."""


# --- the store -------------------------------------------------------------------------------------------------------


class Store:
    """The C++ client: one connection a request, IPv4, no time limit to wait for an answer."""

    def __init__(self, address: str, port: int) -> None:
        self.address, self.port = socket.gethostbyname(address), port

    def send(self, method: str, path: str, body: bytes = b"") -> socket.socket:
        connection = socket.create_connection((self.address, self.port))
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.address}:{self.port}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def read(self, connection: socket.socket) -> tuple[int, bytes]:
        """Status and body. The body's length is looked for in this spelling only."""
        with connection, connection.makefile("rb") as file:
            status = file.readline().split()
            if len(status) < 2:
                raise OSError("no answer")
            length = None
            while line := file.readline().strip():
                name, _, value = line.partition(b":")
                if name == b"Content-Length":
                    length = int(value)
            assert length is not None, "an answer without Content-Length"
            body = file.read(length)
            if len(body) < length:
                raise OSError("half an answer")
            return int(status[1]), body

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes | None:
        """The answer's body; None for 404."""
        for tried in range(TRIES):
            if tried:
                time.sleep(PAUSE_S)
            with contextlib.suppress(OSError):
                status, answer = self.read(self.send(method, path, body))
                if status in (200, 404):
                    return answer if status == 200 else None
        raise InitError(f"{method} {path}: no answer after {TRIES} tries")


# --- one Gloo context ------------------------------------------------------------------------------------------------


class Context:
    """Connections to all peers of one scope."""

    def __init__(self, store: Store, scope: str, rank: int, size: int, *, timeout_s: float, after_put: Any) -> None:
        self.scope, self.rank, self.size, self._timeout_s = scope, rank, size, timeout_s
        self.peers: dict[int, socket.socket] = {}
        self._put(store, f"rank_{rank}", socket.gethostname().encode())
        for lower in range(rank):
            store.ask("GET", f"/{scope}/rank_{lower}")
        with socket.create_server((address_of(os.environ.get("HOROVOD_GLOO_IFACE", "")), 0), backlog=128) as listener:
            listener.settimeout(timeout_s)
            self.body = self._records(listener)
            self._put(store, str(rank), self.body)
            after_put()
            accepted: dict[int, socket.socket] = {}
            for peer in range(size):
                if peer != rank:
                    self.peers[peer] = self._meet(peer, self._address(store, peer), listener, accepted)
        self._barrier()
        store.ask("DELETE", f"/{scope}/{rank}")

    def _put(self, store: Store, key: str, body: bytes) -> None:
        store.ask("PUT", f"/{self.scope}/{key}", body)

    def _records(self, listener: socket.socket) -> bytes:
        host, port = listener.getsockname()[:2]
        end = (socket.AF_INET, struct.pack("!H", port), socket.inet_aton(host))
        return b"".join(_RECORD.pack(*end, peer) for peer in range(self.size) if peer != self.rank)

    def _address(self, store: Store, peer: int) -> bytes:
        end = time.monotonic() + self._timeout_s
        while not store.ask("GET", f"/{self.scope}/{peer}"):
            if time.monotonic() > end:
                raise InitError(f"Wait timeout after {self._timeout_s:.0f} seconds for key(s): {peer}")
            time.sleep(POLL_S)
        body = store.ask("GET", f"/{self.scope}/{peer}")
        if body is None or len(body) != _RECORD.size * (self.size - 1):
            raise InitError(f"{self.scope}: rank {peer} has put no addresses of {self.size} workers")
        return body

    def _meet(
        self, peer: int, body: bytes, listener: socket.socket, accepted: dict[int, socket.socket]
    ) -> socket.socket:
        mine = self.rank - (self.rank > peer)
        _, port, host, number = _RECORD.unpack_from(body, mine * _RECORD.size)
        try:
            if peer < self.rank:
                end = (socket.inet_ntoa(host), struct.unpack("!H", port)[0])
                connection = socket.create_connection(end, self._timeout_s)
                connection.sendall(struct.pack("=QQ", number, self.rank))
            else:
                while peer not in accepted:
                    one, _ = listener.accept()
                    one.settimeout(self._timeout_s)
                    to, who = struct.unpack("=QQ", _exactly(one, 16))
                    if to != who:
                        raise InitError(f"{self.scope}: rank {who} took the address of another")
                    accepted[who] = one
                connection = accepted[peer]
        except (OSError, InternalError) as error:
            raise InitError(f"{self.scope}: cannot meet rank {peer}: {error}") from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _barrier(self) -> None:
        try:
            for connection in self.peers.values():
                connection.sendall(b"b")
            for connection in self.peers.values():
                _exactly(connection, 1)
        except (OSError, InternalError) as error:
            raise InitError(f"{self.scope}: the barrier failed: {error}") from None

    def gather(self, value: Any) -> list[Any]:
        """The values of all, by rank, round a ring: who is no neighbor of the dead waits."""
        values: list[Any] = [None] * self.size
        values[self.rank] = value
        right = self.peers.get((self.rank + 1) % self.size)
        left = self.peers.get((self.rank - 1) % self.size)
        if right is None or left is None:
            return values
        at = self.rank
        for left_to_do in reversed(range(self.size - 1)):
            try:
                body = json.dumps(values[at]).encode()
                right.sendall(_LENGTH.pack(len(body)) + body)
                self._wait(left, right if left_to_do else left)  # who has all that it needs may have ended
                (length,) = _LENGTH.unpack(_exactly(left, _LENGTH.size))
                at = (at - 1) % self.size
                values[at] = json.loads(_exactly(left, length))
            except OSError as error:
                raise InternalError(f"{self.scope}: {error}") from None
        return values

    def _wait(self, left: socket.socket, right: socket.socket) -> None:
        """Until the left neighbor has sent something, or the right one is gone."""
        poll = select.poll()
        poll.register(left, select.POLLIN)
        if right is not left:
            poll.register(right, select.POLLRDHUP)
        found = poll.poll(self._timeout_s * 1000)
        if not found:
            raise InternalError(f"Timed out waiting {self._timeout_s * 1000:.0f}ms for recv operation to complete")
        if all(descriptor != left.fileno() for descriptor, _ in found):
            raise InternalError("Connection closed by peer")

    def close(self) -> None:
        for connection in self.peers.values():
            connection.close()


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(size)
        if not part:
            raise InternalError("Connection closed by peer")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; of loopback where there is none of that name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))[20:24])
    return "127.0.0.1"


# --- the notification service ----------------------------------------------------------------------------------------

NETWORK, WORKER = "horovod.runner.common.util.network", "horovod.runner.elastic.worker"


def _named(module: str, *names: str) -> list[type]:
    """Classes that a pickle finds under Horovod's names."""
    holder = sys.modules[module] = types.ModuleType(module)
    made = []
    for name in names:
        made.append(type(name, (), {"__module__": module}))
        setattr(holder, name, made[-1])
    for end in range(1, module.count(".") + 1):
        parent = ".".join(module.split(".")[:end])
        sys.modules.setdefault(parent, types.ModuleType(parent))
    return made


class NotificationService:
    """Takes notices from whoever has its key.

    Attributes:
        notices: (timestamp, res) of each, as they came.
        pings: how many.
    """

    def __init__(self, interface: str) -> None:
        ping, self._pong, self._ack = _named(NETWORK, "PingRequest", "PingResponse", "AckResponse")
        (update,) = _named(WORKER, "HostsUpdatedRequest")
        self.notices: list[tuple[float, int]] = []
        self.pings = 0
        self.key = os.urandom(32)
        service = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                seal, (length,) = self.rfile.read(32), _LENGTH.unpack(self.rfile.read(_LENGTH.size))
                body = self.rfile.read(length)
                if not hmac.compare_digest(seal, hmac.digest(service.key, body, hashlib.sha256)):
                    return
                said = pickle.loads(body)
                if isinstance(said, ping):
                    service.pings += 1
                    answer = service._pong()
                    answer.service_name, answer.source_address = "worker notification service", self.client_address[0]
                else:
                    assert isinstance(said, update)
                    service.notices.append((said.timestamp, int(said.res)))  # type: ignore[attr-defined]
                    answer = service._ack()
                sealed = pickle.dumps(answer)
                seal = hmac.digest(service.key, sealed, hashlib.sha256)
                self.wfile.write(seal + _LENGTH.pack(len(sealed)) + sealed)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("0.0.0.0", 0), Handler)
        port = self._server.server_address[1]
        names = [name for _, name in socket.if_nameindex() if not interface or name in interface]
        self.addresses = {name: [(address_of(name), port)] for name in names}
        if not self.addresses:
            raise RuntimeError(f"NoValidAddressesFound: none of {interface}")
        serve = functools.partial(self._server.serve_forever, poll_interval=0.02)
        threading.Thread(target=serve, name="notifications", daemon=True).start()  # as long as the process

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def registration(self) -> bytes:
        return base64.b64encode(pickle.dumps((self.addresses, self.key), 5))
