"""Jobs of nodes on several machines: one command on each, in any order, and one of them is the driver."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.support.network.machines import made_machines, marks
from tests.support.paths import ROOT
from tests.support.processes.nodes import NodesJob

pytestmark = marks


def _names(job: NodesJob, *names: str) -> list[str]:
    """Blocks until the job runs on these nodes. Their names in the order of their ranks."""
    world = job.wait_for_world(*names)
    ordered = [line for _, line in sorted(world.items())]
    assert [line["GROUP_RANK"] for line in ordered] == [str(rank) for rank in range(len(names))]
    assert len({(line.get("MASTER_ADDR"), line.get("MASTER_PORT")) for line in ordered}) == 1
    if "met" in ordered[0]:
        assert ordered[0]["met"] == [str(rank) for rank in range(len(names))]
    return [line["NODE"] for line in ordered]


def test_nodes_come_in_any_order_are_lost_and_come_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token of the test's own\n")
    token.chmod(0o600)
    given = {"join_token_file": str(token)}
    # As in a headless service: the name is there when the first pod is.
    endpoint = "first.service:29400"
    with made_machines(sshd=False) as machines, NodesJob(tmp_path, endpoint=endpoint, least=2, most=3) as job:
        node0, node1, node2 = machines
        open_one = job.start("open", host=node2)
        one = job.start("one", host=node1, given=given, node_rank=2)
        job.wait_for("it waits for the name", lambda: "; waiting for up to " in one.err)
        assert open_one.wait() == 2
        assert "need a secret" in open_one.err
        assert "--join-token-file" in open_one.err
        for host in machines:
            with (host.etc / "hosts").open("a") as hosts:
                hosts.write(f"{node0.ipv4} first.service\n")
        two = job.start("two", host=node2, env={"ELASTIC_DRIVER_JOIN_TOKEN_FILE": str(token)}, node_rank=1)
        job.wait_for("it waits for the driver", lambda: "cannot reach the driver yet" in two.err)
        driver = job.start("zero", host=node0, given=given)
        order = _names(job, "one", "two", "zero")
        assert "this node runs the driver" in driver.err
        stranger = job.start("stranger", host=node2, env={"ELASTIC_DRIVER_JOIN_TOKEN": "a token of another job"})
        assert stranger.wait() == 2
        assert "check that all nodes have the same join token" in stranger.err

        # A node is killed, and comes again: behind those that stayed.
        one.signal(signal.SIGKILL)
        order.remove("one")
        assert _names(job, "two", "zero") == order
        one = job.start("one", host=node1, given=given, node_rank=2)
        assert _names(job, "two", "zero", "one") == [*order, "one"]

        # The driver is killed: the others end their workers, and wait for it.
        driver.signal(signal.SIGKILL)
        job.wait_for(
            "the others wait", lambda: all("its workers on this node were stopped" in node.err for node in (one, two))
        )
        assert not job.living()
        driver = job.start("zero", host=node0, given=given, node_rank=0)
        assert _names(job, "zero", "two", "one")[0] == "zero"
        job.end(0)
        assert [node.wait() for node in (driver, one, two)] == [0, 0, 0]
        assert all("the job has succeeded" in node.err for node in (one, two))
        # What a driver has left that was killed goes with the next look.
        assert "no job of yours" in node0.run([sys.executable, "-m", "elastic_driver", "jobs"], cwd=ROOT).stdout
