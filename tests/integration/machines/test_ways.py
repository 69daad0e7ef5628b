"""On which ways machines speak to each other, and that a job there is as on one machine."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.support.network.machines import MachinesJob, connections, made_machines, marks
from tests.support.paths import PROGRAMS

pytestmark = marks


def test_functions_run_on_other_machines(tmp_path: Path) -> None:
    with made_machines() as machines:
        program = str(PROGRAMS / "run_over_machines.py")
        done = machines[0].run([sys.executable, program, "node1:1,node2:1", "eth0"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        assert answer["results"] == [["node1", 0, 2.0, "yes"], ["node2", 10, 2.0, "yes"]]
        assert "no luck on node2" in answer["error"]
        assert list(tmp_path.iterdir()) == [], "they need no folder"


def test_ipv6_and_what_workers_get(tmp_path: Path) -> None:
    with made_machines() as machines:
        node0, node1, _ = machines
        if not node1.ipv6:
            pytest.skip("no IPv6 in this kernel")
        flags = ("-np", "4", "--network-interfaces", "fd77::/64", "-x", "GIVEN=by a flag", "-xXDG_DATA_HOME")
        env = {"HOME": "/home-of-driver", "XDG_DATA_HOME": "/data", "XDG_CACHE_HOME": "/cache", "FROM_DRIVER": "yes"}
        output, durable = tmp_path / "output", tmp_path / "durable"
        flags += ("--output-filename", str(output), "--durable-dir", str(durable))
        with MachinesJob(
            machines, tmp_path, f"node0:2\n{node1.name_v6}:2\n", *flags, env={**env, "STEPS": "60"}
        ) as job:
            job.wait_for_steps(4)
            for host in (node0, node1):
                ends = connections(host, job.workers(host))
                assert {ours[0] for ours, _ in ends} == {host.ipv6}
                assert {theirs[0] for _, theirs in ends} == {node0.ipv6, node1.ipv6}
            ends = connections(node1, job.agents(node1))
            assert {theirs[0] for _, theirs in ends} == {node0.ipv6}
            seen = Path(f"/proc/{job.workers(node1)[0]}/environ").read_text().split("\0")
            own = node0.run(["ssh", "node1", "printenv HOME"]).stdout.strip()
            assert {"GIVEN=by a flag", "XDG_DATA_HOME=/data", "FROM_DRIVER=yes", f"HOME={own}"} <= set(seen)
            assert "XDG_CACHE_HOME=/cache" not in seen
            assert f"XDG_RUNTIME_DIR={node1.runtime}" in seen
            assert job.wait() == 0, job.said()[-4000:]
        for rank in range(4):
            assert (output / f"rank.{rank}" / "stdout").read_text().endswith(f"rank {rank} done at step 60\n")
        at = time.time()
        with MachinesJob(
            machines, tmp_path, "node1:2\nnode2:2\n", "-np", "4", "--durable-dir", str(durable), env={"STEPS": "70"}
        ) as job:
            assert job.wait() == 0, job.said()[-4000:]
            assert "at step 70" in job.stdout.read_text()
            again = [line["step"] for line in job.steps() if line["time"] > at]
            assert sorted(again) == [step for step in range(61, 71) for _ in range(4)]
