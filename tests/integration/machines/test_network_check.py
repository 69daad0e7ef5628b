"""The check of the network over real ones: routes that are missing, links that are slow, agents that are stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.support.network.machines import MachinesJob, kill, listening, made_machines, marks, wait_for
from tests.support.network.namespaces import NamespaceHost
from tests.support.processes.jobs import check_agreement

pytestmark = marks

FLAGS = ("-np", "2", "--min-np", "1", "--check-network", "--port-range", "42000-42031")


def route(host: NamespaceHost, do: str, other: NamespaceHost) -> None:
    """Has a host lose what it sends to another one, or no more: neither reaches the other, and nobody is told."""
    done = host.run(["ip", "route", do, "blackhole", other.ipv4])
    assert done.returncode == 0, done.stderr


def test_a_host_that_another_does_not_reach_waits_outside(tmp_path: Path) -> None:
    with made_machines() as machines, MachinesJob(machines, tmp_path, "node0:2\nnode1:2\n", *FLAGS) as job:
        _, node1, node2 = machines
        job.wait_for_steps(4)
        # Where node1 comes later than a check waits for, node0 has nobody to be checked with.
        assert job.wait_for_event("network_checked")["admitted"] in (["node0", "node1"], ["node1"])
        rounds = len(job.events("round_formed"))
        route(node2, "add", node1)
        at = job.mark()
        job.set_hosts("node0:2\nnode1:2\nnode2:2\n")
        told = job.wait_for_event("host_unready", host="node2")
        assert not told["permanent"]
        assert f"host node1 cannot reach each other at {node2.ipv4}:420" in told["reason"], told
        assert told["reason"].endswith("(check firewalls, routes and --network-interfaces)")
        assert f"host node2 is not ready: {told['reason']}; retrying" in job.said()
        job.wait_for_steps(4, after=job.mark())
        assert {line["size"] for line in job.steps() if line["time"] > at} == {4}
        assert len(job.events("round_formed")) == rounds, "nobody who trains was disturbed"

        route(node2, "del", node1)
        job.wait_for_steps(6, after=at)
        checked = job.wait_for_event("network_checked", admitted=["node2"])
        assert {tuple(link["hosts"]) for link in checked["links"]} == {("node0", "node2"), ("node1", "node2")}
        assert all(link["mbit_s"] > 1 and link["rtt_ms"] < 10_000 for link in checked["links"]), checked
        assert len(job.events("host_unready")) == 1
        for host in (node1, node2):
            assert not listening(host), "an agent listens only while a check runs"
        job.check_no_step_is_lost()
        job.end()


def test_agents_and_connections_end_in_the_middle_of_a_check(tmp_path: Path) -> None:
    flags = (*FLAGS, "--blacklist-cooldown-range", "1", "2")
    with made_machines() as machines, MachinesJob(machines, tmp_path, "node0:2\nnode1:2\n", *flags) as job:
        _, node1, node2 = machines
        job.wait_for_steps(4)
        began = job.mark()
        route(node2, "add", node1)  # so that it takes a while
        job.set_hosts("node0:2\nnode1:2\nnode2:2\n")
        wait_for("a check", lambda: listening(node2))
        agent = job.agent(node2)
        kill(agent)
        job.wait_for_event("host_lost", host="node2")
        wait_for("another agent in a check", lambda: listening(node2))
        assert job.agent(node2) != agent

        # One of a host in use: it is lost, as at any time, and comes back.
        kill(job.agent(node1))
        job.wait_for_event("host_lost", host="node1")
        at = job.mark()
        route(node2, "del", node1)
        job.wait_for_steps(6, after=at)

        # What agents say of a check goes on over the next connection.
        kill(job.agent(node2))
        job.wait_for_event("host_lost", host="node2", count=2)
        route(node2, "add", node1)
        wait_for("a check", lambda: listening(node2))
        node2.cut()
        time.sleep(1.5)
        node2.heal()
        at = job.mark()
        route(node2, "del", node1)
        job.wait_for_steps(6, after=at)
        assert len(job.events("host_lost")) == 3
        check_agreement([line for line in job.steps() if line["time"] > began])
        job.end()


def test_slow_links_and_stopped_agents(tmp_path: Path) -> None:
    with made_machines() as machines, MachinesJob(machines, tmp_path, "node0:2\nnode1:2\n", *FLAGS) as job:
        _, node1, node2 = machines
        words = "tc qdisc add dev eth0 root tbf rate 10mbit burst 32kbit latency 400ms"
        done = node2.run(words.split())
        assert done.returncode == 0, done.stderr
        job.wait_for_steps(4)
        # Its driver's machine acknowledges for it; it says nothing.
        agent = job.agent(node1)
        kill(agent, signal.SIGSTOP)
        job.set_hosts("node0:2\nnode1:2\nnode2:2\n")
        checked = job.wait_for_event("network_checked", admitted=["node2"])
        assert checked["unheard"] == ["node1"]
        kill(agent, signal.SIGCONT)
        (link,) = checked["links"]
        assert link["hosts"] == ["node0", "node2"]
        assert link["mbit_s"] < 40, "10, and what a queue held"
        (text,) = checked["slow"]
        assert text.startswith("the link between hosts node0 and node2 is slow: "), text
        assert " Mbit/s, others " in text
        assert text in job.said()
        job.end()
