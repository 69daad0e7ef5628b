"""Where ranks listen: ports of a range, one after the other, and addresses of both families."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from typing import Any

import numpy as np
import pytest

from elastic_driver.system.interfaces import host_addresses
from elastic_driver.worker.engine import native_loader
from elastic_driver.worker.engine.native import NativeEngine
from tests.native.engines import NEVER_S, Meeting, each_rank, make_engine
from tests.support.network.ports import free_ports

native: Any = native_loader.load()


def has_address(host: str) -> bool:
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_v6 = pytest.mark.skipif(not has_address("::1"), reason="this machine has no IPv6")


def link_local() -> str | None:
    lines = [line.rpartition(" ") for line in host_addresses()]
    for interface, _, address in lines:
        one = ipaddress.ip_interface(address).ip
        if one.version == 6 and one.is_link_local:
            return str(one) if "%" in str(one) else f"{one}%{interface}"
    return None


def group(rank: int, size: int, **given: Any) -> Any:
    return native.ContextGroup([("global", list(range(size)), rank)], **({"host": "127.0.0.1"} | given))


def port_of(blob: bytes) -> int:
    return int.from_bytes(blob[-2:], "big")


def connect(members: list[Any], blobs: list[bytes]) -> list[np.ndarray]:
    """Connects all and sums their ranks."""
    values = [np.full(3, rank, np.float32) for rank in range(len(members))]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            members[rank].connect(blobs, NEVER_S)
            members[rank].allreduce("global", values[rank], "float32", "sum", NEVER_S)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return values


def test_each_rank_listens_at_a_port_of_the_range_and_again_in_the_next_round() -> None:
    ports = free_ports(3)
    kept = []
    for _ in range(3):  # the connections of the rounds before stay open
        members = [group(rank, 3, ports=(ports[0], ports[-1])) for rank in range(3)]
        blobs = [member.prepare() for member in members]
        assert sorted(map(port_of, blobs)) == list(ports)
        assert all((value == 3).all() for value in connect(members, blobs))
        kept += members
    for member in kept:
        member.close()


def test_ports_in_use_are_passed_over_and_where_none_is_left_that_is_said() -> None:
    low, middle, high = free_ports(3)
    one = group(1, 2, ports=(low, high))
    with socket.create_server(("127.0.0.1", middle)), socket.create_server(("127.0.0.1", high)):
        assert port_of(one.prepare()) == low
        another = group(0, 2, ports=(low, high))
        said = rf"cannot listen on 127\.0\.0\.1: all ports from {low} to {high} \(--port-range\) are in use"
        with pytest.raises(native.CollectiveError, match=said):
            another.prepare()
    one.close()
    another.close()


@pytest.mark.parametrize("ports", [(5, 4), (0, 5), (1, 65536), (-1, 5), (-2, -1)])
def test_what_is_no_range_is_refused(ports: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is no range of ports"):
        group(0, 2, ports=ports)


def over(address: str, machines: str = "", **settings: Any) -> list[NativeEngine]:
    """Engines at one address, connected."""
    meeting = Meeting()
    made = [make_engine(rank, len(machines), machines[rank], **settings) for rank in range(len(machines))]
    for engine in made:
        engine._address = address
    errors = each_rank(made, lambda engine, rank: engine.connect(meeting, timeout_s=NEVER_S))
    assert not errors, errors
    return made


def test_an_engine_keeps_to_its_range() -> None:
    ports = free_ports(4)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            for engine in over("127.0.0.1", "aabb", ports=(ports[0], ports[-1])):
                stack.callback(engine.close)


@needs_v6
def test_contexts_over_ipv6() -> None:
    members = [group(rank, 3, host="::1") for rank in range(3)]
    assert all((value == 3).all() for value in connect(members, [member.prepare() for member in members]))
    for member in members:
        member.close()


@needs_v6
def test_an_engine_over_ipv6_within_a_range() -> None:
    ports = free_ports(4)
    for engine in over("::1", "aabb", ports=(ports[0], ports[-1])):
        engine.close()


@pytest.mark.skipif(link_local() is None, reason="this machine has no link-local address")
def test_contexts_over_an_address_of_the_link_alone() -> None:
    address = link_local()
    members = [group(rank, 2, host=address) for rank in range(2)]
    assert all((value == 1).all() for value in connect(members, [member.prepare() for member in members]))
    for member in members:
        member.close()
