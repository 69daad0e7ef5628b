"""Scripts that do not use this library, and nodes, that stand still: they are named, in real time."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import Job
from tests.support.processes.nodes import NodesJob, free_port

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.slow]


def test_a_rank_that_sleeps_while_the_others_wait_in_gloo(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "standing_script.py")]
    flags = ("-H", "localhost:3", "-np", "3", "--on-change", "restart")
    with Job(tmp_path, None, *flags, command=command) as job:
        (cleared,) = job.wait_for("its end", lambda: job.events("worker_cleared"))
        (suspected,) = job.events("worker_suspected")
        assert (suspected["rank"], suspected["kind"], suspected["ends_s"]) == (1, "awaited", None)
        assert suspected["why"].startswith("its main thread waits for a sleep to end, and others do nothing; no rank")
        assert cleared["why"] == "it goes on"


def test_a_node_that_is_stopped_with_its_worker(tmp_path: Path) -> None:
    with NodesJob(tmp_path, endpoint=f"127.0.0.1:{free_port()}", least=2, most=2) as job:
        first = job.start("first")
        second = job.start("second")
        world = job.wait_for_world("first", "second")
        (rank,) = (rank for rank, line in world.items() if line["NODE"] == "second")
        node = psutil.Process(second.process.pid)
        stopped = [node, *node.children(recursive=True)]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            said = f"(rank {rank}) may hang: nothing was heard of its host's agent for "
            job.wait_for("a word", lambda: said in first.err)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        job.wait_for("another", lambda: "its host's agent is heard again" in first.err)
        job.end(0)
        assert first.wait() == 0
