"""Dialling through the system's ssh, between hosts of their own with real ssh servers: what it says when it fails, and
what users' configurations can do.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import shlex
import sys
from collections.abc import Iterator

import psutil
import pytest

from elastic_driver.launch.dial.command import CommandDialler, RshDialler
from elastic_driver.launch.dial.dialler import DialFailure, Dialler
from elastic_driver.launch.dial.ssh import SshDialler
from elastic_driver.rendezvous.agent_messages import Bootstrap
from tests.support.network.namespaces import Namespaces
from tests.support.processes.launching import PATIENCE_S

pytestmark = pytest.mark.integration

HELLO = "dialled in from"


@pytest.fixture(scope="module")
def shared() -> Iterator[Namespaces]:
    with Namespaces(3, sshd=True) as made:
        yield made


@pytest.fixture
def hosts(shared: Namespaces) -> Iterator[Namespaces]:
    """As at the beginning, whatever tests have done to the configuration."""
    config = shared.ssh_config.read_text()
    yield shared
    shared.ssh_config.write_text(config)
    shared.write_known_hosts()


def say_where(hosts: Namespaces, words: str) -> None:
    """What the agent's stand-in says at its end: expressions of Python."""
    source = f"import os, socket, sys\nsys.exit(' '.join(('{HELLO}', {words})))\n"
    (hosts.folder / "where_am_i.py").write_text(source)


def dial_with(dialler: Dialler, name: str) -> DialFailure:
    """What comes of one dial."""

    async def main() -> DialFailure:
        child = await dialler.dial(name, Bootstrap(urls=(), identity="agent 1", key="00", host=name))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await child.failed
        finally:
            await child.close()

    return asyncio.run(main())


def dial(hosts: Namespaces, name: str, **settings: object) -> DialFailure:
    """What comes of one dial from the first host; the agent only says on which host it is, and ends."""
    say_where(hosts, "socket.gethostname(), os.environ['SSH_CONNECTION']")
    program = [*hosts[0].prefix, str(hosts.bin / "ssh")]
    there = {"module": "where_am_i", "pythonpath": str(hosts.folder)}
    return dial_with(SshDialler(program=program, **(there | settings)), name)


def test_every_name_of_a_host_will_do(hosts: Namespaces) -> None:
    for name in hosts[1].names():
        assert f"{HELLO} node1" in dial(hosts, name).reason


def test_a_server_that_is_not_up_yet_is_tried_again(hosts: Namespaces) -> None:
    hosts[1].stop_sshd()
    try:
        down = dial(hosts, "node1")
        assert down.reason.startswith("ssh: connect to host node1 port 22: Connection refused")
        assert not down.permanent
    finally:
        hosts[1].start_sshd()
    assert f"{HELLO} node1" in dial(hosts, "node1").reason


def test_a_host_that_does_not_answer_is_tried_again(hosts: Namespaces) -> None:
    hosts[1].cut()
    try:
        silent = dial(hosts, "node1", connect_timeout_s=1)
    finally:
        hosts[1].heal()
    assert silent.reason.startswith("ssh: connect to host node1 port 22: ")
    assert "timed out" in silent.reason or "No route" in silent.reason
    assert not silent.permanent
    assert f"{HELLO} node1" in dial(hosts, "node1").reason


def test_a_server_that_says_nothing_is_tried_again(hosts: Namespaces) -> None:
    deaf = hosts[1].popen(
        [
            sys.executable,
            "-c",
            "import socket, time; s = socket.create_server(('', 2223)); print(flush=True); time.sleep(99)",
        ],
        stdout=-1,
    )
    deaf.stdout.readline()
    told = dial(hosts, "node1", port=2223, connect_timeout_s=1)
    deaf.kill()
    assert "timed out" in told.reason
    assert not told.permanent


def test_an_unknown_name_is_tried_again(hosts: Namespaces) -> None:
    told = dial(hosts, "node77")
    assert told.reason.startswith("ssh: Could not resolve hostname node77: ")
    assert not told.permanent


def test_a_key_that_is_not_let_in_is_told_at_once(hosts: Namespaces) -> None:
    hosts.configure_ssh(f"IdentityFile {hosts.other_key}\nHost node1\n  User root")
    hosts.ssh_config.write_text(hosts.ssh_config.read_text().replace(f"IdentityFile {hosts.key}", ""))
    assert dial(hosts, "node1") == DialFailure("ssh: root@node1: Permission denied (publickey)", permanent=True)
    assert f"{HELLO} node1" in dial(hosts, "node1", identity_file=str(hosts.key)).reason


def test_a_changed_host_key_is_told_at_once(hosts: Namespaces) -> None:
    hosts[1].stop_sshd()
    hosts[1].change_host_key()
    hosts[1].start_sshd()
    try:
        for strict in ("yes", "ask", "accept-new"):
            hosts.configure_ssh(f"StrictHostKeyChecking {strict}")
            told = dial(hosts, "node1")
            assert told.permanent
            assert "Host key for node1 has changed" in told.reason
            assert told.reason.endswith("Host key verification failed")
    finally:
        hosts.write_known_hosts()
        known = hosts.known_hosts.read_text()
    assert f"{HELLO} node1" in dial(hosts, "node1").reason
    assert hosts.known_hosts.read_text() == known


