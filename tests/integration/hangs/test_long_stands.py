"""Workers that stand still for a minute and longer: who is proven to hang, and who is named only.

The jobs run side by side, since mostly they wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_driver.worker.engine import native_loader
from tests.support.paths import PROGRAMS
from tests.support.processes.hang_jobs import FrozenDisk, HangJob, debugged, is_gone

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.slow]

try:
    native_loader.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

# The first steps are slow: they are none of the last 100 by then.
AT = 110
C_CALL_S = 30.0
# Longer than the shortest proof and its last stack; whoever is not ended by then is not ended.
LASTS_S = 72.0


class Jobs:
    """All jobs of this module, with the processes of each. What cannot be had here is None, with the reason."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        def job(name: str, stands: str, *, command: list[str] | None = None, **env: object) -> HangJob:
            texts = {key: str(value) for key, value in env.items()}
            return stack.enter_context(HangJob(folder / name, stands, env=texts, command=command))

        self.debugger_lacks = "" if shutil.which("gdb") else "needs gdb (scripts/install-test-hosts)"
        self.disk_lacks = "" if os.getuid() == 0 else "needs root"
        self.disk: FrozenDisk | None = None
        if not self.disk_lacks:
            try:
                self.disk = FrozenDisk(folder / "frozen")
                stack.callback(self.disk.thaw)
                self.disk.freeze()
            except (OSError, subprocess.CalledProcessError) as error:
                self.disk_lacks = str(error)
        self.inversion = job("inversion", f"inversion 1 {AT}")
        self.idle = job("idle", f"idle -1 {AT}", LASTS_S=LASTS_S)
        self.polls = job("polls", f"poll 1 {AT}", LASTS_S=LASTS_S)
        self.rests = job("rests", f"rest 1 {AT}", LASTS_S=LASTS_S)
        self.lock = stack.enter_context((folder / "lock").open("w"))
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.waits = job("waits", f"lock 1 {AT}", WHERE=self.lock.name)
        self.c_call = job("c-call", f"c_call 1 {AT}", LASTS_S=C_CALL_S)
        self.torch = job("torch", "torch", command=[sys.executable, str(PROGRAMS / "stuck_loader_program.py")])
        self.debugged = None if self.debugger_lacks else job("debugged", "nothing -1")
        self.on_disk = None
        if self.disk is not None:
            self.on_disk = job("on-disk", f"disk 1 {AT}", WHERE=self.disk.folder / "checkpoint")
            stack.callback(self.disk.thaw)  # before the job's end is waited for
        everybody = (self.inversion, self.idle, self.polls, self.c_call, self.torch, self.debugged, self.on_disk)
        everybody += (self.rests, self.waits)
        self.pids = {each: each.pids() for each in everybody if each is not None}
        self.debugger = contextlib.ExitStack()
        if self.debugged is not None:
            stack.enter_context(self.debugger)
            self.attached_at = time.time()
            self.debugger.enter_context(debugged(self.pids[self.debugged][1]))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with contextlib.ExitStack() as stack:
        yield Jobs(tmp_path_factory.mktemp("long-stands"), stack)


def test_a_call_that_holds_the_lock_is_named_and_goes_on(jobs: Jobs) -> None:
    job, pids = jobs.c_call, jobs.pids[jobs.c_call]
    ((_, _, at, lasts_s),) = job.stood()
    suspected = job.suspected(1, after=at)
    assert (suspected["kind"], suspected["collective"]) == ("awaited", "allreduce 'gradient'")
    assert any(frame.endswith("in call_c") for frame in suspected["frames"])
    job.same_go_on(pids, after=at + lasts_s)
    job.cleared(suspected, not_before=at + lasts_s)


def test_an_inversion_of_locks_is_proven_and_ended(jobs: Jobs) -> None:
    job, pids = jobs.inversion, jobs.pids[jobs.inversion]
    ((_, _, at, _),) = job.stood()
    suspected = job.suspected(1, after=at)
    assert (suspected["kind"], suspected["collective"]) == ("awaited", "allreduce 'gradient'")
    assert any(frame.endswith("in invert_locks") for frame in suspected["frames"])
    assert "hang_program.py" in suspected["stack"]
    assert "in take" in suspected["stack"], "the threads that have the locks"
    assert suspected["limit_s"] >= 5
    assert suspected["ends_s"] == max(60, 6 * suspected["limit_s"])
    hung = job.one("worker_hung")
    assert hung["worker"] == "127.0.0.1[0]#0"
    assert "it has not submitted allreduce 'gradient', for which others have waited " in hung["reason"]
    assert "its stacks are the same (the deadline is " in hung["reason"]
    assert suspected["ends_s"] <= hung["time"] - at
    lines = job.wait_for_steps(1, 3)
    assert {line["pid"] for line in lines} == {pids[0]}
    job.wait_for("its end", lambda: is_gone(pids[1]))
    assert "in invert_locks" in job.said(), "its last words"


