"""Hosts that cannot be reached, yet or at all, and agents that something else than ssh starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests.support.network.machines import MachinesJob, made_machines, marks
from tests.support.network.namespaces import NamespaceHost

pytestmark = marks

COOLDOWN = ("--blacklist-cooldown-range", "60", "60")


def test_hosts_that_are_not_ready_or_never_will_be(tmp_path: Path) -> None:
    with made_machines() as machines:
        _, node1, node2 = machines
        node1.stop_sshd()  # it boots
        node2.stop_sshd()
        node2.change_host_key()  # it is another machine than the user knows
        node2.start_sshd()
        hosts = "node0:2\nnode1:2\nnode2:2\n"
        with MachinesJob(machines, tmp_path, hosts, "-np", "2", "--min-np", "1") as job:
            job.wait_for_steps(2)
            told = job.wait_for_event("host_unready", host="node1")
            assert "Connection refused" in told["reason"]
            assert not told["permanent"]
            told = job.wait_for_event("host_unready", host="node2")
            assert "Host key verification failed" in told["reason"]
            assert told["permanent"]
            at = job.mark()
            node1.start_sshd()
            job.wait_for_steps(4, after=at)
            assert len(job.events("host_unready")) == 2, "each is told once"
            assert "blacklist" not in job.said()
            # An agent that is there needs no ssh server.
            node1.stop_sshd()
            job.wait_for_steps(4, after=job.mark())
            node1.start_sshd()
            job.end()


def test_no_host_can_be_used(tmp_path: Path) -> None:
    with made_machines() as machines:
        flags = ("-np", "2", "--remote-python", "/nope/python")
        with MachinesJob(machines, tmp_path, "node1:2\nnode2:2\n", *flags) as job:
            assert job.wait() == 2
            last = job.said().splitlines()[-1]
            assert "node1" in last, last
            assert "node2" in last, last
            assert last.count("/nope/python") >= 2, last
            assert "Traceback" not in job.said()


def test_a_ticket_that_two_use_is_good_for_none(tmp_path: Path) -> None:
    launch = tmp_path / "launch.sh"
    # On node2 a stranger has read the command and runs it first; the agent is started when he is in the job.
    launch.write_text(
        f"""if [ "$1" = node2 ]; then
    setsid ssh "$1" "$2" &
    read go < {tmp_path}/go
fi
exec ssh "$1" "$2"
"""
    )
    os.mkfifo(tmp_path / "go")
    flags = ("--launcher-command", f"sh {launch} {{host}} {{command}}", "--launcher-bootstrap", "command")
    hosts = "node0:2\nnode1:2\nnode2:2\n"
    with (
        made_machines() as machines,
        MachinesJob(machines, tmp_path, hosts, "-np", "4", "--min-np", "2", *flags) as job,
    ):
        job.wait_for_event("host_ready", host="node2")
        (tmp_path / "go").write_text("\n")
        told = job.wait_for_event("host_unready", host="node2")
        assert told["permanent"]
        assert told["reason"].count(f" at {machines[2].ipv4}") == 2, told
        job.wait_for("that neither runs", lambda: not job.agents(machines[2]))
        job.wait_for_steps(4, after=job.mark())
        assert "the host is excluded from the job" in job.said()
        assert len(job.events("host_ready")) == 3
        # The host of a ticket that nobody else has used is none the worse.
        assert job.workers(machines[1])
        job.end()


def command_lines(host: NamespaceHost) -> list[str]:
    """Of all processes on a machine."""
    lines = []
    for pid in host.pids():
        with contextlib.suppress(OSError):  # it has just ended
            lines.append(Path(f"/proc/{pid}/cmdline").read_text())
    return lines


def test_no_ticket_is_on_a_command_line_where_standard_input_arrives(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f"""#!/bin/sh
echo "$*" >> {tmp_path}/calls
exec ssh "$@"
""")
    wrapper.chmod(0o755)
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\ntouch {tmp_path}/taken\n")
    ssh.chmod(0o755)
    for folder, variable in ((tmp_path / "1", str(wrapper)), (tmp_path / "2", str(ssh))):
        folder.mkdir()
        with (
            made_machines() as machines,
            MachinesJob(
                machines,
                folder,
                "node0:2\nnode1:2\n",
                *("-np", "4"),
                env={"OMPI_MCA_plm_rsh_agent": variable},
            ) as job,
        ):
            job.wait_for_steps(4)
            lines = [line for host in machines for line in command_lines(host)]
            assert any("elastic_driver.launch.agent" in line for line in lines)
            assert not any("--bootstrap" in line for line in lines)
            assert "can read it" not in job.said()
            job.end()
    assert "--given-within" in (tmp_path / "calls").read_text()
    assert "--bootstrap" not in (tmp_path / "calls").read_text()
    assert not (tmp_path / "taken").exists(), "the variable names ssh, which is dialled as ever"


def test_an_rsh_agent_that_forwards_no_input(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text(f"""#!/bin/sh
echo "$*" >> {tmp_path}/calls-$1
exec ssh -n "$@"
""")
    agent.chmod(0o755)
    with (
        made_machines() as machines,
        MachinesJob(machines, tmp_path, "node0:1\nnode1:1\nnode2:1\n", "-np", "3", "--rsh-agent", str(agent)) as job,
    ):
        job.wait_for_steps(3)
        for name in ("node1", "node2"):
            first, second = (tmp_path / f"calls-{name}").read_text().splitlines()
            assert "--given-within" in first
            assert "--bootstrap" in second
        assert job.said().count("every user of the job's machines can read it") == 1
        assert job.events("host_unready") == []
        job.end()


def test_a_folder_that_is_missing_there(tmp_path: Path) -> None:
    outside = tmp_path / "parent"
    folder = outside / "only-here"
    folder.mkdir(parents=True)
    hide = tmp_path / "hide.sh"
    hide.write_text(f'mount -t tmpfs none {outside}\nexec "$@"\n')
    launch = tmp_path / "launch.sh"
    launch.write_text(f'[ "$1" = node2 ] && hide="unshare -m sh {hide}"\nexec ssh "$1" $hide "$2"\n')
    flags = ("--launcher-command", f"sh {launch} {{host}} {{command}}")
    with made_machines() as machines:
        hosts = "node1:2\nnode2:2\n"
        with MachinesJob(machines, tmp_path, hosts, "-np", "2", *COOLDOWN, *flags, cwd=folder) as job:
            job.wait_for("the reason", lambda: f"on host node2 in the folder {folder}: No such file" in job.said())
            job.wait_for_steps(2)
            job.end()
        with MachinesJob(machines, tmp_path, "node2:2\n", "-np", "2", *flags, cwd=folder) as job:
            assert job.wait() == 2
            assert f"cannot start workers on host node2 in the folder {folder}" in job.said().splitlines()[-1]
