"""Hosts that cannot be reached, yet or at all, and agents that something else than ssh starts."""

from __future__ import annotations

from pathlib import Path

from machines import MachinesJob, made_machines, marks

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


def test_a_ticket_is_good_once(tmp_path: Path) -> None:
    launch = tmp_path / "launch.sh"
    launch.write_text(f'printf %s "$2" > {tmp_path}/line-$1\nexec ssh "$1" "$2"\n')
    flags = ("--launcher-command", f"sh {launch} {{host}} {{command}}", "--launcher-bootstrap", "command")
    with (
        made_machines() as machines,
        MachinesJob(machines, tmp_path, "node0:2\nnode1:2\n", "-np", "4", *flags) as job,
    ):
        job.wait_for_steps(4)
        line = (tmp_path / "line-node1").read_text()
        again = machines[1].run(["sh", "-c", line])
        assert again.returncode == 2
        assert again.stderr.count("\n") == 1, again.stderr
        job.wait_for_steps(4, after=job.mark())
        assert len(job.events("round_formed")) == 1
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
