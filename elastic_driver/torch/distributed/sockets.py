"""The connections of one round's process groups over Gloo, and of their store: finding them, ending waits on them.

Nothing in torch does that (abort is a no-op there). They are identified by their ends: one was accepted where a Gloo
device of this process listens, or leads to where a peer's listens. These addresses are in the messages that Gloo sends
through the store. So connections made later are found, too, and those of subgroups.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from elastic_driver.torch_private.groups import GLOO_THREAD
from elastic_driver.worker.engine.own_sockets import Ends, duplicate, end_of, is_listening, own_sockets, shut

_ESTABLISHED = 1  # first byte of TCP_INFO
# Between two checks of the threads: longer than a tick of the thread that moves their bytes, 10 ms, in which it notices
# a shut connection, and notifies them.
_SLEEP_LOOK_S = 0.015
# Between two searches for connections that are made although the round is broken.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0

Listener = tuple[str, int]
"""Address and port."""


def _plain(address: str) -> str:
    """Normalize an address: without a zone, and IPv4 in its own form."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def gloo_sleeps() -> bool:
    """Return whether the threads that run collectives of torch's Gloo have slept for a moment. Blocks for that moment.

    Once their connections are shut nothing wakes sleeping threads: they will write nothing more.
    """
    before = _gloo_threads()
    if not before:
        return True
    time.sleep(_SLEEP_LOOK_S)
    return before == _gloo_threads() and all(state.startswith("S") for state, _ in before.values())


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return each such thread's state, and how many times it has gone to sleep."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
            facts = dict(line.split(":", 1) for line in lines if ":" in line)
            if facts["Name"].strip() == GLOO_THREAD:
                found[thread] = facts["State"].strip(), facts.get("voluntary_ctxt_switches", "").strip()
    return found


class GroupSockets:
    """The sockets of one round's groups. Used by the training thread, the watch thread, and a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following attributes
        self._listeners: set[Listener] = set()
        self._peers: set[Listener] = set()
        self._remembered: set[int] = set()
        self._over = threading.Event()  # ends the thread
        self._sweeper: threading.Thread | None = None

    def note_listener(self, listener: Listener) -> None:
        """Add an address where this process accepts connections of the groups."""
        with self._lock:
            self._listeners.add((_plain(listener[0]), listener[1]))

    def note_peer(self, listener: Listener) -> None:
        """Add an address where a peer does."""
        with self._lock:
            self._peers.add((_plain(listener[0]), listener[1]))

    def _found(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield inode and a second descriptor of each of their connections; the caller closes the latter."""
        with self._lock:
            listeners, peers = set(self._listeners), set(self._peers)
        seen: set[int] = set()
        for descriptor, inode in own_sockets():
            if inode in seen:
                continue
            seen.add(inode)
            candidate = duplicate(descriptor, inode)
            if candidate is None:
                continue
            try:
                is_theirs = (
                    candidate.family in (socket.AF_INET, socket.AF_INET6)
                    and not is_listening(candidate)
                    and (_listener_of(candidate.getsockname()) in listeners or _far_end(candidate) in peers)
                )
            except OSError:
                is_theirs = False
            if is_theirs:
                yield inode, candidate
            else:
                candidate.close()

    def remember(self) -> list[Ends]:
        """Remember the current connections as those that all members need. Returns their ends."""
        ends: list[Ends] = []
        remembered: set[int] = set()
        for inode, connection in self._found():
            with connection, contextlib.suppress(OSError):  # gone meanwhile
                remembered.add(inode)
                ends.append((end_of(connection.getsockname()), end_of(connection.getpeername())))
        with self._lock:
            self._remembered = remembered
        return ends

    def forget(self) -> None:
        """Forget the remembered connections."""
        with self._lock:
            self._remembered = set()

    def is_cut(self) -> bool:
        """Return whether a remembered connection is gone, or closed at the other end."""
        with self._lock:
            missing = set(self._remembered)
        if not missing:
            return False
        for inode, connection in self._found():
            with connection:
                if inode in missing and _is_established(connection):
                    missing.discard(inode)
        return bool(missing)

    def shut(self) -> None:
        """End all waits on the connections, here and in the peers."""
        for _, connection in self._found():
            with connection:
                shut(connection)

    def keep_shut(self) -> None:
        """Shut the connections, also later ones, until ``close``. Returns at once."""
        self.shut()
        with self._lock:
            if self._sweeper is not None or self._over.is_set():
                return
            # A daemon, as it may run when the interpreter exits; close() ends it.
            self._sweeper = threading.Thread(target=self._sweep, name="elastic-group-shut", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter exits
            self._sweeper.start()

    def _sweep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._over.wait(pause_s):
            self.shut()
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def close(self) -> None:
        """Stop the thread: there are no connections any more."""
        self._over.set()
        with self._lock:
            sweeper = self._sweeper
        if sweeper is not None and sweeper.ident is not None and sweeper is not threading.current_thread():
            sweeper.join()


def _listener_of(name: tuple[str, int]) -> Listener:
    return _plain(name[0]), name[1]


def _far_end(connection: socket.socket) -> Listener | None:
    try:
        return _listener_of(connection.getpeername())
    except OSError:
        return None  # not connected yet, or no longer


def _is_established(connection: socket.socket) -> bool:
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False


def lazy_gloo() -> bool:
    """Return whether Gloo connects two ranks only once they have data for each other (torch's own variable)."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "") in ("1", "Y", "y", "true", "TRUE")
