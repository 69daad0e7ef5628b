"""Command lines of torchrun under elasticrun: real workers, which need no torch for what they are asked here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.jobs import Job

pytestmark = [pytest.mark.integration]

TELL = """\
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID",
         "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "CUDA_VISIBLE_DEVICES")
print(json.dumps({"argv": sys.argv, "name": __name__, **{name: os.environ.get(name) for name in names}}), flush=True)
"""
# Rank 1 fails in its first generations; the others wait to be ended.
FAIL = """\
import os, pathlib, signal, sys, time
generation, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
print(f"generation {generation}", flush=True)
print("apple" if rank == "0" else "pear", file=sys.stderr, flush=True)
if generation < int(sys.argv[1]):
    has_said = pathlib.Path(__file__).with_name(f"said.{generation}")
    if rank == "1":
        while not has_said.exists():  # else the other may be ended before it has said anything
            time.sleep(0.01)
        sys.exit(7)
    has_said.touch()
    signal.pause()
"""


def start(folder: Path, *words: str, env: dict[str, str] | None = None) -> Job:
    return Job(folder, None, "--on-change", "restart", command=list(words), env=env)


def script(folder: Path, text: str, name: str = "train.py", mode: int = 0o644) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def told(job: Job) -> list[dict[str, Any]]:
    """What each worker told, by rank."""
    assert job.wait() == 0, job.said()
    lines = job.stdout.read_text().splitlines()
    found: list[dict[str, Any]] = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
    return sorted(found, key=lambda each: int(each["RANK"]))


@dataclass
class JobOutput:
    """What the workers of a job were told, what the command said, and the script's path."""

    workers: list[dict[str, Any]]
    said: str
    path: str


@pytest.fixture(scope="class")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobOutput:
    folder = tmp_path_factory.mktemp("command-line")
    path = script(folder, TELL)
    words = "--standalone --nproc_per_node=2 --max-restarts=3 --rdzv-id=mine --role=trainer --rdzv-backend=c10d"
    more = "--rdzv-conf read_timeout=3,join_timeout=30 --numa-binding node"
    with start(folder, *words.split(), *more.split(), path, "--local", "x") as running:
        return JobOutput(told(running), running.said(), path)


class TestACommandLine:
    """One of torchrun, with much of what can be given."""

    def test_a_command_line_of_torchrun(self, job: JobOutput) -> None:
        assert [worker["argv"] for worker in job.workers] == [[job.path, "--local", "x"]] * 2
        for rank, worker in enumerate(job.workers):
            assert (worker["RANK"], worker["LOCAL_RANK"]) == (str(rank), str(rank))
            assert (worker["WORLD_SIZE"], worker["LOCAL_WORLD_SIZE"], worker["ROLE_NAME"]) == ("2", "2", "trainer")
            assert (worker["TORCHELASTIC_RESTART_COUNT"], worker["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "3")

    def test_keys_without_effect_are_told(self, job: JobOutput) -> None:
        assert job.said.count("of --rdzv-conf has no effect here") == 1

    @pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").exists(), reason="a machine without GPUs is asked for")
    def test_workers_that_cannot_be_bound_run_all_the_same(self, job: JobOutput) -> None:
        assert len(job.workers) == 2
        complaint = "cannot bind workers to processors (--numa-binding node): this host has no NVIDIA GPU"
        assert job.said.count(complaint) == 1, job.said


def test_variables_alone(tmp_path: Path) -> None:
    env = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "nowhere.invalid"}
    with start(tmp_path, script(tmp_path, TELL), env={**env, "PET_RDZV_ID": "pod", "PET_MODULE": "0"}) as job:
        workers = told(job)
    assert [worker["TORCHELASTIC_RUN_ID"] for worker in workers] == ["pod", "pod"]


def test_what_is_run(tmp_path: Path) -> None:
    script(tmp_path, TELL, "mine.py")
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), *filter(None, (os.environ.get("PYTHONPATH"),))))}
    with start(tmp_path, "--standalone", "-m", "mine", "a", env=env) as job:
        assert [worker["argv"][1:] for worker in told(job)] == [["a"]]
    with start(tmp_path, "--run-path", script(tmp_path, TELL, "without_a_suffix"), "b") as job:
        assert [(worker["name"], worker["argv"][1:]) for worker in told(job)] == [("__main__", ["b"])]
    shell = script(tmp_path, "#!/bin/sh\necho '{\"RANK\": \"'$RANK'\"}'\n", "shell", 0o755)
    with start(tmp_path, "--no-python", "--nproc-per-node", "2", shell) as job:
        assert told(job) == [{"RANK": "0"}, {"RANK": "1"}]


