"""What goes wrong while a job has no driver, or when another one comes: real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_driver.journal import entries
from elastic_driver.journal.file import RecordFile, read
from elastic_driver.journal.folder import JOURNAL
from elastic_driver.launch.agent.machine import addresses
from tests.support.processes.dying_drivers import DyingDrivers, agents_of
from tests.support.processes.joined import joined, where_to_join, write_token

pytestmark = [pytest.mark.integration, pytest.mark.faults]

FLAGS = ("-np", "2", "--min-np", "1", "--on-change", "in-place")
TWO = "localhost:1\n127.0.0.1:1\n"
YEAR_S = 365 * 86400.0

hosts_that_join = pytest.mark.skipif(not addresses(), reason="this machine has no address but loopback")


def ends_well(drivers: DyingDrivers, losses: int = 0) -> None:
    drivers.end_at(drivers.last_step() + 5)
    assert drivers.ended() == 0
    drivers.check_steps(losses)


# --- drivers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("times", [3, pytest.param(50, marks=[pytest.mark.release, pytest.mark.timeout(1200)])])
def test_two_drivers_start_at_the_same_instant(tmp_path: Path, times: int) -> None:
    """At first for a job that begins. One has it, and the other one says so."""
    with DyingDrivers(tmp_path, TWO, *FLAGS) as drivers:
        for number in range(times):
            both = [drivers.start()]
            of_first = tmp_path / "of_first"
            both[0].stderr.rename(of_first)
            both[0].stderr = of_first
            both.append(drivers.start())
            loser = drivers.until_ended(both)
            (winner,) = (job for job in both if job is not loser)
            assert loser.process.poll() == 2, loser.said()
            # In a new folder the winner may not have written yet who it is.
            unsigned = "another job uses it" in loser.said() and not number
            assert unsigned or f"is driven by process {winner.process.pid}" in loser.said()
            drivers.job = winner
            if number:
                drivers.has_taken_over()
            drivers.trains(2, 1)
            if number < times - 1:
                drivers.die()
        ends_well(drivers)


def test_the_clock_of_the_system_jumps(tmp_path: Path) -> None:
    """Forth by a year before the second driver, and back by two before the third."""
    with DyingDrivers(tmp_path, TWO, *FLAGS) as drivers:
        drivers.start()
        drivers.trains(2)
        for wrong_s in (YEAR_S, -YEAR_S):
            drivers.die()
            drivers.set_clock(wrong_s)
            drivers.start()
            told = drivers.has_taken_over()
            assert told["workers"] == 2
            assert told["away_s"] < YEAR_S / 2
            drivers.trains(2)
        ends_well(drivers)


@pytest.mark.parametrize(
    "which", ["protocol", *(pytest.param(each, marks=pytest.mark.release) for each in ("format", "core"))]
)
def test_a_journal_of_another_version_is_left_alone_and_so_is_its_job(tmp_path: Path, which: str) -> None:
    with DyingDrivers(tmp_path, TWO, *FLAGS) as drivers:
        drivers.start()
        drivers.trains(2)
        drivers.die()
        path = drivers.kept / JOURNAL
        ours = path.read_bytes()
        theirs = of_another_version(drivers.kept, ours, which)
        job = drivers.start()
        assert job.wait() == 2
        assert path.read_bytes() == theirs
        drivers.step_after(time.time())
        path.write_bytes(ours)
        drivers.start()
        drivers.has_taken_over()
        ends_well(drivers)


def of_another_version(folder: Path, journal: bytes, which: str) -> bytes:
    """Makes the journal one that another version has written. Returns it."""
    path = folder / JOURNAL
    if which == "format":
        path.write_bytes(journal.replace(b"journal 1\n", b"journal 2\n", 1))
        return path.read_bytes()
    records = read(path) or ()
    number = {"protocol": f'"protocol":{entries.PROTOCOL}', "core": f'"core":{entries.document.VERSION}'}[which]
    text = entries._text(records[0].body)
    assert number.encode() in text
    new = RecordFile.new(
        folder, records[0].sequence, b"\x00" + text.replace(number.encode(), number.encode() + b"7", 1)
    )
    for record in records[1:]:
        new.append(record.sequence, record.body)
    new.close()
    return path.read_bytes()


# --- the folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "none", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(file: Path) -> None:
    """Has a file take all that is left."""
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))


def test_the_disk_of_the_journal_is_full(tmp_path: Path, small_disk: Path) -> None:
    """A driver that comes takes nobody over before it can say so; the training goes on all the while."""
    with DyingDrivers(tmp_path, TWO, *FLAGS, kept=small_disk / "kept") as drivers:
        drivers.start()
        drivers.trains(2)
        drivers.die()
        full = small_disk / "full"
        fill(full)
        job = drivers.start()
        job.wait_for("why it waits", lambda: "No space left on device" in job.said())
        drivers.step_after(time.time())
        assert "took over" not in job.said()
        full.unlink()
        drivers.has_taken_over()
        ends_well(drivers)


def test_the_folder_is_removed_while_there_is_no_driver(tmp_path: Path) -> None:
    """Nobody knows of the job any more: another begins, whose agent ends that one's first."""
    with DyingDrivers(tmp_path, TWO, *FLAGS) as drivers:
        drivers.start()
        before = {line["pid"] for line in drivers.trains(2)}
        drivers.die()
        shutil.rmtree(drivers.kept)
        drivers.start()
        drivers.job.wait_for("another job", lambda: {line["pid"] for line in drivers.job.steps()} - before)
        drivers.end_at(5)
        assert drivers.ended() == 0
        one_after_the_other(drivers, before)


