"""What the death of a driver costs a job with a journal.

    python benchmarks/takeover.py [--runs 5] [--workers 4] [--folder DIR] [--standby] [--loop torchrun]

One job on this machine: workers with 4 MB of gradients, 50 ms of sleep and a commit each step (elastic_loop.py); with
``--loop torchrun`` those of a script for torchrun, DDP over gloo (torchrun_loop.py). In turn its driver is killed, the
same command is started again at once, and when that has taken over, a stretch of the same length passes undisturbed.
With --standby that command is there before, with --standby-driver. Over all runs, medians and ranges, seconds:

    took over   from SIGKILL until all agents are the new driver's (its event took_over), imports and all
    gap         the longest time between two steps of a rank, from SIGKILL until a second after the takeover
    undisturbed likewise in a stretch of the same length in which nothing happens

The ratio is that of the two gaps. Steps that were lost are counted, too: there may be none.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from elastic_jobs import ElasticJob

from elastic_driver.journal.folder import LOCK
from elastic_driver.system.process_name import pid_in

AFTER_S = 1.0


class JournaledJob(ElasticJob):
    """A job whose driver may die.

    Args:
        folder: for its files, and its journal.
        workers: how many.
        has_standby: whether the next driver is there before one dies.
        loop: see ElasticJob.
    """

    def __init__(self, folder: Path, workers: int, *, has_standby: bool, loop: str) -> None:
        self.journal = folder / "journal"
        self._has_standby = has_standby
        super().__init__(folder, workers, 1, loop=loop)

    def launcher(self) -> list[str]:
        """See ElasticJob."""
        return [*super().launcher(), "--journal", str(self.journal)]

    @property
    def driver(self) -> int:
        """The process that has the job, as its lock says."""
        return pid_in((self.journal / LOCK).read_text().splitlines()[1])

    def kill_driver(self) -> float:
        """Kills it, and whoever would start it again, and starts the same command anew. Returns when, unix seconds."""
        driver = self.driver
        again = self._standing_by() if self._has_standby else None
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
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        JournaledJob(
            Path(name), arguments.workers, has_standby=arguments.standby, loop=f"{arguments.loop}_loop.py"
        ) as job,
    ):
        job.wait_for_steps(arguments.workers, steps=20)
        runs = [one_run(job, arguments.workers) for _ in range(arguments.runs)]
        lost = job.lost()
    took, gaps, undisturbed = (list(each) for each in zip(*runs, strict=True))
    print(f"{arguments.workers} workers, {len(runs)} runs, seconds")
    for what, values in (("took over", took), ("gap", gaps), ("undisturbed", undisturbed)):
        print(f"  {what:12}{told(values)}")
    ratio = statistics.median(gaps) / statistics.median(undisturbed)
    print(f"  gap / undisturbed: {ratio:.2f}; steps done twice: {lost}")


if __name__ == "__main__":
    main()
