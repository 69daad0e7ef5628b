"""Processes whose end takes long: the others are told at once, and the place is kept until it is over."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.support.processes.jobs import PROGRAM, Job, check_agreement

pytestmark = pytest.mark.faults

TWO = "localhost:1\n127.0.0.1:1\n"
PIDFD_THREAD = os.O_EXCL


def can_watch_threads() -> bool:
    try:
        os.close(os.pidfd_open(threading.get_native_id(), PIDFD_THREAD))
    except OSError:
        return False
    return True


pytestmark = [pytest.mark.faults, pytest.mark.skipif(not can_watch_threads(), reason="needs Linux 6.9")]


def pid_of(job: Job, worker: str) -> int:
    return int(next(line["pid"] for line in job.events("worker_started") if line["worker"] == worker))


def order(job: Job) -> list[str]:
    return [line["event"] for line in job.events()]


def test_survivors_go_on_while_a_large_process_is_taken_down(tmp_path: Path) -> None:
    """A GB in small pages takes the system a tenth of a second or more to free; its sockets close no earlier."""
    program = tmp_path / "program.py"
    steps = PROGRAM
    program.write_text(
        "import mmap, os, runpy\nimport numpy as np\n"
        "if os.environ['ELASTIC_DRIVER_WORKER'].startswith('127'):\n"
        "    ballast = mmap.mmap(-1, 1 << 30)\n"
        "    ballast.madvise(mmap.MADV_NOHUGEPAGE)\n"
        "    np.frombuffer(ballast, np.uint8)[::4096] = 1\n"
        f"runpy.run_path({str(steps)!r}, run_name='__main__')\n"
    )
    with Job(tmp_path, TWO, "-np", "2", "--min-np", "1", command=[sys.executable, str(program)]) as job:
        job.wait_for_steps(2)
        os.kill(pid_of(job, "127.0.0.1[0]#0"), signal.SIGKILL)
        job.wait_for("its end", lambda: "worker_exited" in order(job))
        seen = order(job)
        # Where the whole machine was busy, whoever looks may find both at once.
        if "worker_dying" in seen:
            assert seen.index("worker_dying") < seen.index("worker_exited")
        # Its round's line comes when the survivors train again.
        lost = "host 127.0.0.1 lost (worker 127.0.0.1[0] killed by SIGKILL)"
        job.wait_for("the round's line", lambda: lost in job.said())
        assert job.said().count("(pid") == 1, "it is told once"
        job.wait_for_steps(1)
        check_agreement(job.steps())
        exited = job.events("worker_exited")[0]
        assert (exited["returncode"], exited["expected"]) == (-9, False)


def test_an_exit_code_is_known_before_the_end(tmp_path: Path) -> None:
    env = {"FAULT": "exception 1 10", "ONCE": str(tmp_path / "once")}
    with Job(tmp_path, TWO, "-np", "2", "--min-np", "1", env=env) as job:
        job.wait_for_steps(1)
        job.wait_to_say("worker 127.0.0.1[0] exited with code 1")
        assert [line["how"] for line in job.events("worker_dying")] in ([], ["exited with code 1"])
        check_agreement(job.steps())


def test_a_good_end_is_no_early_news(tmp_path: Path) -> None:
    with Job(tmp_path, TWO, "-np", "2", env={"STEPS": "20"}) as job:
        assert job.wait() == 0
        assert job.events("worker_dying") == []


def test_a_process_that_replaces_itself_does_not_die(tmp_path: Path) -> None:
    """exec ends all threads but one, under the same process id."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\nimport elastic_driver as hvd\nhvd.init()\nhvd.barrier()\nhvd.shutdown()\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(0.5)'])\n"
    )
    with Job(tmp_path, TWO, "-np", "2", command=[sys.executable, str(program)]) as job:
        assert job.wait() == 0, job.said()
        assert job.events("worker_dying") == []


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0, reason="may not dump core")
def test_nobody_waits_for_a_core_dump(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    steps = PROGRAM
    program.write_text(
        f"import resource, runpy, os\nos.chdir({str(tmp_path)!r})\n"
        "hard = resource.getrlimit(resource.RLIMIT_CORE)[1]\nresource.setrlimit(resource.RLIMIT_CORE, (hard, hard))\n"
        f"runpy.run_path({str(steps)!r}, run_name='__main__')\n"
    )
    with Job(tmp_path, TWO, "-np", "2", "--min-np", "1", command=[sys.executable, str(program)]) as job:
        job.wait_for_steps(2)
        os.kill(pid_of(job, "127.0.0.1[0]#0"), signal.SIGSEGV)
        job.wait_for_steps(1)
        job.wait_for("its end", lambda: "worker_exited" in order(job))
        crashed = "(worker 127.0.0.1[0] crashed (it is dumping core))"
        job.wait_for("what it says of it", lambda: crashed in job.said() or "SIGSEGV" in job.said())
        check_agreement(job.steps())
