"""elasticrun join and leave: hosts come to a job that began with none, over TLS, and go without a lost step."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from elastic_driver.launch.agent.machine import addresses
from tests.support.processes.jobs import Job, check_agreement
from tests.support.processes.joined import TOKEN, joined, where_to_join, write_token
from tests.support.processes.subcommands import elasticrun

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not addresses(), reason="this machine has no address but loopback"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can make a namespace of processes for each host"),
]


def test_hosts_join_and_leave(tmp_path: Path, runtime: Path) -> None:
    token = write_token(tmp_path)
    flags = ("-np", "2", "--min-np", "1", "--accept-agents", "--join-token-file", str(token))
    with Job(tmp_path, None, *flags) as job, ExitStack() as agents:
        driver = where_to_join(job)
        assert driver.startswith("https://")
        assert "#sha256:" in driver
        nobody = elasticrun("leave")
        assert (nobody.returncode, nobody.stdout, nobody.stderr.count("\n")) == (2, "", 1)
        first = agents.enter_context(joined(tmp_path, "node-x", driver))
        second = agents.enter_context(joined(tmp_path, "node-y", driver))
        job.wait_for_steps(2)
        shown = elasticrun("status").stdout
        assert [shown.count(f"node-{name}[") for name in "xy"] == [1, 1]
        at = time.time()
        several = elasticrun("leave", "--timeout", "60")
        assert several.returncode == 2, "two of one user's, only here: which?"
        left = elasticrun("leave", "--host", "node-y", "--timeout", "60")
        assert (left.returncode, left.stderr) == (0, "")
        assert second.wait(150) == 0
        lines = job.wait_for_steps(1, after=at)
        check_agreement(job.steps())
        assert {line["worker"].partition("[")[0] for line in lines} >= {"node-x"}
        assert "node-y[" not in elasticrun("status").stdout
        third = agents.enter_context(joined(tmp_path, "node-z", driver))
        at = time.time()
        job.wait_for_steps(2, after=at)
        at = time.time()
        psutil.Process(third.pid).children()[0].send_signal(signal.SIGTERM)
        job.wait_for_steps(1, after=at)
        assert third.wait(150) == 0
        assert elasticrun("end", job.events("job_started")[0]["job_id"]).returncode == 0
        assert job.wait() == 128 + signal.SIGTERM
        assert first.wait(150) == 0
        assert TOKEN not in job.said() + "".join(path.read_text() for path in tmp_path.glob("node-*.txt"))
        assert "exited with code 1" not in job.said(), "nobody failed"


def test_a_host_whose_driver_is_preempted_is_not_done(tmp_path: Path, runtime: Path) -> None:
    """With 0 a Job would count its pod as completed, and make no other for the driver that comes again."""
    token = write_token(tmp_path)
    with (
        Job(tmp_path, None, "-np", "1", "--accept-agents", "--join-token-file", str(token)) as job,
        ExitStack() as all_,
    ):
        agent = all_.enter_context(joined(tmp_path, "node-x", where_to_join(job)))
        job.wait_for_steps(1)
        job.process.terminate()
        assert job.wait() == 128 + signal.SIGTERM
        assert agent.wait(150) == 75


def test_a_wrong_token_joins_nothing(tmp_path: Path, runtime: Path) -> None:
    flags = ("-np", "1", "--accept-agents")
    with Job(tmp_path, None, *flags) as job, ExitStack() as agents:
        driver = where_to_join(job)
        stranger = agents.enter_context(joined(tmp_path, "node-x", driver, token="another token of sixteen"))
        token = tmp_path / "token"
        written = elasticrun("jobs", "--write-join-token", str(token))
        assert written.stdout.startswith(f"elasticrun join --slots N --driver {driver} --join-token-file ")
        right = agents.enter_context(joined(tmp_path, "node-y", driver, token=token.read_text()))
        job.wait_for_steps(1)
        assert stranger.wait(150) == 2
        assert (tmp_path / "node-x.txt").read_text() == (
            f"elasticrun join: cannot join the job at {driver.partition('#')[0]}: this job's join token is not the one "
            "from standard input; elasticrun jobs --write-join-token FILE, on the driver's machine, writes the current "
            "one\n"
        )
        assert "node-x" not in job.said()
        os.kill(right.pid, signal.SIGKILL)
        job.wait_for("the loss", lambda: "node-y" in job.said().partition("round 1: 1 worker")[2])
