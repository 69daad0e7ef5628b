"""``-x``: what workers find in their environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.processes.jobs import capture_elasticrun

pytestmark = [pytest.mark.integration]


def test_variables_reach_the_workers_and_flags_win(tmp_path: Path) -> None:
    words = (
        "-x",
        "MINE=a b",
        "-x",
        "OURS",
        "-x",
        "HOROVOD_CYCLE_TIME=9",
        "-x",
        "HOROVOD_RANK=7",
        "--cycle-time-ms",
        "3",
    )
    script = 'echo "$MINE|$OURS|$HOROVOD_CYCLE_TIME|$HOROVOD_RANK|$ELASTIC_DRIVER_JOIN_TOKEN"'
    env = {**os.environ, "MINE": "not this", "OURS": "c", "ELASTIC_DRIVER_JOIN_TOKEN": "secret"}
    ran = capture_elasticrun("-np", "1", *words, "sh", "-c", script, env=env, cwd=tmp_path)
    assert ran.stdout == "[0]<stdout>:a b|c|3.0|0|\n", ran.stderr
