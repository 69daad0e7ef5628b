"""A plain DDP script over two machines: its ranks meet at rank 0's host, and again after a loss."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.support.network.machines import MachinesJob, made_machines, marks
from tests.support.paths import PROGRAMS

pytestmark = marks


def test_a_script_for_torchrun_over_two_machines(tmp_path: Path) -> None:
    files = {"CHECKPOINT": tmp_path / "model.pt", "STOP": tmp_path / "stop", "FAIL": tmp_path / "fail"}
    words = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", **{name: str(file) for name, file in files.items()}}
    with (
        made_machines(2) as machines,
        MachinesJob(
            machines,
            tmp_path,
            "node0:1\nnode1:1\n",
            *("-np", "2", "--min-np", "1", "--on-change", "restart", "--port-range", "42000-42031"),
            *(word for name in (*words, "STEP_LOG") for word in ("-x", name)),
            command=[sys.executable, str(PROGRAMS / "ddp_program.py")],
            env=words,
        ) as job,
    ):
        node0, _ = machines
        job.wait_for_steps(2)
        assert {(line["MASTER_ADDR"], line["GROUP_RANK"] == str(line["rank"])) for line in job.steps()} == {
            (node0.ipv4, True)
        }
        ports = {int(line["MASTER_PORT"]) for line in job.steps()}
        assert len(ports) == 1
        assert 42000 <= ports.pop() <= 42031
        # The first rank's host stays; with the other one its generation ends.
        at = job.mark()
        os.kill(next(line["pid"] for line in reversed(job.steps()) if line["rank"] == 1), signal.SIGKILL)
        job.wait_for_steps(1, after=at)
        last = job.steps()[-1]
        assert (last["TORCHELASTIC_RESTART_COUNT"], last["MASTER_ADDR"]) == ("1", "127.0.0.1")
        files["STOP"].touch()
        assert job.wait() == 0, job.said()
