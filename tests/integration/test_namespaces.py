"""The hosts that other tests run on: that they are apart, can be cut off, serve ssh, and leave nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.network import namespaces
from tests.support.network.namespaces import Namespaces
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

_LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 5000), family=family)
print("listening", flush=True)
while True:
    connection, address = server.accept()
    connection.sendall(socket.gethostname().encode() + b" " + address[0].encode())
    connection.close()
"""
_ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as connection:
    print(connection.makefile().read())
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with Namespaces(2, sshd=True) as made:
        yield made


def ask(hosts: Namespaces, name: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    return hosts[0].run([sys.executable, "-c", _ASK, name, str(timeout_s)])


def test_hosts_have_names_and_addresses_of_their_own(hosts: Namespaces) -> None:
    for address, ours in ((hosts[1].ipv4, hosts[0].ipv4), (hosts[1].ipv6, hosts[0].ipv6)):
        if not address:
            continue
        listener = hosts[1].popen([sys.executable, "-c", _LISTEN, address], stdout=subprocess.PIPE, text=True)
        assert listener.stdout.readline() == "listening\n"
        name = hosts[1].name_v6 if ":" in address else hosts[1].name
        for text in (address, name):
            assert ask(hosts, text).stdout.split() == ["node1", ours]
        # This machine is not on their network.
        assert "br0" not in subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
        listener.kill()
        listener.wait()
    assert socket.gethostname() not in ("node0", "node1")
    assert "Name or service not known" in ask(hosts, "nobody").stderr or "resolution" in ask(hosts, "nobody").stderr


def test_a_host_that_is_cut_off_says_nothing_until_it_is_healed(hosts: Namespaces) -> None:
    listener = hosts[1].popen([sys.executable, "-c", _LISTEN, hosts[1].ipv4], stdout=subprocess.PIPE, text=True)
    assert listener.stdout.readline() == "listening\n"
    hosts[1].cut()
    try:
        assert "TimeoutError" in ask(hosts, hosts[1].name, 0.5).stderr
    finally:
        hosts[1].heal()
    assert ask(hosts, hosts[1].name).stdout.startswith("node1 ")
    listener.kill()
    listener.wait()


def test_ssh_logs_in_on_another_host(hosts: Namespaces) -> None:
    for name in hosts[1].names():
        done = hosts[0].run(["ssh", "-oBatchMode=yes", name, "hostname; echo $SSH_CONNECTION"])
        assert done.stdout.split()[0] == "node1", done.stderr
    hosts[1].stop_sshd()
    refused = hosts[0].run(["ssh", "-oBatchMode=yes", "node1", "hostname"])
    assert "Connection refused" in refused.stderr
    hosts[1].start_sshd()
    assert hosts[0].run(["ssh", "-oBatchMode=yes", "node1", "hostname"]).stdout == "node1\n"


def test_nothing_is_left() -> None:
    before = threads_and_descriptors()
    with Namespaces(3, sshd=True) as hosts:
        child = f"{sys.executable} -c 'import time; time.sleep(1000)' >/dev/null 2>&1 & echo $!"
        orphan = psutil.Process(int(hosts[2].run(["sh", "-c", child]).stdout))
    # Whoever is its parent now may not have looked yet.
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert [name for host in hosts for name in (Path("/run/netns") / host.namespace, host.etc) if name.exists()] == []
    assert not hosts.folder.exists()
    assert threads_and_descriptors() == before


def test_nothing_is_left_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object) -> None:
        raise RuntimeError("no key")

    monkeypatch.setattr(namespaces.NamespaceHost, "change_host_key", fails)
    made = Namespaces(2, sshd=True)
    with pytest.raises(RuntimeError, match="no key"):
        made.__enter__()
    assert [host.namespace for host in made if (Path("/run/netns") / host.namespace).exists()] == []
    assert not made.folder.exists()


def test_what_a_killed_run_has_left_is_removed_by_the_next(hosts: Namespaces) -> None:
    source = (
        "from tests.support.network.namespaces import Namespaces; import os; hosts = Namespaces(1).__enter__(); "
        "print(hosts[0].namespace, hosts.folder, flush=True); os.kill(os.getpid(), 9)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", source], env=env, stdout=subprocess.PIPE, text=True, check=False)
    namespace, folder = done.stdout.split()
    left = [Path("/run/netns", namespace), Path("/etc/netns", namespace), Path(folder)]
    assert all(each.exists() for each in left)
    with Namespaces(1):
        assert not any(each.exists() for each in left)


def threads_and_descriptors() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
