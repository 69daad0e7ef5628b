"""Commits on disk under faults: killed and stopped writers, a disk that is full or gone, machines that are lost."""

from __future__ import annotations

import collections
import contextlib
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.worker.durable import format as durable_format
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import PATIENCE_S, Job, check_agreement

pytestmark = [pytest.mark.faults]

COMMAND = [sys.executable, str(PROGRAMS / "durable_program.py")]
TWO_HOSTS = "localhost:1\n127.0.0.1:1\n"
MIB = 1 << 20


def start(folder: Path, hosts: str, *flags: str, **env: object) -> Job:
    folder.mkdir(exist_ok=True)
    return Job(folder, hosts, *flags, command=COMMAND, env={name: str(value) for name, value in env.items()})


class Stoppable:
    """A job that trains until the test has it end: whatever the fault takes, the training is not over before.

    Args: see :func:`start`.
    """

    def __init__(self, folder: Path, hosts: str, *flags: str, **env: object) -> None:
        self._stop = folder / "stop"
        self.job = start(folder, hosts, *flags, STOP=self._stop, **env)

    def end(self) -> int:
        """Blocks until it has ended well. Gives its last step."""
        self._stop.touch()
        assert self.job.wait() == 0, self.job.said()
        return int(self.job.steps()[-1]["step"])


def until(job: Job, what: str, found: Callable[[], Any]) -> Any:
    return job.wait_for(what, found)


def newest(folder: Path) -> int:
    return max((int(path.stem.split("-")[1]) for path in folder.glob("commit-*.state")), default=0)


def beyond(job: Job, folder: Path, commits: int) -> int:
    """Waits until there is a commit above that number; gives it."""
    return until(job, f"a commit above {commits}", lambda: max(newest(folder) - commits, 0) and newest(folder))


def rank_0(job: Job) -> psutil.Process:
    return psutil.Process(next(line["pid"] for line in reversed(job.steps()) if line["rank"] == 0))


def stop_while_writing(job: Job, folder: Path) -> tuple[psutil.Process, Path]:
    """Stops the writer with SIGSTOP when it has begun a file and not yet finished it."""
    writer = rank_0(job)

    def stopped() -> Path | None:
        if not list(folder.glob(".commit-*.tmp")):
            return None
        writer.suspend()
        while writer.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        left = list(folder.glob(".commit-*.tmp"))
        if left:
            return left[0]
        writer.resume()
        return None

    return writer, until(job, "a file that is being written", stopped)


def kill_all(job: Job) -> None:
    """SIGKILL to elasticrun; waits until nothing of the job is left."""
    job.process.kill()
    job.process.wait(PATIENCE_S)
    end = time.monotonic() + PATIENCE_S
    while job.leftovers() and time.monotonic() < end:
        time.sleep(0.05)
    assert not job.leftovers()


def test_killed_in_the_middle_of_writing_and_gone_on_with_at_another_size(tmp_path: Path) -> None:
    """Also every sample of the epoch is used once, but for the steps after the commit that the job goes back to."""
    folder = tmp_path / "commits"
    flags = ("--min-np", "1", "--durable-dir", str(folder), "--durable-keep", "3", "--preload", "elastic_driver.torch")
    env = {"SAMPLES": 480, "BALLAST": 16 * MIB}
    with start(tmp_path / "1", "localhost:2\n", "-np", "2", *flags, **env, STEP_S=0.05, STEP_GROWS=1.25) as job:
        job.wait_for_steps(2, 4)
        beyond(job, folder, 1)
        _, torn = stop_while_writing(job, folder)
        workers = {line["pid"] for line in job.steps()}
        job.process.kill()
        for pid in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        kill_all(job)
        first = job.steps()
    assert torn.exists()
    kept = newest(folder)
    assert kept >= 2
    with start(tmp_path / "2", "localhost:3\n", "-np", "3", *flags, **env, STEP_S=0) as job:
        assert job.wait() == 0, job.said()
        second = job.steps()
        assert f"resuming from commit {kept} in" in job.said()
    assert min(line["step"] for line in second) == kept + 1
    assert {line["size"] for line in second} == {3}
    check_agreement(first + second)
    used = collections.Counter(
        sample for line in [x for x in first if x["step"] <= kept] + second for sample in line["samples"]
    )
    assert set(used) == set(range(480)), "a sample is lost"
    # 3 ranks share out what is left evenly, by which at most two samples are used again.
    assert sum(used.values()) <= 482
    assert not list(folder.glob(".commit-*")), "what the killed writer left is removed"
    assert len(list(folder.glob("commit-*"))) == 3


