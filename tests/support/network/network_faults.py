"""What can go wrong between a test's machines, a tool for each: cuts, slow and lossy links, names, clocks.

All is silent: packets vanish and nobody is told. ``NamespaceHost`` itself can be cut off, go and move; here are the
faults between some of the hosts, and those that leave a host on the network. Needs what :mod:`namespaces` needs; no
netem, no packet filter.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.network.namespaces import NamespaceHost, Namespaces, batch, ip, run

_HERE = Path(__file__).parent
# Bytes that a slow link lets through at once; what waits longer than the latency is lost, as at a full switch.
_BURST, _LATENCY = "64kb", "200ms"


class NetworkFaults:
    """Faults of the network between hosts. A context manager: afterwards the network is as it was."""

    def __init__(self) -> None:
        self._lost: set[tuple[NamespaceHost, NamespaceHost]] = set()
        self._slow: set[NamespaceHost] = set()
        self._wires: dict[NamespaceHost, subprocess.Popen[str]] = {}

    def __enter__(self) -> NetworkFaults:
        return self

    def __exit__(self, *unused: object) -> None:
        self.heal()

    def one_way(self, sender: NamespaceHost, receiver: NamespaceHost) -> None:
        """Nothing that the sender sends to the receiver arrives; the other way is open."""
        self._lost.add((sender, receiver))
        sender.lose_way_to(receiver)

    def between(self, one: NamespaceHost, other: NamespaceHost) -> None:
        """Nothing passes between these two; all others reach both."""
        self.one_way(one, other)
        self.one_way(other, one)

    def partition(self, *groups: Iterable[NamespaceHost]) -> None:
        """Nothing passes between the groups; within each all is well."""
        for some, others in itertools.combinations([list(group) for group in groups], 2):
            for one, other in itertools.product(some, others):
                self.between(one, other)

    def slow(self, host: NamespaceHost, rate: str) -> None:
        """A host's link has this rate ("20mbit"), both ways."""
        self._slow.add(host)
        for namespace, link in ((host.namespace, "eth0"), (host.switch, host.port)):
            shaped = f"qdisc replace dev {link} root tbf rate {rate} burst {_BURST} latency {_LATENCY}"
            run(["tc", "-n", namespace, *shaped.split()])

    def lossy(self, host: NamespaceHost, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 1) -> None:
        """A host's link is late and loses frames, both ways. Blocks until it does.

        Args:
            host: whose.
            delay_s: added to each frame, seconds.
            loss: the probability that a frame is lost, each way.
            seed: of the random numbers for that.
        """
        self._unwire(host)
        ours, far = _wire_ends(host)
        batch(
            host.switch,
            f"link add {far} type veth peer name {ours}",
            f"link set {host.port} nomaster",
            f"link set {far} master br0 up",
            f"link set {ours} up",
        )
        words = [sys.executable, str(_HERE / "lossy_wire.py"), host.port, ours, str(delay_s), str(loss), str(seed)]
        wire = subprocess.Popen(
            ["ip", "netns", "exec", host.switch, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wires[host] = wire
        assert wire.stdout is not None
        assert wire.stdout.readline(), "the lossy wire does not start"

    def heal(self) -> None:
        """Everything passes again, at once."""
        for sender, receiver in self._lost:
            sender.find_way_to(receiver)
        self._lost.clear()
        for host in self._slow:
            for namespace, link in ((host.namespace, "eth0"), (host.switch, host.port)):
                run(["tc", "-n", namespace, "qdisc", "del", "dev", link, "root"])
        self._slow.clear()
        for host in list(self._wires):
            self._unwire(host)

    def _unwire(self, host: NamespaceHost) -> None:
        wire = self._wires.pop(host, None)
        if wire is None:
            return
        wire.kill()
        wire.wait()
        assert wire.stdout is not None
        wire.stdout.close()
        _, far = _wire_ends(host)
        ip("-n", host.switch, "link", "del", far)
        host.heal()


def _wire_ends(host: NamespaceHost) -> tuple[str, str]:
    """The ends of the link between a lossy wire and the bridge: the wire's and the bridge's."""
    return f"x{host.port}", f"w{host.port}"


class NameService:
    """A name server for one host, which from now on knows the others from it alone. A context manager.

    Args:
        host: whose.
        machines: whose names it knows.
        timeout_s: how long the host waits for an answer, twice.
    """

    def __init__(self, host: NamespaceHost, machines: Namespaces, *, timeout_s: int = 5) -> None:
        self._machines = machines
        (host.etc / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        (host.etc / "resolv.conf").write_text(f"nameserver 127.0.0.1\noptions timeout:{timeout_s} attempts:2\n")
        names = [f"{other.name}={other.ipv4}" for other in machines]
        self._server = host.popen(
            [sys.executable, str(_HERE / "name_server.py"), *names], stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout.readline(), "the name server does not start"

    def __enter__(self) -> NameService:
        return self

    def __exit__(self, *unused: object) -> None:
        self._server.kill()
        self._server.wait()
        self._machines.write_names()

    def go_silent(self) -> None:
        """It takes questions and answers none."""
        self._server.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        """It answers again."""
        self._server.send_signal(signal.SIGCONT)


class WallClock:
    """The time of day of some processes, which jumps. Clocks that only run are right.

    Args:
        folder: for its files.

    Attributes:
        environment: of the processes.
    """

    def __init__(self, folder: Path) -> None:
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("needs a C compiler")
        library, self._offset = folder / "wall_clock.so", folder / "wall_clock"
        run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_HERE / "wall_clock.c")])
        self.jump(0.0)
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(self._offset)}

    def jump(self, seconds: float) -> None:
        """It is this much ahead of the true time from now on; less than 0: behind it."""
        # In place: the processes have the file mapped.
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("q", int(seconds * 1e9)))
