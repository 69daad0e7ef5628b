"""Scripts that never call init(), those of which it cannot be seen, and those that must not: with real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.rendezvous.environment import NCCL
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import PROGRAM, Job

pytestmark = pytest.mark.integration

# Writes a line when it starts, and one when it is told to end; ends well when the test has said so.
SCRIPT = """
import json, os, signal, sys, time

def say(what):
    line = {"what": what, "rank": int(os.environ["RANK"]), "size": int(os.environ["WORLD_SIZE"]), "pid": os.getpid()}
    line["local_rank"], line["round"] = int(os.environ["LOCAL_RANK"]), int(os.environ["ELASTIC_DRIVER_ROUND"])
    with open(os.environ["STEP_LOG"], "a") as file:
        file.write(json.dumps(line) + "\\n")

def told(*_):
    say("saved")
    sys.exit(0)

signal.signal(signal.SIGTERM, told)
say("began")
while not os.path.exists(os.environ["DONE"]):
    time.sleep(0.02)
"""


class Script(Job):
    """A job of that script."""

    def __init__(self, folder: Path, hosts: str, *flags: str) -> None:
        program = folder / "train.py"
        program.write_text(SCRIPT)
        self.done = folder / "done"
        command = [sys.executable, str(program)]
        super().__init__(folder, hosts, *flags, command=command, env={"DONE": str(self.done)})

    def lines(self, what: str, round_id: int) -> list[dict[str, Any]]:
        return [line for line in self.steps() if line["what"] == what and line["round"] == round_id]

    def began(self, round_id: int, size: int) -> list[dict[str, Any]]:
        """Waits until all of a round of this size have begun; gives their lines by rank."""
        lines = self.wait_for(
            f"round {round_id} of {size}",
            lambda: len(self.lines("began", round_id)) == size and self.lines("began", round_id),
        )
        self.wait_for("its formation", lambda: len(self.events("round_formed")) == round_id)
        assert {line["size"] for line in lines} == {size}
        return sorted(lines, key=lambda line: int(line["rank"]))


def members(job: Job, round_id: int) -> list[str]:
    """The places of a round by rank."""
    formed = job.events("round_formed")[round_id - 1]
    assert formed["round_id"] == round_id
    return [member["worker"].partition("#")[0] for member in formed["members"]]


def test_a_command_that_is_no_training_script_ends_well(tmp_path: Path) -> None:
    with Job(tmp_path, None, "-np", "2", command=["true"]) as job:
        assert job.wait() == 0, job.said()
        assert "round 1: 2 workers on localhost:2, started after" in job.said()
    ended = job.events("job_ended")[-1]
    assert ended["message"] == "all workers of round 1 exited with code 0"


@pytest.mark.release  # cli/test_bad_usage.py has it, too
def test_in_place_is_taken_at_its_word(tmp_path: Path) -> None:
    with Job(tmp_path, None, "-np", "2", "--on-change", "in-place", command=["true"]) as job:
        assert job.wait() == 2
        assert "exited with code 0 before it called hvd.init()" in job.said()


def test_a_script_that_is_seen_to_call_init_need_not_do_so(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import sys\nimport elastic_driver as hvd\nif '--help' not in sys.argv:\n    hvd.init()\n")
    with Job(tmp_path, None, "-np", "2", command=[sys.executable, str(program), "--help"]) as job:
        assert job.wait() == 0, job.said()
    assert job.events("job_ended")[-1]["message"] == "all 2 workers exited with code 0 without calling hvd.init()"


def test_a_shell_around_a_script_that_calls_init(tmp_path: Path) -> None:
    command = ["bash", "-c", f"{sys.executable} {PROGRAM}; exit $?"]
    last = tmp_path / "last"
    with Job(tmp_path, "localhost:2\n", "-np", "2", "--min-np", "1", command=command, env={"LAST": str(last)}) as job:
        job.wait_for_steps(2)
        assert "called hvd.init(): from now on, workers reset without restarting their processes" in job.said()
        before = {line["pid"] for line in job.steps()}
        job.set_hosts("localhost:3\n")
        lines = job.wait_for_steps(3, count=1)
        assert before < {line["pid"] for line in lines}, "those who were there have been started anew"
        last.write_text(str(lines[-1]["step"] + 10))
        assert job.wait() == 0, job.said()
    formed = job.events("round_formed")
    assert [event["backend"] is None for event in formed] == [True, False, False]
    assert [event["round_id"] for event in formed] == [1, 2, 3]


def test_one_that_resets_in_place_after_all_has_the_environment_of_such(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import importlib, json, os\n"
        "def nccl():\n"
        "    return {name: value for name, value in os.environ.items() if name.startswith('TORCH_NCCL_')}\n"
        "started = nccl()\n"
        "importlib.import_module('elastic_driver').init()\n"
        "line = json.dumps({'started': started, 'present': nccl()})\n"
        "with open(os.environ['STEP_LOG'], 'a') as file:\n"
        "    file.write(line + '\\n')\n"
    )
    with Job(tmp_path, None, "-np", "2", command=[sys.executable, str(program)]) as job:
        assert job.wait() == 0, job.said()
        assert "called hvd.init(): from now on, workers reset without restarting their processes" in job.said()
    lines = job.steps()
    assert [line["started"] for line in lines] == [{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}] * 2
    assert [line["present"] for line in lines] == [NCCL] * 2


def test_init_where_workers_are_restarted(tmp_path: Path) -> None:
    with Job(tmp_path, None, "-np", "2", "--on-change", "restart") as job:
        assert job.wait() == 1
        assert "this job restarts its workers at each change (--on-change restart)" in job.said()
        assert "hvd.init() needs --on-change auto or in-place" in job.said()


def test_a_mistake_at_the_top_of_a_script_that_is_restarted_is_shown_once(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("raise ImportError('no data set')\n")
    patient = (str(PROGRAMS / "patient.py"),)
    with Job(tmp_path, None, "-np", "3", command=[sys.executable, str(program)], elasticrun=patient) as job:
        assert job.wait() == 1
        # Of three that fail alike; one that is stopped while it prints that has printed something else.
        assert 1 <= job.said().count("Traceback (most recent call last):") < 3
        assert "job failed: ImportError: no data set (train.py:1), rank " in job.said()
        assert ", within the first 60 s of the training; --reset-limit N would allow retries" in job.said()


def test_all_are_restarted_when_one_is_killed(tmp_path: Path) -> None:
    with Script(tmp_path, "localhost:2\n127.0.0.1:1\n", "-np", "3", "--min-np", "1") as job:
        first = job.began(1, 3)
        assert members(job, 1) == ["localhost[0]", "localhost[1]", "127.0.0.1[0]"]
        os.kill(first[2]["pid"], signal.SIGKILL)
        second = job.began(2, 2)
        assert members(job, 2) == ["localhost[0]", "localhost[1]"]
        assert {line["pid"] for line in first}.isdisjoint(line["pid"] for line in second)
        assert [line["local_rank"] for line in second] == [0, 1]
        job.wait_to_say("round 2: 3 -> 2 workers on localhost:2, host 127.0.0.1 lost")
        job.done.touch()
        assert job.wait() == 0, job.said()


def test_all_are_restarted_when_a_host_comes_and_when_one_goes(tmp_path: Path) -> None:
    with Script(tmp_path, "localhost:2\n", "-np", "2", "--min-np", "1", "--max-np", "3") as job:
        job.began(1, 2)
        job.set_hosts("localhost:2\n127.0.0.1:1\n")
        job.began(2, 3)
        assert members(job, 2) == ["localhost[0]", "localhost[1]", "127.0.0.1[0]"]
        assert sorted(line["rank"] for line in job.lines("saved", 1)) == [0, 1], "they were given time to end"
        job.set_hosts("localhost:1\n127.0.0.1:1\n")
        job.began(3, 2)
        assert members(job, 3) == ["localhost[0]", "127.0.0.1[0]"]
        assert sorted(line["rank"] for line in job.lines("saved", 2)) == [0, 1, 2]
        job.done.touch()
        assert job.wait() == 0, job.said()
    assert job.events("worker_exited"), "the log has no ends"
    assert json.dumps(job.events("round_formed")[2]["cause"]) == '"host localhost: 2 -> 1 slot"'


def test_restarts_on_the_same_host_are_counted(tmp_path: Path) -> None:
    with Script(tmp_path, "localhost:2\n", "-np", "2", "--reset-limit", "1") as job:
        first = job.began(1, 2)
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = job.began(2, 2)
        assert members(job, 2) == ["localhost[0]", "localhost[1]"]
        os.kill(second[0]["pid"], signal.SIGKILL)
        assert job.wait() == 4
        assert "the limit of 1 unplanned reset (--reset-limit) is used up" in job.said()
