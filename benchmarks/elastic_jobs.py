"""Running jobs for the benchmarks of changes: the command, its hosts file, and what its step lines say."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.network.namespaces import Namespaces as Namespaces

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PATIENCE_S = 120.0
# All of them this machine.
HOSTS = ("localhost", "127.0.0.1", "127.0.0.2")


@dataclass
class Figures:
    """One run: seconds, and a count of steps. None where the scenario has no such figure.

    ``stages`` are what a recovery is made of, in order: when the last of those concerned was there, seconds from the
    change on. Empty where the scenario does not tell them.
    """

    stall_s: float | None = None
    join_s: float | None = None
    found_s: float | None = None
    lost: int | None = None
    step_s: float | None = None
    requests: int | None = None
    stages: dict[str, float] = field(default_factory=dict)


class Job:
    """A running command and the step lines its workers write. Use as a context manager."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], *, at: list[str] | None = None) -> None:
        self.steps_file = folder / "steps.jsonl"
        self.marks_file = folder / "marks.jsonl"
        for file in (self.steps_file, self.marks_file):
            file.touch()
        self.output = (folder / "output.txt").open("wb")
        self.began = time.time()
        self._command = [*(at or []), *command]
        logs = {"STEP_LOG": str(self.steps_file), "MARK_LOG": str(self.marks_file)}
        self._environment = {**os.environ, "ELASTIC_DRIVER_HISTORY": "off", **env, **logs, "PYTHONPATH": str(ROOT)}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.output.close()

    def steps(self) -> list[dict[str, Any]]:
        lines = self.steps_file.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def said(self) -> str:
        return Path(self.output.name).read_text(errors="replace")

    def wait_for(self, what: str, found: Callable[[], Any]) -> Any:
        end = time.time() + PATIENCE_S
        while time.time() < end:
            answer = found()
            if answer:
                return answer
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        code = self.process.poll()
        raise SystemExit(f"{what}: did not happen (exit code {code}); output:\n{self.said()[-3000:]}")

    def wait_for_steps(self, size: int, *, steps: int = 1, since: float = 0.0) -> None:
        """Waits until all ranks have done that many steps at this size since then."""

        def found() -> bool:
            counts: dict[int, int] = {}
            for line in self.steps():
                if line["size"] == size and line["time"] > since:
                    counts[line["rank"]] = counts.get(line["rank"], 0) + 1
            return len(counts) >= size and min(counts.values()) >= steps

        self.wait_for(f"{steps} steps at size {size}", found)

    def pid_of(self, rank: int) -> int:
        """The process that had this rank last."""
        return int(next(line["pid"] for line in reversed(self.steps()) if line["rank"] == rank))


class LoggedJob(Job):
    """A job whose launcher writes an event log."""

    events_file: Path

    def events(self, *kinds: str, since: float = 0.0) -> list[dict[str, Any]]:
        """What the event log has of these kinds after this time."""
        lines = (json.loads(line) for line in self.events_file.read_text().splitlines() if line.endswith("}"))
        return [line for line in lines if line["event"] in kinds and line["time"] > since]

    def marks(self, mark: str, *, since: float) -> dict[int, float]:
        """By process, when it has made this mark of elastic_loop.py first after this time, unix seconds."""
        found: dict[int, float] = {}
        for text in self.marks_file.read_text().splitlines():
            line = json.loads(text)
            if line["mark"] == mark and line["time"] > since:
                found.setdefault(line["pid"], line["time"])
        return found

    def found_at(self, since: float) -> float:
        """When discovery's answer changed first after this time, unix seconds."""
        return min(float(event["time"]) for event in self.events("hosts_discovered", since=since))


