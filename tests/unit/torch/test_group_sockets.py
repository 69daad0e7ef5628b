"""Whose sockets are a process group's, and what ends the waiting on them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from elastic_driver.errors import HorovodInternalError, RendezvousTimeoutError
from elastic_driver.torch.distributed.sockets import GroupSockets
from elastic_driver.torch.distributed.store import LazyServer, RoundStore, listen
from elastic_driver.torch_private.groups import gloo_listener

pytestmark = pytest.mark.integration

HERE = "127.0.0.1"


def told(family: int, port: int, address: str) -> bytes:
    packed = ipaddress.ip_address(address).packed
    name = struct.pack("=H", family) + struct.pack(">H", port)
    name += packed if family == socket.AF_INET else bytes(4) + packed
    return struct.pack("<Q", 3) + b"box" + struct.pack("<Q", 136) + name.ljust(128, b"\0") + bytes(8)


def test_what_gloo_says_of_its_listener() -> None:
    assert gloo_listener(told(socket.AF_INET, 4242, "10.1.2.3")) == ("10.1.2.3", 4242)
    assert gloo_listener(told(socket.AF_INET6, 4242, "fd00::7")) == ("fd00::7", 4242)
    assert gloo_listener(told(socket.AF_INET6, 4242, "::ffff:10.1.2.3")) == ("10.1.2.3", 4242)
    assert gloo_listener(told(socket.AF_UNIX, 4242, "fd00::7")) is None
    assert gloo_listener(b"") is None
    assert gloo_listener(struct.pack("<Q", 1 << 60) + bytes(200)) is None


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """Who has dialled, who was dialled, and at which port."""
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((HERE, port)) as near:
            far, _ = server.accept()
            with far:
                yield near, far, port


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True


def test_only_the_groups_own_are_shut() -> None:
    sockets = GroupSockets()
    with connected() as (near, far, port), connected() as (other, other_far, _):
        sockets.note_peer((HERE, port))
        sockets.shut()
        assert not is_open(near)
        assert not is_open(far)
        assert is_open(other)
        assert is_open(other_far)


def test_those_that_were_accepted_are_the_groups_too() -> None:
    sockets = GroupSockets()
    with connected() as (_, far, port):
        sockets.note_listener((HERE, port))
        assert len(sockets.remember()) == 1
        assert not sockets.is_cut()
        sockets.shut()
        assert not is_open(far)
        assert sockets.is_cut()
        sockets.forget()
        assert not sockets.is_cut()


def test_a_peer_that_closes_cuts_the_group() -> None:
    sockets = GroupSockets()
    with connected() as (near, far, port):
        sockets.note_peer((HERE, port))
        sockets.remember()
        far.close()
        near.settimeout(150)
        assert near.recv(1) == b""
        assert sockets.is_cut()


def test_connections_of_after_the_end_are_shut_too() -> None:
    sockets = GroupSockets()
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        sockets.note_peer((HERE, port))
        sockets.keep_shut()
        with socket.create_connection((HERE, port)) as late:
            late.settimeout(150)
            assert late.recv(1) == b""
        sockets.close()


class Meeting:
    """The rendezvous of a round, for threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[tuple[str, str], bytes] = {}
        self.exchanges = 0

    def __call__(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        with self._changed:
            self.exchanges += 1
        self.put(scope, str(key), value)
        return [self.get(scope, str(rank), timeout_s=20) for rank in range(count)]

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._changed:
            self._values[scope, key] = value
            self._changed.notify_all()

    def get(self, scope: str, key: str, *, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: (scope, key) in self._values, timeout_s):
                raise RendezvousTimeoutError(key)
            return self._values[scope, key]


class Ranks:
    """Stores, sockets and groups of ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.meeting, self.size = Meeting(), size
        self.sockets = [GroupSockets() for _ in range(size)]
        self.stores: list[Any] = [None] * size
        self.groups: list[Any] = [None] * size

    def each(self, work: Any) -> list[Any]:
        found: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            try:
                found[rank] = work(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        assert not any(thread.is_alive() for thread in threads)
        return found

    def store(self, rank: int) -> Any:
        meeting: Any = self.meeting
        self.stores[rank] = RoundStore(
            "scope", rank, self.size, meeting, lambda: LazyServer(HERE, None), self.sockets[rank]
        )
        return self.stores[rank]

    def make(self, prefix: str = "0/") -> None:
        def one(rank: int) -> None:
            store = c10d.PrefixStore(f"{prefix}/cpu/", self.stores[rank] or self.store(rank))
            device = c10d.ProcessGroupGloo.create_device(hostname=HERE)
            gloo: Any = c10d.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [device]
            options._timeout = timedelta(seconds=60)
            self.groups[rank] = c10d.ProcessGroupGloo(store, rank, self.size, options)

        assert self.each(one) == [None] * self.size

    def close(self) -> None:
        for sockets in self.sockets:
            sockets.shut()
            sockets.close()
        self.groups.clear()
        for store in self.stores:
            if store is not None:
                store.close()


def allreduced(group: Any) -> float:
    data = torch.ones(1)
    group.allreduce([data], c10d.AllreduceOptions()).wait()
    return data.item()


def test_a_blocked_allreduce_of_gloo_is_ended() -> None:
    ranks = Ranks(3)
    try:
        ranks.make()
        assert ranks.meeting.exchanges == 3, "one for each rank"
        assert ranks.each(lambda rank: allreduced(ranks.groups[rank])) == [3.0] * 3
        # One end of each connection, as all ranks are this process.
        assert [len(sockets.remember()) for sockets in ranks.sockets] == [3, 3, 3]
        begun = threading.Event()

        def work(rank: int) -> Any:
            if rank:
                begun.set()
                return allreduced(ranks.groups[rank])
            assert begun.wait(150)
            ranks.sockets[1].shut()
            return "shut"

        assert all(isinstance(end, RuntimeError) for end in ranks.each(work)[1:])
    finally:
        ranks.close()


def test_subgroups_are_of_the_round_too() -> None:
    ranks = Ranks(2)
    try:
        ranks.make()
        assert [len(sockets.remember()) for sockets in ranks.sockets] == [1, 1]
        world = list(ranks.groups)
        ranks.make("1/")
        assert ranks.meeting.exchanges == 2, "the others' keys go one by one"
        assert [len(sockets.remember()) for sockets in ranks.sockets] == [2, 2]
        assert ranks.each(lambda rank: allreduced(ranks.groups[rank])) == [2.0] * 2
        ranks.sockets[0].shut()
        for groups in (ranks.groups, world):
            assert all(isinstance(end, RuntimeError) for end in ranks.each(lambda rank: allreduced(groups[rank])))  # noqa: B023
    finally:
        ranks.close()


def test_all_else_is_kept_in_rank_0s_store() -> None:
    ranks = Ranks(2)
    try:
        ranks.make()

        def work(rank: int) -> list[Any]:
            store: Any = c10d.PrefixStore("mine", ranks.stores[rank])
            store.set(f"from {rank}", str(rank))
            store.wait([f"from {1 - rank}"], timedelta(seconds=20))
            counted = store.add("count", 1)
            return [store.get(f"from {1 - rank}"), counted, store.check([f"from {rank}"])]

        found = ranks.each(work)
        assert [end[0] for end in found] == [b"1", b"0"]
        assert sorted(end[1] for end in found) == [1, 2]
        assert all(end[2] for end in found)
        ranks.sockets[1].shut()  # whoever waits in it is freed like whoever waits in Gloo
        with pytest.raises(RuntimeError):
            ranks.stores[1].get("never")
    finally:
        ranks.close()


def test_one_rank_alone_needs_nobody() -> None:
    def serve() -> LazyServer:
        raise AssertionError("nobody asks it")

    store = RoundStore("scope", 0, 1, None, serve, GroupSockets())
    group = c10d.ProcessGroupGloo(c10d.PrefixStore("0//cpu/", store), 0, 1, timedelta(seconds=20))
    assert allreduced(group) == 1.0
    assert store.add("count", 2) == 2
    store.close()


def test_the_store_keeps_to_the_range_of_ports() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HorovodInternalError, match=f"ports {port}-{port}"):
            listen(HERE, (port, port))
    with listen(HERE, (port, port)) as listener:
        assert listener.getsockname()[1] == port


def test_a_server_that_nobody_asks_for_is_never_made() -> None:
    server = LazyServer(HERE, None)
    server.close()
    assert server.store() is None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(server.address)
