"""A job over several machines whose journal is in etcd: its driver's machine is lost, or cut off from etcd, and a
driver that stands by on another one goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from elastic_driver.words import ExitCode
from tests.support.network.machines import MachinesJob, kill, made_machines, marks
from tests.support.network.namespaces import Namespaces
from tests.support.processes.etcd import PORT, etcd_on, needs_etcd
from tests.support.processes.jobs import check_agreement

pytestmark = [*marks, needs_etcd]


class Cluster:
    """Three machines, and one of etcd; drivers of the first two."""

    def __init__(
        self, machines: Namespaces, folder: Path, server: subprocess.Popen[bytes], hosts: Sequence[str]
    ) -> None:
        self.machines = machines
        self.folder = folder
        self.etcd = server
        self.hosts = hosts
        key = folder / "key"
        key.write_text(os.urandom(32).hex() + "\n")
        key.chmod(0o600)
        journal = f"etcd://{machines[3].ipv4}:{PORT}/jobs/one"
        self.flags = (
            *("-np", str(2 * len(hosts)), "--min-np", "2", "--on-change", "in-place", "--agent-timeout", "10"),
            *("--journal", journal, "--journal-key", str(key)),
        )
        self.env = {"LAST": str(folder / "last"), "STEP_S": "0.05"}

    def driver(self) -> MachinesJob:
        listed = "".join(f"{host}:2\n" for host in self.hosts)
        return MachinesJob(self.machines, self.folder, listed, *self.flags, env=self.env)

    def standby(self, first: MachinesJob, there: int = 1) -> MachinesJob:
        """On one of the machines. It waits until the first one's driver is gone, and has the same job then."""
        folder = self.folder / "standby"
        folder.mkdir()
        script = ("--host-discovery-script", str(self.folder / "discover.sh"), "--discovery-interval", "0.1")
        flags = (*self.flags, *script, "--event-log", str(self.folder / "events.jsonl"), "--standby-driver")
        one = MachinesJob(self.machines, folder, None, *flags, on=self.machines[there], env=self.env)
        one._steps, one._events = first._steps, first._events
        one.wait_to_say("standing by")
        return one

    def end_after(self, job: MachinesJob, more: int) -> None:
        """Has the script end after so many steps."""
        (self.folder / "new").write_text(str(max(line["step"] for line in job.steps()) + more))
        (self.folder / "new").replace(self.folder / "last")

    def forget(self, host: int) -> None:
        """What is lost with the machine: what its disk had, and those whom other machines may wait for."""
        for path in self.machines[host].runtime.rglob("*.*"):
            path.unlink()
        for other in self.machines:
            other.end_sessions()

    def agents(self, job: MachinesJob, *hosts: int) -> list[int]:
        """The agents of these machines. Blocks until they are there."""
        return [job.agent(self.machines[number]) for number in hosts]


@contextlib.contextmanager
def cluster(folder: Path, *hosts: str) -> Iterator[Cluster]:
    with made_machines(4) as machines, etcd_on(machines[3], folder) as server:
        yield Cluster(machines, folder, server, hosts or ("node0", "node1", "node2"))


def test_a_driver_is_killed_with_all_that_would_start_it_again(tmp_path: Path) -> None:
    """Nobody's training stops, on its own machine either."""
    with cluster(tmp_path) as one, one.driver() as first:
        first.wait_for_steps(6)
        agents = one.agents(first, 0, 1, 2)
        with one.standby(first) as second:
            first.process.kill()
            first.process.wait()
            second.wait_to_say("6 workers on 3 hosts kept training, no step is lost")
            second.wait_for_steps(6, after=time.time())
            assert one.agents(first, 0, 1, 2) == agents
            one.end_after(first, 40)
            assert second.wait() == 0, second.said()
        first.check_no_step_is_lost()
        assert "no job of yours runs" in first.here("jobs").stdout


@pytest.mark.parametrize("there", [0, 1], ids=["there", "elsewhere"])
def test_it_is_stopped_and_goes_on_when_another_has_the_job(tmp_path: Path, there: int) -> None:
    """Its kernel acknowledges all that is said to it, and holds its ports."""
    with cluster(tmp_path) as one, one.driver() as first:
        first.wait_for_steps(6)
        agents = one.agents(first, 0, 1, 2)
        with one.standby(first, there) as second:
            stopped = first.driver_pid()
            kill(stopped, signal.SIGSTOP)
            second.wait_to_say("6 workers on 3 hosts kept training, no step is lost")
            kill(stopped, signal.SIGCONT)
            assert first.wait() == ExitCode.OTHER_DRIVER
            second.wait_for_steps(6, after=time.time())
            assert one.agents(first, 0, 1, 2) == agents
            one.end_after(first, 40)
            assert second.wait() == 0, second.said()
        first.check_no_step_is_lost()


