"""Scripts that do not use this library, and nodes, that stand still: they are named, in real time."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.network.ports import free_port
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import FORKED, Job
from tests.support.processes.nodes import NodesJob

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.slow]


def test_a_rank_that_sleeps_while_the_others_wait_in_gloo(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "standing_script.py")]
    flags = ("-H", "localhost:3", "-np", "3", "--on-change", "restart")
    with Job(tmp_path, None, *flags, command=command, elasticrun=FORKED) as job:
        (cleared,) = job.wait_for("its end", lambda: job.events("worker_cleared"))
        (suspected,) = job.events("worker_suspected")
        assert (suspected["rank"], suspected["kind"], suspected["ends_s"]) == (1, "awaited", None)
        assert suspected["why"].startswith("its main thread waits for a sleep to end, and others are idle; no rank")
        assert cleared["why"] == "it makes progress again"


def test_a_node_that_is_stopped_with_its_worker(tmp_path: Path) -> None:
    """Of two that start at once either may be the driver: the other is stopped."""
    with NodesJob(tmp_path, endpoint=f"127.0.0.1:{free_port()}", least=2, most=2) as job:
        nodes = [job.start(name) for name in ("first", "second")]
        world = job.wait_for_world("first", "second")
        driver, other = sorted(nodes, key=lambda node: "this node runs the driver" not in node.err)
        (rank,) = (rank for rank, line in world.items() if line["NODE"] == other.name)
        process = psutil.Process(other.process.pid)
        stopped = [process, *process.children(recursive=True)]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            said = f"(rank {rank}) may hang: its host's agent has not reported for "
            job.wait_for("a word", lambda: said in driver.err)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        job.wait_for("another", lambda: "its host's agent reports again" in driver.err)
        job.end(0)
        assert driver.wait() == 0