class ElasticJob(LoggedJob):
    """elasticrun on the loop of elastic_loop.py, on hosts of ``slots`` slots each.

    Args:
        folder: for its files.
        slots: of each host.
        hosts: how many of them there are at the start.
        flags: more of the command line's.
        nodes: the hosts, of which the first has the driver; None for names of this machine.
        loop: what its workers run.
    """

    def __init__(
        self,
        folder: Path,
        slots: int,
        hosts: int,
        *flags: str,
        nodes: Namespaces | None = None,
        loop: str = "elastic_loop.py",
    ) -> None:
        self.names = HOSTS if nodes is None else tuple(node.name for node in nodes)
        self.hosts_file = folder / "hosts.txt"
        self.events_file = folder / "events.jsonl"
        self.slots = slots
        self.others: list[subprocess.Popen[bytes]] = []
        self._token = folder / "token"
        self._token.write_text(secrets.token_urlsafe(24))
        self._token.chmod(0o600)
        self.set_hosts(hosts)
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self.hosts_file}\n")
        script.chmod(0o755)
        command = [*self.launcher(), "-np", str(slots), "--min-np", str(slots)]
        command += ["--host-discovery-script", str(script), *flags]
        if nodes is None:
            command += ["--accept-agents", "--join-token-file", str(self._token)]
        command += [sys.executable, str(HERE / loop)]
        if nodes is None:
            super().__init__(command, folder, {})
        else:
            super().__init__(command, folder, nodes[0].environment(), at=nodes[0].prefix)

    def add_host(self) -> None:
        """Another host comes: an agent of its own, which joins by itself and shares no process with the first."""
        url = self.events("job_started")[0]["rendezvous"]
        command = [sys.executable, "-m", "elastic_driver", "join", "--driver", url, "--slots", str(self.slots)]
        command += ["--host", "joined", "--join-token-file", str(self._token)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "STEP_LOG": str(self.steps_file)}
        self.others.append(
            subprocess.Popen(
                command,
                env={**env, "MARK_LOG": str(self.marks_file)},
                stdout=self.output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        )

    def __exit__(self, *unused: object) -> None:
        super().__exit__()
        for other in self.others:
            other.wait()

    def launcher(self) -> list[str]:
        """The command line up to the flags."""
        return [sys.executable, "-m", "elastic_driver", "--event-log", str(self.events_file)]

    def set_hosts(self, count: int, *, last: int | None = None) -> None:
        """Lists the first ``count`` hosts, the last of them with ``last`` slots where that is given."""
        counts = [self.slots] * (count - 1) + [self.slots if last is None else last]
        new = self.hosts_file.with_suffix(".new")
        new.write_text("".join(f"{name}:{slots}\n" for name, slots in zip(self.names[:count], counts, strict=True)))
        new.replace(self.hosts_file)


class Nodes(Job):
    """A command on the loop of torchrun_loop.py for each of two hosts of this machine: hosts that share no process.

    Args:
        command: what each host runs, up to the flags.
        flags: of the hosts; those of the first only.
        folder: for its files.
        slots: workers of each.
        hosts: how many of them there are at the start, 1 or 2.
        env: more of their environment.
    """

    def __init__(
        self,
        command: list[str],
        flags: tuple[list[str], list[str]],
        folder: Path,
        slots: int,
        hosts: int,
        env: dict[str, str],
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        all_flags, first_flags = flags
        all_flags = [*all_flags, f"--nproc-per-node={slots}", "--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=bench"]
        all_flags += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", str(HERE / "torchrun_loop.py")]
        self._other = [*command, *all_flags]
        self._env = env
        self._others: list[subprocess.Popen[bytes]] = []
        super().__init__([*command, *first_flags, *all_flags], folder, env)
        if hosts > 1:
            time.sleep(0.5)  # the first is to have the port
            self.add_host()

    def add_host(self) -> None:
        """The second host comes."""
        env = {**os.environ, **self._env, "STEP_LOG": str(self.steps_file), "MARK_LOG": str(self.marks_file)}
        self._others.append(
            subprocess.Popen(
                self._other,
                env={**env, "PYTHONPATH": str(ROOT)},
                stdout=self.output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        )

    def remove_host(self) -> None:
        """The second host is told to go."""
        self._others[-1].terminate()

    def __exit__(self, *unused: object) -> None:
        for other in self._others:
            other.terminate()
        super().__exit__()
        for other in self._others:
            other.wait()


class TorchrunNodes(Nodes):
    """torchrun, as impatient as can be."""

    def __init__(self, folder: Path, slots: int, hosts: int) -> None:
        flags = ["--max-restarts=9", "--monitor-interval=0.05"]
        flags += ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"]
        # Without it a job cannot grow at all, and does not come back from a failure.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        super().__init__([sys.executable, "-m", "torch.distributed.run"], (flags, []), folder, slots, hosts, env)


class ElasticNodes(Nodes, LoggedJob):
    """elasticrun in torchrun's place."""

    def __init__(self, folder: Path, slots: int, hosts: int) -> None:
        self.events_file = folder / "events.jsonl"
        first = ["--event-log", str(self.events_file)]
        super().__init__(
            [sys.executable, "-m", "elastic_driver"], (["--max-restarts=9"], first), folder, slots, hosts, {}
        )


class TorchrunJob(Job):
    """torchrun on the loop of torchrun_loop.py, with this many processes; on so many hosts, where there are nodes."""

    def __init__(self, folder: Path, workers: int, *, nodes: Namespaces | None = None, hosts: int = 2) -> None:
        self._others: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=9", "--monitor-interval=0.05"]
        # Without this a job does not come back from a failure at all: the restarted workers meet the old keys.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        loop = str(HERE / "torchrun_loop.py")
        if nodes is None:
            super().__init__([*command, "--standalone", f"--nproc-per-node={workers}", loop], folder, env)
            return
        command += [f"--nnodes={hosts}", f"--nproc-per-node={workers // hosts}"]
        command += ["--rdzv-backend=c10d", "--rdzv-id=bench"]
        command += [f"--rdzv-endpoint={nodes[0].name}:29400", loop]
        env |= nodes[0].environment()
        super().__init__(command, folder, env, at=nodes[0].prefix)
        env = {**os.environ, **env, "STEP_LOG": str(self.steps_file), "PYTHONPATH": str(ROOT)}
        for node in nodes.hosts[1:hosts]:
            self._others.append(node.popen(command, env=env, stdout=self.output, stderr=subprocess.STDOUT))

    def wait_for_others(self) -> list[int]:
        """Blocks until all but the first node's have ended. Returns their exit codes."""
        return [other.wait(PATIENCE_S) for other in self._others]

    def __exit__(self, *unused: object) -> None:
        for other in self._others:
            other.terminate()
        super().__exit__()
        for other in self._others:
            other.wait()


def normal_step(lines: list[dict[str, Any]], pids: set[int], before: float) -> float:
    """The median step of these processes until then, seconds."""
    times = [sorted(line["time"] for line in lines if line["pid"] == pid and line["time"] < before) for pid in pids]
    every: list[float] = [b - a for of_worker in times for a, b in itertools.pairwise(of_worker)][-200:]
    return statistics.median(every)


def survivors_figures(job: Job, at: float, pids: set[int], *, join_size: int | None = None) -> Figures:
    """What a change at this time cost the processes that lived through it."""
    lines = job.steps()
    step = normal_step(lines, pids, at)
    stall, lost = 0.0, 0
    for pid in pids:
        mine = sorted((line["time"], line["step"]) for line in lines if line["pid"] == pid)
        stall = max(stall, *(b - a for (a, _), (b, _) in itertools.pairwise(mine) if b > at))
        lost = max(lost, len(mine) - len({number for _, number in mine}))
    join = found = None
    if join_size is not None and isinstance(job, ElasticJob):
        join = min(line["time"] for line in lines if line["size"] == join_size and line["time"] > at) - at
        found = job.found_at(at) - at
    return Figures(stall - step, join, found, lost, step)


def stages(job: ElasticJob, at: float, survivors: set[int], size: int, *, planned: bool) -> dict[str, float]:
    """The stages of a change at this time, see Figures.

    Args:
        job: whose change it was.
        at: when something was killed, or the hosts file was edited.
        survivors: processes that lived through it.
        size: of the round that it led to.
        planned: whether hosts came, and nobody died.
    """
    formed = next(event for event in job.events("round_formed", since=at) if event["size"] == size)
    members = {member["pid"] for member in formed["members"]}
    steps: dict[int, float] = {}
    for line in job.steps():
        # A survivor may finish the step that it is in.
        if line["pid"] in members and line["size"] == size and line["time"] > formed["time"]:
            steps.setdefault(line["pid"], line["time"])
    last = max(steps.values())

    def when(mark: str, pids: set[int]) -> float | None:
        """When the last of these was there. Who was not by its first step had no need to be."""
        times = [time for pid, time in job.marks(mark, since=at).items() if pid in pids and time < last]
        return max(times, default=None)

    def event(*kinds: str) -> float | None:
        return min((one["time"] for one in job.events(*kinds, since=at)), default=None)

    staying = survivors & members
    found: dict[str, float | None] = {}
    if planned:
        started = [one["time"] for one in job.events("worker_started", since=at) if one["pid"] in members]
        found |= {
            "seen": event("hosts_discovered"),
            "started": max(started),
            "booted": when("asked", members - staying),
        }
    else:
        found["seen"] = event("worker_dying", "worker_exited")
    found |= {
        "told": when("told", staying),
        "left" if planned else "aborted": when("left", staying),
        "asked": when("asked", staying),
        "formed": formed["time"],
        "met again": when("met", members),
        "connected": when("connected", staying),
        "synced": when("synced", members),
        "first step": last,
    }
    return {name: time - at for name, time in found.items() if time is not None}
