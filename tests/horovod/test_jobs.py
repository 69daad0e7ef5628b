"""Jobs of Horovod's own workers: what a death costs, static jobs, output, exit codes, ends from outside."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes.horovod_jobs import HorovodJob, Start
from tests.support.processes.jobs import check_agreement

pytestmark = [pytest.mark.integration, pytest.mark.horovod, pytest.mark.slow]

TWO = "localhost:2\n"
FOUR = "localhost:2\n127.0.0.1:2\n"
FOUR_HOSTS = "localhost:1\n127.0.0.1:1\n127.0.0.2:1\n127.0.0.3:1\n"
ELASTIC = ("-np", "2", "--min-np", "1")
# No epoch ends at this size.
FOR_EVER = "99"
# Long enough that a job that waits for it fails its test.
PATIENT_GLOO = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}


def pids(lines: list[dict[str, Any]], size: int) -> set[int]:
    return {line["pid"] for line in lines if line["size"] == size}


def repeated(lines: list[dict[str, Any]], pid: int) -> int:
    steps = [line["step"] for line in lines if line["pid"] == pid]
    return len(steps) - len(set(steps))


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("hosts", [FOUR, FOUR_HOSTS], ids=["2_hosts", "4_hosts"])
def test_what_a_kill_costs(start: Start, hosts: str, victim: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Those whose neighbors in the ring live do not notice, and wait for Gloo's time limit, if they are left alone."""
    if "127.0.0.2" in hosts:
        if start.launcher != "elasticrun":
            pytest.skip("horovodrun takes 127.0.0.2 for another machine")
        left = 3
    else:
        left = 2
    patience = PATIENT_GLOO if start.launcher == "elasticrun" else {}
    job = start(hosts, "-np", "4", "--min-np", "1", SIZES=FOR_EVER, **patience)
    before = job.wait_for_steps(4, 10)
    at = time.time()
    job.kill(before, victim)
    after = job.wait_for_steps(left, 5, after=at)
    survivors = pids(after, left)
    assert survivors < pids(before, 4)
    check_agreement(job.steps())
    for pid in survivors:
        assert repeated(job.steps(), pid) <= 1, "a commit each batch"
    first = max(min(line["time"] for line in after if line["pid"] == pid) for pid in survivors) - at
    with capsys.disabled():
        print(f"\n{job.by}, {hosts.count(':')} hosts, rank {victim} of 4 killed: {left} go on after {first:.2f} s")


