"""A job with a chief over several machines: addresses that all of them reach, and machines that are cut off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.network.machines import MachinesJob, made_machines, marks, wait_for_nobody
from tests.support.network.namespaces import NamespaceHost, Namespaces
from tests.support.paths import PROGRAMS, ROOT, SUPPORT

pytestmark = marks


class ChiefJob(MachinesJob):
    """Its chief is ``chief_program.py``, its servers those of the fake TensorFlow."""

    def __init__(self, machines: Namespaces, folder: Path, hosts: str, *flags: str) -> None:
        self.orders = folder / "orders"
        command = [sys.executable, str(PROGRAMS / "chief_program.py"), str(self.orders)]
        path = f"PYTHONPATH={SUPPORT / 'fake_tensorflow'}:{ROOT}"
        more = ("--parameter-servers", "1", "-x", path)
        super().__init__(machines, folder, hosts, *more, *flags, command=command)

    def printed(self, word: str) -> list[Any]:
        prefix = f"[chief]<stdout>:{word} "
        lines = self.stdout.read_text(errors="replace").splitlines()
        return [json.loads(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)]

    def order(self, text: str) -> None:
        with self.orders.open("a") as file:
            file.write(f"{text}\n")


def reaches(host: NamespaceHost, address: str) -> bool:
    """Whether somebody answers there, as this machine sees it."""
    name, _, port = address.rpartition(":")
    program = f"import socket; socket.create_connection(({name!r}, {port}), timeout=5)"
    return host.run([sys.executable, "-c", program]).returncode == 0


def test_all_machines_reach_all_servers_and_the_chief_is_told_of_one_that_is_cut_off(tmp_path: Path) -> None:
    # The parameter server's machine is the driver's own, on which alone the job begins.
    flags = ("-np", "1", "--host-timeout", "3")
    with made_machines() as machines, ChiefJob(machines, tmp_path, "node0:2\n", *flags) as job:
        (config,) = job.wait_for("the chief", lambda: job.printed("cluster"))
        job.set_hosts("node0:2\nnode1:1\nnode2:1\n")
        servers = job.wait_for(
            "all servers", lambda: next((s for s in job.printed("servers")[-1:] if len(s["workers"]) == 3), None)
        )
        assert servers["ps"] == config["cluster"]["ps"]
        for address in (*servers["ps"], *servers["workers"]):
            assert all(reaches(host, address) for host in machines), address
        of_chief = config["cluster"]["chief"][0].rpartition(":")[0]
        assert of_chief == servers["ps"][0].rpartition(":")[0] != "127.0.0.1"
        machines[2].cut()
        left = job.wait_for(
            "one is gone", lambda: next((s for s in job.printed("servers")[-1:] if len(s["workers"]) == 2), None)
        )
        (lost,) = servers["workers"].keys() - left["workers"].keys()
        assert not any(leaves for leaves, _ in left["workers"].values())
        job.set_hosts("node0:2\nnode1:1\n")
        machines[2].heal()
        wait_for_nobody(machines[2])  # its agent ends them, which nobody can wait for who has lost the machine
        job.order("exit 0")
        assert job.wait() == 0, job.said()[-4000:]
        assert lost not in left["workers"]


def test_a_parameter_server_that_is_not_heard_is_waited_for(tmp_path: Path) -> None:
    flags = ("-np", "1", "--min-np", "1", "--protect", "node1", "--host-timeout", "2", "--agent-timeout", "10")
    with made_machines(2) as machines, ChiefJob(machines, tmp_path, "node0:1\nnode1:1\n", *flags) as job:
        job.wait_for("the chief", lambda: job.printed("cluster"))
        machines[1].cut()
        job.wait_for("a warning", lambda: "has variables that no other process has" in job.said())
        machines[1].heal()
        job.wait_for("it responds again", lambda: "host node1 responds again" in job.said())
        assert job.events("worker_exited") == []
        job.order("exit 0")
        assert job.wait() == 0, job.said()[-4000:]
