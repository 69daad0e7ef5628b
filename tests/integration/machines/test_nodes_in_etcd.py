"""Jobs of nodes with a journal in etcd: one command on each machine, any of which may drive, and is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.network.machines import command_of, made_machines, marks
from tests.support.network.namespaces import Namespaces
from tests.support.paths import ROOT
from tests.support.processes.etcd import PORT, etcd_on, needs_etcd
from tests.support.processes.nodes import WORKER, Node, NodesJob

pytestmark = [*marks, needs_etcd]


class Job(NodesJob):
    """Its nodes are started by their command line; what that has in common is made for all."""

    def __init__(self, folder: Path, machines: Namespaces, *, least: int, most: int) -> None:
        super().__init__(folder)
        self.machines = machines
        for name in ("token", "key"):
            (folder / name).write_text(os.urandom(32).hex() + "\n")
            (folder / name).chmod(0o600)
        self.journal = ("--journal", f"etcd://{machines[3].ipv4}:{PORT}/jobs/one", "--journal-key", str(folder / "key"))
        self._flags = (
            *self.journal,
            *("--join-token-file", str(folder / "token"), "--agent-timeout", "10"),
            *("--nnodes", f"{least}:{most}", "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{machines[0].ipv4}:29400", "--rdzv-id", "a job"),
        )

    def node(self, number: int, *more: str, name: str = "", command: Sequence[str] = WORKER) -> Node:
        """Starts one on that machine."""
        host = self.machines[number]
        words = [sys.executable, "-m", "elastic_driver", *self._flags, *more, *command]
        return self.start_words(name or host.name, host, words)

    def tidy(self, number: int) -> None:
        """What processes of a machine have left that were killed goes with the next look."""
        self.machines[number].run([sys.executable, "-m", "elastic_driver", "jobs"], cwd=ROOT)

    def beside(self, number: int) -> list[int]:
        """The processes beside the nodes of a machine, parents first."""
        pids = self.machines[number].pids()
        return sorted(pid for pid in pids if is_beside(pid))


def is_beside(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"ELASTIC_DRIVER_BESIDE=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


@contextlib.contextmanager
def job(folder: Path, least: int = 2, most: int = 3) -> Iterator[Job]:
    with (
        made_machines(4) as machines,
        etcd_on(machines[3], folder),
        Job(folder, machines, least=least, most=most) as one,
    ):
        yield one


def drives(*nodes: Node) -> list[str]:
    """Those that say that they drive the job, by now or until they were lost."""
    return [node.name for node in nodes if "this node runs the driver" in node.err or "took over: " in node.err]


def pids(world: dict[int, dict[str, Any]]) -> dict[str, int]:
    return {line["NODE"]: line["pid"] for line in world.values()}


def test_the_driver_is_killed_beside_its_node(tmp_path: Path) -> None:
    """With all that would start it again there. No node is lost, and nobody's training stops."""
    with job(tmp_path) as one:
        nodes = [one.node(number) for number in range(3)]
        before = pids(one.wait_for_world("node0", "node1", "node2"))
        (first,) = drives(*nodes)
        number = int(first.removeprefix("node"))
        for pid in one.beside(number):
            os.kill(pid, signal.SIGKILL)
        # The one that this node has beside it by then, or another node's.
        kept = "3 workers on 3 hosts kept training"
        one.wait_for("one has taken over", lambda: any(kept in node.err for node in nodes))
        assert pids(one.wait_for_world("node0", "node1", "node2")) == before
        one.wait_for("there is another one", lambda: len(one.beside(number)) == 2)
        one.end(0)
        assert [node.wait() for node in nodes] == [0, 0, 0]
        # Each has shown what its own workers wrote, once.
        assert [node.out.count("I am rank ") for node in nodes] == [1, 1, 1]
        one.tidy(number)


