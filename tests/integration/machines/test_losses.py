"""What is killed, stopped or cut off: agents, the driver, networks. Who is left goes on, and nothing else is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

from tests.support.network.machines import MachinesJob, is_dead, kill, made_machines, marks, wait_for, wait_for_nobody
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import check_agreement

pytestmark = marks

HOSTS = "node0:2\nnode1:2\nnode2:2\n"
COOLDOWN = ("--blacklist-cooldown-range", "1", "2")


def test_agents_are_killed_or_stand_still(tmp_path: Path) -> None:
    flags = ("-np", "6", "--min-np", "1", "--heartbeat-timeout", "4", *COOLDOWN)
    with made_machines() as machines, MachinesJob(machines, tmp_path, HOSTS, *flags) as job:
        _, node1, node2 = machines
        job.wait_for_steps(6)
        descriptors = job.descriptors()

        # Killed: its workers with it; the others go on, and the host comes back with another agent.
        agent, workers, at = job.agent(node1), job.workers(node1), job.mark()
        kill(agent)
        wait_for("its workers' death", lambda: all(map(is_dead, workers)))
        job.wait_for_steps(4, after=at)
        lost = job.wait_for_event("host_lost", host="node1")
        at = job.mark()
        job.wait_for_steps(6, after=at)
        assert job.agent(node1) != agent
        assert lost["reason"].startswith("its agent disconnected"), lost

        # Stopped: the training needs no agents.
        agent, workers = job.agent(node1), job.workers(node1)
        kill(agent, signal.SIGSTOP)
        at = job.mark()
        job.wait_for_steps(6, after=at)
        # The others need the next round, and it does not answer: they go on without it.
        at = job.mark()
        kill(job.workers(node2)[-1])
        job.wait_for_event("host_lost", host="node1", count=2)
        job.wait_for_steps(4, after=at)
        # Back again it hears that it was given up, and its host begins anew.
        at = job.mark()
        kill(agent, signal.SIGCONT)
        wait_for("its end", lambda: is_dead(agent) and all(map(is_dead, workers)))
        job.wait_for_steps(6, after=at)
        check_agreement(job.steps())
        job.check_descriptors(descriptors)
        job.end()


def test_a_drain_and_the_loss_of_a_host_outlast_its_agent(tmp_path: Path) -> None:
    with made_machines() as machines, MachinesJob(machines, tmp_path, HOSTS, "-np", "6", "--min-np", "1") as job:
        _, node1, node2 = machines
        job.wait_for_steps(6)
        assert job.here("drain", "node1").returncode == 0
        job.wait_for_steps(4, after=job.mark())
        kill(job.agent(node1))
        job.wait_for_event("host_lost", host="node1")
        job.wait_for_event("host_ready", host="node1", count=2)
        # Lost for the first time a host is back soon, for the second time half a minute later.
        for size in (2, 4, 2, 4):
            if size == 2:
                kill(job.agent(node2))
            job.wait_for_steps(size, after=job.mark())
        lost = [event["time"] for event in job.events("host_lost") if event["host"] == "node2"]
        starts = [event["time"] for event in job.events("worker_started") if event["worker"].startswith("node2[")]
        waited = [min(at for at in starts if at > when) - when for when in lost]
        assert waited[0] >= 0.9
        assert waited[1] >= 29
        assert not job.workers(node1), "it is drained still"
        assert job.here("drain", "--undo", "node1").returncode == 0
        job.wait_for_steps(6, after=job.mark())
        check_agreement(job.steps())
        job.end()


def test_the_driver_stands_still_and_dies(tmp_path: Path) -> None:
    stop_at = tmp_path / "stop_at"
    with made_machines() as machines:
        with MachinesJob(
            machines,
            tmp_path,
            HOSTS,
            *("-np", "6", "--agent-timeout", "3"),
            command=[sys.executable, str(PROGRAMS / "printing_program.py")],
            env={"STOP_AT": str(stop_at), "STEP_S": "0.05"},
        ) as job:
            job.wait_for_steps(6)
            kill(job.process.pid, signal.SIGSTOP)
            time.sleep(6)  # as long as twice the limit
            kill(job.process.pid, signal.SIGCONT)
            job.wait_for_steps(6, after=job.mark())
            last = max(line["step"] for line in job.steps()) + 20
            stop_at.write_text(str(last))
            assert job.wait() == 0, job.said()[-4000:]
            assert not job.events("host_lost")
            assert len(job.events("round_formed")) == 1
            numbers: dict[int, list[int]] = {}
            for rank, number in re.findall(r"rank (\d) line (\d+) x{1000}\n", job.stdout.read_text()):
                numbers.setdefault(int(rank), []).append(int(number))
            assert numbers == {rank: list(range(20 * last)) for rank in range(6)}

        with MachinesJob(machines, tmp_path, HOSTS, "-np", "6", "--agent-timeout", "3") as job:
            job.wait_for_steps(6, after=job.mark())
            local, remote = job.workers(machines[0]), job.workers(machines[2])
            assert len(local) == len(remote) == 2
            kill(job.process.pid)
            wait_for("the end of those beside it", lambda: all(map(is_dead, local)))
            for host in machines:
                wait_for_nobody(host)
            assert job.here("leave").returncode == 2, "finds nobody, and tidies up"
            job.process.wait()
            for file in (machines[0].runtime / "elasticrun").iterdir():
                file.unlink()  # the dead driver's


def test_with_a_journal_all_train_on_when_the_driver_dies(tmp_path: Path) -> None:
    """The command that has started an agent by ssh ends with the driver; the agent does not."""
    journal = ("--journal", str(tmp_path / "kept"), "--driver-timeout", "25")
    flags = ("-np", "6", "--on-change", "in-place", "--agent-timeout", "15", *journal)
    with made_machines() as machines, MachinesJob(machines, tmp_path, HOSTS, *flags) as job:
        job.wait_for_steps(6)
        agents = [job.agent(host) for host in machines]
        at = job.mark()
        kill(job.process.pid)
        job.process.wait()
        # The lease is 15 s, and the driver's machine says that it is dead.
        wait_for("steps without a driver", lambda: max(line["time"] for line in job.steps()) > at + 18)
        last = [line for line in job.steps() if line["time"] > at + 17]
        assert {line["rank"] for line in last} == set(range(6))
        assert not any(map(is_dead, agents))
        wait_for("the end of all", lambda: all(map(is_dead, agents)))
        for host in machines:
            wait_for_nobody(host)
        assert job.here("leave").returncode == 2, "finds nobody, and tidies up"
        for file in (machines[0].runtime / "elasticrun").iterdir():
            file.unlink()  # the dead driver's


def test_agents_without_a_driver_are_seen_and_ended_on_their_machines(tmp_path: Path) -> None:
    flags = ("-np", "6", "--on-change", "in-place", "--journal", str(tmp_path / "kept"))
    with made_machines() as machines, MachinesJob(machines, tmp_path, HOSTS, *flags) as job:
        job.wait_for_steps(6)
        (job_id,) = {event["job_id"] for event in job.events("job_started")}
        agents = [job.agent(host) for host in machines]
        assert (
            job.here("jobs", host=machines[1]).stdout
            == "no job of yours runs on this machine; elasticrun history lists jobs that have ended\n"
        )
        at = job.mark()
        kill(job.process.pid)
        job.process.wait()
        wait_for("steps without a driver", lambda: max(line["time"] for line in job.steps()) > at + 1)
        for host in machines[1:]:
            assert f" s ({host.name}: 2 workers)" in job.here("jobs", host=host).stdout
            ended = job.here("end", job_id[:6], host=host)
            assert (ended.returncode, ended.stderr) == (0, "")
            assert f"job {job_id}: ended on this machine ({host.name}: 2 workers), without a driver; " in ended.stdout
            wait_for_nobody(host)
        assert not is_dead(agents[0])
        kill(agents[0], signal.SIGTERM)
        wait_for_nobody(machines[0])
        for file in (machines[0].runtime / "elasticrun").iterdir():
            file.unlink()  # the dead driver's


def test_networks_are_cut(tmp_path: Path) -> None:
    flags = ("-np", "6", "--min-np", "1", "--gloo-timeout-seconds", "10", *COOLDOWN)
    with made_machines() as machines, MachinesJob(machines, tmp_path, HOSTS, *flags) as job:
        _, _, node2 = machines
        job.wait_for_steps(6)
        node2.cut()
        time.sleep(1.5)
        node2.heal()
        job.wait_for_steps(6, after=job.mark())
        assert not job.events("host_lost")
        assert len(job.events("round_formed")) == 1

        workers, at = job.workers(node2), job.mark()
        node2.cut()
        job.wait_for_event("host_lost", host="node2")
        job.wait_for_steps(4, after=at)
        wait_for("the end of those that were cut off", lambda: all(map(is_dead, workers)))
        assert os.path.exists(f"/proc/{job.agent(machines[1])}")
        at = job.mark()
        node2.heal()
        job.wait_for_steps(6, after=at)
        check_agreement(job.steps())
        job.end()