def test_a_reader_that_hangs_is_told_with_the_optimizers_collective(jobs: Jobs) -> None:
    job, pids = jobs.torch, jobs.pids[jobs.torch]
    ((_, _, at, _),) = job.stood()
    suspected = job.suspected(1, after=at)
    assert suspected["kind"] == "awaited"
    assert suspected["collective"].startswith("allreduce ")
    assert "in next_batch" in suspected["stack"]
    hung = job.one("worker_hung")
    assert hung["worker"] == "127.0.0.1[0]#0"
    assert suspected["ends_s"] <= hung["time"] - at
    lines = job.wait_for_steps(1, 3)
    assert {line["pid"] for line in lines} == {pids[0]}


def test_a_disk_that_hangs_does_not_hold_the_others(jobs: Jobs) -> None:
    job, disk = jobs.on_disk, jobs.disk
    if job is None or disk is None:
        pytest.skip(jobs.disk_lacks)
    pids = jobs.pids[job]
    ((_, pid, at, _),) = job.stood()
    assert pid == pids[1]
    suspected = job.suspected(1, after=at)
    assert (suspected["kind"], suspected["collective"]) == ("awaited", "allreduce 'gradient'")
    assert "it is in an uninterruptible system call (state D), usually waiting for a disk" in suspected["why"]
    assert any(frame.endswith("in write_to_the_disk") for frame in suspected["frames"])
    hung = job.one("worker_hung")
    assert suspected["ends_s"] <= hung["time"] - at
    lines = job.wait_for_steps(1, 3)
    assert {line["pid"] for line in lines} == {pids[0]}
    assert psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP, "nobody can end it; the job goes on nevertheless"
    disk.thaw()
    job.wait_for("its end, once it can", lambda: is_gone(pid))


def test_who_polls_is_named_and_not_ended(jobs: Jobs) -> None:
    job, pids = jobs.polls, jobs.pids[jobs.polls]
    ((_, _, at, lasts_s),) = job.stood()
    suspected = job.suspected(1, after=at)
    assert suspected["kind"] == "awaited"
    job.same_go_on(pids, after=at + lasts_s)
    job.cleared(suspected, not_before=at + lasts_s)


def test_who_rests_for_a_second_again_and_again_is_named_and_not_ended(jobs: Jobs) -> None:
    job, pids = jobs.rests, jobs.pids[jobs.rests]
    ((_, _, at, lasts_s),) = job.stood()
    suspected = job.suspected(1, after=at)
    assert suspected["kind"] == "awaited"
    assert any(frame.endswith("in rest") for frame in suspected["frames"])
    job.same_go_on(pids, after=at + lasts_s)
    job.cleared(suspected, not_before=at + lasts_s)


def test_who_waits_for_a_lock_of_somebody_elses_is_named_and_not_ended(jobs: Jobs) -> None:
    job, pids = jobs.waits, jobs.pids[jobs.waits]
    ((_, _, at, _),) = job.stood()
    suspected = job.suspected(1, after=at)
    assert (suspected["kind"], suspected["ends_s"]) == ("awaited", None)
    assert suspected["spared"] == f"its main thread waits for a file lock (flock) that process {os.getpid()} holds"
    job.wait_for("the time in which it would be proven", lambda: time.time() > at + LASTS_S)
    released_at = time.time()
    fcntl.flock(jobs.lock, fcntl.LOCK_UN)
    job.same_go_on(pids, after=released_at)
    job.cleared(suspected, not_before=released_at)


def test_ranks_that_do_nothing_though_nobody_waits_are_named_and_not_ended(jobs: Jobs) -> None:
    job, pids = jobs.idle, jobs.pids[jobs.idle]
    marks = job.stood(2)
    for rank, _, at, _ in marks:
        suspected = job.suspected(rank, after=at)
        assert (suspected["kind"], suspected["collective"]) == ("idle", "")
        assert suspected["ends_s"] is None
        assert "and no other worker waits for it" in suspected["why"]
        assert "in idle" in suspected["stack"]
    job.same_go_on(pids, after=max(at + lasts_s for _, _, at, lasts_s in marks))
    assert all(job.was_suspected_once(rank, after=at, before=at + lasts_s) for rank, _, at, lasts_s in marks)


def test_who_is_debugged_is_named_and_not_ended(jobs: Jobs) -> None:
    job = jobs.debugged
    if job is None:
        pytest.skip(jobs.debugger_lacks)
    suspected = job.suspected(1, after=jobs.attached_at)
    assert (suspected["kind"], suspected["ends_s"]) == ("traced", None)
    assert suspected["why"] == "it is stopped by a debugger (state t)"
    job.wait_for("the end of its debugging", lambda: time.time() > jobs.attached_at + LASTS_S)
    at = time.time()
    jobs.debugger.close()
    job.same_go_on(jobs.pids[job], after=time.time())
    job.cleared(suspected, not_before=at)
