"""elasticrun doctor over machines: by ssh, and a network between them that may not work."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from tests.support.network.machines import command_of, made_machines, marks, wait_for
from tests.support.network.namespaces import NamespaceHost

pytestmark = marks


def doctor(host: NamespaceHost, *words: str) -> tuple[int, dict[str, Any]]:
    """Its exit code, and what it has found, run on this machine."""
    command = [sys.executable, "-m", "elastic_driver", "doctor", "--json", "--timeout", "300", *words]
    ran = host.run(command, capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    return ran.returncode, json.loads(ran.stdout)


def stopping(found: dict[str, Any]) -> dict[str, str]:
    return {host: each["what"] for each in found["problems"] if each["level"] == "stops" for host in each["hosts"]}


def test_machines_are_looked_at_by_ssh_and_each_link_is_measured() -> None:
    """From a machine that is none of them."""
    with made_machines() as machines:
        code, found = doctor(machines[0], "-H", "node1:2,node2:2")
        assert (code, stopping(found)) == (0, {})
        assert [link["hosts"] for link in found["network"]] == [["node1", "node2"]]
        assert {host: facts["meeting"]["size"] for host, facts in found["hosts"].items()} == {"node1": 2, "node2": 2}
        for facts in found["hosts"].values():
            assert abs(facts["clock_s"]) <= facts["clock_error_s"]


def test_a_link_that_does_not_work_is_found_though_all_hosts_answer() -> None:
    with made_machines() as machines:
        node0, node1, node2 = machines
        node1.lose_way_to(node2)
        code, found = doctor(node0, "-H", "node0,node1,node2")
        assert code == 1
        [(host, why)] = stopping(found).items()
        assert host in ("node1", "node2")
        assert "cannot reach" in why
        assert found["hosts"]["node0"]["meeting"]["size"] == 2


def test_a_machine_that_is_another_than_the_user_knows_is_a_line() -> None:
    with made_machines() as machines:
        node0, _, node2 = machines
        node2.stop_sshd()
        node2.change_host_key()
        node2.start_sshd()
        code, found = doctor(node0, "-H", "node1,node2")
        assert code == 1
        assert list(stopping(found)) == ["node2"]
        assert "Host key verification failed" in stopping(found)["node2"]
        assert found["hosts"]["node1"]["meeting"]["correct"] is True


def test_ctrl_c_leaves_nothing_on_any_machine() -> None:
    """While one of them does not answer."""
    with made_machines() as machines:
        node0, node1, node2 = machines
        node2.cut()
        command = [sys.executable, "-m", "elastic_driver", "doctor", "--timeout", "300", "-H", "node1,node2"]
        process = node0.popen(command)
        wait_for("a worker", lambda: any("elastic_driver.doctor.worker" in command_of(pid) for pid in node1.pids()))
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
