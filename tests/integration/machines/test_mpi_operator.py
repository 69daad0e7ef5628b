"""A job in the pods of mpi-operator (v2: ssh, v1: kubexec), with its launcher, its ConfigMap and its workers."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.clusters.kubectl import ApiServer
from tests.support.clusters.mpi_operator import DISCOVERY, MpiJob, Operator, leave
from tests.support.clusters.pods import Pods
from tests.support.network.machines import marks, wait_for
from tests.support.network.namespaces import Namespaces, cannot_serve_ssh
from tests.support.paths import ROOT
from tests.support.processes.jobs import check_agreement

pytestmark = marks

FLAGS = ("-np", "2", "--min-np", "1", "--host-discovery-script", DISCOVERY)
V1_COMMAND = yaml.safe_load((ROOT / "deploy/kubernetes/mpi-operator/mpijob-v1.yaml").read_text())["spec"][
    "mpiReplicaSpecs"
]["Worker"]["template"]["spec"]["containers"][0]["command"]


@contextlib.contextmanager
def made_pods(count: int, **more: Any) -> Iterator[Pods]:
    """Room for so many pods."""
    if reason := cannot_serve_ssh():
        pytest.skip(reason)
    with Namespaces(count, sshd=False) as machines, Pods(machines, **more) as pods:
        yield pods


def no_step_is_lost(job: MpiJob) -> bool:
    lines = job.steps()
    check_agreement(lines)
    done = [(line["step"], line["rank"]) for line in lines]
    steps = sorted({step for step, _ in done})
    return len(done) == len(set(done)) and steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_workers_start_late_leave_come_back_and_crash() -> None:
    with made_pods(8) as pods:
        operator = Operator(pods)
        launcher = operator.launcher(read_only_home=True)
        with MpiJob(pods, launcher, operator.launchers_environment, *FLAGS) as job:
            # The launcher is there before any worker: none is listed, then one has no name yet, then no server.
            job.wait_for("that it waits", lambda: "hosts: none" in job.said())
            operator.write(2, [0, 1])
            job.wait_for_event("host_unready", host=operator.host(0))
            operator.worker(0)
            late = operator.worker(1, late=True)
            job.wait_for("a refusal", lambda: "port 2222: Connection refused" in job.said())
            late.go()
            job.wait_for_steps(2)
            assert job.hosts(2) == [operator.host(0), operator.host(1)]

            # Up, and down with elasticrun leave as preStop. The deleted pod is listed all the while, and its successor.
            operator.worker(2)
            operator.write(3, [0, 1, 2])
            job.wait_for_steps(3)
            at = time.time()
            said = operator.workers[2].delete(leave(within_s=55))
            assert said == f"host {operator.host(2)} has left its job\n"
            job.wait_for_steps(2, after=at)
            assert not job.events("host_lost")
            operator.worker(2)
            job.wait_for_steps(3, after=time.time())
            assert time.time() - at < 50, "its name means another machine before the time is over"
            assert job.hosts(3)[2] == operator.host(2)
            assert operator.workers[2].log().count("Accepted publickey for mpiuser") == 1

            # Or drained by hand before it is deleted.
            at = time.time()
            assert job.elasticrun("drain", operator.host(2)).returncode == 0
            job.wait_for_steps(2, after=at)
            operator.workers[2].delete()
            operator.worker(2)
            job.wait_for_steps(3, after=time.time())
            assert no_step_is_lost(job)

            # Without, it is a crash: sshd ends, and with it all that runs in the pod.
            at = time.time()
            operator.workers[2].delete()
            job.wait_for("the loss", lambda: f"host {operator.host(2)} lost" in job.said())
            job.wait_for_steps(2, after=at)
            # The operator makes another of its name, which is listed already.
            operator.worker(2)
            job.wait_for_steps(3, after=time.time())
            check_agreement(job.steps())
            for pod in (launcher, *operator.workers.values()):
                wait_for(f"no zombies on {pod.name}", lambda pod=pod: not pod.zombies())
            assert operator.host(1) in job.elasticrun("status").stdout
            assert job.end() == 128 + signal.SIGTERM


def test_a_launcher_that_is_restarted_ends_the_agents_of_the_one_before() -> None:
    """restartPolicy OnFailure: its container is there again, and goes on from the last commit on disk."""
    with made_pods(3) as pods:
        operator = Operator(pods)
        launcher = operator.launcher()
        flags = (*FLAGS, "--durable-dir", "/mnt/work/durable", "--durable-every", "1")
        operator.worker(0)
        operator.worker(1)
        operator.write(2, [0, 1])
        job = MpiJob(pods, launcher, operator.launchers_environment, *flags)
        job.wait_for_steps(2)
        # What is the launcher's own stays there.
        env = dict(line.split("=", 1) for line in operator.workers[0].environments("step_program")[0])
        assert not env.keys() & {"K_MPI_JOB_ROLE", "NVIDIA_VISIBLE_DEVICES", "OMPI_MCA_orte_default_hostfile"}
        # No pod runs, says the operator, and they do: who holds the state waits.
        operator.write(2, [])
        job.wait_for("that it waits", lambda: "waiting for 1 worker (--min-np)" in job.said())
        at = time.time()
        operator.write(2, [0, 1])
        job.wait_for_steps(2, after=at)
        assert no_step_is_lost(job)
        job.wait_for("a commit on disk", lambda: list((pods.work / "durable").glob("commit-*.state")))

        launcher.kill()
        with MpiJob(pods, launcher, operator.launchers_environment, *flags, name="second") as job:
            formed = job.wait_for_event("round_formed")["time"]
            job.wait_for_steps(2, after=formed)
            again = [line for line in job.steps() if line["time"] > formed]
            assert min(line["step"] for line in again) > 1, "it goes on from the disk"
            mark = f"ELASTIC_DRIVER_MARK={job.events('job_started')[0]['job_id']}"
            for worker in operator.workers.values():
                processes = worker.environments("step_program")
                assert processes
                assert all(any(line.startswith(mark) for line in env) for env in processes), "none of the other job's"
            assert job.end() == 128 + signal.SIGTERM


def test_the_launcher_trains_too_before_its_name_resolves() -> None:
    """runLauncherAsWorker, as root, and no flag names hosts."""
    with made_pods(2, uid=0) as pods:
        operator = Operator(pods, slots=2, launcher_works=True)
        launcher = operator.launcher()
        operator.worker(0)
        operator.write(1, [0])
        env = operator.launchers_environment
        with MpiJob(pods, launcher, env, "-np", "4", "--min-np", "1", named=False) as job:
            job.wait_for_steps(4)
            assert "using the hosts in /etc/mpi/hostfile (OMPI_MCA_orte_default_hostfile)" in job.said()
            assert job.hosts(4) == [pods.name_of("pi-launcher")] * 2 + [operator.host(0)] * 2
            assert job.end() == 128 + signal.SIGTERM


def test_v1_with_kubexec_and_a_user_that_no_file_knows() -> None:
    with (
        made_pods(4, uid=12345, has_user=False) as pods,
        ApiServer(pods.shared / "api", pods.find),
    ):
        operator = Operator(pods, v1=True)
        launcher = operator.launcher(read_only_home=True)
        operator.worker(0)
        operator.write(2, [0, 1])
        with MpiJob(pods, launcher, operator.launchers_environment, *FLAGS) as job:
            job.wait_for("that it waits", lambda: 'pods "pi-worker-1" not found' in job.said())
            # With ssh that cannot be.
            without = job.elasticrun("-np", "1", "-H", "10.77.0.2:1", "--ssh-port", "2222", "true")
            assert without.returncode == 2
            assert "No user exists for uid 12345" in without.stderr
            operator.worker(1)
            job.wait_for_steps(2)
            assert job.hosts(2) == ["pi-worker-0", "pi-worker-1"]
            # Its first process is no init and has no handler of SIGTERM: it is killed when the grace is over.
            at = time.time()
            operator.workers[1].delete(grace_s=0.5)
            job.wait_for_steps(1, after=at)
            operator.worker(1, V1_COMMAND)
            job.wait_for_steps(2, after=time.time())
            at = time.time()
            assert operator.workers[1].delete(leave(within_s=20)) == "host pi-worker-1 has left its job\n"
            assert time.time() - at < 20, "it ends by itself"
            job.wait_for_steps(1, after=at)
            check_agreement(job.steps())
            assert job.end() == 128 + signal.SIGTERM
