"""torch's own Gloo behind the Collectives protocol, for processes where the native module cannot be loaded.

Process groups are made directly over a Store of ours, so that ``torch.distributed``'s global state stays the user's.
Nothing in torch ends a blocked Gloo collective (its abort is a no-op there); shutting down the group's own sockets
does. They are identified by their ports: each member puts the port of its Gloo listener in front of its addresses, and
a connection is ours if it was accepted at our port or leads to a peer's.

That Gloo accepts any peer. So before anything is sent, the members compare the ends of their connections through the
driver, and give up the round if one leads elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from elastic_driver.errors import HorovodInternalError
from elastic_driver.torch_private.groups import c10d, gloo_device, gloo_group
from elastic_driver.worker.engine.collectives import CONTEXT_SCOPE, Bytes, Exchange, Group, ReduceOp
from elastic_driver.worker.engine.own_sockets import (
    Ends,
    check_ends,
    duplicate,
    end_of,
    is_listening,
    own_sockets,
    pack_ends,
    shut,
    unpack_ends,
)

_OPS = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
    ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT,
}
_PORT = struct.Struct("<H")
_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")
_ADVICE = re.compile(r"\.? This (means|is typically) .*$")


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Start threads meanwhile with the scheduling class SCHED_BATCH, such as the loop thread of a Gloo device.

    Then it does not preempt the computing threads at every packet: allreduce is 2-9 times as fast where processes
    outnumber cores. Needs no privilege.
    """
    former = os.sched_getscheduler(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, former, os.sched_param(0))


