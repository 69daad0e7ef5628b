"""A job over three machines, by ssh: it grows, shrinks, loses a worker and has a host drained, and leaves nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.network.machines import (
    End,
    MachinesJob,
    connections,
    is_dead,
    listening,
    made_machines,
    marks,
    wait_for,
)
from tests.support.processes.jobs import check_agreement

pytestmark = marks


def test_hosts_come_and_go(tmp_path: Path) -> None:
    with (
        made_machines() as machines,
        MachinesJob(
            machines,
            tmp_path,
            "node0:2\n",
            *("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "2"),
            *("--port-range", "42000-42031", "--output-filename", str(tmp_path / "output")),
        ) as job,
    ):
        node0, node1, node2 = machines
        job.wait_for_steps(2)
        # All hosts are this machine: nothing can be reached from beyond it, and the driver by no port at all.
        assert job.process.pid not in listening(node0)
        assert {address for (address, _), _ in connections(node0, job.workers(node0))} == {"127.0.0.1"}

        at = job.mark()
        job.set_hosts("node0:2\nnode1:2\n")
        job.wait_for_steps(4, after=at)
        at = job.mark()
        job.set_hosts("node0:2\nnode1:2\nnode2:2\n")
        job.wait_for_steps(6, after=at)
        addresses = {host.ipv4 for host in machines}
        for host in machines:
            ends = connections(host, job.workers(host))
            assert {ours[0] for ours, _ in ends} == {host.ipv4}
            assert {theirs[0] for _, theirs in ends} == addresses
            assert all(in_range(ours) or in_range(theirs) for ours, theirs in ends), ends
            others = {end for ends in listening(host).values() for end in ends}
            assert not {"0.0.0.0", "::", "*"} & {address for address, _ in others}, others
            if host is not node0:
                assert not others, "an agent listens nowhere"
        assert listening(node0)[job.process.pid], "it listens since another host was listed"
        assert all(map(in_range, listening(node0)[job.process.pid]))
        descriptors = job.descriptors()

        # Planned ends cost no step.
        at = job.mark()
        assert job.here("drain", "node2").returncode == 0
        job.wait_for_steps(4, after=at)
        job.set_hosts("node0:2\nnode1:2\n")
        wait_for("the end of its agent", lambda: not job.agents(node2))
        at = job.mark()
        job.set_hosts("node0:2\nnode1:2\nnode2:2\n")
        job.wait_for_steps(6, after=at)
        at = job.mark()
        job.set_hosts("node0:2\nnode1:2\n")
        job.wait_for_steps(4, after=at)
        job.check_no_step_is_lost()
        assert not [event for event in job.events("worker_exited") if event["returncode"] or not event["expected"]]

        # A worker's death costs a reset; its host comes back after its time out.
        victim, at = job.workers(node1)[-1], job.mark()
        os.kill(victim, signal.SIGKILL)
        job.wait_for_steps(2, after=at)
        job.wait_for_steps(4, after=at)
        assert is_dead(victim)
        check_agreement(job.steps())
        assert len(job.agents(node1)) == 1, "an agent survives its workers"
        job.set_hosts("node0:2\nnode1:2\nnode2:2\n")
        job.wait_for_steps(6, after=job.mark())
        job.check_descriptors(descriptors)
        job.end()
        assert {path.parent.name for path in (tmp_path / "output").rglob("stdout")} >= {
            f"rank.{rank}" for rank in range(6)
        }


def in_range(end: End) -> bool:
    return 42000 <= end[1] <= 42031