def test_each_sees_its_own_device(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "3", "--virtual-local-rank", script(tmp_path, TELL))
    with start(tmp_path, *words, env={"CUDA_VISIBLE_DEVICES": "7,5"}) as job:
        workers = told(job)
    assert [(worker["LOCAL_RANK"], worker["CUDA_VISIBLE_DEVICES"]) for worker in workers] == [
        ("0", "7"),
        ("0", "5"),
        ("0", "2"),
    ]


def test_restarts_on_the_same_host_and_logs_of_all_generations(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    words = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "--rdzv-id",
        "../mine",
        "-r",
        "1",
        "-t",
        "0:2",
        "--duplicate-stderr-filters",
        "apple",
    ]
    prefix = ("--log-line-prefix-template", "<${role_name} ${local_rank}>")
    with start(tmp_path, *words, *prefix, "--log-dir", str(logs), script(tmp_path, FAIL), "2") as job:
        assert job.wait() == 0, job.said()
        said = job.said()
    folder = logs / "_mine"
    assert f"the workers' output is kept in {folder}" in said
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.log")) == [
        "0/stderr.log",
        "0/stdout.log",
        "1/stdout.log",
        "filtered_stderr.log",
    ]
    for rank in "01":
        text = re.sub(r" #?\d*, pid \d+, started .*", "", (folder / rank / "stdout.log").read_text())
        headers = [line for line in text.splitlines() if line.startswith("=====")]
        assert len(headers) == 3, text
        assert re.findall("generation .", text) == ["generation 0", "generation 1", "generation 2"]
    assert job.stdout.read_text() == ""
    assert said.count("<default 0>apple") == 3, said
    assert said.count("<default 1>pear") == 3, said
    assert (folder / "filtered_stderr.log").read_text() == "<default 0>apple\n" * 3


