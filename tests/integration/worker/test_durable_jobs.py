"""Jobs that outlive all their processes: killed as a whole, or member by member."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes.jobs import PATIENCE_S, Job, check_agreement

pytestmark = [pytest.mark.integration]


def number_of(commit: Path) -> int:
    return int(commit.stem.split("-")[1])


def test_a_killed_job_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    flags = ("-np", "2", "--min-np", "2", "--durable-dir", str(folder))
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with Job(first, "localhost:2\n", *flags) as job:
        job.wait_for_steps(2, 10)
        with Job(second, "localhost:2\n", *flags) as other:
            assert other.wait() == 2
            assert "another job is using it" in other.said()
        job.wait_for("two commits on disk", lambda: len([*folder.glob("commit-*.state")]) > 1)
        job.process.send_signal(signal.SIGKILL)
        job.process.wait(PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while job.leftovers() and time.monotonic() < end:
            time.sleep(0.05)
        assert not job.leftovers()
        done = {line["step"]: line["weights"] for line in job.steps()}
    kept, newest = sorted(folder.glob("commit-*.state"))[-2:]
    assert re.fullmatch(r"commit-\d{12}-1\.state", newest.name), "with the driver's leave, of its first round"
    newest.write_bytes(newest.read_bytes()[:100])
    with Job(second, "localhost:2\n", *flags, env={"STEPS": str(max(done) + 5)}) as job:
        assert job.wait() == 0, job.said()
        assert "trying the previous commit" in job.said()
        assert "resuming from commit" in job.said()
        lines = job.steps()
    assert lines[0]["step"] == number_of(kept) + 1 <= max(done)
    check_agreement(lines)
    again = {line["step"]: line["weights"] for line in lines}
    assert all(again[step] == done[step] for step in done if step in again), "the same training, bit for bit"
    assert number_of(max(folder.glob("commit-*.state"))) == max(done) + 5


def test_all_members_lost_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "commits"
    flags = ("-np", "1", "--min-np", "1", "--max-np", "1", "--durable-dir", str(folder))
    flags += ("--blacklist-cooldown-range", "1", "1")
    with Job(tmp_path, "localhost:1\n127.0.0.1:1\n", *flags) as job:
        job.wait_for("commits on disk", lambda: max(map(number_of, folder.glob("commit-*.state")), default=0) > 5)
        before = job.steps()
        os.kill(before[-1]["pid"], signal.SIGKILL)
        after = job.wait_for("another process", lambda: [x for x in job.steps() if x["pid"] != before[-1]["pid"]])
        assert after[0]["step"] > 5, job.said()
        job.wait_to_say("resuming from commit")
