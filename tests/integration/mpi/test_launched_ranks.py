"""Ranks that nobody but each other tells of: jobs as mpirun and srun start them, on one machine, without MPI."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_driver.worker.launched import door
from elastic_driver.worker.launched.launcher import launch_of
from tests.support.processes.launched_jobs import (
    PATIENCE_S,
    PROGRAM,
    Ranks,
    environment,
    new_job,
    nothing_left,
    place_in,
)

pytestmark = [pytest.mark.integration, pytest.mark.mpi]

NOBODY = 65534
# As the time limit of a meeting or an operation: where ranks end, it has not been what ended them.
NEVER_S = "3600"


def name_of(job: str, size: int) -> str:
    launch = launch_of(place_in(job, 0, size))
    assert launch is not None
    return door.door_name(f"{launch.launcher}\n{launch.job}", list(range(size)))


def test_ranks_of_one_machine_meet_and_two_jobs_do_not_mix(tmp_path: Path) -> None:
    with (
        Ranks(tmp_path / "one", 3, "meet", fresh=True, TOKEN="one") as one,
        Ranks(tmp_path / "two", 2, "meet", fresh=True, TOKEN="two") as two,
    ):
        for job, size, token in ((one, 3, "one"), (two, 2, "two")):
            assert job.wait() == [0] * size, job.said(0)
            total = float(sum(range(size)))
            assert job.answers("ranks") == {rank: [[rank, rank, 0]] for rank in range(size)}
            assert job.answers("sizes") == {rank: [[size, size, 1]] for rank in range(size)}
            assert job.answers("total") == {rank: [[total, total]] for rank in range(size)}
            assert job.answers("token") == {rank: [token] for rank in range(size)}
            assert {values[0][0] for values in job.answers("mpi").values()} == {True}


def test_under_srun_likewise(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": new_job(), "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), "meet"], env=environment(tmp_path, SLURM_PROCID=str(rank), **step)
        )
        for rank in range(2)
    ]
    assert [process.wait(100) for process in processes] == [0, 0]
    assert sorted(file.name for file in tmp_path.glob("*.jsonl")) == ["0.jsonl", "1.jsonl"]
    assert '"mpi": [false,' in (tmp_path / "0.jsonl").read_text()


def test_init_after_shutdown_is_another_round(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "again") as job:
        assert job.wait() == [0, 0], job.said(0)
        assert job.answers("total") == {rank: [[1.0, 1.0]] * 3 for rank in range(2)}


@pytest.mark.parametrize("dies", [1, 0])
def test_a_rank_that_dies_ends_the_job_at_once(tmp_path: Path, dies: int) -> None:
    with Ranks(tmp_path, 3, "train", DIES=str(dies), HOROVOD_GLOO_TIMEOUT_SECONDS=NEVER_S) as job:
        job.processes[dies].wait(PATIENCE_S)
        codes = job.wait()
        assert codes == [-signal.SIGKILL if rank == dies else 1 for rank in range(3)]
        assert sorted(job.answers("error")) == [rank for rank in range(3) if rank != dies]
        said = "".join(job.said(rank) for rank in range(3))
        assert said.count("its ranks stay as they are") == 1
        assert "HorovodInternalError" in said


@pytest.mark.slow
def test_a_script_for_horovod_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with Ranks(tmp_path, 2, "horovod", torch=True) as job:
        assert job.wait() == [0, 0], job.said(0)
        assert job.answers("place") == {0: [[0, 2, 0]], 1: [[1, 2, 1]]}
        weights = job.answers("weights")
        assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_rank_that_dies_ends_what_waits_in_torchs_group(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with Ranks(tmp_path, 4, "group", torch=True, DIES="1", HOROVOD_GLOO_TIMEOUT_SECONDS=NEVER_S) as job:
        job.processes[1].wait(PATIENCE_S)
        codes = job.wait()
        assert [code == 0 for code in codes] == [False] * 4
        assert sorted(job.answers("error")) == [0, 2, 3]


def test_ranks_of_a_job_end_when_each_is_done(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, "alone") as job:
        assert job.processes[0].wait(100) == 0
        (tmp_path / "0.ended").touch()
        assert job.wait() == [0, 0, 0]
        assert not any(job.said(rank) for rank in range(3))


def test_a_process_that_rank_0_has_forked_does_not_hide_its_end(tmp_path: Path) -> None:
    with nothing_left(tmp_path), Ranks(tmp_path, 2, "forked", fresh=True) as job:
        try:
            assert job.wait() == [-signal.SIGKILL, 0]
            assert "1" in map(str, job.answers("error"))
        finally:
            for pid in job.answers("child").get(0, []):
                os.kill(pid, signal.SIGKILL)


def test_a_process_that_a_rank_has_started_is_no_rank(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "child", fresh=True) as job:
        assert job.wait() == [0, 0], job.said(1)
        assert job.answers("code") == {1: [1]}
        assert "rank 1 is process" in job.answers("said")[1][0]


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with Ranks(tmp_path, 4, "meet", only=[0, 2], HOROVOD_START_TIMEOUT="2") as job:
        assert job.wait() == [1, 1]
        for rank in (0, 2):
            assert "ranks 1, 3 of 4 did not call init() within 2 s (HOROVOD_START_TIMEOUT)" in job.said(rank)


def test_rank_0_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "meet", only=[1], HOROVOD_START_TIMEOUT="1") as job:
        assert job.wait() == [1]
        assert "cannot meet rank 0 within 1 s" in job.said(1)


def test_a_job_of_the_same_name_after_one_that_was_killed(tmp_path: Path) -> None:
    with Ranks(tmp_path / "first", 2, "train", DIES="0") as first:
        assert first.wait()[0] == -signal.SIGKILL
        with Ranks(tmp_path / "second", 2, "meet", job=first.job) as second:
            assert second.wait() == [0, 0], second.said(0)


def test_a_second_job_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with Ranks(tmp_path / "first", 2, "meet", only=[0]) as first:
        end = time.monotonic() + PATIENCE_S
        while not is_taken(name_of(first.job, 2)):
            assert time.monotonic() < end
            time.sleep(0.01)
        with Ranks(tmp_path / "second", 2, "meet", job=first.job, only=[0]) as second:
            assert second.wait() == [1]
            assert "another process has called init() as rank 0" in second.said(0)
        with Ranks(tmp_path / "rest", 2, "meet", job=first.job, only=[1]) as rest:
            assert (first.wait(), rest.wait()) == ([0], [0])


def is_taken(name: str) -> bool:
    return f"@{name}\n" in Path("/proc/net/unix").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_stranger_at_the_door_is_told_nothing_and_not_believed(tmp_path: Path) -> None:
    job = new_job()
    name = name_of(job, 2)
    # It takes the name first, and offers itself as rank 0 of a job.
    squatter = subprocess.Popen(
        [sys.executable, "-c", _SQUATTER, name, str(NOBODY)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert squatter.stdin is not None
    assert squatter.stdout is not None
    try:
        assert squatter.stdout.readline() == b"listens\n"
        with Ranks(tmp_path, 2, "meet", job=job) as ranks:
            assert ranks.wait() == [1, 1]
            assert "is taken" in ranks.said(0)
            assert f"a process of user {NOBODY} listens" in ranks.said(1)
            assert "is not believed" in ranks.said(1)
    finally:
        squatter.stdin.close()
        heard = squatter.stdout.read()
        squatter.wait(30)
        squatter.stdout.close()
    assert heard == b"heard 0 bytes\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_stranger_who_knocks_is_told_nothing(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "meet", only=[0]) as first:
        name = name_of(first.job, 2)
        end = time.monotonic() + PATIENCE_S
        while not is_taken(name):
            assert time.monotonic() < end
            time.sleep(0.01)
        asked = subprocess.run(
            [sys.executable, "-c", _KNOCKER, name, str(NOBODY)], capture_output=True, text=True, timeout=60
        )
        assert asked.stdout == "heard 0 bytes\n", asked
        with Ranks(tmp_path / "rest", 2, "meet", job=first.job, only=[1]) as rest:
            assert (first.wait(), rest.wait()) == ([0], [0])


_SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listening = socket.socket(socket.AF_UNIX)
listening.bind("\\0" + sys.argv[1])
listening.listen()
print("listens", flush=True)
connection, _ = listening.accept()
heard = 0
try:
    connection.sendall(b'{"url": "unix:@x", "secret": "' + b"00" * 32 + b'", "size": 2, "owner": "", "host": ""}')
    connection.shutdown(socket.SHUT_WR)
    while piece := connection.recv(4096):
        heard += len(piece)
except OSError:
    pass
print("heard", heard, "bytes")
sys.stdin.read()
"""
_KNOCKER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
try:
    print("heard", len(connection.recv(4096)), "bytes")
