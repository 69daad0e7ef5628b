"""Where the ranks of real jobs are: multiples, protected hosts, racks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.jobs import Job, check_agreement
from tests.support.processes.subcommands import elasticrun

pytestmark = [pytest.mark.integration]

ONE, TWO, THREE = "127.0.0.1:1\n", "localhost:2\n", "127.0.0.2:1\n"


def ranks(lines: list[dict[str, Any]]) -> list[str]:
    """The workers of these lines' last round, by rank."""
    last = {line["rank"]: line["worker"] for line in lines}
    return [last[rank] for rank in sorted(last)]


def test_a_world_of_a_multiple_with_rank_0_on_a_protected_host(tmp_path: Path) -> None:
    flags = ("-np", "2", "--min-np", "2", "--np-multiple", "2", "--protect", "localhost,nowhere")
    with Job(tmp_path, ONE + TWO, *flags) as job:
        assert ranks(job.wait_for_steps(2)) == ["localhost[0]#0", "127.0.0.1[0]#0"]
        assert "warning: host nowhere, given by --protect, is not in the job yet" in job.said()
        assert "1 slot of host localhost is not used: --np-multiple 2" in job.said()

        job.set_hosts(ONE + TWO + THREE)
        grown = job.wait_for_steps(4)
        assert ranks(grown) == ["localhost[0]#0", "localhost[1]#0", "127.0.0.1[0]#0", "127.0.0.2[0]#0"]

        # Three are left of four: one of them stands by, in its process, until there are four again.
        os.kill(next(line["pid"] for line in grown if line["worker"] == "127.0.0.1[0]#0"), signal.SIGKILL)
        at = time.time()
        assert ranks(job.wait_for_steps(2, after=at)) == ["localhost[0]#0", "localhost[1]#0"]
        assert "1 slot of host 127.0.0.2 is not used: --np-multiple 2" in job.said()
        at = time.time()
        job.set_hosts(TWO + THREE + "127.0.0.3:1\n")
        again = job.wait_for_steps(4, after=at)
        assert ranks(again) == ["localhost[0]#0", "localhost[1]#0", "127.0.0.2[0]#0", "127.0.0.3[0]#0"]
        stood_by = {line["pid"] for line in grown if line["rank"] == 3}
        assert {line["pid"] for line in again if line["rank"] == 2} == stood_by
        assert [event["size"] for event in job.events("round_formed")] == [2, 4, 2, 4]
        check_agreement(job.steps())


def test_hosts_of_a_rack_are_neighbors_and_have_whole_groups_of_ranks(tmp_path: Path) -> None:
    hosts = "localhost:2 rack=a\n127.0.0.1:3 rack=b  # one too many\n127.0.0.2:2 rack=a spot\n"
    with Job(tmp_path, hosts, "-np", "6", "--min-np", "2", "--ranks-per-host-multiple", "2") as job:
        lines = job.wait_for_steps(6)
        by_rank = [worker.partition("[")[0] for worker in ranks(lines)]
        assert by_rank == ["localhost", "localhost", "127.0.0.2", "127.0.0.2", "127.0.0.1", "127.0.0.1"]
        assert {line["local_size"] for line in lines} == {2}
        labels = {"localhost": ["rack=a"], "127.0.0.1": ["rack=b"], "127.0.0.2": ["rack=a", "spot"]}
        assert job.events("hosts_discovered")[-1]["labels"] == labels
        job_id = job.events("job_started")[0]["job_id"]
        answer = json.loads(elasticrun("status", job_id, "--json").stdout)
        assert {host["name"]: host["labels"] for host in answer["hosts"]} == labels
        assert answer["unused"] == "1 slot of host 127.0.0.1 is not used: --ranks-per-host-multiple 2"
        assert answer["unused"] in answer["explain"]
        assert "rack=a, spot" in elasticrun("status", job_id).stdout

        # Labels that change move nobody, and count from the next round on.
        formed = len(job.events("round_formed"))
        job.set_hosts("localhost:2 rack=a\n127.0.0.1:2 rack=a\n127.0.0.2:2 rack=b\n")
        at = time.time()
        job.wait_for("the new labels", lambda: job.events("hosts_discovered")[-1]["labels"]["127.0.0.2"] == ["rack=b"])
        job.wait_for_steps(6, after=at)
        assert len(job.events("round_formed")) == formed
        job.set_hosts("localhost:2 rack=a\n127.0.0.1:2 rack=b\n127.0.0.2:1 rack=b\n")
        after = job.wait_for_steps(4)
        assert [worker.partition("[")[0] for worker in ranks(after)] == ["localhost"] * 2 + ["127.0.0.1"] * 2
        check_agreement(job.steps())
