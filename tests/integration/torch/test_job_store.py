"""HTTPStore inside a job of elasticrun: workers of two hosts, each through its agent, share the driver's keys."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.processes.jobs import Job

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROGRAM = """
    import json, os
    from datetime import timedelta
    import torch, torch.distributed as dist
    import elastic_driver.torch as hvd

    hvd.init()
    limit = timedelta(seconds=100)
    store = hvd.HTTPStore(scope="group", timeout=limit)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    keys = hvd.HTTPStore(scope="keys", timeout=limit)
    count = keys.add("count", 1)
    if hvd.rank() == 0:
        keys.set("large", bytes(20 << 20) + b"end")
    large = keys.get("large")
    keys.queue_push(f"queue {1 - hvd.rank()}", str(hvd.rank()))
    got = keys.queue_pop(f"queue {hvd.rank()}")
    try:
        keys.wait(["nobody's"], timedelta(milliseconds=100))
    except dist.DistStoreError as error:
        said = str(error)
    line = {"rank": hvd.rank(), "sum": total.item(), "large": len(large), "got": got.decode(), "said": said}
    with open(os.environ["STEP_LOG"], "a") as log:
        log.write(json.dumps(line) + chr(10))
    keys.barrier("end", hvd.size())
"""


def test_workers_share_the_keys_of_their_job(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(program)]
    with Job(tmp_path, None, "-np", "2", "-H", "localhost:1,127.0.0.1:1", command=command) as job:
        assert job.wait() == 0, job.said()
        lines = sorted(
            (json.loads(line) for line in job.step_log.read_text().splitlines()), key=lambda line: line["rank"]
        )
    expected = {"sum": 2.0, "large": (20 << 20) + 3, "said": "wait timeout after 100ms, keys: /nobody's"}
    assert lines == [{"rank": rank, "got": str(1 - rank), **expected} for rank in range(2)]
