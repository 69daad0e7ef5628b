"""A driver that is stopped for longer than any limit blames nobody for what it has missed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes.jobs import Job

pytestmark = [pytest.mark.faults, pytest.mark.slow]

PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "hang_program.py"
TWO = "localhost:1\n127.0.0.1:1\n"
# Longer than what is suspicious (5 s, after ten steps), than what makes a look stale (3 s), and than the limit below.
STOPPED_S = float(os.environ.get("STOPPED_S", "7"))


def test_nobody_is_blamed_for_what_a_stopped_driver_has_missed(tmp_path: Path) -> None:
    env = {"STANDS": "nothing -1 0", "MARK_FILE": str(tmp_path / "mark"), "ONCE": str(tmp_path / "once")}
    flags = ("-np", "2", "--heartbeat-timeout", "4")
    with Job(tmp_path, TWO, *flags, command=[sys.executable, str(PROGRAM)], env=env) as job:
        job.wait_for_steps(2, 15)
        os.kill(job.process.pid, signal.SIGSTOP)
        try:
            end = time.time() + STOPPED_S
            while time.time() < end:
                job.wait_for_steps(2, after=time.time())
        finally:
            os.kill(job.process.pid, signal.SIGCONT)
        # It has read what came meanwhile, and has had time to judge of it.
        at = time.time()
        job.wait_for_steps(2, 60, after=at)
        blamed = ("worker_suspected", "worker_cleared", "worker_hung", "worker_exited", "straggler")
        assert [event for event in job.events() if event["event"] in blamed] == []
        assert [event["size"] for event in job.events("round_formed")] == [2]
