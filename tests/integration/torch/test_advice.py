"""A user is told of what a script has forgotten: a loop outside of ``elastic.run``, then one without a commit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes.jobs import Job

pytestmark = pytest.mark.integration

# It is forked from a process that has the tests' own modules, and some of these commit: no user's does that.
SCRIPT = """
import sys

import torch

import elastic_driver.torch as hvd

for name, module in list(sys.modules.items()):
    if "/tests/" in str(getattr(module, "__file__", None)) and name != "__main__":
        del sys.modules[name]
hvd.init()
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def steps():
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()


@hvd.elastic.run
def train(state):
    steps()


steps()
train(hvd.elastic.TorchState(model=model, optimizer=optimizer))
steps()
"""


def test_what_a_script_has_forgotten_is_said_once_by_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Job(tmp_path, "localhost:2\n", "-np", "2", command=[sys.executable, str(script)]) as job:
        assert job.wait() == 0
        warnings = [line for line in job.said().splitlines() if "elastic_driver: warning: " in line]
    outside, uncommitted = warnings
    assert all(line.startswith("[0]<stderr>:") for line in warnings)
    assert "steps() (train.py:20) has trained for 100 steps outside of elastic.run" in outside
    assert "train() (train.py:23) has trained for 100 steps without a commit" in uncommitted