def test_no_restart_is_left(tmp_path: Path) -> None:
    with start(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", script(tmp_path, FAIL), "9") as job:
        assert job.wait() == 4
        assert "the limit of 1 unplanned reset (--max-restarts) is used up" in job.said()
        # One process, and another in its place.
        assert len([event for event in job.events("worker_exited") if event["returncode"] == 7]) == 2
        assert "blacklisted" not in job.said()
        assert "removed from the job" not in job.said()


def test_the_first_failure_ends_the_job_where_that_is_asked_for(tmp_path: Path) -> None:
    with start(tmp_path, "--nproc-per-node", "2", "--max-restarts", "0", script(tmp_path, FAIL), "9") as job:
        assert job.wait() == 4
        assert len([event for event in job.events("worker_exited") if event["returncode"] == 7]) == 1


def test_another_signal_ends_the_job(tmp_path: Path) -> None:
    text = "import signal\nprint('waits', flush=True)\nsignal.pause()\n"
    words = ("--nproc-per-node", "2", "--signals-to-handle", "SIGTERM,SIGUSR1", script(tmp_path, text))
    with start(tmp_path, *words) as job:
        job.wait_for("both wait", lambda: job.stdout.read_text().count("waits") == 2)
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait() == 128 + signal.SIGUSR1
        assert "SIGUSR1: stopping all workers" in job.said()
        assert {event["returncode"] for event in job.events("worker_exited")} == {-signal.SIGUSR1}


# The second rank fails at its exit, when the first is through; then both run again, forked from a warm process, until
# somebody interrupts them.
EXIT = """\
import os, pathlib, signal, sys, time
import elastic_driver  # what the warm process is for
def say(*words):  # in one piece, also where Python's output has no buffer: torchrun's workers share a pipe
    os.write(1, " ".join(map(str, words)).encode() + b"\\n")
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if generation == 0:
    if rank == 1:
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
    sys.exit(rank)
taken = []
for name in ("SIGUSR1", "SIGALRM"):
    signal.signal(getattr(signal, name), lambda number, frame: say(signal.Signals(number).name, rank))
there, says_so = os.pipe()
child = os.fork()
if child == 0:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    os.write(says_so, b"!")  # from here on no signal is lost
try:
    if child:
        os.read(there, 1)
        say("waits", os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"])
    while True:
        time.sleep(0.1)
except KeyboardInterrupt:
    if child:
        say("saved", rank)
"""


def test_a_failure_after_another_has_ended_well_and_signals_as_they_came(tmp_path: Path) -> None:
    path, go_on = script(tmp_path, EXIT), tmp_path / "go-on"
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--preload", "elastic_driver", path, str(go_on))
    with start(tmp_path, *words) as job:

        def shown(text: str, times: int = 2) -> None:
            job.wait_for(text, lambda: job.stdout.read_text().count(text) >= times)

        job.wait_for("one has ended well", lambda: [e for e in job.events("worker_exited") if e["returncode"] == 0])
        go_on.touch()
        shown("waits SIGTERM,SIGINT,SIGHUP,SIGQUIT")
        # Not to what a worker has started, which would die of it; and one that nobody handles ends nobody.
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGALRM):
            job.process.send_signal(number)
            job.wait_for("it is told", lambda: f"{number.name}: passed on to the workers" in job.said())  # noqa: B023
        shown("SIGUSR1")
        shown("SIGALRM")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT
        assert sorted(re.findall("saved .", job.stdout.read_text())) == ["saved 0", "saved 1"]
        assert [event["returncode"] for event in job.events("worker_exited")] == [0, 1, 0, 0]
        assert not job.leftovers()


@pytest.mark.release
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torchrun")
def test_the_same_as_torchrun(tmp_path: Path) -> None:
    """A failure after another has ended well, and Ctrl-C."""
    path, ours, theirs = script(tmp_path, EXIT), tmp_path / "ours", tmp_path / "theirs"
    said: list[list[str]] = []
    words = ("--nproc-per-node", "2", "--max-restarts", "1", path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words, str(theirs)]
    elasticrun = [sys.executable, "-m", "elastic_driver.cli.main", *words, str(ours)]
    for command, go_on in ((torchrun, theirs), (elasticrun, ours)):
        go_on.touch()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            seen = [process.stdout.readline() for _ in range(2)]
            process.send_signal(signal.SIGINT)
            seen += process.stdout.readlines()
            assert process.wait(150) in (1, 128 + signal.SIGINT)
        said.append(sorted(line.rpartition(":")[2] for line in seen))
    assert said[0] == said[1] == ["saved 0\n", "saved 1\n", *["waits SIGTERM,SIGINT,SIGHUP,SIGQUIT\n"] * 2]


def test_a_log_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with start(tmp_path, "--standalone", "-t", "3", "--log-dir", str(tmp_path / "file" / "logs"), "true") as job:
        assert job.wait() == 2
        said = f"cannot use the folder {tmp_path}/file/logs (--log-dir): Not a directory"
        assert said in job.said() or said.replace("use", "create") in job.said(), job.said()
        assert job.said().count("\n") == 1


def test_a_script_that_fails_at_its_start_ends_a_job_of_one_node(tmp_path: Path) -> None:
    with start(tmp_path, "--standalone", "--nproc-per-node", "2", script(tmp_path, "raise SystemExit(3)\n")) as job:
        assert job.wait() == 1, job.said()
        assert (
            "exited with code 3, within the first 60 s of the training; --max-restarts N would allow retries"
            in job.said()
        )
    assert len(job.events("worker_started")) <= 2, "it was started again"
