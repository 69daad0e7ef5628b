"""What mpi-operator does for an MPIJob, on a test's pods: its ConfigMap, its launcher's environment, its workers.

v2 (``v2beta1``: ssh) unless said otherwise; v1 has kubexec. Its controller is the test: it says which pods are listed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.clusters.pods import SHARED, Pod, Pods
from tests.support.paths import ROOT, SUPPORT
from tests.support.processes.jobs import PROGRAM, Job
from tests.support.processes.json_lines import JsonLines

DISCOVERY = "/etc/mpi/discover_hosts.sh"
# Short, so that tests are.
LIMITS = ("--discovery-interval", "0.1", "--agent-timeout", "4", "--host-timeout", "2", "--grace-time", "1")


_KUBEXEC = f"""#!/bin/sh
set -x
POD_NAME=$1
shift
{SHARED}/kubectl exec ${{POD_NAME}} -- /bin/sh -c "$*"
"""


class Operator:
    """See above.

    Args:
        pods: of the job.
        slots: of each worker.
        launcher_works: whether it is ``runLauncherAsWorker``.
        v1: whether it is that version; its kubectl is :mod:`kubectl`'s.

    Attributes:
        workers: by index.
    """

    def __init__(self, pods: Pods, *, slots: int = 1, launcher_works: bool = False, v1: bool = False) -> None:
        self._pods = pods
        self._slots = slots
        self._launcher_works = launcher_works
        self._v1 = v1
        if v1:
            command = pods.shared / "kubectl"
            command.write_text(f'#!/bin/sh\nexec {sys.executable} {SUPPORT}/clusters/kubectl.py "$@"\n')
            command.chmod(0o755)
        self.workers: dict[int, Pod] = {}
        self.write(0, ())

    @property
    def launchers_environment(self) -> dict[str, str]:
        """What the operator gives the launcher's container, for Open MPI."""
        without_gpus = {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}
        if self._v1:
            return without_gpus | {
                "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
                "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
                "KUBECTL_SOCKET": f"{SHARED}/api",
            }
        env = {
            "K_MPI_JOB_ROLE": "launcher",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            "OMPI_MCA_orte_set_default_slots": str(self._slots),
        }
        return env if self._launcher_works else env | without_gpus

    def name(self, index: int) -> str:
        """The name of a worker's pod."""
        return f"{self._pods.job}-worker-{index}"

    def host(self, index: int) -> str:
        """The name under which it is listed."""
        return self.name(index) if self._v1 else self._pods.name_of(self.name(index))

    def write(self, replicas: int, running: Sequence[int]) -> None:
        """Updates the ConfigMap, and the kubelet the launcher's volume.

        Args:
            replicas: how many workers are wanted.
            running: indices of the workers whose pods are in phase Running, deleted ones too.
        """
        launcher = [self._pods.name_of(f"{self._pods.job}-launcher")] if self._launcher_works else []
        wanted = [*launcher, *map(self.host, range(replicas))]
        listed = [*launcher, *sorted(map(self.host, running))]
        if self._v1:
            script = "\n".join(["#!/bin/sh", *(f"echo {name}:{self._slots}" for name in listed)])
        else:
            script = "#!/bin/sh\n" + "".join(f"echo {name}\n" for name in listed)
        hostfile = "".join(f"{name} slots={self._slots}\n" for name in wanted)
        more = {"kubexec.sh": _KUBEXEC} if self._v1 else {}
        self._pods.config.write({"hostfile": hostfile, "discover_hosts.sh": script, **more})

    def launcher(self, **more: Any) -> Pod:
        """The launcher's pod; arguments as for Pods.pod."""
        return self._pods.pod(f"{self._pods.job}-launcher", resolves=True, **more)

    def worker(self, index: int, command: Sequence[str] = ("sleep", "365d"), *, late: bool = False) -> Pod:
        """Starts a worker's pod, which replaces one of its name. Blocks until its ssh server listens.

        Args:
            index: of the worker.
            command: the first process of a container of v1.
            late: see Pod.start_sshd.
        """
        pod = self.workers[index] = self._pods.pod(self.name(index))
        if self._v1:
            pod.start(command, {})
        else:
            pod.start_sshd({}, late=late)
        return pod


class MpiJob(Job):
    """``elasticrun`` as the first process of a launcher's container. Use as a context manager.

    Args:
        pods: of the job.
        launcher: its pod.
        env: what the operator gives its container.
        flags: of elasticrun.
        name: of its output's files, where a job has several launchers one after another.
        steps: how many are trained; None for no end.
        named: see Pod.start.
        more_env: for the container, too.
    """

    def __init__(
        self,
        pods: Pods,
        launcher: Pod,
        env: Mapping[str, str],
        *flags: str,
        name: str = "first",
        steps: int | None = None,
        named: bool = True,
        more_env: Mapping[str, str] | None = None,
    ) -> None:
        self._launcher = launcher
        self.folder = pods.work
        self.step_log, self.event_log = self.folder / "steps.jsonl", self.folder / f"events-{name}.jsonl"
        self._steps, self._events = JsonLines(self.step_log), JsonLines(self.event_log)
        self.stdout, self.stderr = self.folder / f"{name}.stdout", self.folder / f"{name}.stderr"
        work = f"{SHARED}/work"
        own = {
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": "0",  # hash() of bytes is compared between workers
            "STEP_LOG": f"{work}/{self.step_log.name}",
            "STEP_S": "0.02",
            **({} if steps is None else {"STEPS": str(steps)}),
        }
        events = ("--event-log", f"{work}/{self.event_log.name}", "--verbose")
        command = [sys.executable, "-m", "elastic_driver", *events, *LIMITS, *flags, sys.executable, str(PROGRAM)]
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            env = {**env, **own, **(more_env or {})}
            self.process = launcher.start(command, env, named=named, stdout=out, stderr=err)

    def __exit__(self, *unused: object) -> None:
        if self.process.poll() is None:
            self.end()
        assert not self.leftovers(), f"left running: {self.leftovers()}"

    def end(self) -> int:
        """Deletes the launcher as the kubelet does. Returns elasticrun's exit code."""
        self._launcher.delete()
        return self.process.wait(150)

    def steps(self) -> list[dict[str, Any]]:
        """See Job; none before the first."""
        return self._steps.all() if self.step_log.exists() else []

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """See Job; none before the first."""
        return super().events(kind) if self.event_log.exists() else []

    def wait_for_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The first event of this kind with these fields."""

        def found() -> list[dict[str, Any]]:
            return [event for event in self.events(kind) if all(event[name] == fields[name] for name in fields)]

        event: dict[str, Any] = self.wait_for(f"{kind} {fields}", found)[0]
        return event

    def hosts(self, size: int) -> list[str]:
        """The hosts of the ranks of the last round of this size, by rank."""
        lines = {line["rank"]: line["worker"].partition("[")[0] for line in self.steps() if line["size"] == size}
        return [lines[rank] for rank in range(size)]

    def elasticrun(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a subcommand in the launcher's container."""
        return self._launcher.run([sys.executable, "-m", "elastic_driver", *words])


def leave(within_s: float) -> list[str]:
    """The command of a worker's preStop."""
    return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "elastic_driver", "leave", "--within", str(within_s)]