class ExchangeStore(c10d.Store):
    """The Store of one group: Gloo sets its own addresses once, then reads everybody's.

    The first read becomes one exchange, instead of a wait and a get for each member.
    """

    def __init__(self, group: Group, exchange: Exchange, port: int) -> None:
        super().__init__()
        self.scope = f"{CONTEXT_SCOPE}.torch.{group.name}"
        self._index, self._count = group.index, len(group.members)
        self._exchange, self._port = exchange, port
        self._own_addresses = b""
        self._values: list[bytes] = []
        self.peer_ports: set[int] = set()
        self.error: BaseException | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Store this member's addresses."""
        self._own_addresses = bytes(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all members have set theirs."""
        self._fetch()

    def get(self, key: str) -> bytes:
        """Return the addresses of the member that the key ends with."""
        return self._fetch()[int(key.rsplit("/", 1)[-1])]

    def _fetch(self) -> list[bytes]:
        if not self._values:
            try:
                value = _PORT.pack(self._port) + self._own_addresses
                values = self._exchange(self.scope, key=self._index, count=self._count, value=value)
            except BaseException as error:
                self.error = error  # torch would replace it with another on its way up
                raise
            self.peer_ports = {_PORT.unpack_from(value)[0] for value in values}
            self._values = [value[_PORT.size :] for value in values]
        return self._values


class TorchCollectives:
    """Collectives over ProcessGroupGloo."""

    def __init__(self, group: Group, address: str) -> None:
        self._group = group
        self._address = address
        self._process_group: Any = None
        self._lock = threading.Lock()  # guards _connections and _aborted
        self._connections: list[socket.socket] = []
        self._aborted = ""

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        """Connect to the peers, and check the ends of the connections."""
        before = {inode for _, inode in own_sockets()}
        device = self._make_device()
        port = self._adopt_listener(before)
        group = self._group
        store = ExchangeStore(group, exchange, port)
        with self._failures("connect to its peers", store):
            self._process_group = gloo_group(store, group.index, len(group.members), device, timeout_s)
        ends = self._adopt_connections(before, port, store.peer_ports)
        packed = exchange(f"{store.scope}.ends", key=group.index, count=len(group.members), value=pack_ends(ends))
        check_ends(group, [unpack_ends(member_ends) for member_ends in packed])

    @property
    def process_group(self) -> Any:
        """torch's process group, once connected."""
        return self._process_group

    def _make_device(self) -> Any:
        try:
            with batch_scheduling():
                return gloo_device(self._address)
        except RuntimeError as error:
            raise HorovodInternalError(f"cannot listen at {self._address}: {error}") from error

    def _adopt_listener(self, before: set[int]) -> int:
        for descriptor, inode in own_sockets():
            if inode in before:
                continue
            candidate = duplicate(descriptor, inode)
            if candidate is None:
                continue
            # Never shut down: torch's Gloo ends the process if accept() fails on its listener.
            with candidate:
                if is_listening(candidate):
                    port: int = candidate.getsockname()[1]
                    return port
        raise HorovodInternalError("cannot find the listening socket of torch's Gloo device")

    def _adopt_connections(self, before: set[int], port: int, peer_ports: set[int]) -> list[Ends]:
        """Keep the new connections, and return their ends."""
        ends = []
        with self._lock:
            adopted = {os.fstat(connection.fileno()).st_ino for connection in self._connections}
        for descriptor, inode in own_sockets():
            if inode in before or inode in adopted:
                continue
            adopted.add(inode)  # its duplicate may appear in the list, under a number that was free before
            candidate = duplicate(descriptor, inode)
            if candidate is None:
                continue
            try:
                is_ours = (
                    candidate.family in (socket.AF_INET, socket.AF_INET6)
                    and not is_listening(candidate)
                    and (candidate.getsockname()[1] == port or candidate.getpeername()[1] in peer_ports)
                )
            except OSError:
                is_ours = False  # not connected
            if is_ours:
                with contextlib.suppress(OSError):  # gone since
                    ends.append((end_of(candidate.getsockname()), end_of(candidate.getpeername())))
                self._adopt(candidate)
            else:
                candidate.close()
        return ends

    def _adopt(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.append(connection)
            aborted = bool(self._aborted)
        if aborted:
            shut(connection)

    @contextlib.contextmanager
    def _failures(self, deed: str, store: ExchangeStore | None = None) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            cause = store.error if store is not None and store.error is not None else error
            reason = self._aborted or essence(str(cause))
            raise HorovodInternalError(f"cannot {deed}: {reason}") from cause

    def allreduce(self, data: Bytes, dtype: str, op: ReduceOp, *, timeout_s: float) -> None:
        """Reduce data in place."""
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        options.timeout = timedelta(seconds=timeout_s)
        tensor = torch.from_numpy(data).view(getattr(torch, dtype))
        with self._failures("finish an allreduce"):
            self._process_group.allreduce([tensor], options).wait()

    def broadcast(self, data: Bytes, root: int, *, timeout_s: float) -> None:
        """Overwrite data with the root's."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=timeout_s)
        with self._failures("finish a broadcast"):
            self._process_group.broadcast([torch.from_numpy(data)], options).wait()

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        """Gather the members' data. Gloo requires equal parts here, so shorter ones are padded."""
        most = max(counts)
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        padded = np.zeros(most, np.uint8)
        padded[: data.nbytes] = data
        parts = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in counts]
        with self._failures("finish an allgather"):
            self._process_group.allgather([parts], [torch.from_numpy(padded)], options).wait()
        offset = 0
        for part, count in zip(parts, counts, strict=True):
            output[offset : offset + count] = part.numpy()[:count]
            offset += count

    def abort(self, reason: str) -> None:
        """Make this and every later call fail."""
        with self._lock:
            self._aborted = self._aborted or reason
            connections = list(self._connections)
        for connection in connections:
            shut(connection)

    def close(self) -> None:
        """Free the sockets."""
        with self._lock:
            connections, self._connections = self._connections, []
            self._aborted = self._aborted or "closed"
        for connection in connections:
            shut(connection)
            connection.close()
        self._process_group = None

    def abandon(self) -> None:
        """Keep the process group alive in a forked child: its destructor would join threads that exist only in the
        parent.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._process_group))


def essence(text: str) -> str:
    """Return Gloo's message without its source location and its advice."""
    first = text.splitlines()[0] if text else text
    return _ADVICE.sub("", _PLACE.sub("", first)).rstrip(". ")
