"""Ranks that nobody but each other tells of: jobs as mpirun and srun start them, on one machine, without MPI."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_driver.system.local_socket import connect, named_paths
from elastic_driver.worker.launched import meeting
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
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


def name_of(job: str, size: int) -> str:
    launch = launch_of(place_in(job, 0, size))
    assert launch is not None
    return meeting.meeting_name(f"{launch.launcher}\n{launch.job}", list(range(size)))


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
        assert said.count("its ranks are fixed") == 1
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
            # Nor does it hold the place of rank 0.
            with Ranks(tmp_path / "next", 2, "meet", job=job.job) as following:
                assert following.processes[0].wait(100) == 0, following.said(0)
                assert following.wait() == [0, 0], following.said(1)
        finally:
            for pid in job.answers("child").get(0, []):
                os.kill(pid, signal.SIGKILL)


def test_a_process_that_a_rank_has_started_is_no_rank(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "child", fresh=True) as job:
        assert job.wait() == [0, 0], job.said(1)
        assert job.answers("code") == {1: [1]}
        assert "rank 1 is process" in job.answers("said")[1][0]


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with Ranks(tmp_path, 4, "meet", only=[0, 2], HOROVOD_START_TIMEOUT="5") as job:
        assert job.wait() == [1, 1]
        for rank in (0, 2):
            assert "ranks 1, 3 of 4 did not call init() within 5 s (HOROVOD_START_TIMEOUT)" in job.said(rank)


def test_rank_0_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "meet", only=[1], HOROVOD_START_TIMEOUT="1") as job:
        assert job.wait() == [1]
        assert "cannot reach rank 0 within 1 s" in job.said(1)


def test_a_job_of_the_same_name_after_one_that_was_killed(tmp_path: Path) -> None:
    with Ranks(tmp_path / "first", 2, "train", DIES="0") as first:
        assert first.wait()[0] == -signal.SIGKILL
        with Ranks(tmp_path / "second", 2, "meet", job=first.job) as second:
            assert second.wait() == [0, 0], second.said(0)


def test_a_second_job_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with Ranks(tmp_path / "first", 2, "meet", only=[0]) as first:
        until_taken(name_of(first.job, 2))
        with Ranks(tmp_path / "second", 2, "meet", job=first.job, only=[0]) as second:
            assert second.wait() == [1]
            assert "another process has called init() as rank 0" in second.said(0)
        with Ranks(tmp_path / "rest", 2, "meet", job=first.job, only=[1]) as rest:
            assert (first.wait(), rest.wait()) == ([0], [0])
        assert not folder_of(name_of(first.job, 2)).exists()


def is_taken(name: str) -> bool:
    return (folder_of(name) / meeting.SOCKET).exists()


def names_of_sockets(pid: int) -> list[str]:
    """Of those that it listens on, as each process of this network namespace can read them."""
    numbers = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it may have been closed meanwhile
            numbers.add(os.readlink(file))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    found = [line[7] for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in numbers]
    assert len(found) >= 2
    return found


def until_taken(name: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_taken(name):
        assert time.monotonic() < end
        time.sleep(0.01)


def folder_of(name: str) -> Path:
    return named_paths(name)[0]


@needs_root
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_stranger_in_place_of_rank_0_is_told_nothing_and_not_believed(tmp_path: Path, *, everywhere: bool) -> None:
    job = new_job()
    # It makes the folder first, and offers itself as rank 0 of a job.
    folders = named_paths(name_of(job, 2))[: None if everywhere else 1]
    squatter = subprocess.Popen(
        [sys.executable, "-c", _SQUATTER, str(NOBODY), meeting.SOCKET, *map(str, folders)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    assert squatter.stdin is not None
    assert squatter.stdout is not None
    try:
        assert squatter.stdout.readline() == b"listens\n"
        with Ranks(tmp_path, 2, "meet", job=job) as ranks:
            if everywhere:
                assert ranks.wait() == [1, 1]
                assert "cannot make a folder for sockets" in ranks.said(0)
                assert "cannot reach rank 0" in ranks.said(1)
                for rank in (0, 1):
                    assert f"{folders[0]} belongs to user nobody, and this process to user " in ranks.said(rank)
            else:
                assert ranks.wait() == [0, 0], ranks.said(0)  # in the next place
        assert select.select([squatter.stdout], [], [], 0)[0] == [], "somebody has connected to it"
    finally:
        squatter.stdin.close()
        squatter.wait(30)
        squatter.stdout.close()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@needs_root
@pytest.mark.parametrize("who", ["another user", "another container's root"])
def test_a_stranger_who_asks_is_told_nothing(tmp_path: Path, who: str) -> None:
    as_who = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if who != "another user":
        # As pods under hostNetwork: files and processes of its own, and this network.
        as_who = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", _OWN_FILES]
    with Ranks(tmp_path, 2, "meet", only=[0]) as first:
        name = name_of(first.job, 2)
        until_taken(name)
        names = [str(folder_of(name) / socket) for socket in (meeting.SOCKET, "ranks.sock")]
        names += [f"/proc/{first.processes[0].pid}/root{each}" for each in names]
        names += names_of_sockets(first.processes[0].pid)
        asked = subprocess.run(
            [*as_who, sys.executable, "-S", "-c", _STRANGER, *names],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.stdout == "heard 0 bytes\n", asked
        with Ranks(tmp_path / "rest", 2, "meet", job=first.job, only=[1]) as rest:
            assert (first.wait(), rest.wait()) == ([0], [0])


_OWN_FILES = 'mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && exec "$0" "$@"'
_SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listening = []
for folder in sys.argv[3:]:
    os.mkdir(folder, 0o777)
    listening.append(socket.socket(socket.AF_UNIX))
    listening[-1].bind(os.path.join(folder, sys.argv[2]))
    listening[-1].listen()
print("listens", flush=True)
from select import select
while True:
    ready, _, _ = select([*listening, sys.stdin], [], [])
    if sys.stdin in ready:
        break
    print("heard", flush=True)
    connection, _ = ready[0].accept()
    connection.sendall(b'{"url": "unix:/x", "secret": "' + b"00" * 32 + b'", "size": 2, "owner": "", "host": ""}')
    connection.close()
"""
_STRANGER = """
import socket, sys
heard = 0
for name in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(10)
            connection.connect(name.replace("@", "\\0"))
            heard += len(connection.recv(4096))
        except OSError:
            pass
print("heard", heard, "bytes")
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
        ('"all"', "expected an mpi4py communicator, or ranks"),
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
    driver = {"ELASTIC_DRIVER_RENDEZVOUS": "unix:/nowhere/agent.sock", "ELASTIC_DRIVER_WORKER": "a[0]#0"}
    driver["ELASTIC_DRIVER_RANKS_KEY"] = "00" * 32
    env = environment(tmp_path, COMM="[0, 1]", **(driver | place_in("job", 0, 2)))
    done = subprocess.run([sys.executable, str(PROGRAM), "refused"], env=env, timeout=60)
    assert done.returncode == 0
    assert "the job consists of all processes that elasticrun started" in (tmp_path / "0.jsonl").read_text()


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
    assert "cannot join the job of 4 ranks that Open MPI's mpirun started on several hosts" in last
    assert last.endswith("pip install 'elastic_driver[mpi]'")


def test_rubbish_costs_nothing(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "meet", only=[0]) as first:
        name = name_of(first.job, 2)
        until_taken(name)
        with contextlib.ExitStack() as held:
            for _ in range(50):
                asking = held.enter_context(connect(folder_of(name) / meeting.SOCKET, 60))
                with contextlib.suppress(OSError):
                    asking.sendall(b"\0" * 5000)
            with Ranks(tmp_path / "rest", 2, "meet", job=first.job, only=[1]) as rest:
                assert (first.wait(), rest.wait()) == ([0], [0])