def test_growth_and_shrinking_lose_no_step(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Who lives on keeps its process and its rank; who goes is not blamed."""
    job = start(TWO, *ELASTIC, SIZES=FOR_EVER, **PATIENT_GLOO)
    first = job.wait_for_steps(2)
    at = time.time()
    job.set_hosts(FOUR)
    grown = job.wait_for_steps(4)
    joined = min(line["time"] for line in grown) - at
    assert pids(first, 2) < pids(grown, 4)
    at = time.time()
    job.set_hosts(TWO)
    job.wait_for_steps(2, after=at)
    again = job.wait_for_steps(2, after=max(line["time"] for line in job.steps() if line["size"] == 4))
    left = min(line["time"] for line in again) - at
    assert pids(again, 2) == pids(first, 2)
    lines = job.steps()
    check_agreement(lines)
    for pid in pids(lines, 4):
        steps = [line["step"] for line in lines if line["pid"] == pid]
        assert steps == list(range(steps[0], steps[0] + len(steps))), "no step was lost, none done twice"
    assert {(line["rank"], line["local_rank"], line["cross_rank"]) for line in grown} == {
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    }
    assert {(line["local_size"], line["cross_size"]) for line in grown} == {(2, 2)}
    if job.is_ours:
        assert "2 -> 4 workers, host 127.0.0.1 added" in job.said()
        assert "4 -> 2 workers, host 127.0.0.1 removed" in job.said()
        assert "blacklisted" not in job.said()
        assert "removed from the job" not in job.said()
    with capsys.disabled():
        print(f"\n{job.by}: 2 more train after {joined:.2f} s, they are gone after {left:.2f} s")


@pytest.mark.only_elasticrun
def test_the_driver_dies(start: Start, tmp_path: Path) -> None:
    """Nobody trains otherwise for it. When a worker dies with it, the others go on when there is a driver again."""
    journal = ("--journal", str(tmp_path / "kept"))
    job = start(FOUR, "-np", "4", "--min-np", "1", *journal, SIZES=FOR_EVER, **PATIENT_GLOO)
    before = pids(job.wait_for_steps(4, 10), 4)
    os.kill(job.driver_pid(), signal.SIGKILL)
    job.wait_for("a takeover", lambda: job.events("took_over"))
    steps = job.wait_for_steps(4, 10, after=time.time())
    assert pids(steps, 4) == before
    assert not any(repeated(job.steps(), pid) for pid in before)
    at = time.time()
    os.kill(job.driver_pid(), signal.SIGKILL)
    job.kill(steps, 3)
    after = job.wait_for_steps(2, 5, after=at)
    assert pids(after, 2) < before
    check_agreement(job.steps())
    assert len(job.events("took_over")) == 2


STATIC_RANKS = {
    None: {(rank, rank, 4, 0, 1) for rank in range(4)},
    "localhost:2,127.0.0.1:2": {(0, 0, 2, 0, 2), (1, 1, 2, 0, 2), (2, 0, 2, 1, 2), (3, 1, 2, 1, 2)},
}


@pytest.mark.parametrize("hosts", STATIC_RANKS, ids=["1_host", "2_hosts"])
def test_a_static_job(start: Start, hosts: str | None) -> None:
    """No elastic.run in the script, and a process set, which has scopes of its own in the rendezvous."""
    flags = ("-np", "4", *(("-H", hosts) if hosts else ()))
    job = start(None, *flags, STATIC="1", PROCESS_SET="0,2,3")
    assert job.wait() == 0, job.all_said()
    lines = job.steps()
    assert len(lines) == 4 * 10
    fields = ("rank", "local_rank", "local_size", "cross_rank", "cross_size")
    assert {tuple(line[name] for name in fields) for line in lines} == STATIC_RANKS[hosts]
    assert all(line["first_rank"] == line["rank"] for line in lines)
    check_agreement(lines)
    for rank in range(4):
        assert f"[{rank}]<stdout>:rank {rank} of 4 is done\n" in job.printed()
        assert f"[{rank}]<stderr>:rank {rank} says goodbye\n" in job.said()


def test_a_script_with_elastic_run_in_a_static_job(start: Start) -> None:
    job = start(None, "-np", "2")
    assert job.wait() == 0, job.all_said()
    assert job.sizes() == [2]
    assert "rank 1 of 2 is done" in job.printed()


@pytest.mark.parametrize("how", ["exception", "exit", "kill"])
@pytest.mark.parametrize("hosts", [None, "localhost:2,127.0.0.1:2"], ids=["1_host", "2_hosts"])
def test_a_static_job_fails(start: Start, hosts: str | None, how: str) -> None:
    """It ends, the others with it; nobody waits for slots that do not come, since none can."""
    flags = ("-np", "4", *(("-H", hosts) if hosts else ()))
    job = start(None, *flags, STATIC="1", SIZES=FOR_EVER, FAULTS=json.dumps([[0, 2, how]]))
    assert job.wait() == 1, job.all_said()
    if how == "exception":
        assert "a bug in the training script" in job.said()
    if job.is_ours:
        # Who leaves shuts Horovod down first, and another may be gone before it.
        assert ("killed by SIGKILL" if how == "kill" else "exited with code") in job.said()
        assert "job failed" in job.said()


@pytest.mark.only_elasticrun
def test_a_drained_host_is_left_without_blame(start: Start) -> None:
    job = start(FOUR, "-np", "4", "--min-np", "1", "--reset-limit", "0", SIZES=FOR_EVER, **PATIENT_GLOO)
    before = job.wait_for_steps(4)
    at = time.time()
    job_id = job.events("job_started")[-1]["job_id"]
    command = [sys.executable, "-m", "elastic_driver", "drain", "--job", job_id, "127.0.0.1"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said
    after = job.wait_for_steps(2, after=at)
    assert pids(after, 2) < pids(before, 4)
    assert "4 -> 2 workers, host 127.0.0.1 drained" in job.said()
    assert "blacklisted" not in job.said()
    assert "removed from the job" not in job.said()
    for pid in pids(after, 2):
        assert repeated(job.steps(), pid) == 0


def killed_at(job: HorovodJob, kind: str, old: set[int]) -> int:
    """Kills the first process that an event of this kind names and that is not among the old ones."""

    def found() -> list[int]:
        return [event["pid"] for event in job.events(kind) if event["pid"] not in old]

    pid = int(job.wait_for(kind, found)[0])
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.only_elasticrun
def test_a_joiner_is_killed_while_it_starts(start: Start) -> None:
    """Those who train do not lose a step by it."""
    job = start(TWO, *ELASTIC, SIZES=FOR_EVER, **PATIENT_GLOO)
    old = pids(job.wait_for_steps(2), 2)
    job.set_hosts(FOUR)
    killed_at(job, "worker_started", old)
    at = time.time()
    after = job.wait_for_steps(2, 20, after=at)
    assert pids(after, 2) == old
    assert {line["size"] for line in job.steps()} == {2}
    job.wait_for("the blame", lambda: "127.0.0.1" in job.said() and "SIGKILL" in job.said())
    assert all(repeated(job.steps(), pid) == 0 for pid in old)


@pytest.mark.only_elasticrun
def test_two_jobs_at_once(start: Start) -> None:
    """Neither hears of the other."""
    jobs = [start(FOUR, "-np", "4", "--min-np", "2", SIZES="4,2", **PATIENT_GLOO) for _ in range(2)]
    for job in jobs:
        job.wait_for_epoch(1)
    jobs[0].set_hosts(TWO)
    jobs[1].set_hosts("127.0.0.1:2\n")
    for job, host in zip(jobs, ("localhost", "127.0.0.1"), strict=True):
        assert job.wait() == 0, job.all_said()
        assert job.sizes() == [4, 2]
        assert {line["host"] for line in job.steps()[-2:]} == {host}
        check_agreement(job.steps())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_launcher_is_told_to_end(start: Start, number: signal.Signals) -> None:
    """A worker that is stopped, and so says nothing and ends by no goodwill, changes nothing."""
    job = start(FOUR, "-np", "4", "--min-np", "2", SIZES=FOR_EVER, **PATIENT_GLOO)
    lines = job.wait_for_steps(4)
    job.kill(lines, 1, signal.SIGSTOP)
    job.process.send_signal(number)
    assert job.wait() == ((143 if number == signal.SIGTERM else 130) if job.is_ours else 1)


def test_the_launcher_is_killed(start: Start) -> None:
    job = start(FOUR, "-np", "4", "--min-np", "2", SIZES=FOR_EVER, **PATIENT_GLOO)
    mine = [psutil.Process(pid) for pid in pids(job.wait_for_steps(4), 4)]
    job.process.kill()
    assert job.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(mine, timeout=60)
    assert not alive
    end = time.monotonic() + 60
    while job.leftovers() and time.monotonic() < end:
        time.sleep(0.1)


@pytest.mark.only_elasticrun
@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes(start: Start, seed: int) -> None:
    """Hosts come and go, some before the last change is done, and workers die; at the end all hosts train."""
    source = random.Random(seed)
    names = ("localhost", "127.0.0.1", "127.0.0.2")
    flags = ("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1")
    job = start("localhost:2\n127.0.0.1:1\n", *flags, SIZES=FOR_EVER, **PATIENT_GLOO)
    job.wait_for_steps(3)

    def progress(since: float, of: int) -> Callable[[], bool]:
        return lambda: sum(line["time"] > since for line in job.steps()) >= of

    for _ in range(8):
        if source.random() < 0.3:
            # Never of the host that stays: alone, it would take the job with it.
            victims = {line["pid"] for line in job.steps()[-4:] if line["host"] != names[0]}
            for pid in source.sample(sorted(victims), min(1, len(victims))):
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)
        else:
            # One stays, so that the state does.
            some = sorted({names[0], *source.sample(names, source.randint(0, 2))})
            job.set_hosts("".join(f"{name}:{source.randint(1, 2)}\n" for name in some))
        job.wait_for("progress", progress(time.time(), source.choice([1, 5, 20])))
    job.set_hosts("".join(f"{name}:1\n" for name in names))
    at = time.time()
    job.wait_for_steps(3, 5, after=at)
    check_agreement(job.steps())