def test_the_node_that_drives_is_lost_and_a_new_one_comes(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        first = one.node(0)
        one.wait_for("it drives", lambda: drives(first))
        one.node(1)
        second = one.started[1]
        one.wait_for_world("node0", "node1")
        one.machines[0].power_off()
        first.wait()
        third = one.node(2)
        one.wait_for_world("node1", "node2")
        assert len(drives(second, third)) == 1
        # Its machine comes back: the same command there finds them, whoever drives.
        for other in one.machines:
            other.end_sessions()
        one.machines[0].heal()
        again = one.node(0, name="again")
        one.wait_for_world("node1", "node2", "again")
        one.end(3)
        codes = [node.wait() for node in (second, third, again)]
        assert all(codes), codes
        assert len(set(codes)) == 1, "all know how it has ended"


def test_nodes_leave_one_after_the_other(tmp_path: Path) -> None:
    """Also the one that drives, which ends the job for nobody."""
    with job(tmp_path, least=1) as one:
        first = one.node(0)
        one.wait_for_world("node0")
        second = one.node(1)
        one.wait_for_world("node0", "node1")
        first.signal(signal.SIGTERM)
        assert first.wait() == 128 + signal.SIGTERM
        one.wait_for_world("node1")
        one.wait_for("the other drives", lambda: drives(second))
        third = one.node(2)
        one.wait_for_world("node1", "node2")
        second.signal(signal.SIGKILL)
        one.wait_for_world("node2")
        one.wait_for("the last drives", lambda: drives(third))
        one.end(0)
        assert third.wait() == 0
        one.tidy(1)


def test_all_are_told_to_end_at_once(tmp_path: Path) -> None:
    """As a scheduler does, which signals all processes of a job."""
    with job(tmp_path) as one:
        nodes = [one.node(number) for number in range(3)]
        one.wait_for_world("node0", "node1", "node2")
        for host in one.machines:
            for pid in host.pids():
                if "python" in command_of(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
        assert {node.wait() for node in nodes} == {128 + signal.SIGTERM}


def test_nodes_that_do_not_belong_together(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        other = tmp_path / "other"
        other.write_text(os.urandom(32).hex() + "\n")
        other.chmod(0o600)
        first = one.node(0)
        one.wait_for("it drives", lambda: drives(first))
        stranger = one.node(1, "--join-token-file", str(other), name="stranger")
        assert stranger.wait() == 2
        assert "give all nodes the same join token" in stranger.err
        another = one.node(2, "--rdzv-id", "another", name="another")
        assert another.wait() == 2
        assert "--rdzv-id" in another.err
        # One that cannot read the journal may be a node, and says that it cannot drive.
        unsealed = one.node(1, "--journal-key", str(other), name="unsealed")
        one.wait_for_world("node0", "unsealed")
        one.wait_for("it says so", lambda: "another key" in unsealed.err)
        one.end(0)
        assert (first.wait(), unsealed.wait()) == (0, 0)


@pytest.mark.parametrize("what", ["node", "driver"])
def test_the_driver_is_killed_while_the_job_ends(tmp_path: Path, what: str) -> None:
    """With its node, or alone. What is left of the job ends, and all know its end."""
    stubborn = ["bash", "-c", "trap '' TERM; exec \"$@\"", "bash", *WORKER]
    with job(tmp_path) as one:
        nodes = [one.node(number, "--shutdown-timeout", "20", command=stubborn) for number in range(2)]
        one.wait_for_world("node0", "node1")
        (first,) = drives(*nodes)
        number = int(first.removeprefix("node"))
        found = re.search(r"has joined job ([0-9a-f]+)", nodes[0].err)
        assert found is not None
        ended = one.machines[number].run([sys.executable, "-m", "elastic_driver", "end", found[1]], cwd=ROOT)
        assert ended.returncode == 0, ended.stderr
        if what == "node":
            nodes[number].signal(signal.SIGKILL)
            nodes[number].wait()
        else:
            for pid in one.beside(number):
                os.kill(pid, signal.SIGKILL)
            assert nodes[number].wait() == 128 + signal.SIGTERM
        assert nodes[1 - number].wait() == 128 + signal.SIGTERM
        one.tidy(number)


def test_a_node_that_was_away_does_not_begin_the_job_again(tmp_path: Path) -> None:
    """It is cut off from the others, and not from etcd, and the job ends without it."""
    with job(tmp_path, least=1) as one:
        first = one.node(0)
        one.wait_for_world("node0")
        second = one.node(1)
        one.wait_for_world("node0", "node1")
        one.machines[1].cut_from(one.machines[0])
        one.wait_for("it is lost", lambda: "its workers on this node were stopped" in second.err)
        one.wait_for_world("node0")
        one.end(0)
        assert first.wait() == 0
        assert second.wait() == 0
        assert len(one.lines()) == 4, "nobody has begun anew"
        assert not drives(second)
