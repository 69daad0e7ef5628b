"""A job over several machines, for tests: its driver on the first of a test's namespaces, its agents on all."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.support.network.namespaces import NamespaceHost, Namespaces
from tests.support.processes.jobs import Job, check_agreement

PATIENCE_S = 150.0
# What hosts of two slots each have room for.
NAMES = ("node0:2", "node1:2", "node2:2")

marks = [pytest.mark.integration, pytest.mark.machines]

_T = TypeVar("_T")


@contextlib.contextmanager
def made_machines(count: int = 3, *, sshd: bool = True) -> Iterator[Namespaces]:
    """Machines. At the end nothing of a job may be left on them."""
    with Namespaces(count, sshd=sshd) as machines:
        yield machines
        for host in machines:
            wait_for_nobody(host)
            assert "elastic" not in host.run(["cat", "/proc/net/unix"]).stdout
            left = [path for path in host.runtime.rglob("*") if not path.is_dir()]
            assert not left, f"left on {host.name}: {left}"


def wait_for_nobody(host: NamespaceHost) -> None:
    """Blocks until nothing runs there but its ssh server."""
    wait_for(f"{host.name} is clean", lambda: not _busy(host), more=lambda: str(_busy(host)))


def _busy(host: NamespaceHost) -> list[str]:
    commands = [f"{pid} {command_of(pid)}" for pid in host.pids() if command_of(pid)]
    return [command for command in commands if "sshd" not in command or "[listener]" not in command]


def command_of(pid: int) -> str:
    """A process's command line; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def wait_for(what: str, found: Callable[[], _T], *, more: Callable[[], str] = str) -> _T:
    """What was found at last. Fails when that takes too long."""
    end = time.monotonic() + PATIENCE_S
    while not (answer := found()):
        assert time.monotonic() < end, f"{what}: not seen; {more()}"
        time.sleep(0.02)
    return answer


class MachinesJob(Job):
    """``elasticrun`` on one of the machines.

    Args:
        machines: for the job.
        folder: of its files.
        hosts: that a discovery script lists; None for no script.
        flags: more.
        cwd: of the driver, and so of all workers; None for the usual.
        on: on which machine; None for the first.
        more: see Job.
    """

    def __init__(
        self,
        machines: Namespaces,
        folder: Path,
        hosts: str | None,
        *flags: str,
        cwd: Path | None = None,
        on: NamespaceHost | None = None,
        **more: Any,
    ) -> None:
        self.machines = machines
        host = on or machines[0]
        env = host.environment() | {"STEP_S": "0.02"} | more.pop("env", {})
        limits = ("--agent-timeout", "4", "--heartbeat-timeout", "4", "--grace-time", "1", "--verbose")
        prefix = host.prefix + ([] if cwd is None else ["env", "-C", str(cwd)])
        super().__init__(folder, hosts, *limits, *flags, env=env, prefix=prefix, **more)

    def agents(self, host: NamespaceHost) -> list[int]:
        """The agents on a machine that the driver has started: processes of Python."""
        return [pid for pid in host.pids() if is_agent(pid)]

    def agent(self, host: NamespaceHost) -> int:
        """The machine's agent. Blocks until it is there."""
        return wait_for(f"the agent of {host.name}", lambda: self.agents(host))[0]

    def workers(self, host: NamespaceHost) -> list[int]:
        """Processes of workers on a machine that have done a step."""
        pids = {line["pid"] for line in self.steps()}
        return sorted(pids & set(host.pids()))

    def here(self, *words: str, host: NamespaceHost | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a subcommand of elasticrun on the driver's machine, or another."""
        return (host or self.machines[0]).run([sys.executable, "-m", "elastic_driver", *words])

    def wait_for_event(self, kind: str, *, count: int = 1, **fields: Any) -> dict[str, Any]:
        """The event of this kind with these fields, the first or a later one."""

        def found() -> dict[str, Any] | None:
            alike = [event for event in self.events(kind) if all(event[name] == fields[name] for name in fields)]
            return alike[count - 1] if len(alike) >= count else None

        event: dict[str, Any] = self.wait_for(f"{kind} {fields}", found)
        return event

    def mark(self) -> float:
        """The time now, for what comes afterwards."""
        return time.time()

    def check_no_step_is_lost(self) -> None:
        """Each rank has done each step once, and all agree."""
        lines = self.steps()
        check_agreement(lines)
        done = [(line["step"], line["rank"]) for line in lines]
        assert len(done) == len(set(done)), "a step was done again"
        steps = sorted({step for step, _ in done})
        assert steps == list(range(1, len(steps) + 1))

    def descriptors(self) -> int:
        """How many the driver has."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def check_descriptors(self, before: int) -> None:
        """The driver has no more than that soon; a discovery script takes some for a moment."""
        wait_for("no more descriptors", lambda: self.descriptors() <= before, more=lambda: str(self.descriptors()))

    def end(self) -> None:
        """Has the job end, as by its user."""
        self.process.send_signal(signal.SIGTERM)
        assert self.wait() == 128 + signal.SIGTERM, self.said()[-4000:]


def is_agent(pid: int) -> bool:
    """Whether this process is an agent, and not what has started it."""
    words = command_of(pid).split()
    return bool(words) and "python" in words[0] and "elastic_driver.launch.agent" in words


End = tuple[str, int]
"""Address and port."""


def listening(host: NamespaceHost) -> dict[int, set[End]]:
    """Who listens on a machine for TCP, beside its ssh server: where, by process."""
    found: dict[int, set[End]] = {}
    for pids, ours, _ in _sockets(host, "listening"):
        for pid in pids if ours[1] != 22 else ():
            found.setdefault(pid, set()).add(ours)
    return found


def connections(host: NamespaceHost, pids: Sequence[int]) -> set[tuple[End, End]]:
    """This and the other end of these processes' TCP connections."""
    return {(ours, theirs) for owners, ours, theirs in _sockets(host, "established") if owners & set(pids)}


def _sockets(host: NamespaceHost, state: str) -> Iterator[tuple[set[int], End, End]]:
    listed = host.run(["ss", "-Htnp", "state", state])
    assert listed.returncode == 0, listed.stderr
    for line in listed.stdout.splitlines():
        _, _, ours, theirs, *owners = line.split()
        yield set(map(int, re.findall(r"pid=(\d+)", " ".join(owners)))), _end(ours), _end(theirs)


def _end(text: str) -> End:
    address, _, port = text.rpartition(":")
    return address.strip("[]").removeprefix("::ffff:"), int(port) if port != "*" else 0


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to a process that need not live any more."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_dead(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
