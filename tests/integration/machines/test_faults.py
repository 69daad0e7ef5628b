"""Each fault of machines and networks, in a real job: the others go on without the unreachable, or the job waits and
says so; whoever comes back begins anew. The job is looked at all the while (``followed_job.py``).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.network.machines import is_dead, kill, made_machines, marks
from tests.support.network.network_faults import NameService, NetworkFaults, WallClock
from tests.support.processes.followed_job import FollowedJob

pytestmark = [*marks, pytest.mark.faults, pytest.mark.slow]

HOSTS = "node0:1\nnode1:1\nnode2:1\n"
FLAGS = ("-np", "3", "--min-np", "1")


def test_a_host_is_cut_off_and_one_vanishes(tmp_path: Path) -> None:
    with made_machines() as machines, FollowedJob(machines, tmp_path, HOSTS, *FLAGS) as job:
        node0, node1, node2 = machines
        job.goes_on(machines.hosts)

        # Back in the network at once after the verdict: it hears of it, ends, and begins anew.
        workers, agent = job.workers(node2), job.agent(node2)
        node2.cut()
        job.goes_on([node0, node1])
        assert job.lost() == ["node2"]
        node2.heal()
        job.goes_on(machines.hosts)
        assert is_dead(agent)
        job.ended(workers)

        # No connection is closed: the machine is not there any more. It comes back as another, under its name.
        node1.power_off()
        job.goes_on([node0, node2])
        node1.move(99)
        node1.power_on()
        job.goes_on(machines.hosts)
        assert job.lost() == ["node2", "node1"]
        job.end()


def test_a_host_that_joined_is_told_that_it_was_given_up(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token of the test's own\n")
    token.chmod(0o600)
    flags = ("-np", "1", "--min-np", "1", "--accept-agents", "--join-token-file", str(token))
    with made_machines(2) as machines, FollowedJob(machines, tmp_path, "node0:1\n", *flags) as job:
        node0, node1 = machines
        job.goes_on([node0])
        driver: str = job.wait_for("where to join", lambda: job.said().partition("join --driver ")[2]).split()[0]
        words = ("join", "--driver", driver, "--slots", "1", "--join-token-file", str(token))
        said = tmp_path / "joined.txt"
        with said.open("w") as file:
            joined = node1.popen([sys.executable, "-m", "elastic_driver", *words], stdout=file, stderr=file)
        job.goes_on(machines.hosts)
        workers = job.workers(node1)
        node1.cut()
        job.goes_on([node0])
        node1.heal()
        job.goes_on(machines.hosts)
        job.ended(workers)
        assert "has given up on this agent: its host was silent for too long" in said.read_text()
        job.end()
        assert joined.wait(60) == 75, "its driver was told to end, and another may come"


def test_an_address_changes_under_a_living_host(tmp_path: Path) -> None:
    with made_machines() as machines, FollowedJob(machines, tmp_path, HOSTS, *FLAGS) as job:
        node0, node1, node2 = machines
        job.goes_on(machines.hosts)
        workers = job.workers(node1)
        node1.move(77)
        job.goes_on([node0, node2])
        job.goes_on(machines.hosts)
        job.ended(workers)
        job.end()
        node1.end_sessions()  # to the old address


def test_the_driver_is_cut_off(tmp_path: Path) -> None:
    """All who have the state are beyond the cut: the job waits for them, or goes back to the disk without them."""
    with (
        made_machines() as machines,
        FollowedJob(machines, tmp_path, "node1:1\nnode2:1\n", "-np", "2", "--min-np", "2") as job,
    ):
        node0, node1, node2 = machines
        job.goes_on([node1, node2])
        with NetworkFaults() as faults:
            faults.partition([node0], [node1, node2])
            job.waits()
            for host in (node1, node2):
                job.clean(host)
        job.goes_on([node1, node2])

        # Those beyond the cut can train with each other. Nobody may train on this side of it meanwhile.
        with NetworkFaults() as faults:
            faults.partition([node0], [node1, node2])
            job.set_hosts("node0:2\nnode1:1\nnode2:1\n")
            job.goes_on([node0])
        job.goes_on(machines.hosts)
        job.end()


def test_a_partition_down_the_middle(tmp_path: Path) -> None:
    hosts = "node0:1\nnode1:1\nnode2:1\nnode3:1\n"
    with made_machines(4) as machines, FollowedJob(machines, tmp_path, hosts, "-np", "4", "--min-np", "1") as job:
        node0, node1, node2, node3 = machines
        job.goes_on(machines.hosts)
        with NetworkFaults() as faults:
            faults.partition([node0, node1], [node2, node3])
            job.goes_on([node0, node1])
        job.goes_on(machines.hosts)
        assert set(job.lost()) == {"node2", "node3"}
        job.end()


def test_two_hosts_are_cut_from_each_other(tmp_path: Path) -> None:
    """The driver reaches both. One of them goes, and no storm of rounds comes of it."""
    with made_machines() as machines, FollowedJob(machines, tmp_path, HOSTS, *FLAGS) as job, NetworkFaults() as faults:
        node0, node1, node2 = machines
        job.goes_on(machines.hosts)
        known = len(job.events("round_formed"))
        faults.one_way(node2, node1)
        job.goes_on_one_of([node0, node1], [node0, node2], steps=50)
        assert len(job.events("round_formed")) == known + 1, job.said()
        faults.heal()
        # Off the list and back, it is taken for another machine, and need not wait.
        job.set_hosts("node0:1\n")
        job.goes_on([node0])
        job.set_hosts(HOSTS)
        job.goes_on(machines.hosts)

        known = len(job.events("round_formed"))
        faults.between(node1, node2)
        job.goes_on_one_of([node0, node1], [node0, node2], steps=50)
        assert len(job.events("round_formed")) == known + 1, job.said()
        faults.heal()
        job.goes_on(machines.hosts)
        assert not job.lost()
        job.end()


def test_a_newcomer_that_does_not_get_through_displaces_nobody(tmp_path: Path) -> None:
    """It dials the one that is there, and is the only one that can tell."""
    with (
        made_machines() as machines,
        FollowedJob(machines, tmp_path, "node1:1\n", "-np", "1", "--min-np", "1") as job,
        NetworkFaults() as faults,
    ):
        _, node1, node2 = machines
        job.goes_on([node1])
        faults.between(node1, node2)
        job.set_hosts("node1:1\nnode2:1\n")
        job.wait_for("the verdict", lambda: "is left out" in job.said())
        job.goes_on([node1], steps=50)
        assert "host node1 is left out" not in job.said()
        faults.heal()
        job.goes_on([node1, node2])
        job.end()


def test_two_hosts_are_cut_from_each_other_and_both_are_needed(tmp_path: Path) -> None:
    with made_machines() as machines, FollowedJob(machines, tmp_path, HOSTS, "-np", "3") as job:
        _, node1, node2 = machines
        job.goes_on(machines.hosts)
        with NetworkFaults() as faults:
            faults.between(node1, node2)
            job.wait_for("that it waits", lambda: "has too few workers (--min-np 3)" in job.said())
            assert "retrying with all of them in" in job.said()
        job.goes_on(machines.hosts)
        assert not job.lost()
        job.end()


@pytest.mark.parametrize("way", ["to the driver", "from the driver"])
def test_only_one_way_is_cut(tmp_path: Path, way: str) -> None:
    with made_machines() as machines, FollowedJob(machines, tmp_path, HOSTS, *FLAGS) as job:
        node0, node1, node2 = machines
        job.goes_on(machines.hosts)
        workers = job.workers(node2)
        with NetworkFaults() as faults:
            faults.one_way(*((node2, node0) if way == "to the driver" else (node0, node2)))
            job.goes_on([node0, node1])
            job.ended(workers)
        job.goes_on(machines.hosts)
        job.end()


def test_slow_and_lossy_links_are_no_reason(tmp_path: Path) -> None:
    with made_machines() as machines, FollowedJob(machines, tmp_path, HOSTS, *FLAGS) as job:
        _, node1, node2 = machines
        job.goes_on(machines.hosts)
        with NetworkFaults() as faults:
            faults.lossy(node2, delay_s=0.1)
            job.goes_on(machines.hosts)
            faults.lossy(node2, delay_s=0.01, loss=0.03, seed=7)
            faults.slow(node1, "2mbit")
            job.goes_on(machines.hosts, steps=20)
            # A change of membership goes over these links as well.
            kill(job.workers(node2)[0])
            job.goes_on([machines[0], node1])
            job.goes_on(machines.hosts)
        job.goes_on(machines.hosts)
        assert not job.lost()
        job.end()


def test_names_are_not_answered(tmp_path: Path) -> None:
    with made_machines() as machines:
        node0, node1, node2 = machines
        with NameService(node0, machines, timeout_s=1) as names, FollowedJob(machines, tmp_path, HOSTS, *FLAGS) as job:
            job.goes_on(machines.hosts)
            names.go_silent()
            job.goes_on(machines.hosts)
            # A worker's death needs no names: the host's agent is there.
            kill(job.workers(node1)[0])
            job.goes_on([node0, node2])
            job.goes_on(machines.hosts)
            # An agent that has to be started needs them. The others go on, and the driver answers.
            kill(job.agent(node2))
            job.goes_on([node0, node1])
            told = job.wait_for_event("host_unready", host="node2")
            assert "resolve" in told["reason"], told
            assert not told["permanent"]
            assert job.here("status").returncode == 0
            job.set_hosts(HOSTS + "another:1\n")
            job.goes_on([node0, node1], steps=100)
            job.set_hosts(HOSTS)
            names.answer()
            job.goes_on(machines.hosts)
            job.end()


def test_clocks_jump(tmp_path: Path) -> None:
    """Of the driver and all workers; and, by another jump, of an agent. All limits go by clocks that only run."""
    here, there = WallClock(made(tmp_path / "here")), WallClock(made(tmp_path / "there"))
    launch = tmp_path / "launch.sh"
    variables = " ".join(f"{name}={value}" for name, value in there.environment.items())
    launch.write_text(f'[ "$1" = node2 ] && clock="env {variables}"\nexec ssh "$1" $clock "$2"\n')
    flags = (*FLAGS, "--launcher-command", f"sh {launch} {{host}} {{command}}")
    with (
        made_machines() as machines,
        FollowedJob(machines, tmp_path, HOSTS, *flags, env=here.environment) as job,
    ):
        node0, node1, node2 = machines
        job.goes_on(machines.hosts)
        for ours_s, theirs_s in ((3600.0, 0.0), (-86400.0, 0.0), (-86400.0, 400 * 86400.0), (3600.0, -400 * 86400.0)):
            here.jump(ours_s)
            there.jump(theirs_s)
            job.goes_on(machines.hosts, steps=20)
        assert not job.lost()
        assert len(job.events("round_formed")) == 1
        # A host is lost and comes back on time all the same.
        kill(job.workers(node1)[0])
        job.goes_on([node0, node2])
        here.jump(-7200.0)
        job.goes_on(machines.hosts)
        node2.cut()
        here.jump(7200.0)
        job.goes_on([node0, node1])
        there.jump(0.0)
        node2.heal()
        job.goes_on(machines.hosts)
        job.end()


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_an_ssh_server_is_away(tmp_path: Path) -> None:
    """What runs needs no ssh; what is to start waits for it."""
    with made_machines() as machines, FollowedJob(machines, tmp_path, HOSTS, *FLAGS) as job:
        node0, node1, node2 = machines
        job.goes_on(machines.hosts)
        node2.stop_sshd()
        job.goes_on(machines.hosts)
        os.kill(job.agent(node2), signal.SIGKILL)
        job.goes_on([node0, node1])
        job.wait_for_event("host_unready", host="node2")
        node2.start_sshd()
        job.goes_on(machines.hosts)
        job.end()
