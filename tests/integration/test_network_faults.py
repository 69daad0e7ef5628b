"""The faults that other tests use: that each does what it says, to those hosts and no others, and heals."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network.machines import wait_for
from tests.support.network.namespaces import NamespaceHost, Namespaces
from tests.support.network.network_faults import NameService, NetworkFaults, WallClock

pytestmark = [pytest.mark.integration, pytest.mark.machines]

_ECHO = """
import socket, threading
server = socket.create_server(("::", 5000), family=socket.AF_INET6, dualstack_ipv6=True)
print("listens", flush=True)
def echo(connection):
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""
# Sends and receives SIZE bytes, SIZE from the command line, and says in what time.
_ASK = """
import socket, sys, threading, time
size = int(sys.argv[3])
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as connection:
    began = time.monotonic()
    threading.Thread(target=connection.sendall, args=(bytes(size),), daemon=True).start()
    while size:
        size -= len(connection.recv(1 << 16))
    print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Namespaces]:
    with Namespaces(3) as made:
        for host in made:
            echo = host.popen([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE, text=True)
            assert echo.stdout.readline() == "listens\n"
        yield made


def ask(asker: NamespaceHost, name: str, *, timeout_s: float = 100.0, size: int = 1) -> float:
    """How long an echo took; raises TimeoutError when none came."""
    done = asker.run([sys.executable, "-c", _ASK, name, str(timeout_s), str(size)])
    if done.returncode:
        raise TimeoutError(done.stderr)
    return float(done.stdout)


def is_fast(asker: NamespaceHost, other: NamespaceHost, below_s: float, *, size: int = 1) -> bool:
    """Whether an echo can take less than that: on a busy machine not each does."""
    return any(ask(asker, other.name, size=size) < below_s for _ in range(100))


def is_cut(asker: NamespaceHost, name: str) -> bool:
    try:
        ask(asker, name, timeout_s=0.5)
    except TimeoutError:
        return True
    return False


def names(host: NamespaceHost) -> list[str]:
    return [host.name] + ([host.name_v6] if host.ipv6 else [])


def test_two_hosts_are_cut_from_each_other(machines: Namespaces) -> None:
    node0, node1, node2 = machines
    for host, other in ((node1, node2), (node2, node1)):  # so that each knows the way
        for name in names(other):
            ask(host, name)
    with NetworkFaults() as faults:
        faults.between(node1, node2)
        for name in names(node2):
            assert is_cut(node1, name)
        assert is_cut(node2, node1.name)
        for host in (node1, node2):
            ask(node0, host.name)
            ask(host, node0.name)
    for name in names(node2):
        ask(node1, name)
    ask(node2, node1.name)


def test_one_way_only(machines: Namespaces) -> None:
    node0, node1, _ = machines
    count = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 5001))"
    listen = f"{count}; print('listens', flush=True); print(s.recv(9).decode())"
    send = (
        "import socket, sys; text, to = sys.argv[1:]; "
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(text.encode(), (to, 5001))"
    )
    ask(node0, node1.name)
    with NetworkFaults() as faults:
        faults.one_way(node1, node0)
        for sender, receiver, said in ((node0, node1, "hello\n"), (node1, node0, "nothing\n")):
            listener = receiver.popen(
                [sys.executable, "-c", listen], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert listener.stdout.readline() == "listens\n"
            assert sender.run([sys.executable, "-c", send, "hello", receiver.ipv4]).returncode == 0
            # What comes first counts; the receiver's own word would not overtake the other's.
            assert receiver.run([sys.executable, "-c", send, "nothing", "127.0.0.1"]).returncode == 0
            assert listener.communicate(timeout=150)[0] == said


def test_a_partition(machines: Namespaces) -> None:
    node0, node1, node2 = machines
    with NetworkFaults() as faults:
        faults.partition([node0, node1], [node2])
        ask(node0, node1.name)
        assert is_cut(node0, node2.name)
        assert is_cut(node2, node1.name)
    ask(node0, node2.name)


def sent_again(host: NamespaceHost) -> int:
    """Segments of TCP that a host has sent once more."""
    heads, numbers = (
        line.split() for line in host.run(["cat", "/proc/net/snmp"]).stdout.splitlines() if line.startswith("Tcp:")
    )
    return int(numbers[heads.index("RetransSegs")])


def test_slow_and_lossy_links(machines: Namespaces) -> None:
    node0, node1, node2 = machines
    with NetworkFaults() as faults:
        faults.slow(node1, "5mbit")
        # 512 KB with what is around them take 0.84 s; what a burst has of them, 0.1 s, is free.
        assert ask(node0, node1.name, size=1 << 19) > 0.7
        assert is_fast(node0, node2, 0.7, size=1 << 19)
    with NetworkFaults() as faults:
        faults.lossy(node1, delay_s=0.5)
        assert ask(node0, node1.name) >= 1.0
        assert ask(node1, node2.name) >= 1.0
        assert is_fast(node0, node2, 1.0)
        faults.lossy(node1, loss=0.1, seed=5)
        before = sent_again(node0) + sent_again(node1)
        ask(node0, node1.name, size=1 << 22)
        assert sent_again(node0) + sent_again(node1) > before
        faults.lossy(node1, loss=1.0)
        assert is_cut(node0, node1.name)
    ask(node0, node1.name, size=1 << 20)


def test_a_machine_that_goes_and_comes_back_with_another_address() -> None:
    with Namespaces(2, sshd=True) as machines:
        node0, node1 = machines
        echo = node1.popen([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE, text=True)
        assert echo.stdout.readline() == "listens\n"
        ask(node0, node1.name)
        old = node1.ipv4
        node1.power_off()
        assert node1.pids() == []
        assert is_cut(node0, node1.name)
        node1.move(99)
        node1.power_on()
        done = node0.run(["ssh", "-oBatchMode=yes", node1.name, "echo $SSH_CONNECTION"])
        assert done.stdout.split()[2] == "10.77.0.99" != old, done.stderr


def test_names_that_are_not_answered(machines: Namespaces) -> None:
    node0, _, _ = machines
    look_up = [sys.executable, "-c", "import socket; print(socket.getaddrinfo('node1', 1)[0][4][0])"]
    with NameService(node0, machines, timeout_s=3) as names:
        assert node0.run(look_up).stdout == "10.77.0.2\n"
        names.go_silent()
        assert "name resolution" in node0.run(look_up).stderr
        names.answer()
        assert node0.run(look_up).stdout == "10.77.0.2\n"
    assert node0.run(look_up).stdout == "10.77.0.2\n"


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    tell = "import json, time\nwhile input(): print(json.dumps([time.time(), time.monotonic()]), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", tell],
        env=clock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for jump_s in (0.0, 86400.0, -3600.0):
            clock.jump(jump_s)
            process.stdin.write("tell\n")
            wall, running = json.loads(process.stdout.readline())
            assert abs(wall - time.time() - jump_s) < 600, "less than any jump"
            assert 0 <= time.monotonic() - running < 600
        process.stdin.write("\n")
    wait_for("its end", lambda: process.poll() is not None)