except ConnectionResetError:
    print("heard 0 bytes")
"""


def test_a_list_of_ranks_is_the_job(tmp_path: Path) -> None:
    with Ranks(tmp_path, 4, "some") as job:
        assert job.wait() == [0] * 4, job.said(0)
        assert job.answers("ranks") == {0: [[0, 0, 0]], 1: [[1, 1, 0]], 2: [[1, 1, 0]], 3: [[0, 0, 0]]}
        assert {tuple(values[0]) for values in job.answers("sizes").values()} == {(2, 2, 1)}


@pytest.mark.parametrize(
    ("comm", "text"),
    [
        ("[1]", "this process is rank 0, which is not among them"),
        ("[0, 2]", "expected ranks from 0 to 1, each once"),
        ("[0, 0]", "expected ranks from 0 to 1, each once"),
        ('"all"', "expected a communicator of mpi4py, or ranks"),
    ],
)
def test_what_is_no_list_of_ranks_is_refused(tmp_path: Path, comm: str, text: str) -> None:
    with Ranks(tmp_path, 2, "refused", only=[0], COMM=comm) as job:
        assert job.wait() == [0], job.said(0)
        assert text in job.answers("error")[0][0]


def test_a_process_alone_has_no_other_ranks(tmp_path: Path) -> None:
    for comm, text in (("[0, 1]", "was started alone"), ("3", "of type int")):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), "refused"], env=environment(tmp_path, COMM=comm), timeout=60
        )
        assert done.returncode == 0
        assert text in (tmp_path / "0.jsonl").read_text()


def test_under_a_driver_there_is_no_choice_of_ranks(tmp_path: Path) -> None:
    """Nobody listens there: it is refused before anything is asked."""
    driver = {"ELASTIC_DRIVER_RENDEZVOUS": "http://127.0.0.1:1", "ELASTIC_DRIVER_WORKER": "a[0]#0"}
    keys = dict.fromkeys(("ELASTIC_DRIVER_KEY", "ELASTIC_DRIVER_RANKS_KEY"), "00" * 32)
    env = environment(tmp_path, COMM="[0, 1]", **(driver | keys | place_in("job", 0, 2)))
    done = subprocess.run([sys.executable, str(PROGRAM), "refused"], env=env, timeout=60)
    assert done.returncode == 0
    assert "the job is all processes that elasticrun started" in (tmp_path / "0.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["meet", "train"])
def test_without_the_native_extension_torchs_gloo_carries_them(tmp_path: Path, what: str) -> None:
    pytest.importorskip("torch")
    with Ranks(tmp_path, 3, what, torch=True, DIES="1", ELASTIC_DRIVER_BACKEND="torch") as job:
        codes = job.wait()
        if what == "meet":
            assert codes == [0, 0, 0], job.said(0)
            assert job.answers("total") == {rank: [[3.0, 3.0]] for rank in range(3)}
        else:
            assert codes == [1, -signal.SIGKILL, 1]
            assert sorted(job.answers("error")) == [0, 2]


def test_over_several_hosts_it_is_said_what_to_install(tmp_path: Path) -> None:
    place = place_in(new_job(), 1, 4, local_size=2)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "without_mpi4py"],
        env=environment(tmp_path, **place),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "cannot join the job of 4 ranks that Open MPI's mpirun has started over several hosts" in last
    assert last.endswith("pip install 'elastic_driver[mpi]'")


def test_rubbish_knocks_cost_nothing(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "meet", only=[0]) as first:
        name = name_of(first.job, 2)
        end = time.monotonic() + PATIENCE_S
        while not is_taken(name):
            assert time.monotonic() < end
            time.sleep(0.01)
        with contextlib.ExitStack() as held:
            for _ in range(50):
                knocking = held.enter_context(socket.socket(socket.AF_UNIX))
                knocking.connect(f"\0{name}")
                with contextlib.suppress(OSError):
                    knocking.sendall(b"\0" * 5000)
            with Ranks(tmp_path / "rest", 2, "meet", job=first.job, only=[1]) as rest:
                assert (first.wait(), rest.wait()) == ([0], [0])