def one_after_the_other(drivers: DyingDrivers, before: set[int]) -> None:
    """Those that were there before have done no step since others have begun."""
    lines = drivers.job.steps()
    last = max(line["time"] for line in lines if line["pid"] in before)
    assert last < min(line["time"] for line in lines if line["pid"] not in before)


# --- workers and agents ---------------------------------------------------------------------------------------------


def test_a_worker_ends_with_0_while_there_is_no_driver(tmp_path: Path) -> None:
    """By design the job ends with 1, as with a driver: a rank left early."""
    when = tmp_path / "when"
    with DyingDrivers(tmp_path, TWO, *FLAGS, FAULT="exit 1 1", WHEN=str(when)) as drivers:
        drivers.start()
        pid = next(line["pid"] for line in drivers.trains(2) if line["rank"] == 1)
        drivers.die()
        when.touch()
        drivers.wait_for_end_of(pid)
        drivers.start()
        assert drivers.ended() == 1
        assert "exited with code 0 while" in drivers.said()


@pytest.mark.slow
@hosts_that_join
def test_drivers_die_while_an_agent_joins(tmp_path: Path) -> None:
    flags = (*FLAGS, "--accept-agents", "--join-token-file", str(write_token(tmp_path)))
    with DyingDrivers(tmp_path, "localhost:1\n", "-np", "1", *flags[2:]) as drivers:
        where = where_to_join(drivers.start())
        drivers.trains(1)
        drivers.arm("join", "node-x")
        with joined(tmp_path, "node-x", where, apart=False, timeout_s=120) as agent:
            drivers.trains(2)
            drivers.disarm()
            ends_well(drivers)
            assert agent.wait(150) == 0
        assert "join: before writing fact AgentKept node-x" in drivers.died_at
        assert "join: said start node-x[0]" in drivers.died_at


@pytest.mark.slow
@hosts_that_join
def test_an_agent_is_stopped_when_another_driver_comes(tmp_path: Path) -> None:
    """The job goes on without it when its lease is over, and its workers end when it runs again."""
    flags = (*FLAGS, "--accept-agents", "--join-token-file", str(write_token(tmp_path)), "--agent-timeout", "3")
    with DyingDrivers(tmp_path, "localhost:1\n", *flags) as drivers:
        where = where_to_join(drivers.start())
        with joined(tmp_path, "node-x", where, apart=False, XDG_RUNTIME_DIR=str(drivers.runtime)) as agent:
            drivers.trains(2)
            worker = drivers.worker("node-x[0]")
            agent.send_signal(signal.SIGSTOP)
            drivers.die()
            drivers.start()
            drivers.trains(1)
            agent.send_signal(signal.SIGCONT)
            # Either it is told so, and joins anew; or it sees first that its lease is over.
            drivers.wait_for_end_of(worker)
            ends_well(drivers, losses=1)


@pytest.mark.slow
def test_the_only_agent_is_stopped_when_another_driver_comes(tmp_path: Path) -> None:
    """It may be killed, as it is on the driver's machine: its workers do not train on beside those of the next job."""
    flags = (*FLAGS, "--agent-timeout", "3", "--durable-dir", str(tmp_path / "durable"))
    with DyingDrivers(tmp_path, TWO, *flags) as drivers:
        drivers.start()
        before = {line["pid"] for line in drivers.trains(2)}
        drivers.job.wait_for("a commit on disk", lambda: [*(tmp_path / "durable").glob("commit-*.state")])
        (agent,) = agents_of(drivers.runtime).values()
        os.kill(agent.pid, signal.SIGSTOP)
        drivers.die()
        drivers.start()
        drivers.job.wait_for("others", lambda: {line["pid"] for line in drivers.job.steps()} - before)
        assert not psutil.pid_exists(agent.pid)
        assert "killing it, and its workers with it" in drivers.said()
        drivers.end_at(drivers.last_step() + 5)
        assert drivers.ended() == 0
        one_after_the_other(drivers, before)
        first = min(int(line["step"]) for line in drivers.job.steps() if line["pid"] not in before)
        assert first > 1, "from the last commit on disk"
