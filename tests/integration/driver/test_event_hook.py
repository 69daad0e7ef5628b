"""--event-hook: real commands, which do what commands do."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.cli.main import main
from elastic_driver.reporting import event_hook
from elastic_driver.reporting.event_hook import EventHook
from elastic_driver.reporting.happenings import HostLost, JobEnded, MomentPassed, Remark, Summary, WorkersStopped
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import Job

pytestmark = [pytest.mark.integration]

PATIENCE_S = 150.0


class Hook:
    """A hook, and what it says."""

    def __init__(self, command: str, **limits: Any) -> None:
        self.warnings: list[str] = []
        self.details: list[str] = []
        limits = {"run_s": PATIENCE_S, **limits}
        self.hook = EventHook(
            command, job_id="77", on_warning=self.warnings.append, on_detail=self.details.append, **limits
        )

    def lose(self, *hosts: str) -> None:
        for host in hosts:
            self.hook.hear(HostLost(host, "gone"))

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, (self.warnings, self.details)
            self.hook.hear(MomentPassed())
            time.sleep(0.005)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_each_event_once_and_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    one = Hook(f"cat >> {log}; echo $ELASTIC_DRIVER_JOB >> {log}.job; echo not told", grace_s=PATIENCE_S)
    for number in range(20):
        one.hook.hear(Remark(str(number), warning=False))
    one.hook.hear(WorkersStopped([]))
    one.hook.hear(MomentPassed())
    one.hook.close()
    assert [event["text"] for event in lines(log)] == [str(number) for number in range(20)]
    assert {event["event"] for event in lines(log)} == {"report"}
    assert set((tmp_path / "log.job").read_text().split()) == {"77"}
    assert (one.warnings, one.details) == ([], [])
    one.lose("late")
    one.hook.close()


def test_a_failure_is_told_once_a_kind_and_its_output_each_time() -> None:
    one = Hook("case $(cat) in *a*) echo oh; echo no >&2; exit 3;; *) kill -9 $$;; esac", grace_s=PATIENCE_S)
    for host in ("a", "a", "b"):
        one.hook.hear(Remark(host, warning=False))
    one.hook.close()
    assert len(one.warnings) in (1, 2)
    assert "failed with exit code 3, on the event report; the same failure is not reported again" in one.warnings[0]
    assert len(one.details) == 3
    assert one.details[0].endswith("failed with exit code 3, on the event report: oh | no")


def started_and_killed(pids: Path, run_s: float) -> int:
    """How many processes two runs of a hook have started that sleeps longer than it may; all of them are gone."""
    command = f"setsid sleep 1000 & echo $! >> {pids}; sleep 1000 & echo $! >> {pids}; echo $$ >> {pids}; wait"
    one = Hook(command, run_s=run_s)
    one.lose("b", "c")
    one.until(lambda: len(one.details) == 2)
    assert [text.partition("' ")[2] for text in one.warnings] == [
        f"did not exit within {run_s:g} s and was killed, on the event host_lost; the same failure is not reported "
        "again"
    ]
    found = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
    one.until(lambda: all(map(is_gone, found)))
    one.hook.close()
    return len(found)


def test_one_that_sleeps_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    # On a busy machine it is killed before it has started all of them.
    assert any(started_and_killed(tmp_path / f"{run_s:g}", run_s) == 6 for run_s in (0.5, 2.0, 8.0, 32.0))


def test_what_it_leaves_running_ends_with_it_and_holds_up_nobody(tmp_path: Path) -> None:
    pid, log = tmp_path / "pid", tmp_path / "log"
    one = Hook(f"sleep 1000 & echo $! >> {pid}; cat >> {log}", grace_s=PATIENCE_S)
    one.lose("b", "c")
    one.hook.close()
    assert [event["host"] for event in lines(log)] == ["b", "c"]
    one.until(lambda: all(is_gone(int(each)) for each in pid.read_text().split()))
    assert (one.warnings, one.details) == ([], [])


def test_one_that_waits_for_its_children_waits_for_its_own_only(tmp_path: Path) -> None:
    one = Hook(f"cat >> {tmp_path}/log & wait", grace_s=PATIENCE_S)
    one.lose("b")
    one.hook.close()
    assert one.warnings == []


def test_a_gigabyte_of_output_takes_no_memory() -> None:
    one = Hook("head -c 1000000000 /dev/zero; echo; echo that was all; exit 1", grace_s=PATIENCE_S)
    before = psutil.Process().memory_info().rss
    one.lose("b")
    one.until(lambda: one.details)
    assert one.details[0].endswith("that was all")
    assert len(one.details[0]) < 2000
    assert psutil.Process().memory_info().rss < before + (64 << 20)
    one.hook.close()


def test_what_it_does_not_keep_up_with_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hook, "MOST_WAITING", 5)
    began, go = tmp_path / "began", tmp_path / "go"
    command = f"touch {began}; until test -e {go}; do sleep 0.01; done; cat >> {tmp_path}/log"
    one = Hook(command, grace_s=PATIENCE_S)
    one.lose("a")
    one.until(began.exists)
    one.lose(*"bcdefghij")
    assert len(one.warnings) == 1
    assert "cannot keep up: dropping events (5 are queued)" in one.warnings[0]
    go.touch()
    one.hook.close()
    assert [event["host"] for event in lines(tmp_path / "log")] == list("abcdef")
    assert one.warnings[1].endswith("missed 4 events: it could not keep up")


def test_the_end_waits_for_a_moment_only(tmp_path: Path) -> None:
    one = Hook(f"echo $$ > {tmp_path}/pid; sleep 1000", grace_s=0.2)
    one.lose("a", "b", "c")
    one.until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    one.hook.close()  # not after the thousand seconds
    assert [text.partition("' ")[2] for text in one.warnings] == [
        "was still running 0.2 s after the job ended and was killed, and 2 more events were dropped"
    ]
    one.until(lambda: is_gone(int((tmp_path / "pid").read_text())))


def test_the_end_is_told_though_many_events_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hook, "MOST_WAITING", 50)
    monkeypatch.setattr(event_hook, "LAST_S", 5.0)
    log = tmp_path / "log"
    one = Hook(f"e=$(cat); case $e in *job_ended*) ;; *) sleep 0.2;; esac; echo $e >> {log}", grace_s=10.0)
    one.lose(*map(str, range(100)))
    one.hook.hear(JobEnded(0, "over", Summary()))
    one.hook.close()
    told = [event["event"] for event in lines(log)]
    assert told[-1] == "job_ended"
    assert set(told[:-1]) <= {"host_lost"}
    assert re.search(r"missed \d+ events at the end of the job: it could not keep up", one.warnings[1])


def test_the_end_is_told_though_a_run_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hook, "LAST_S", 5.0)
    log = tmp_path / "log"
    one = Hook(f"e=$(cat); case $e in *job_ended*) ;; *) sleep 1000;; esac; echo $e >> {log}", grace_s=10.0)
    one.lose("a", "b")
    one.hook.hear(JobEnded(0, "over", Summary()))
    one.hook.close()
    assert [event["event"] for event in lines(log)] == ["job_ended"]
    assert [text.partition("' ")[2] for text in one.warnings] == [
        "missed 2 events at the end of the job: it could not keep up"
    ]


def test_an_end_that_hangs_is_killed() -> None:
    one = Hook("sleep 1000", grace_s=0.4)
    one.hook.hear(JobEnded(0, "over", Summary()))
    one.hook.close()
    assert [text.partition("' ")[2] for text in one.warnings] == [
        "was still running 0.4 s after the job ended and was killed"
    ]


def test_a_machine_without_processes_is_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **values: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    one = Hook("true")
    monkeypatch.setattr(event_hook.subprocess, "Popen", refuse)
    one.lose("a")
    one.until(lambda: one.details)
    assert "cannot be run: Resource temporarily unavailable, on the event host_lost" in one.warnings[0]
    one.hook.close()


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("./no-such-hook --all", "cannot find the event hook './no-such-hook': there is no such file"),
        ("'", "cannot read --event-hook"),
        ("", "--event-hook is empty"),
        ("/", "cannot run the event hook '/': it is not a file"),
    ],
)
def test_one_that_is_not_there_is_refused_at_the_start(
    command: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-np", "1", "--event-hook", command, "true"]) == 2
    assert complaint in capsys.readouterr().err


def test_a_job_tells_its_hook_what_its_log_has(tmp_path: Path, runtime: Path) -> None:
    log = tmp_path / "hooked"
    # The last event is told, too, though the job is over then: what ends its processes leaves this one.
    command = f'e=$(cat); case $e in *job_ended*) sleep 0.5;; esac; echo "$e" >> {log}'
    flags, patient = ("-np", "2", "--event-hook", command), (str(PROGRAMS / "patient.py"),)
    with Job(tmp_path, "localhost:2\n", *flags, command=["true"], elasticrun=patient) as job:
        assert job.wait() == 0
        told, logged = lines(log), [event for event in job.events() if event["event"] != "sampled"]
    assert [event["event"] for event in told][-1] == "job_ended"
    for event in (*told, *logged):
        event.pop("time")
    assert told == logged


def test_a_driver_that_is_killed_leaves_no_hook_behind(tmp_path: Path, runtime: Path) -> None:
    pid = tmp_path / "pid"
    with Job(
        tmp_path, "localhost:1\n", "-np", "1", "--event-hook", f"echo $$ > {pid}; sleep 1000",
        command=[sys.executable, "-c", "import time; time.sleep(1000)"],
    ) as job:  # fmt: skip
        job.wait_for("the hook", lambda: pid.exists() and pid.read_text())
        job.wait_for("the worker", lambda: job.events("worker_started"))
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
        end = time.monotonic() + PATIENCE_S
        while not is_gone(int(pid.read_text())) or job.leftovers():
            assert time.monotonic() < end
            time.sleep(0.02)