def test_a_disk_that_is_full_and_has_room_again(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    training = Stoppable(tmp_path, "localhost:2\n", "-np", "2", "--durable-dir", str(folder), BALLAST=2 * MIB)
    with training.job as job:
        beyond(job, folder, 3)
        writer = rank_0(job)
        writer.rlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        until(job, "a warning", lambda: "File too large; training continues" in job.said())
        before = newest(folder)
        step = job.steps()[-1]["step"]
        until(job, "steps without commits", lambda: job.steps()[-1]["step"] > step + 20)
        assert newest(folder) == before
        until(job, "a moment between two tries", lambda: not list(folder.glob(".commit-*")))
        writer.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        until(job, "that there is room", lambda: "commits are written to" in job.said())
        last = training.end()
        assert job.said().count("training continues") == 1
        assert f"elasticrun: on disk: commit {last} in {folder}\n" in job.said()
    assert newest(folder) == last
    check_agreement(job.steps())


def test_a_folder_that_is_removed_and_one_that_cannot_be_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    training = Stoppable(tmp_path, "localhost:2\n", "-np", "2", "--durable-dir", str(folder))
    with training.job as job:
        beyond(job, folder, 3)
        shutil.rmtree(folder, ignore_errors=True)
        commits = beyond(job, folder, 3)
        while folder.is_dir():  # the writer makes it anew at any moment
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.touch(exist_ok=False)
            except FileExistsError:
                continue
        until(job, "a warning", lambda: "training continues" in job.said())
        step = job.steps()[-1]["step"]
        until(job, "steps without commits", lambda: job.steps()[-1]["step"] > step + 10)
        folder.unlink()
        assert beyond(job, folder, commits) > step
        second = Stoppable(tmp_path / "second", "localhost:1\n", "-np", "1", "--durable-dir", str(folder))
        with second.job as other:
            # The lock went with the old folder, so the new one is the second job's: the first keeps out of it.
            until(job, "whose it is", lambda: "the folder now belongs to job" in job.said())
            other.wait_for_steps(1, 3)
            training.end()
            last = second.end()
    assert newest(folder) == last


def test_a_stopped_writer_is_followed_by_another(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    training = Stoppable(
        tmp_path, TWO_HOSTS, "-np", "2", "--min-np", "1", "--durable-dir", str(folder), "--heartbeat-timeout", "4",
        BALLAST=32 * MIB, STEP_S=0.05,
    )  # fmt: skip
    with training.job as job:
        beyond(job, folder, 1)
        writer, _ = stop_while_writing(job, folder)
        before = newest(folder)
        beyond(job, folder, before)
        assert not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE
        last = training.end()
    assert newest(folder) == last
    for path in folder.glob("commit-*"):
        durable_format.read(path)


def test_disks_of_machines_one_of_which_is_lost(tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    flags = ("-np", "2", "--durable-dir", str(tmp_path / "driver"), "--durable-every", "1")
    with start(tmp_path / "1", TWO_HOSTS, *flags, LOCAL_DISKS=disks, BALLAST=MIB) as job:
        beyond(job, disks / "localhost", 5)
        beyond(job, disks / "127.0.0.1", 5)
        kill_all(job)
        weights = {line["step"]: line["weights"] for line in job.steps()}
    assert not list((tmp_path / "driver").glob("commit-*")), "the driver's machine trains nothing"
    # The machine of rank 0 comes back with a new disk.
    shutil.rmtree(disks / "localhost")
    kept = newest(disks / "127.0.0.1")
    with start(tmp_path / "2", TWO_HOSTS, *flags, LOCAL_DISKS=disks, BALLAST=MIB, STEPS=kept + 8) as job:
        assert job.wait() == 0, job.said()
        lines = job.steps()
        assert f"resuming from commit {kept} in {disks}/127.0.0.1 on 127.0.0.1" in job.said()
        for host in ("localhost", "127.0.0.1"):
            assert f"elasticrun: on disk: commit {kept + 8} in {disks}/{host} on {host}\n" in job.said()
    assert min(line["step"] for line in lines) == kept + 1
    check_agreement(lines)
    assert all(line["weights"] == weights[line["step"]] for line in lines if line["step"] in weights)
    assert newest(disks / "localhost") == newest(disks / "127.0.0.1") == kept + 8


@pytest.mark.release  # unit/worker/test_durable.py has it of one disk
def test_what_one_disk_has_torn_another_has_whole(tmp_path: Path) -> None:
    """Then none has any."""
    disks = tmp_path / "disks"
    flags = ("-np", "2", "--durable-dir", str(tmp_path / "driver"), "--durable-every", "1")
    with start(tmp_path / "1", TWO_HOSTS, *flags, LOCAL_DISKS=disks, STEPS=8) as job:
        assert job.wait() == 0, job.said()
    before = sorted((disks / "localhost").glob("commit-*"))
    assert len(before) == 2
    (disks / "localhost" / before[1].name).write_bytes(b"torn")
    for path in sorted((disks / "127.0.0.1").glob("commit-*"))[:-1]:
        path.unlink()
    with start(tmp_path / "2", TWO_HOSTS, *flags, LOCAL_DISKS=disks, STEPS=9) as job:
        assert job.wait() == 0, job.said()
        assert f"{before[1]} is not a complete commit: it has only 4 bytes; trying the previous" in job.said()
        assert f"resuming from commit 8 in {disks}/127.0.0.1" in job.said()
    files = list(disks.glob("*/commit-*"))
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])
    with start(tmp_path / "3", TWO_HOSTS, *flags, LOCAL_DISKS=disks, STEPS=9) as job:
        assert job.wait() == 1
        assert f"none of the {len(files)} commits can be used" in job.said()
        assert all(str(path) in job.said() for path in files)
        assert not job.steps()


def test_all_that_is_known_is_lost_with_its_machine(tmp_path: Path) -> None:
    """The job goes not on from nothing, and says so."""
    with start(
        tmp_path, TWO_HOSTS, "-np", "1", "--max-np", "1", "--durable-dir", str(tmp_path / "driver"),
        LOCAL_DISKS=tmp_path / "disks",
    ) as job:  # fmt: skip
        beyond(job, tmp_path / "disks" / "localhost", 3)
        rank_0(job).send_signal(signal.SIGKILL)
        assert job.wait() == 1, job.said()
        assert "all workers that had the training's state are lost, and there is no commit of it in" in job.said()
    assert {line["worker"] for line in job.steps()} == {"localhost[0]#0"}


@pytest.mark.release  # one after the other in worker/test_durable_jobs.py
def test_two_jobs_that_want_one_folder_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    flags = ("-np", "1", "--durable-dir", str(folder))
    both = [Stoppable(tmp_path / name, "localhost:1\n", *flags) for name in "ab"]
    with both[0].job, both[1].job:
        (refused,) = until(both[0].job, "who is refused", lambda: [x for x in both if x.job.process.poll() is not None])
        assert refused.job.process.returncode == 2, [each.job.said() for each in both]
        assert f"cannot use the folder {folder} (--durable-dir): another job is using it" in refused.job.said()
        (other,) = (each for each in both if each is not refused)
        other.job.wait_for_steps(1, 3)
        last = other.end()
    assert newest(folder) == last
