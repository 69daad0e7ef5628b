"""Whole jobs of workers that do on the wire what Horovod's own library does (programs/horovod_worker.py)."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import FORKED, Job

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, str(PROGRAMS / "horovod_worker.py")]
THREE = "localhost:2\n127.0.0.1:1\n"
FIVE = "localhost:3\n127.0.0.1:2\n"
TRUSTS = pytest.param((), id="trusts-its-environment")
ASKS = pytest.param(("--asks-first",), id="asks-first")


def job(folder: Path, hosts: str | None, *worker: str, flags: tuple[str, ...] = ("--min-np", "1")) -> Job:
    np = [] if hosts is None else ["-np", str(sum(int(line.split(":")[1]) for line in hosts.split()))]
    words = (*np, "--horovod-protocol", "on", *flags)
    return Job(folder, hosts, *words, command=[*COMMAND, *worker], elasticrun=FORKED)  # which none of them is


def told(one: Job, what: str, **wanted: Any) -> list[dict[str, Any]]:
    return [line for line in one.steps() if line["what"] == what and wanted.items() <= line.items()]


def wait_for(one: Job, what: str, number: int = 1, **wanted: Any) -> list[dict[str, Any]]:
    """Waits for so many lines of this kind."""

    def found() -> list[dict[str, Any]]:
        lines = told(one, what, **wanted)
        return lines if len(lines) >= number else []

    lines: list[dict[str, Any]] = one.wait_for(f"{number} times {what} {wanted}", found)
    return lines


def wait_for_round(one: Job, size: int, *, after: float = 0.0, steps: int = 2) -> list[dict[str, Any]]:
    """Waits until each rank of a round of this size has done steps; gives one line of each, by rank."""

    def found() -> list[dict[str, Any]]:
        lines = [line for line in told(one, "step", size=size) if line["time"] > after]
        of_rank = [[line for line in lines if line["rank"] == rank] for rank in range(size)]
        return [lines[-1] for lines in of_rank] if all(len(lines) >= steps for lines in of_rank) else []

    lines: list[dict[str, Any]] = one.wait_for(f"steps at size {size}", found)
    return lines


def nobody_is_blamed(one: Job) -> None:
    assert "blacklisted" not in one.said()
    assert "removed from the job" not in one.said()
    assert "warning" not in one.said()


# --- the start, the end, what a worker may ask ---------------------------------------------------------------------


@pytest.mark.parametrize("worker", [TRUSTS, pytest.param(*ASKS.values, id=ASKS.id, marks=pytest.mark.release)])
def test_a_job_from_start_to_end(tmp_path: Path, worker: tuple[str, ...]) -> None:
    with job(tmp_path, THREE, "--steps", "20", "--step-s", "0.01", *worker) as one:
        assert one.wait() == 0
        assert sorted(line["rank"] for line in told(one, "boot")) == [0, 1, 2]
        assert sorted((line["rank"], line["step"]) for line in told(one, "end")) == [(rank, 20) for rank in range(3)]
        assert all(line["reset"] == 0 for line in one.steps() if line["what"] != "boot")
        assert "neither encrypted nor authenticated" in one.said()
        nobody_is_blamed(one)


def test_what_no_worker_asks_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    with job(tmp_path, "localhost:2\n", "--steps", "5", "--strange", "--rubbish-registration") as one:
        assert one.wait() == 0
        assert len(told(one, "end")) == 2


def test_a_static_job(tmp_path: Path) -> None:
    """Flags that do nothing here are told of."""
    flags = ("-np", "3", "--hang-timeout", "50", "--port-range", "20000-40000", "--cycle-time-ms", "3")
    with job(tmp_path, None, "--static", "--steps", "5", flags=flags) as one:
        assert one.wait() == 0, one.said()
        assert sorted(line["rank"] for line in told(one, "end", size=3, reset=0)) == [0, 1, 2]
        for flag in ("--hang-timeout", "--port-range"):
            assert one.said().count(f"{flag} has no effect here: the workers run Horovod's own library") == 1
        assert "warning: no effect here" not in one.said()


def test_a_static_job_ends_with_its_first_failure(tmp_path: Path) -> None:
    with job(tmp_path, None, "--static", "--fault", "exit:1:3:7", flags=("-np", "3")) as one:
        assert one.wait() == 1
        assert "exited with code 7" in one.said()


def test_the_reset_limit(tmp_path: Path) -> None:
    flags = ("--min-np", "1", "--reset-limit", "0")
    with job(tmp_path, THREE, "--fault", "kill:2:3", flags=flags) as one:
        assert one.wait() == 4


def test_a_rank_that_leaves_early_is_no_success(tmp_path: Path) -> None:
    with job(tmp_path, "localhost:2\n", "--fault", "exit:1:3:0") as one:
        assert one.wait() == 1
        assert "a rank left early" in one.said()


# --- losses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill:4:5", pytest.param("exit:4:5:3", marks=pytest.mark.release)])
def test_who_is_no_neighbor_of_the_dead_resumes_at_once(tmp_path: Path, fault: str) -> None:
    flags = ("--min-np", "1", "--gloo-timeout-seconds", "1000")  # longer than this test waits
    with job(tmp_path, FIVE, "--steps", "20", "--fault", fault, "--late-put", flags=flags) as one:
        assert one.wait() == 0
        assert len(told(one, fault.partition(":")[0])) == 1
        resumed = told(one, "init", size=3, reset=1)
        assert {line["pid"] for line in resumed} == {line["pid"] for line in told(one, "end", size=3, step=20)}
        assert len(resumed) == 3
        assert told(one, "error", rank=1)[0]["error"] == "Connection closed by peer"
        assert [line["step"] for line in told(one, "sync", reset=1)] == [5, 5, 5]
        assert "removed from the job: worker 127.0.0.1[1]" in one.said()


def test_a_stopped_worker_is_found(tmp_path: Path) -> None:
    flags = ("--min-np", "1", "--heartbeat-timeout", "5", "--gloo-timeout-seconds", "1000")
    with job(tmp_path, THREE, "--steps", "20", "--fault", "stop:2:5", flags=flags) as one:
        assert one.wait() == 0
        assert len(told(one, "end", size=2, step=20)) == 2


def test_a_collective_that_fails_costs_nobody(tmp_path: Path) -> None:
    with job(tmp_path, THREE, "--steps", "20", "--fault", "error:1:5") as one:
        assert one.wait() == 0
        assert len(told(one, "end", size=3, step=20, reset=1)) == 3
        assert "blacklisted" not in one.said()
        assert "removed from the job" not in one.said()


def test_who_aborts_since_another_was_lost_in_their_first_meeting_is_not_blamed(tmp_path: Path) -> None:
    with job(tmp_path, THREE, "--fault", "meet-first:2:2") as one:
        assert one.wait() == 1
        assert "that had the training's state are lost" in one.said()
        assert {line["rank"] for line in told(one, "abort", host="localhost")} == {0, 1}
        assert "its host is removed from the job: worker localhost" not in one.said()


def test_all_states_lost_while_they_meet_ends_the_job(tmp_path: Path) -> None:
    # Whoever waits in Gloo to be connected to would wait so long: it is ended before.
    flags = ("--min-np", "1", "--gloo-timeout-seconds", "1000")
    faults = ("--fault", "error:1:5", "--fault", "meet:4:1")
    with job(tmp_path, FIVE, *faults, flags=flags) as one:
        assert one.wait() == 1
        assert "that had the training's state are lost" in one.said()
        assert "job failed: worker 127.0.0.1[1] (rank 4) killed by SIGKILL; " in one.said()


# --- planned changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [TRUSTS, ASKS])
def test_hosts_come_and_go(tmp_path: Path, worker: tuple[str, ...]) -> None:
    over = tmp_path / "over"
    with job(tmp_path, "localhost:2\n", "--end-when", str(over), *worker) as one:
        first = wait_for_round(one, 2)
        one.set_hosts("localhost:2\n127.0.0.1:1\n")
        second = wait_for_round(one, 3)
        assert [line["pid"] for line in second[:2]] == [line["pid"] for line in first]
        assert told(one, "sync", pid=second[2]["pid"])[0]["step"] >= first[0]["step"]
        one.set_hosts("localhost:2\n")
        third = wait_for_round(one, 2, after=second[0]["time"])
        assert [line["pid"] for line in third] == [line["pid"] for line in first]
        assert len(wait_for(one, "abort", pid=second[2]["pid"])) == 1
        one.set_hosts("localhost:2\n127.0.0.1:1\n")
        fourth = wait_for_round(one, 3, after=third[0]["time"])
        assert fourth[2]["pid"] != second[2]["pid"]
        assert not any(line["skip_sync"] for line in told(one, "notice"))
        over.touch()
        assert one.wait() == 0
        nobody_is_blamed(one)


@pytest.mark.parametrize("worker", [TRUSTS, pytest.param(*ASKS.values, id=ASKS.id, marks=pytest.mark.release)])
def test_one_that_was_started_for_another_place_gets_its_own(tmp_path: Path, worker: tuple[str, ...]) -> None:
    over, go = tmp_path / "over", tmp_path / "go"
    with job(tmp_path, "localhost:1\n", "--end-when", str(over), "--boot-until", str(go), *worker) as one:
        wait_for_round(one, 1)
        one.set_hosts("localhost:1\n127.0.0.1:1\n")
        wait_for(one, "boot", host="127.0.0.1")
        one.set_hosts("localhost:2\n127.0.0.1:1\n")
        wait_for(one, "boot", host="localhost", local_rank=1)
        go.touch()
        members = wait_for_round(one, 3)
        over.touch()
        assert one.wait() == 0
        assert [(line["host"], line["local_rank"]) for line in members] == [
            ("localhost", 0),
            ("localhost", 1),
            ("127.0.0.1", 0),
        ]
        boots = told(one, "boot", host="127.0.0.1")
        assert [(line["rank"], line["size"]) for line in boots] == ([(1, 2)] if worker else [(1, 2), (2, 3)])
        assert boots[-1]["pid"] == members[2]["pid"]
        nobody_is_blamed(one)


def test_a_notice_is_repeated_until_it_is_acted_on(tmp_path: Path) -> None:
    over = tmp_path / "over"
    with job(tmp_path, "localhost:1\n", "--end-when", str(over), "--alone-until-told", "2") as one:
        wait_for_round(one, 1)
        one.set_hosts("localhost:2\n")
        (notice,) = wait_for(one, "notice")
        assert len(notice["notices"]) > 1
        assert len({timestamp for timestamp, _ in notice["notices"]}) == 1
        one.set_hosts("localhost:3\n")  # now it resets: what comes meanwhile is lost there
        wait_for_round(one, 3)
        over.touch()
        assert one.wait() == 0
        nobody_is_blamed(one)


def test_two_notices_in_a_second_are_both_acted_on(tmp_path: Path) -> None:
    over = tmp_path / "over"
    with job(tmp_path, "localhost:1\n", "--end-when", str(over), "--step-s", "0.005") as one:
        wait_for_round(one, 1)
        one.set_hosts("localhost:2\n")
        second = wait_for_round(one, 2, steps=1)
        one.set_hosts("localhost:1\n")
        wait_for_round(one, 1, after=second[0]["time"])
        over.touch()
        assert one.wait() == 0
        first, then = [line["notices"][-1][0] for line in told(one, "notice", rank=0)]
        assert then > first
        nobody_is_blamed(one)


# --- ends do not depend on goodwill --------------------------------------------------------------------------------


def test_the_end_does_not_wait_for_one_that_does_not_heed_that_it_is_removed(tmp_path: Path) -> None:
    over = tmp_path / "over"
    flags = ("--min-np", "1", "--grace-time", "0.2")
    with job(tmp_path, "localhost:2\n", "--end-when", str(over), "--stubborn", flags=flags) as one:
        wait_for_round(one, 2)
        one.set_hosts("localhost:1\n")
        (removed,) = wait_for(one, "stays")
        wait_for_round(one, 1)
        assert psutil.pid_exists(removed["pid"])
        over.touch()
        assert one.wait() == 0
        assert not psutil.pid_exists(removed["pid"])


def test_a_job_of_workers_that_ignore_sigterm_ends(tmp_path: Path) -> None:
    with job(tmp_path, "localhost:2\n", "--stubborn", flags=("--min-np", "1", "--grace-time", "0.2")) as one:
        wait_for_round(one, 2)
        one.process.send_signal(signal.SIGTERM)
        assert one.wait() == 143
