"""Ports that are kept for rank 0: nobody else gets them, and rank 0 does."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.launch.agent import ports as ports_module
from elastic_driver.launch.agent.ports import HeldPorts, bound_port
from elastic_driver.rendezvous.agent_messages import AgentMessage, Close, HoldPort, LetGo, PortHeld, PortLevel
from tests.support.network.ports import free_ports

pytestmark = pytest.mark.unit


class SentMessages:
    """What the driver is told."""

    def __init__(self) -> None:
        self.said: list[AgentMessage] = []
        self.ports = HeldPorts(self.said.append)

    def hold(self, generation: int, ports: list[int] | None = None) -> PortHeld:
        assert self.ports.take(HoldPort(generation, ports or [], round_id=7))
        answer = self.said.pop()
        assert isinstance(answer, PortHeld)
        assert (self.said, answer.generation) == ([], generation)
        return answer

    def close(self) -> None:
        self.ports.close()


@pytest.fixture
def told() -> Iterator[SentMessages]:
    with contextlib.closing(SentMessages()) as one:
        yield one


def listens(port: int, *, reuse: bool, address: str = "127.0.0.1") -> bool:
    """Whether somebody can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            sock.bind((address, port))
            sock.listen()
        except OSError:
            return False
        return True


def test_nobody_is_given_a_held_port_but_who_knows_of_it(told: SentMessages) -> None:
    port = told.hold(1).port
    assert told.ports.holds(port)
    for address in ("127.0.0.1", "0.0.0.0"):
        assert not listens(port, reuse=False, address=address)
        assert listens(port, reuse=True, address=address), "rank 0 does it so"
    assert told.hold(1).port == port, "asked twice"
    assert told.ports.levels() == [PortLevel(1, 7, port)]
    assert told.ports.take(LetGo(1))
    assert not told.ports.holds(port)
    assert listens(port, reuse=False)
    assert not told.ports.take(Close())


def test_a_thief_that_takes_every_free_port_does_not_get_it(told: SentMessages) -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    port = told.hold(1).port
    assert low <= port <= high
    with contextlib.ExitStack() as stack:
        got = []
        for _ in range(600):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            got.append(sock.getsockname()[1])
        assert port not in got
    # All of a range that is smaller than what is asked for.
    with contextlib.ExitStack() as stack:
        base = free_ports(4)[0]
        held = told.hold(2, [base, base + 3]).port
        assert base <= held <= base + 3
        taken = []
        for each in range(base, base + 4):
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("", each))
                taken.append(each)
        assert sorted([*taken, held]) == list(range(base, base + 4))


def test_two_jobs_with_one_range_never_hold_the_same_port(told: SentMessages) -> None:
    base = free_ports(2)[0]
    with contextlib.closing(SentMessages()) as other:
        got = {told.hold(1, [base, base + 1]).port, other.hold(1, [base, base + 1]).port}
        assert got == {base, base + 1}
        none = told.hold(2, [base, base + 1])
        assert (none.port, none.error) == (0, "no port in --port-range is free")
    assert told.hold(3, [base, base + 1]).port in (base, base + 1)


@pytest.mark.parametrize("ports", [[70000, 70001], [-5, -5], [3, 2]])
def test_what_is_no_port_is_told(told: SentMessages, ports: list[int]) -> None:
    answer = told.hold(1, ports)
    assert answer.port == 0
    assert answer.error


def test_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def none(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, kind)

    monkeypatch.setattr(ports_module.socket, "socket", none)
    held = bound_port([])
    monkeypatch.undo()
    with held:
        assert held.family == socket.AF_INET
        port = held.getsockname()[1]
        assert not listens(port, reuse=False)
        assert listens(port, reuse=True)
