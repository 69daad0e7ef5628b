"""Hosts that run different scripts, here because it was changed while the job runs: the user is told once, by names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes.jobs import Job

pytestmark = pytest.mark.integration

SCRIPT = """
import numpy as np

import elastic_driver as hvd

hvd.init()


@hvd.elastic.run
def train(state):
    while state.left:
        hvd.allreduce(np.zeros(1))
        state.left -= hvd.size() == 2
        state.commit()


train(hvd.elastic.ObjectState(left=10))
"""


def test_a_host_with_another_script_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Job(tmp_path, "localhost:1\n", "-np", "1", command=[sys.executable, str(script)]) as job:
        job.wait_for("the first round", lambda: job.events("round_formed"))
        script.write_text(SCRIPT + "# mended\n")
        job.set_hosts("localhost:1\n127.0.0.1:1\n")
        assert job.wait() == 0
        told = f"warning: {script} is not the same file on hosts localhost and 127.0.0.1: their workers run different"
        assert job.said().count(told) == 1
        assert job.said().count("is not the same file") == 1
