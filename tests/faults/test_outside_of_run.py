"""A newcomer whose script calls a collective outside of elastic.run, where no member would ever meet it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes.jobs import PROGRAM as STEPS
from tests.support.processes.jobs import Job

pytestmark = pytest.mark.faults

PROGRAM = """
import runpy
import sys

import numpy as np

import elastic_driver as hvd

hvd.init()
hvd.allreduce(np.ones(1), name="outside")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("hosts", ["localhost:2\n127.0.0.1:1\n", "localhost:3\n"], ids=["another", "the-same"])
def test_a_collective_outside_of_run_costs_the_newcomer_not_the_job(tmp_path: Path, hosts: str) -> None:
    (tmp_path / "outside.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "outside.py"), str(STEPS)]
    flags = ("-np", "2", "--min-np", "1", "--max-np", "3")
    with Job(tmp_path, "localhost:2\n", *flags, command=command) as job:
        job.wait_for_steps(2)
        job.set_hosts(hosts)
        job.wait_for("the newcomer's end", lambda: "gets no new workers: worker " in job.said())
        steps = len(job.steps())
        job.wait_for("the members", lambda: len(job.steps()) > steps + 4)
        assert {line["size"] for line in job.steps()} == {2}
        assert len(job.events("round_formed")) == 1
        assert "outside of elastic.run, in a worker that joins a running job" in job.said()