def test_a_host_key_that_is_not_known_is_the_configurations_affair(hosts: Namespaces) -> None:
    hosts.known_hosts.write_text("")
    unknown = dial(hosts, "node1")
    assert unknown.permanent
    assert unknown.reason.startswith("ssh: node1: Host key verification failed (its host key is unknown here")
    assert hosts.known_hosts.read_text() == ""
    hosts.configure_ssh("StrictHostKeyChecking accept-new")
    assert f"{HELLO} node1" in dial(hosts, "node1").reason


def test_a_host_without_python_or_package_is_told_at_once(hosts: Namespaces) -> None:
    no_python = dial(hosts, "node1", python="/no/such python")
    assert no_python.permanent
    assert no_python.reason.startswith("ssh: node1: ")
    assert "/no/such python" in no_python.reason
    assert "--remote-python" in no_python.reason
    empty = hosts.folder / "empty"
    empty.mkdir()
    (hosts.folder / "where_am_i.py").unlink(missing_ok=True)
    no_package = dial(hosts, "node1", module="elastic_driver.launch.agent", python=bare_python(), pythonpath=str(empty))
    assert no_package.permanent
    assert "No module named 'elastic_driver'" in no_package.reason


def bare_python() -> str:
    """An interpreter in whose site-packages this package is not."""
    return os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")


def test_users_configurations_count(hosts: Namespaces) -> None:
    hosts[2].stop_sshd()
    hosts[2].start_sshd(port=2222)
    assert dial(hosts, "node2", port=2222).reason.endswith(f" {hosts[2].ipv4} 2222")
    assert "Connection refused" in dial(hosts, "node2").reason
    hosts.configure_ssh(
        "Host gpu-7\n  HostName node2\n  Port 2222\n  HostKeyAlias node2\n  RemoteCommand uptime\n  RequestTTY yes\n"
        "  LocalForward 9000 localhost:9000\n  ForwardAgent yes\n"
    )
    assert dial(hosts, "gpu-7").reason.endswith(f" {hosts[2].ipv4} 2222")
    hosts[2].stop_sshd()
    hosts[2].start_sshd()


def test_a_name_to_log_in_with_wins_over_the_configuration(hosts: Namespaces) -> None:
    hosts.ssh_config.write_text("Host node1\n  User nobody-of-this-name\n" + hosts.ssh_config.read_text())
    assert dial(hosts, "node1").permanent
    assert f"{HELLO} node1" in dial(hosts, "node1", logins={"node1": getpass.getuser()}).reason


def test_a_host_behind_another(hosts: Namespaces) -> None:
    hosts.configure_ssh("Host inner\n  HostName node2\n  HostKeyAlias node2\n  ProxyJump node1\n")
    through = dial(hosts, "inner")
    assert f"{HELLO} node2 {hosts[1].ipv4}" in through.reason
    hosts[2].stop_sshd()
    refused = dial(hosts, "inner")
    hosts[2].start_sshd()
    assert refused == DialFailure("ssh: inner: channel 0: open failed: connect failed: Connection refused")


def test_a_dial_through_another_host_leaves_nothing_when_it_is_closed(hosts: Namespaces) -> None:
    hosts.configure_ssh("Host inner\n  HostName node2\n  HostKeyAlias node2\n  ProxyJump node1\n")
    pipe = hosts.folder / "up"
    os.mkfifo(pipe)
    (hosts.folder / "where_am_i.py").write_text(f"import sys\nopen({str(pipe)!r}, 'w').close()\nsys.stdin.read()\n")
    program = [*hosts[0].prefix, str(hosts.bin / "ssh")]
    dialler = SshDialler(program=program, module="where_am_i", pythonpath=str(hosts.folder))

    async def main() -> None:
        child = await dialler.dial("inner", Bootstrap(urls=(), identity="agent 1", key="00", host="inner"))
        await asyncio.to_thread(pipe.read_text)
        run_here = [psutil.Process(pid) for pid in hosts[0].pids()]
        clients = [process for process in run_here if process.name() == "ssh"]
        assert len(clients) == 2
        await child.close()
        _, left = psutil.wait_procs(clients, timeout=PATIENCE_S)
        assert left == []

    asyncio.run(main())


def test_a_connection_that_the_user_shares_outlives_the_dial(hosts: Namespaces) -> None:
    hosts.configure_ssh(f"ControlMaster auto\nControlPersist 60\nControlPath {hosts.folder}/control-%h\n")
    assert f"{HELLO} node1" in dial(hosts, "node1").reason
    assert hosts[0].run(["ssh", "-O", "check", "node1"]).stderr.startswith("Master running")
    # The next dial goes through it, so it does not need the server to take a connection.
    hosts[1].stop_sshd()
    try:
        assert f"{HELLO} node1" in dial(hosts, "node1").reason
    finally:
        hosts[0].run(["ssh", "-O", "exit", "node1"])
        hosts[1].start_sshd()


def test_commands_of_the_users_reach_hosts_as_well(hosts: Namespaces) -> None:
    say_where(hosts, "socket.gethostname(), *(name for _, name in socket.if_nameindex())")
    there = {"module": "where_am_i", "pythonpath": str(hosts.folder)}
    netns = CommandDialler("ip netns exec {host}", **there)
    assert dial_with(netns, hosts[1].namespace).reason.endswith(" lo eth0")
    ssh = shlex.join([*hosts[0].prefix, "ssh", "-F", str(hosts.ssh_config)])
    through_ssh = CommandDialler(f"{ssh} {{host}} {{command}}", **there)
    assert dial_with(through_ssh, "node1").reason.endswith("node1 lo eth0")
    as_rsh_agent = RshDialler(ssh, **there)
    assert dial_with(as_rsh_agent, "node1").reason.endswith("node1 lo eth0")
