"""Hosts that are not heard: the job goes on without them long before their leases have ended, or waits and says so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.network.machines import MachinesJob, is_dead, kill, made_machines, marks, wait_for
from tests.support.network.network_faults import NetworkFaults
from tests.support.processes.jobs import check_agreement

pytestmark = marks

HOSTS = "node0:2\nnode1:2\nnode2:2\n"
# A lease that lasts longer than the test has patience: what is seen is not its end.
LIMITS = ("--agent-timeout", "100", "--host-timeout", "2", "--gloo-timeout-seconds", "100", "--grace-time", "1")


def test_a_host_that_vanishes_is_gone_on_without_and_comes_back(tmp_path: Path) -> None:
    with (
        made_machines() as machines,
        MachinesJob(machines, tmp_path, HOSTS, "-np", "6", "--min-np", "2", *LIMITS) as job,
    ):
        node2 = machines[2]
        job.wait_for_steps(6)
        workers, at = job.workers(node2), job.mark()
        node2.cut()
        lost = job.wait_for_event("host_lost", host="node2")
        assert lost["reason"].startswith("it did not respond for 2."), lost
        job.wait_for_steps(4, after=at)
        assert not any(map(is_dead, workers)), "they have heard nothing of it"
        assert not job.events("worker_hung")
        formed = job.events("round_formed")[-1]
        assert [member["worker"] for member in formed["members"]] == [f"node{n}[{m}]#0" for n in (0, 1) for m in (0, 1)]
        # Their agent is told, ends them, and the host begins anew.
        at = job.mark()
        node2.heal()
        wait_for("their end", lambda: all(map(is_dead, workers)))
        job.wait_for_steps(6, after=at)
        check_agreement(job.steps())
        job.end()


def test_a_driver_that_is_cut_off_from_too_many_waits_and_loses_nothing(tmp_path: Path) -> None:
    with made_machines() as machines, MachinesJob(machines, tmp_path, HOSTS, "-np", "6", *LIMITS) as job:
        job.wait_for_steps(6)
        workers, at = [job.workers(host) for host in machines], job.mark()
        machines[0].cut()
        told = [f"host node{number} has not responded for" for number in (1, 2)]
        job.wait_for("it says for whom it waits", lambda: all(text in job.said() for text in told))
        assert "the job waits for it: without hosts node1, node2 there are 2 workers, and --min-np is 6" in job.said()
        time.sleep(3)  # in all longer than the heartbeats' limit
        machines[0].heal()
        job.wait_for("they are heard", lambda: job.said().count("responds again") == 2)
        at = job.mark()
        job.wait_for_steps(6, after=at)
        assert [job.workers(host) for host in machines] == workers, "a worker was lost"
        assert not job.events("host_lost")
        assert not job.events("worker_hung")
        check_agreement(job.steps())
        job.end()


def test_a_host_that_does_not_hear_the_driver_any_more_is_silent_though_it_is_heard(tmp_path: Path) -> None:
    """It sends again what nobody acknowledges, after 6.2 and 12.6 s for instance, and that arrives."""
    limits = (*LIMITS, "--host-timeout", "8")
    with (
        made_machines() as machines,
        MachinesJob(machines, tmp_path, "node1:1\nnode2:1\n", "-np", "2", "--min-np", "1", *limits) as job,
    ):
        job.wait_for_steps(2)
        with NetworkFaults() as faults:
            at = job.mark()
            faults.one_way(machines[0], machines[2])
            lost = job.wait_for_event("host_lost", host="node2")
            assert lost["reason"].startswith("it did not respond for 8."), lost
            # After what was sent at 12.6 s it would not be before 20 s.
            assert 7 < lost["time"] - at < 16
            job.wait_for_steps(1, after=job.mark())
        job.wait_for_steps(2, after=lost["time"])
        check_agreement(job.steps())
        job.end()


@pytest.mark.slow
def test_a_network_that_is_away_for_most_of_the_host_timeout_is_of_use_as_soon_as_it_is_back(tmp_path: Path) -> None:
    """What was lost is sent again after 12.6 and 25.4 s; another connection works long before."""
    limits = (*LIMITS, "--host-timeout", "20")
    with (
        made_machines() as machines,
        MachinesJob(machines, tmp_path, "node1:2\nnode2:2\n", "-np", "4", "--min-np", "1", *limits) as job,
    ):
        node0, node1, node2 = machines
        job.wait_for_steps(4)
        agents = [job.agent(host) for host in (node1, node2)]
        with NetworkFaults() as faults:
            faults.partition([node0], [node1, node2])
            time.sleep(14)
        # The news comes through, and what is said of it.
        worker = job.workers(node2)[0]
        kill(worker)
        job.wait_for_event("worker_exited", pid=worker)
        job.wait_for_steps(2, after=job.mark())
        assert [job.agent(host) for host in (node1, node2)] == agents
        assert not job.events("host_lost"), job.said()
        assert "has not responded" not in job.said()
        job.end()
