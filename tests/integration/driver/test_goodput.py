"""Goodput of real jobs: all seconds are booked, and a second program finds the same in the event log alone."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.health.stalls import LEAST_S
from tests.support.paths import PROGRAMS, ROOT, SUPPORT
from tests.support.processes.jobs import Job
from tests.support.processes.subcommands import elasticrun

pytestmark = [pytest.mark.integration]

TWO = "localhost:2\n"
ONE_EACH = "localhost:1\n127.0.0.1:1\n"


def check(job: Job) -> dict[str, float]:
    """The second program's word on the log, and the picture's. Gives the job's seconds by category."""
    script = [sys.executable, str(ROOT / "scripts" / "goodput"), "--check", str(job.event_log)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "each line of the log is understood"
    started = len({event["worker"] for event in job.events("worker_started")})
    booked = job.events("worker_goodput")
    assert len({event["worker"] for event in booked}) == len(booked) == started
    for event in (*booked, *job.events("goodput")):
        assert sum(event["seconds"].values()) == pytest.approx(event["wall_s"], abs=0.01)
        assert min(event["seconds"].values()) >= 0
    last = job.events("goodput")[-1]
    begun = job.events("job_started")[0]["at_s"]
    assert last["wall_s"] == pytest.approx(job.events("job_ended")[0]["at_s"] - begun, abs=0.001)
    assert job.events()[-2]["event"] == "goodput", "just before the end"
    seconds: dict[str, float] = last["seconds"]
    stood_s = sum(event["stood_s"] for event in job.events("stood_still"))  # the machine may be as busy as that
    assert seconds["unexplained"] <= 0.01 * last["wall_s"] + stood_s
    picture = job.folder / "job.svg"
    done = elasticrun("report", str(job.event_log), "-o", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    ET.parse(picture)
    told = elasticrun("report", str(job.event_log)).stdout
    if seconds["training"]:
        said = next(line for line in job.said().splitlines() if "goodput" in line)
        assert f"training {seconds['training']:.1f} s" in said or seconds["training"] >= 100
        drawn = re.search(r"^goodput ([\d.]+) %", told, re.M)
        assert drawn is not None
        assert float(drawn[1]) == pytest.approx(100 * last["share"], abs=0.06), "the picture's own sums are the same"
    return seconds


def status_of(job: Job) -> dict[str, Any]:
    job_id = job.events("job_started")[0]["job_id"]
    answer: dict[str, Any] = json.loads(elasticrun("status", "--json", job_id).stdout)
    return answer


def all_seen_training(job: Job) -> bool:
    """Whether the driver has heard, and seen by a look, that each worker trains."""
    if not job.steps():
        return False
    return all(one["running"] and one["vitals"] and one["vitals"]["steps"] for one in status_of(job)["workers"])


def rank_of(lines: list[dict[str, Any]], rank: int) -> int:
    pid: int = next(line["pid"] for line in reversed(lines) if line["rank"] == rank)
    return pid


def is_stopped_beyond_a_commit(job: Job) -> bool:
    """Stops rank 1; lets it go again unless there is something to lose now. The other makes one step more at most.

    A commit of the training's own: when that begins, the driver hears later than its workers do.
    """
    lines = job.steps()
    if max((line["step"] for line in lines), default=0) < 50:
        return False
    os.kill(pid := rank_of(lines, 1), signal.SIGSTOP)
    if 20 <= max(line["step"] for line in job.steps()) % 40 < 37:
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def is_end_of_stall(event: dict[str, Any]) -> bool:
    return event["event"] in ("phase", "stall_ended")


def test_a_kill_and_a_growth(tmp_path: Path) -> None:
    """What was trained since the last commit is recomputed, and the joiners' boot is theirs."""
    env = {"COMMIT_EVERY": "40", "STEP_S": "0.03"}
    flags = ("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "2")
    with Job(tmp_path, ONE_EACH, *flags, env=env) as job:
        job.wait_for("steps beyond a commit", lambda: is_stopped_beyond_a_commit(job))
        os.kill(rank_of(job.steps(), 1), signal.SIGKILL)
        job.wait_for_steps(1, after=time.time())
        job.wait_for_steps(2, 50, after=time.time())
        status = status_of(job)
        job.process.terminate()
        assert job.wait() == 143
        seconds = check(job)
    assert set(status["goodput"]) == {"seconds", "share"}
    assert 0 < status["goodput"]["share"] < 1
    member = next(worker for worker in status["workers"] if worker["worker"] == "localhost[0]#0")
    assert member["booked"]["training"] > 0
    lost = next(event for event in job.events("round_formed") if event["round_id"] == 2)["lost_s"]
    assert lost > 0.3, "twenty steps of 30 ms and more"
    # Of what lies between, only training is done again; on a busy machine some of it was none.
    assert lost / 2 < seconds["recomputed"] < lost + 0.01
    assert seconds["training"] > seconds["recomputed"]
    assert seconds["start"] > 0
    assert seconds["reset"] > 0
    joiners = [event for event in job.events("worker_goodput") if event["worker"].endswith("#1")]
    assert joiners
    assert all(event["seconds"]["joiner_boot"] > 0 for event in joiners)
    assert all(event["seconds"]["start"] == 0 for event in joiners)


def test_a_drain_and_a_wait_for_slots(tmp_path: Path) -> None:
    with Job(tmp_path, ONE_EACH, "-np", "2", "--min-np", "2", env={"COMMIT_EVERY": "10"}) as job:
        job.wait_for_steps(2)
        job_id = job.events("job_started")[0]["job_id"]
        assert elasticrun("drain", "--job", job_id, "127.0.0.1").returncode == 0
        job.wait_for("a wait for slots", lambda: [e for e in job.events("phase") if e["doing"] == "waiting_for_slots"])
        stands_since = time.monotonic()
        job.wait_for("something to book", lambda: time.monotonic() > stands_since + 0.1)
        assert elasticrun("drain", "--undo", "--job", job_id, "127.0.0.1").returncode == 0
        job.wait_for_steps(2, after=time.time())
        job.process.terminate()
        assert job.wait() == 143
        seconds = check(job)
    drained = [event["worker"] for event in job.events("worker_drained")]
    assert set(drained) >= {"127.0.0.1[0]#0"}
    phases = job.events("phase")
    waited_s = sum(
        after["at_s"] - phase["at_s"]
        for phase, after in itertools.pairwise(phases)
        if phase["doing"] == "waiting_for_slots"
    )
    assert 0.1 < seconds["waiting_for_slots"] == pytest.approx(waited_s, abs=0.01)
    assert seconds["recomputed"] == 0, "a drain loses nothing"


def test_a_stopped_worker_stalls_the_others_until_it_is_killed(tmp_path: Path) -> None:
    """What that cost is told from the last step before, and nothing of the stall is done again."""
    env = {"COMMIT_EVERY": "40", "STEP_S": "0.03"}
    with Job(tmp_path, ONE_EACH, "-np", "2", "--min-np", "1", env=env) as job:
        job.wait_for("steps beyond a commit", lambda: is_stopped_beyond_a_commit(job))
        job.wait_for("the stall", lambda: job.events("stalled"))
        # A stall is told before it is clear for whom the others wait.
        job.wait_for("whom they wait for", lambda: status_of(job)["stalled"]["waits_for"])
        status = status_of(job)
        job_id = job.events("job_started")[0]["job_id"]
        told, shown = status["explain"], elasticrun("status", job_id).stdout
        os.kill(rank_of(job.steps(), 1), signal.SIGKILL)
        killed = time.time()
        job.wait_for_steps(1, after=killed)
        job.process.terminate()
        assert job.wait() == 143
        seconds = check(job)
    assert status["stalled"]["waits_for"] == ["127.0.0.1[0]#0"]
    assert told.startswith("round 1 with 2 workers has been stalled for ")
    assert "no worker completes a step, waiting for worker 127.0.0.1[0]" in told
    assert shown.startswith(f"job {job_id}, stalled, ")
    [ended] = job.events("stall_ended")
    resumed = job.events("round_resumed")[-1]
    last = max(line["time"] for line in job.steps() if line["time"] < killed and line["size"] == 2)
    # From the last look at which somebody was seen to do something, at most.
    assert LEAST_S <= ended["stood_s"] < ended["time"] - last + 0.1
    assert resumed["took_s"] > resumed["stalled_s"] == ended["stood_s"]
    # Booked until the driver has heard the end of it, which on a busy machine is somewhat later.
    stalled = job.events("stalled")[0]
    over = next(event for event in job.events() if event["at_s"] > stalled["at_s"] and is_end_of_stall(event))
    booked_s = stalled["stood_s"] + over["at_s"] - stalled["at_s"]
    late_s = abs(booked_s - ended["stood_s"])
    assert seconds["stalled"] == pytest.approx(booked_s, abs=0.01)
    formed = job.events("round_formed")[-1]
    assert seconds["recomputed"] == pytest.approx(formed["lost_s"], abs=0.05 + late_s)
    assert formed["since_commit_s"] == pytest.approx(formed["lost_s"] + ended["stood_s"], abs=0.05 + late_s)
    assert f"{resumed['took_s']:.2f} s lost in total" in job.said()


def test_the_driver_stands_still_and_the_workers_train_on(tmp_path: Path) -> None:
    """That is training: they have said so by the time that it is booked."""
    with Job(tmp_path, TWO, "-np", "2") as job:
        job.wait_for("the driver to have seen them train", lambda: all_seen_training(job))
        before = time.time()
        job.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        # Nothing to watch: the driver says nothing while it is stopped; it reports from 5 s on.
        job.wait_for("steps meanwhile", lambda: time.monotonic() - stopped > 7 and job.steps())
        stood_s = time.monotonic() - stopped
        job.process.send_signal(signal.SIGCONT)
        (still,) = job.wait_for("its standstill", lambda: [e for e in job.events("stood_still") if e["time"] > before])
        job.process.terminate()
        assert job.wait() == 143
        seconds = check(job)
    assert still["trained"]
    assert seconds["unexplained"] == 0
    assert seconds["training"] > still["stood_s"]
    # It had looked at its clock half a second before, or somewhat more; and looks again when it gets on.
    assert stood_s - 0.5 < still["stood_s"] < still["time"] - before - still["ended_s"] + 3


def test_the_driver_and_the_workers_stand_still(tmp_path: Path) -> None:
    """What happened while it was stopped nobody knows: that is unexplained, and said."""
    with Job(tmp_path, TWO, "-np", "2") as job:
        job.wait_for_steps(2)
        pids = [job.process.pid, rank_of(job.steps(), 0), rank_of(job.steps(), 1)]
        stopped = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        job.wait_for("a while", lambda: time.monotonic() - stopped > 7)
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)
        os.kill(pids[0], signal.SIGCONT)
        (still,) = job.wait_for("its standstill", lambda: job.events("stood_still"))
        assert job.wait() == 1
        seconds = check(job)
    assert not still["trained"]
    assert seconds["unexplained"] == pytest.approx(still["stood_s"], abs=0.1)


def test_workers_that_are_restarted(tmp_path: Path) -> None:
    """Of these nobody knows what they do again: there is no such category."""
    program = tmp_path / "train.py"
    program.write_text(
        "import os, pathlib, time\n"
        f"mark = pathlib.Path({str(tmp_path / 'failed')!r})\n"
        "time.sleep(1)\n"
        "if os.environ['RANK'] == '1' and not mark.exists():\n    mark.touch(); raise SystemExit(3)\n"
        "time.sleep(1)\n"
    )
    with Job(tmp_path, None, "--standalone", "--nproc-per-node=2", "--max-restarts=2", command=[str(program)]) as job:
        assert job.wait() == 0, job.said()
        seconds = check(job)
    assert "recomputed" not in seconds
    assert {event["lost_s"] for event in job.events("round_formed")} == {None}
    assert seconds["training"] > 1.5
    assert seconds["reset"] > 0


def test_a_job_with_a_chief(tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    command = [sys.executable, str(PROGRAMS / "chief_program.py"), str(orders)]
    env = {"PYTHONPATH": f"{SUPPORT / 'fake_tensorflow'}:{ROOT}"}
    flags = ("--parameter-servers", "1", "-np", "1")
    with Job(tmp_path, TWO, *flags, command=command, env=env) as job:
        # It takes the orders that come once it has begun.
        job.wait_for("the chief", lambda: "[chief]<stdout>:cluster " in job.stdout.read_text())
        orders.write_text("exit 0\n")
        assert job.wait() == 0, job.said()
        seconds = check(job)
    assert "recomputed" not in seconds
    assert seconds["start"] > 0
    assert seconds["training"] > 0
    assert seconds["reset"] == 0


def test_a_job_that_never_trains(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import elastic_driver as hvd\nraise SystemExit(4)\nhvd.init()\n")
    with Job(tmp_path, None, "-np", "2", command=[sys.executable, str(program)]) as job:
        assert job.wait() == 1
        seconds = check(job)
    assert seconds["training"] == 0
    assert seconds["start"] > 0
    assert "goodput" not in job.said(), "there is nothing to tell of"
