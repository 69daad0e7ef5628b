"""A job over several machines, by ssh: its driver is killed, and the same command again takes it over."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.support.network.machines import NAMES, MachinesJob, kill, made_machines, marks
from tests.support.paths import PROGRAMS
from tests.support.processes.dying_drivers import check_generations
from tests.support.processes.jobs import check_agreement

pytestmark = marks

HOSTS = "\n".join(NAMES) + "\n"


def test_a_driver_is_killed_and_the_same_command_takes_over(tmp_path: Path) -> None:
    flags = ("-np", "6", "--on-change", "in-place", "--journal", str(tmp_path / "kept"))
    env = {"LAST": str(tmp_path / "last"), "STEP_S": "0.05"}
    with made_machines() as machines:
        with MachinesJob(machines, tmp_path, HOSTS, *flags, env=env) as first:
            first.wait_for_steps(6)
            agents = [first.agent(host) for host in machines]
            kill(first.process.pid)
            first.process.wait()
            with MachinesJob(machines, tmp_path, HOSTS, *flags, env=env) as second:
                second.wait_for("it has taken over", lambda: "kept training" in second.said())
                assert "6 workers on 3 hosts kept training, no step is lost" in second.said()
                second.wait_for_steps(6, after=time.time())
                assert [second.agent(host) for host in machines] == agents
                (tmp_path / "new").write_text(str(max(line["step"] for line in second.steps()) + 40))
                (tmp_path / "new").replace(tmp_path / "last")
                assert second.wait() == 0, second.said()
            lines = second.steps()
        for rank in range(6):
            steps = [line["step"] for line in lines if line["rank"] == rank]
            assert steps == list(range(1, len(steps) + 1))
        check_agreement(lines)


def test_restarted_workers_of_which_one_dies_meanwhile(tmp_path: Path) -> None:
    """The next generation meets on other machines than the driver's, at a port of the first of them."""
    flags = ("-np", "6", "--on-change", "restart", "--reset-limit", "3", "--journal", str(tmp_path / "kept"))
    env = {"LAST": str(tmp_path / "last"), "STEP_S": "0.05", "CHECKPOINT": str(tmp_path / "checkpoint")}
    command = [sys.executable, str(PROGRAMS / "restarted_program.py")]
    with (
        made_machines() as machines,
        MachinesJob(machines, tmp_path, HOSTS, *flags, env=env, command=command) as first,
    ):
        first.wait_for_steps(6)
        agents = [first.agent(host) for host in machines]
        kill(first.process.pid)
        first.process.wait()
        kill(next(line["pid"] for line in first.steps() if line["rank"] == 5))
        died = time.time()
        with MachinesJob(machines, tmp_path, HOSTS, *flags, env=env, command=command) as second:
            second.wait_for_steps(6, after=died)
            assert [second.agent(host) for host in machines] == agents
            (tmp_path / "new").write_text("1")
            (tmp_path / "new").replace(tmp_path / "last")
            assert second.wait() == 0, second.said()
        check_generations(second.steps())
