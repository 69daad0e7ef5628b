"""The Store of one round's process groups.

Gloo's messages to the other members go over the round's authenticated rendezvous: the whole group's in one exchange,
subgroups' by keys. They are read in passing (sockets.py). Everything else (NCCL's keys, counters, the program's own
keys) goes to a TCPStore of torch's in rank 0, which is made on the first request. That one has no authentication.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from elastic_driver.errors import HorovodInternalError, RendezvousTimeoutError
from elastic_driver.torch.distributed.sockets import GroupSockets, Listener, lazy_gloo
from elastic_driver.torch_private.groups import GLOO_KEY, c10d, gloo_listener
from elastic_driver.worker.rounds.meeting import RoundMeeting

# Less than the driver's limit for waiting requests.
_ONE_REQUEST_S = 20.0


def listen(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket that listens at this address, at a free port of the range; None for any.

    Raises:
        HorovodInternalError: no port is free, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    low, high = ports or (0, 0)
    candidates = list(range(low, high + 1))
    random.shuffle(candidates)  # others search for one, too
    problem: OSError | None = None
    for port in candidates:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)[0][4])
            listener.listen(1024)
        except OSError as error:
            listener.close()
            problem = error
            continue
        return listener
    where = f"{address}, ports {low}-{high}" if ports else address
    raise HorovodInternalError(f"cannot listen for the other ranks' process groups at {where}: {problem}") from problem


class LazyServer:
    """A TCPStore that is made when the first client connects; until then a listening socket. In rank 0."""

    def __init__(self, address: str, ports: tuple[int, int] | None) -> None:
        self._listener: socket.socket | None = listen(address, ports)
        self.address: Listener = (address, self._listener.getsockname()[1])
        self._lock = threading.Lock()  # guards _listener and _store
        self._store: Any = None
        self._closed = False
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        # A daemon for the watch thread's reason; the first client, or close(), wakes and ends it.
        self._thread = threading.Thread(target=self._wait_for_client, name="elastic-store", daemon=True)
        self._thread.start()

    def _wait_for_client(self) -> None:
        with self._selector:
            self._selector.select()
        with contextlib.suppress(RuntimeError):  # the peers notice the closed connection
            self.store()

    def store(self) -> Any:
        """Return the store; None if it is closed."""
        with self._lock:
            if self._store is None and self._listener is not None and not self._closed:
                listener, self._listener = self._listener, None
                self._store = c10d.TCPStore(
                    host_name=self.address[0],
                    port=self.address[1],
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            return self._store

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            self._closed = True
        self._waker.close()
        self._thread.join()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._wake.close()
        self._store = None


class RoundStore(c10d.Store):
    """The Store of one process group. Thread-safe.

    Args:
        scope: of the group's keys among those of the round.
        index: this process's rank.
        count: the number of members.
        meeting: of the round; None if there is only one member.
        serve: starts the server; called on rank 0.
        sockets: record where Gloo listens.

    Attributes:
        error: the last exception raised: torch replaces it with another on its way up.
        is_readable: whether Gloo's messages could be parsed for its addresses.
    """

    def __init__(
        self,
        scope: str,
        index: int,
        count: int,
        meeting: RoundMeeting | None,
        serve: Callable[[], LazyServer],
        sockets: GroupSockets,
    ) -> None:
        super().__init__()
        self._scope, self._index, self._count, self._meeting = scope, index, count, meeting
        self._sockets = sockets
        self._lock = threading.RLock()  # guards the following attributes
        self._values: dict[str, bytes] = {}
        self._world = ""  # prefix of its keys
        self._own = b""
        self._exchanges = not lazy_gloo()  # else a member may not read before it has data to send
        self._far_store: Any = None
        self._server: LazyServer | None = None
        self._server_address: Listener | None = None
        self.error: BaseException | None = None
        self.is_readable = True
        if meeting is None:
            self._far_store = c10d.HashStore()
        elif index == 0:
            self._server = serve()
            self._server_address = self._server.address
            self._sockets.note_listener(self._server_address)
        self._timeout_s = 300.0

    # --- Gloo's messages -------------------------------------------------------------------------------------------

    def _set_of_gloo(self, key: str, value: bytes) -> None:
        head, _, _ = key.rpartition("/")
        with self._lock:
            listener = gloo_listener(value)
            if listener is not None:
                self._sockets.note_listener(listener)
            else:
                self.is_readable = False
            self._values[key] = value
            meeting = self._meeting
            if meeting is None:
                return
            if not self._world:
                self._world, self._own = head, self._packed(value)
                if self._exchanges:
                    return
            sent = self._packed(value) if head == self._world else value
        meeting.put(self._scope, key, sent)

    def _packed(self, value: bytes) -> bytes:
        """Add the address of rank 0's store, in rank 0's message."""
        store = self._server_address
        return (f"{store[1]} {store[0]}" if store is not None else "").encode() + b"\n" + value

    def _take(self, key: str, value: bytes, *, of_world: bool) -> None:
        if of_world:
            place, _, value = value.partition(b"\n")
            if place:
                port, _, address = place.decode().partition(" ")
                self._server_address = (address, int(port))
                self._sockets.note_peer(self._server_address)
        listener = gloo_listener(value)
        if listener is not None and key not in self._values:
            self._sockets.note_peer(listener)
        self._values[key] = value

    def _get_of_gloo(self, key: str, timeout_s: float) -> bytes:
        head = key.rpartition("/")[0]
        of_world = head == self._world
        with self._lock:
            if key in self._values and (not of_world or not self._exchanges or self._meeting is None):
                return self._values[key]
        assert self._meeting is not None
        if of_world and self._exchanges:
            with self._lock:
                if f"{head}/{self._count - 1}" not in self._values or f"{head}/0" not in self._values:
                    values = self._meeting(self._scope, key=self._index, count=self._count, value=self._own)
                    for rank, value in enumerate(values):
                        self._take(f"{head}/{rank}", value, of_world=True)
                return self._values[key]
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                value = self._meeting.get(self._scope, key, timeout_s=min(left_s, _ONE_REQUEST_S))
                break
            except RendezvousTimeoutError:
                if left_s <= _ONE_REQUEST_S:
                    raise
        with self._lock:
            self._take(key, value, of_world=of_world)
            return self._values[key]

    # --- all other keys --------------------------------------------------------------------------------------------

    def _rest(self) -> Any:
        """Return the store for all other keys."""
        with self._lock:
            if self._far_store is None:
                if self._server is not None:
                    self._far_store = self._server.store()
                elif self._server_address is not None:
                    address, port = self._server_address
                    self._far_store = c10d.TCPStore(
                        host_name=address, port=port, is_master=False, wait_for_workers=False
                    )
                if self._far_store is None:
                    raise RuntimeError("cannot use the store of the process group: the round is over")
                self._far_store.set_timeout(timedelta(seconds=self._timeout_s))
            return self._far_store

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = error
            raise

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Set a key."""
        with self._noting():
            if GLOO_KEY.search(key):
                self._set_of_gloo(key, bytes(value))
            else:
                self._rest().set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value. Blocks until it is set."""
        with self._noting():
            if GLOO_KEY.search(key):
                return self._get_of_gloo(key, self._timeout_s)
            return bytes(self._rest().get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set."""
        with self._noting():
            for key in keys:
                if GLOO_KEY.search(key):
                    self._get_of_gloo(key, timeout.total_seconds() if timeout is not None else self._timeout_s)
            others = [key for key in keys if not GLOO_KEY.search(key)]
            if others:
                self._rest().wait(others, *([timeout] if timeout is not None else []))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._rest().check(keys))

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return the sum."""
        return int(self._rest().add(key, value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        """Set a key that has an expected value; return its value afterwards."""
        return bytes(self._rest().compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return bool(self._rest().delete_key(key))

    def deleteKey(self, key: str) -> bool:
        """Delete a key; named as the C++ side expects."""
        return self.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._rest().num_keys())

    def getNumKeys(self) -> int:
        """Return the number of keys; named as the C++ side expects."""
        return self.num_keys()

    def append(self, key: str, value: bytes) -> None:
        """Append to a value."""
        self._rest().append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are available."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of get and wait."""
        with self._lock:
            self._timeout_s = timeout.total_seconds()
            if self._far_store is not None:
                self._far_store.set_timeout(timeout)

    def clone(self) -> RoundStore:
        """Return this store, which is thread-safe."""
        return self

    def close(self) -> None:
        """Close the store: it is no longer used."""
        with self._lock:
            self._far_store = None
            server, self._server = self._server, None
            self._server_address = None
        if server is not None:
            server.close()
