"""Frozen and hung workers, and a driver that is stopped for a while."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.processes.jobs import Job, check_agreement

pytestmark = pytest.mark.faults

TWO = "localhost:1\n127.0.0.1:1\n"
THREE = "localhost:2\n127.0.0.1:1\n"


def test_a_frozen_worker_is_killed_and_the_job_goes_on(tmp_path: Path) -> None:
    with Job(tmp_path, TWO, "-np", "2", "--min-np", "1", "--heartbeat-timeout", "4") as job:
        before = job.wait_for_steps(2)
        at = time.time()
        os.kill(next(line["pid"] for line in before if line["rank"] == 0), signal.SIGSTOP)
        job.wait_for_steps(1, after=at)
        check_agreement(job.steps())
        job.wait_to_say("host localhost lost (worker localhost[0] hung: no heartbeat for ")
        job.wait_for("its stack", lambda: "most recent call first" in job.said() and "step_program.py" in job.said())
        assert [event["worker"] for event in job.events("worker_hung")] == ["localhost[0]#0"]


def test_a_deadlock_in_the_users_code(tmp_path: Path) -> None:
    env = {"FAULT": "deadlock 1 10", "ONCE": str(tmp_path / "once"), "STEPS": "60", "STEP_S": "0.01"}
    flags = ("-np", "2", "--min-np", "1", "--hang-timeout", "4")
    with Job(tmp_path, TWO, *flags, env=env) as job:
        assert job.wait() == 0
        check_agreement(job.steps())
        assert {line["size"] for line in job.steps()} == {2, 1}
        # The other waited for it just as long.
        assert [event["worker"] for event in job.events("worker_hung")] == ["127.0.0.1[0]#0"]
        assert "no progress for " in job.said()
        assert "in deadlock" in job.said(), "the function it hangs in"


def test_survivors_wait_for_a_driver_that_is_stopped_while_one_dies(tmp_path: Path) -> None:
    """With the patience of real jobs it takes more than a minute of silence."""
    env = {"ELASTIC_DRIVER_PATIENCE_S": "0.5", "COMMIT_EVERY": "3"}
    with Job(tmp_path, THREE, "-np", "3", "--min-np", "2", "--heartbeat-timeout", "4", env=env) as job:
        before = job.wait_for_steps(3)
        survivors = [line["pid"] for line in before if line["rank"] in (0, 1)]
        os.kill(job.process.pid, signal.SIGSTOP)
        try:
            os.kill(next(line["pid"] for line in before if line["rank"] == 2), signal.SIGKILL)
            until = time.time() + 6.0  # longer than the heartbeat timeout, and than they would try
            while time.time() < until:
                assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in survivors)
                time.sleep(0.05)
        finally:
            os.kill(job.process.pid, signal.SIGCONT)
        at = time.time()
        job.wait_for_steps(2, after=at)
        check_agreement(job.steps())
        # Their agent has them wait; it was never gone.
        assert "the driver has not answered" not in job.said()
        assert job.events("worker_hung") == []
        assert [event["size"] for event in job.events("round_formed")] == [3, 2]
        assert {event["worker"] for event in job.events("worker_exited")} <= {"127.0.0.1[0]#0"}


def test_who_computes_on_after_an_abort_is_not_frozen(tmp_path: Path) -> None:
    """It learns of the other's death only when its evaluation is over."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nimport numpy as np\nimport elastic_driver as hvd\nhvd.init()\n"
        "@hvd.elastic.run\ndef train(state):\n    hvd.allreduce(np.ones(1), name='x')\n    state.commit()\n"
        "    if hvd.size() == 2:\n        if hvd.rank() == 1:\n            os._exit(3)\n        time.sleep(6)\n"
        "        hvd.allreduce(np.ones(1), name='x')\n"
        "train(hvd.elastic.ObjectState())\n"
    )
    flags = ("-np", "2", "--min-np", "1", "--heartbeat-timeout", "4")
    with Job(tmp_path, "localhost:1\n127.0.0.1:1\n", *flags, command=[sys.executable, str(program)]) as job:
        assert job.wait() == 0, job.said()
        assert job.events("worker_hung") == []
        assert [event["size"] for event in job.events("round_formed")] == [2, 1]
