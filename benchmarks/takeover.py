"""What the death of a driver costs a job with a journal.

    python benchmarks/takeover.py [--runs 5] [--workers 4] [--folder DIR] [--standby] [--loop torchrun]
                                  [--nodes 3 [--torchrun] [--etcd]]

One job on this machine: workers with 4 MB of gradients, 50 ms of sleep and a commit each step (elastic_loop.py); with
``--loop torchrun`` those of a script for torchrun, DDP over gloo (torchrun_loop.py). In turn its driver is killed, the
same command is started again at once, and when that has taken over, a stretch of the same length passes undisturbed.
With --standby that command is there before, with --standby-driver. Over all runs, medians and ranges, seconds:

    took over   from SIGKILL until all agents are the new driver's (its event took_over), imports and all
    gap         the longest time between two steps of a rank, from SIGKILL until a second after the takeover
    undisturbed likewise in a stretch of the same length in which nothing happens

The ratio is that of the two gaps. Steps that were lost are counted, too: there may be none.

With --nodes the workers are on so many hosts, each a network namespace, which join; it takes root. With --torchrun the
same is done to torchrun's launcher that has the store of the rendezvous, on as many hosts: when the last step was made
since then, and when the launchers on the other hosts have ended, is told in gaps of ours. Nothing goes on there.

With --etcd the journal is in etcd, on a host of its own, and a driver stands by on another host than the one that is
killed, with its parent: the first two hosts have the job in turn. The lease of the dead driver runs on for 5 s at most.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from elastic_jobs import ROOT, ElasticJob, TorchrunJob

from elastic_driver.journal.folder import LOCK
from elastic_driver.system.process_name import pid_in
from tests.support.network.namespaces import NamespaceHost, Namespaces
from tests.support.processes.etcd import PORT, etcd_on

AFTER_S = 1.0
_STANDS_BY = re.compile(r"standing by: job \S+ is driven by process (\d+) on ")


class JournaledJob(ElasticJob):
    """A job whose driver may die.

    Args:
        folder: for its files, and its journal.
        workers: how many.
        has_standby: whether the next driver is there before one dies.
        loop: see ElasticJob.
        nodes: the hosts, of which the first has the driver; None for this machine.
        hosts: how many of them have workers.
    """

    def __init__(
        self, folder: Path, workers: int, *, has_standby: bool, loop: str, nodes: Namespaces | None, hosts: int = 0
    ) -> None:
        self.journal = folder / "journal"
        self._has_standby = has_standby
        if nodes is None:
            super().__init__(folder, workers, 1, loop=loop)
            return
        flags = ("--launcher", "none", "--accept-agents", "--join-token-file", str(folder / "token"))
        super().__init__(folder, workers // hosts, hosts, *flags, nodes=nodes, loop=loop)

    def let_join(self, nodes: Sequence[NamespaceHost]) -> None:
        """Has these hosts join the job."""
        url = self.wait_for("where to join", lambda: self.said().partition("join --driver ")[2]).split()[0]
        join = [sys.executable, "-m", "elastic_driver", "join", "--driver", url, "--slots", str(self.slots)]
        logs = {"STEP_LOG": str(self.steps_file), "MARK_LOG": str(self.marks_file), "PYTHONPATH": str(ROOT)}
        for node in nodes:
            words = [*join, "--host", node.name, "--join-token-file", str(self._token)]
            env = node.environment() | logs
            self.others.append(node.popen(words, env=env, stdout=self.output, stderr=subprocess.STDOUT))

    def launcher(self) -> list[str]:
        """See ElasticJob."""
        return [*super().launcher(), "--journal", str(self.journal)]

    def driver(self) -> int:
        """The process that has the job, as its lock says."""
        name = (self.journal / LOCK).read_text().splitlines()[1]
        pid = pid_in(name)
        assert pid is not None, name
        return pid

    def kill_driver(self) -> float:
        """Kills it, and whoever would start it again, and starts the same command anew. Returns when, unix seconds."""
        again = self._standing_by() if self._has_standby else None
        driver = self.driver()
        killed = time.time()
        for pid in (self.process.pid, driver):
            with contextlib.suppress(ProcessLookupError):  # it goes with its parent
                os.kill(pid, signal.SIGKILL)
        if again is None:
            again = self._start()
        self.process.wait()
        self.process = again
        return killed

    def _standing_by(self) -> subprocess.Popen[bytes]:
        words = "standing by: "
        before = self.said().count(words)
        self._command.insert(self._command.index("--journal"), "--standby-driver")
        again = self._start()
        self._command.remove("--standby-driver")
        self.wait_for("a driver that stands by", lambda: self.said().count(words) > before)
        time.sleep(AFTER_S)  # what it does at first is done
        return again

    def gap(self, since: float, until: float) -> float:
        """The longest time in which some rank has made no step."""
        times: dict[int, list[float]] = {}
        for line in self.steps():
            if since <= line["time"] <= until:
                times.setdefault(line["rank"], [since]).append(line["time"])
        return max(later - earlier for each in times.values() for earlier, later in itertools.pairwise(each))

    def lost(self) -> int:
        """Steps that a rank has done twice."""
        done: dict[int, set[int]] = {}
        lost = 0
        for line in self.steps():
            steps = done.setdefault(line["rank"], set())
            lost += line["step"] in steps
            steps.add(line["step"])
        return lost


class EtcdJob(JournaledJob):
    """One whose journal is in etcd. The driver that stands by is on the other one of two hosts each time.

    Args:
        folder, workers, loop, hosts: see JournaledJob.
        nodes: the hosts, of which the last has etcd.
    """

    def __init__(self, folder: Path, workers: int, *, loop: str, nodes: Namespaces, hosts: int) -> None:
        key = folder / "key"
        key.write_text(secrets.token_hex(32) + "\n")
        key.chmod(0o600)
        self._place = ("--journal", f"etcd://{nodes[hosts].ipv4}:{PORT}/jobs/one", "--journal-key", str(key))
        self._prefix = len(nodes[0].prefix)
        self._drivers = itertools.cycle((nodes[1], nodes[0]))
        super().__init__(folder, workers, has_standby=True, loop=loop, nodes=nodes, hosts=hosts)

    def launcher(self) -> list[str]:
        """See ElasticJob."""
        return [*ElasticJob.launcher(self), *self._place]

    def driver(self) -> int:
        """The process that has the job, as the one says that stands by last."""
        return int(_STANDS_BY.findall(self.said())[-1])

    def _standing_by(self) -> subprocess.Popen[bytes]:
        node = next(self._drivers)
        self._command[: self._prefix] = node.prefix
        self._prefix = len(node.prefix)
        self._environment |= node.environment()
        return super()._standing_by()


def one_run(job: JournaledJob, workers: int) -> tuple[float, float, float]:
    """The driver dies once. Returns how long the takeover took, and the longest gaps of steps with it and without."""
    killed = job.kill_driver()
    (taken, *_) = job.wait_for("a takeover", lambda: job.events("took_over", since=killed))
    until = taken["time"] + AFTER_S
    job.wait_for_steps(workers, since=until)
    length_s = until - killed
    began = time.time()
    job.wait_for_steps(workers, since=began + length_s)
    return taken["time"] - killed, job.gap(killed, until), job.gap(began, began + length_s)


def run_torchrun(folder: Path, workers: int, nodes: Namespaces, hosts: int) -> tuple[float, float, list[int]]:
    """Kills the launcher that has the store. Returns when the last step was made and the other launchers had ended,
    seconds since then, and their exit codes."""
    with TorchrunJob(folder, workers, nodes=nodes, hosts=hosts) as job:
        job.wait_for_steps(workers, steps=20)
        killed = time.time()
        job.process.kill()
        codes = job.wait_for_others()
        ended = time.time()
    return max(line["time"] for line in job.steps()) - killed, ended - killed, codes


def told(values: list[float]) -> str:
    """The median, and from which to which."""
    return f"{statistics.median(values):6.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--loop", choices=("elastic", "torchrun"), default="elastic")
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--etcd", action="store_true")
    arguments = parser.parse_args()
    workers, hosts, theirs = arguments.workers, arguments.nodes, None
    if workers % (hosts or 1) or arguments.torchrun > (hosts > 0) or arguments.etcd > (hosts > 1):
        parser.error("--torchrun needs --nodes, --etcd two or more, and --workers is a multiple of that")
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(Namespaces(hosts + arguments.etcd)) if hosts else None
        first, second = (Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder))) for _ in "12")
        loop = f"{arguments.loop}_loop.py"
        job: JournaledJob
        if nodes is not None and arguments.etcd:
            stack.enter_context(etcd_on(nodes[hosts], first))
            job = EtcdJob(first, workers, loop=loop, nodes=nodes, hosts=hosts)
        else:
            job = JournaledJob(first, workers, has_standby=arguments.standby, loop=loop, nodes=nodes, hosts=hosts)
        with job:
            if nodes is not None:
                job.let_join(nodes.hosts[:hosts])
            job.wait_for_steps(workers, steps=20)
            runs = [one_run(job, workers) for _ in range(arguments.runs)]
            lost = job.lost()
        if nodes is not None and arguments.torchrun:
            theirs = run_torchrun(second, workers, nodes, hosts)
    took, gaps, undisturbed = (list(each) for each in zip(*runs, strict=True))
    print(f"{workers} workers{f' on {hosts} hosts' if nodes else ''}, {len(runs)} runs, seconds")
    for what, values in (("took over", took), ("gap", gaps), ("undisturbed", undisturbed)):
        print(f"  {what:12}{told(values)}")
    ratio = statistics.median(gaps) / statistics.median(undisturbed)
    print(f"  gap / undisturbed: {ratio:.2f}; steps done twice: {lost}")
    if theirs is not None:
        last, ended, codes = theirs
        ours = statistics.median(gaps)
        print(
            f"  torchrun: last step {last:.3f} ({last / ours:.0f} gaps of ours); nothing goes on. The other launchers"
        )
        print(f"  have ended {ended:.3f} ({ended / ours:.0f}), exit codes {codes}")


if __name__ == "__main__":
    main()