def test_its_machine_is_lost(tmp_path: Path) -> None:
    """The others' workers go on from their last commit, without those of that machine."""
    with cluster(tmp_path) as one, contextlib.ExitStack() as end, one.driver() as first:
        end.callback(one.forget, 0)
        first.wait_for_steps(6)
        with one.standby(first) as second:
            agents = one.agents(first, 1, 2)
            one.machines[0].power_off()
            first.process.wait()
            second.wait_to_say("took over")
            second.wait_for_steps(4, after=time.time())
            assert one.agents(first, 1, 2) == agents
            one.end_after(first, 40)
            assert second.wait() == 0, second.said()
        check_agreement(first.steps())


def test_it_is_cut_off_from_etcd_alone(tmp_path: Path) -> None:
    """It is heard by everybody, and decides nothing any more; its agents leave it for the other one."""
    with cluster(tmp_path, "node1", "node2") as one, one.driver() as first:
        first.wait_for_steps(4)
        agents = one.agents(first, 1, 2)
        with one.standby(first) as second:
            one.machines[0].cut_from(one.machines[3])
            first.wait_to_say("may have lost the job")
            second.wait_to_say("4 workers on 2 hosts kept training, no step is lost")
            one.machines[0].heal_with(one.machines[3])
            assert first.wait() == ExitCode.OTHER_DRIVER
            second.wait_for_steps(4, after=time.time())
            assert one.agents(first, 1, 2) == agents
            one.end_after(first, 40)
            assert second.wait() == 0, second.said()
        first.check_no_step_is_lost()


def test_so_are_its_own_workers(tmp_path: Path) -> None:
    """Their agent hears a driver that is in doubt, and cannot ask who has the job: they wait, and are ended and started
    anew when it can.
    """
    with cluster(tmp_path) as one, one.driver() as first:
        first.wait_for_steps(6)
        agents = one.agents(first, 1, 2)
        with one.standby(first) as second:
            one.machines[0].cut_from(one.machines[3])
            second.wait_to_say("round 2: 6 -> 4 workers")
            second.wait_for_steps(4, after=time.time())
            one.machines[0].heal_with(one.machines[3])
            assert first.wait() == ExitCode.OTHER_DRIVER
            second.wait_for_steps(6, after=time.time())
            assert one.agents(first, 1, 2) == agents
            one.end_after(first, 40)
            assert second.wait() == 0, second.said()
        check_agreement(first.steps())


def test_etcd_is_away_for_a_while(tmp_path: Path) -> None:
    """For longer than its leases last: training goes on, and the driver decides again when it can write again."""
    with cluster(tmp_path) as one, one.driver() as first:
        first.wait_for_steps(6)
        one.etcd.send_signal(signal.SIGSTOP)
        first.wait_to_say("may have lost the job")
        first.wait_for_steps(6, after=time.time())
        kill(next(line["pid"] for line in first.steps() if line["rank"] == 5))
        first.wait_to_say("cannot write the journal")
        one.etcd.send_signal(signal.SIGCONT)
        first.wait_to_say("this driver still has the job")
        first.wait_for_steps(4, after=time.time())
        one.end_after(first, 40)
        assert first.wait() == 0, first.said()
        check_agreement(first.steps())


def test_hosts_that_join_find_the_next_driver(tmp_path: Path) -> None:
    """They were given one address, of a driver that is gone with its machine."""
    with cluster(tmp_path) as one, contextlib.ExitStack() as end:
        token = tmp_path / "token"
        token.write_text(os.urandom(16).hex() + "\n")
        token.chmod(0o600)
        joins = ("--accept-agents", "--join-token-file", str(token), "--start-timeout", "100")
        flags = ("-np", "4", "--min-np", "2", *one.flags[4:], *joins)
        first = end.enter_context(MachinesJob(one.machines, tmp_path, None, *flags, env=one.env))
        end.callback(one.forget, 0)
        first.wait_to_say("to add a host, run there: ")
        url = re.search(r"--driver (https://10\.77\.0\.1:\S+)", first.said())
        assert url is not None
        for host in one.machines.hosts[1:3]:
            words = ("join", "--driver", url[1], "--slots", "2", "--join-token-file", str(token))
            host.popen([sys.executable, "-m", "elastic_driver", *words])
        first.wait_for_steps(4)
        one.machines[0].power_off()
        first.process.wait()
        (tmp_path / "second").mkdir()
        second = MachinesJob(one.machines, tmp_path / "second", None, *flags, on=one.machines[2], env=one.env)
        second._steps, second._events = first._steps, first._events
        with second:
            second.wait_to_say("4 workers on 2 hosts kept training, no step is lost")
            second.wait_for_steps(4, after=time.time())
            one.end_after(first, 40)
            assert second.wait() == 0, second.said()
        first.check_no_step_is_lost()
