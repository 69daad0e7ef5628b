"""The job's story, as the lines that a user reads."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from elastic_driver import codec
from elastic_driver.core.assignment import Placed
from elastic_driver.core.events import PublishRound, ReportResumed, StopWorker
from elastic_driver.core.state import Failure
from elastic_driver.health.findings import Stalled, StallEnded, WorkerCleared, WorkerSuspected
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.words import ExitStatus
from elastic_driver.rendezvous.messages import DiskReport
from elastic_driver.reporting.chronicle import Chronicle, ChronicleKept
from elastic_driver.reporting.console import Console
from elastic_driver.reporting.event_log import EventLog
from elastic_driver.reporting.happenings import Happening, LinkMeasured, NetworkChecked, RoundFormed, TookOver
from elastic_driver.reporting.narrator import Narrator
from elastic_driver.words import Backend

pytestmark = [pytest.mark.unit]


@dataclass
class Process:
    """What the chronicle looks at of a Worker."""

    worker: WorkerId
    label: str
    last_lines: list[str] = field(default_factory=list)
    error_file: str = ""
    pid: int = 7


class Story:
    """A chronicle that writes into a file, and what stands there."""

    def __init__(self, folder: Path, *, verbose: bool = False) -> None:
        self._path = folder / "stderr"
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT)
        self.console = Console(stdout=self._descriptor, stderr=self._descriptor, verbose=verbose)
        self.log = EventLog(folder / "events")
        self.chronicle = Chronicle(self.log, Narrator(self.console))
        self._events = folder / "events"

    def round(
        self,
        round_id: int,
        cause: str,
        *,
        old_size: int = 2,
        reinit: bool = False,
        backend: Backend = Backend.NATIVE,
        alone: bool = False,
    ) -> None:
        worker = WorkerId("a", 0, 0)
        placed: tuple[Placed, ...] = (
            Placed(worker, SlotInfo(0, 2, 0, 1, 0, 2)),
            Placed(WorkerId("b", 0, 0), SlotInfo(1, 2, 0, 1, 1, 2)),
        )
        if alone:
            placed = (Placed(worker, SlotInfo(0, 1, 0, 1, 0, 1)),)
        command = PublishRound(round_id, placed, True, round_id, backend, cause, old_size, reinit)
        self.chronicle.round_formed(command, {}, 1.0)

    def fail(self, slot: int, lines: list[str], *, code: int = 1) -> None:
        process: Any = Process(WorkerId("a", slot, 0), str(slot), lines)
        self.chronicle.worker_exited(process.worker, process, ExitStatus(code), expected=False)

    def said(self) -> list[str]:
        self.console.__exit__(None, None, None)
        return self._path.read_text().splitlines()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """At the end of a test: the log is closed."""
        self.log.close()
        lines = [json.loads(line) for line in self._events.read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]

    def close(self) -> None:
        self.console.__exit__(None, None, None)
        self.log.close()
        os.close(self._descriptor)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    one = Story(tmp_path)
    yield one
    one.close()


def test_hundreds_of_rounds_are_told_in_a_table_of_twenty_lines(story: Story) -> None:
    story.round(1, "start", old_size=0)
    for number in range(2, 302):
        story.round(number, f"host x{number} lost")
        if number % 100:
            story.chronicle.round_resumed(ReportResumed(number, number, 0.5))
    story.chronicle.ended(0, "done")
    said = story.said()
    table = said[next(index for index, line in enumerate(said) if "time lost" in line) :]
    assert [line.split()[1] for line in table] == [
        "round",
        *map(str, range(1, 6)),
        "...",
        *map(str, range(287, 302)),
        "300",
        "job",
    ]
    assert "281 more rounds; for all of them, use --event-log FILE" in table[6]
    assert "139.50 s" in table[6], "the two of a hundred whose time nobody knows count nothing"
    assert table[-2] == "elasticrun: 300 changes, at least 148.50 s lost in total"
    assert len(story.events("round_formed")) == 301


@pytest.mark.parametrize(
    ("backend", "beginning"),
    [
        (
            Backend.TORCH,
            "elasticrun: PyTorch's Gloo carries the collectives, which is slower: ELASTIC_DRIVER_BACKEND asks for it, ",
        ),
        (Backend.HOROVOD, "elasticrun: the workers run Horovod's own library: connections between them are neither "),
    ],
)
def test_what_a_backend_costs_is_said_once(story: Story, backend: Backend, beginning: str) -> None:
    for number in (1, 2):
        story.round(number, "start", backend=backend)
    assert sum(line.startswith(beginning) for line in story.said()) == 1


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.HOROVOD])
def test_one_worker_alone_has_no_collectives_that_a_backend_carries(story: Story, backend: Backend) -> None:
    story.round(1, "start", backend=backend, alone=True)
    assert not [line for line in story.said() if "carries the collectives" in line or "own library" in line]


def test_a_chief_is_told_of_at_each_start_and_end(story: Story) -> None:
    story.chronicle.server_answers(WorkerId("a", 0, 0), 0, "10.0.0.1:5000")
    story.chronicle.server_answers(WorkerId("a", 1, 0), None, "10.0.0.1:5001")
    story.chronicle.chief_started(1, 41, 1, 2)
    story.chronicle.chief_stopped("parameter server 0 (a[0]) was lost")
    story.chronicle.chief_exited(1, 41, -15, "killed by SIGTERM", expected=True)
    story.chronicle.chief_started(2, 42, 2, 1)
    story.chronicle.chief_exited(2, 42, 1, "exited with code 1", expected=False)
    assert story.said() == [
        "elasticrun: parameter server 0 (a[0]) listens at 10.0.0.1:5000",
        "elasticrun: worker a[1] listens at 10.0.0.1:5001",
        "elasticrun: the chief started (pid 41) with 1 parameter server and 2 workers",
        "elasticrun: stopping the chief: parameter server 0 (a[0]) was lost",
        "elasticrun: the chief restarted (pid 42) with 2 parameter servers and 1 worker",
        "elasticrun: warning: the chief (pid 42) exited with code 1",
    ]
    assert [event["parameter_server"] for event in story.events("server_answers")] == [0, None]
    (first, second) = story.events("chief_started")
    assert (first["number"], first["parameter_servers"], first["workers"]) == (1, 1, 2)
    assert second["pid"] == 42
    assert [event["expected"] for event in story.events("chief_exited")] == [True, False]
    assert len(story.events("chief_stopped")) == 1


def test_a_round_made_by_reinit_is_told_at_once_and_as_what_it_is(story: Story) -> None:
    story.round(1, "start", old_size=0)
    story.round(2, "all workers called shutdown() and init() again", reinit=True)
    story.round(3, "host b lost")
    story.chronicle.ended(0, "done")
    said = story.said()
    assert "elasticrun: round 2: 2 -> 2 workers, all workers called shutdown() and init() again" in said
    assert "elasticrun: round 3: 2 -> 2 workers, host b lost" in said, "those who have finished have not broken it"


def test_a_round_that_broke_before_all_had_resumed_says_so(story: Story) -> None:
    story.round(1, "start", old_size=0)
    story.round(2, "host b lost")
    story.round(3, "host c lost")
    story.chronicle.ended(1, "all is lost")
    broken = "; it ended before all its workers had resumed"
    lines = [line for line in story.said() if line.startswith("elasticrun: round") and "lost" in line]
    assert lines == [
        f"elasticrun: round 2: 2 -> 2 workers, host b lost{broken}",
        f"elasticrun: round 3: 2 -> 2 workers, host c lost{broken}",
    ]


def test_a_mistake_in_all_scripts_is_shown_once_with_who_had_it(story: Story) -> None:
    lines = ["Traceback (most recent call last):", '  File "t.py", line 1', "ImportError: none"]
    for rank in range(4):
        story.console.write("stderr", "".join(f"[{rank}]<stderr>:{line}\n" for line in lines).encode())
    for rank in (2, 0, 1, 3):
        story.fail(rank, lines)
    story.chronicle.first_failure(Failure(WorkerId("a", 2, 0), None, "exited with code 1"))
    assert story.said() == [
        *(f"[0]<stderr>:{line}" for line in lines),
        "elasticrun: warning: worker a[2] (pid 7) exited with code 1, with the same error as rank 0",
        "elasticrun: warning: worker a[0] (pid 7) exited with code 1",
        "elasticrun: warning: workers a[1], a[3] exited with code 1, with the same error as rank 0",
    ]
    (event,) = story.events("first_failure")
    assert (event["last_lines"], event["alike"]) == (lines, ["a[0]#0", "a[1]#0", "a[3]#0"])


def test_last_words_that_are_out_of_sight_are_told_again_with_who_had_the_same(story: Story) -> None:
    lines = ["no room left", "giving up"]
    story.round(1, "start", old_size=0)
    for rank in range(3):
        story.console.write("stderr", "".join(f"[{rank}]<stderr>:{line}\n" for line in lines).encode())
    story.console.write("stderr", b"[9]<stderr>:something else\n" * 100)
    for rank in range(3):
        story.fail(rank, lines if rank else ["another end"])
    story.chronicle.first_failure(Failure(WorkerId("a", 1, 0), 1, "exited with code 1"))
    assert story.said()[-3:] == [
        "elasticrun: last output of worker a[1] (exited with code 1), and of worker a[2]:",
        "elasticrun:   no room left",
        "elasticrun:   giving up",
    ]


def test_last_words_are_forgotten_with_their_round(story: Story) -> None:
    story.fail(0, ["old words"])
    story.round(1, "start", old_size=0)
    story.chronicle.first_failure(Failure(WorkerId("a", 0, 0), None, "killed by SIGKILL"))
    assert story.events("first_failure")[0]["last_lines"] == []


def test_workers_stopped_for_one_reason_are_one_line(story: Story) -> None:
    lost = "its host is removed from the job: worker a[0] killed by SIGKILL"
    commands = [StopWorker(WorkerId("a", slot, 0), lost) for slot in range(1, 9)]
    story.chronicle.workers_stopped([*commands, StopWorker(WorkerId("b", 0, 0), "it is late")])
    assert story.said() == [
        f"elasticrun: stopping workers a[1], a[2], a[3], a[4], a[5], a[6] and 2 more: {lost}",
        "elasticrun: stopping worker b[0]: it is late",
    ]
    assert len(story.events("worker_stopped")) == 9


def test_a_wait_is_told_of_within_seconds_and_then_less_and_less_often(story: Story) -> None:
    def told(what: str, begin: int, **values: float) -> list[int]:
        seconds = []
        for second in range(begin, begin + 1000):
            story.chronicle.waits(second, what, **values)
            if story.chronicle.look(second):
                story.chronicle.still_waiting(f"waiting for {what}", second)
                seconds.append(second - begin)
        return seconds

    assert told("slots", 0) == [5, 15, 35, 75, 155, 315, 615, 915]
    assert told("", 1000) == []
    assert told("a start", 2000, patience=3.0) == [15, 45, 105, 225, 465, 765]
    assert told("slots", 3000)[:2] == [5, 15], "the next wait begins anew"
    said = story.said()
    assert said[1] == "elasticrun: for 15 s now: waiting for slots"
    assert said[2] == "elasticrun: warning: for 35 s now: waiting for slots", "those who hear only warnings, too"


def disk(folder: str, written: int, commits: int, trouble: str = "", *, drivers: bool = False) -> DiskReport:
    return DiskReport(folder, f"/d on {folder}", written, commits, trouble, drivers)


def test_a_disk_that_stays_behind_is_warned_of_now_and_then_and_stands_in_the_summary(story: Story) -> None:
    for commits in range(10, 151, 10):
        story.chronicle.on_disk(disk("a", 1, commits, "No space left on device"))
        story.chronicle.on_disk(disk("b", commits, commits))
    story.chronicle.ended(0, "done")
    warned = [
        f"elasticrun: warning: commits are not reaching the disk: the newest is commit 1 of {commits} in /d on a "
        "(No space left on device)"
        for commits in (20, 40, 80)
    ]
    assert story.said() == [
        *warned,
        "elasticrun: on disk: commit 150 in /d on b",
        "elasticrun: warning: on disk: commit 1 of 150 in /d on a (No space left on device)",
        "elasticrun: job succeeded: done (exit code 0)",
    ]


def test_a_trouble_that_passes_is_not_counted_on(story: Story) -> None:
    for trouble in ("full", "", "full", ""):
        story.chronicle.on_disk(disk("a", 3, 9, trouble))
    assert story.said() == []


def test_another_writer_of_a_folder_does_not_take_back_what_is_there(story: Story) -> None:
    story.chronicle.on_disk(disk("a", 40, 40))
    story.chronicle.on_disk(disk("a", -1, 41))
    story.chronicle.ended(130, "interrupted by SIGINT")
    assert story.said()[0] == "elasticrun: on disk: commit 40 of 41 in /d on a"


def test_what_the_driver_finds_in_its_own_folder_is_newer_than_the_last_heartbeat(story: Story) -> None:
    story.chronicle.on_disk(disk("a", 40, 41, drivers=True))
    story.chronicle.on_disk(disk("b", 39, 41))
    story.chronicle.found_on_disk("/d", 52)
    story.chronicle.ended(130, "interrupted by SIGINT")
    assert story.said()[:2] == [
        "elasticrun: on disk: commit 52 in /d on a",
        "elasticrun: on disk: commit 39 of 41 in /d on b",
    ]


def test_what_is_on_disk_is_said_also_of_a_job_that_never_reported(story: Story) -> None:
    story.chronicle.round_resumed(ReportResumed(1, 0, 0.5))
    story.chronicle.found_on_disk("/d", 52)
    story.chronicle.ended(1, "nothing works")
    assert story.said()[0] == "elasticrun: on disk: commit 52 in /d"


def test_a_damaged_commit_is_not_counted_as_on_disk(story: Story) -> None:
    story.chronicle.on_disk(disk("a", 52, 52, drivers=True))
    story.chronicle.found_on_disk("/d", 40, (52, 41))
    story.chronicle.ended(130, "interrupted by SIGINT")
    assert story.said()[0].endswith("on disk: commit 40 of 52 in /d on a (commit 52 is damaged)")


def test_a_commit_that_no_training_began_from_may_be_none(story: Story) -> None:
    story.chronicle.found_on_disk("/d", 52)
    story.chronicle.ended(1, "none of the commits can be used")
    assert story.said() == ["elasticrun: job failed: none of the commits can be used (exit code 1)"]


def test_what_a_change_costs_begins_when_the_round_before_stalled(story: Story) -> None:
    worker = WorkerId("a", 0, 0)
    story.round(1, "start", old_size=0)
    story.chronicle.found(Stalled(3.0, [worker]))
    story.chronicle.found(StallEnded(5.0, [worker], resumed=True))
    story.chronicle.found(Stalled(2.0, [worker]))
    story.chronicle.found(StallEnded(60.0, [worker], resumed=False))
    story.round(2, "host a lost")
    story.chronicle.round_resumed(ReportResumed(2, 2, 0.5))
    story.round(3, "host a added")
    story.chronicle.round_resumed(ReportResumed(3, 2, 0.25))
    story.chronicle.ended(0, "")
    said = "\n".join(story.said())
    assert "elasticrun: stalled for 5.0 s: no worker completes a step, waiting for worker a[0]; it continues\n" in said
    assert "host a lost, resumed from commit 2 in 60.50 s, including a stall of 60.00 s\n" in said
    assert "host a added, resumed from commit 2 in 0.25 s\n" in said
    assert "2 changes, 60.75 s lost in total" in said
    told = [(event["took_s"], event["stalled_s"]) for event in story.events("round_resumed")]
    assert told == [(60.5, 60.0), (0.25, 0.0)]


def test_another_driver_goes_on_with_the_table(tmp_path: Path, story: Story) -> None:
    for number in range(1, 41):
        story.round(number, "start" if number == 1 else f"host b{number} added", old_size=number > 1)
        if number % 2:
            story.chronicle.round_resumed(ReportResumed(number, number, 0.5))
    story.chronicle.stood_still(10)
    kept = codec.decode(ChronicleKept, codec.encode(ChronicleKept, story.chronicle.kept()))
    (tmp_path / "next").mkdir()
    successor = Story(tmp_path / "next")
    successor.chronicle.go_on(kept)
    for each in (story, successor):
        each.chronicle.round_resumed(ReportResumed(40, 40, 0.5))
        each.chronicle.ended(0, "")
    # Those who died have told of single rounds as they came.
    ours = [line for line in successor.said() if "resumed from" not in line]
    assert len(ours) > 20
    assert ours == story.said()[-len(ours) :]


@pytest.mark.parametrize(
    ("workers", "hosts", "trained", "left"),
    [
        (32, 4, True, "32 workers on 4 hosts kept training, no step is lost"),
        (1, 1, True, "1 worker on 1 host kept training, no step is lost"),
        (3, 1, False, "3 workers on 1 host are still running"),
        (1, 1, False, "1 worker on 1 host is still running"),
        (0, 0, False, "no worker is running"),
    ],
)
def test_a_takeover_is_one_line(story: Story, workers: int, hosts: int, trained: bool, left: str) -> None:
    story.chronicle.took_over(TookOver(2, 1.4, workers, hosts, 7, trained))
    assert story.said() == [f"elasticrun: took over: no driver for 1.4 s; {left}"]
    (event,) = story.events("took_over")
    assert (event["epoch"], event["workers"], event["round_id"], event["trained"]) == (2, workers, 7, trained)


def test_time_in_which_the_driver_stood_still_is_told_of_in_the_end(story: Story) -> None:
    story.chronicle.stood_still(80)
    story.chronicle.stood_still(10)
    story.chronicle.ended(0, "")
    assert "elasticrun: the driver stood still for 90 s in total, which is not counted above" in story.said()


class Metrics:
    """A listener that nothing else knows of: counts what it is told."""

    live = False

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.size = 0

    def hear(self, happening: Happening) -> None:
        self.counts[type(happening).__name__] += 1
        match happening:
            case RoundFormed(members=members):
                self.size = len(members)


def test_another_listener_hears_all_that_the_others_hear(story: Story) -> None:
    metrics = Metrics()
    story.chronicle = Chronicle(story.log, Narrator(story.console), metrics)
    story.chronicle.started("http://a:1", "j")
    story.round(1, "start", old_size=0)
    story.fail(0, ["no more"])
    story.round(2, "worker a[0] exited with code 1")
    story.chronicle.round_resumed(ReportResumed(2, 7, 0.5))
    story.chronicle.warning("a word")
    story.chronicle.ended(0, "done")
    assert metrics.size == 2
    assert metrics.counts == {
        "JobStarted": 1,
        "RoundFormed": 2,
        "ProcessEnded": 1,
        "RoundResumed": 1,
        "Remark": 1,
        "TimeBooked": 1,
        "JobEnded": 1,
    }
    assert len(story.events("round_formed")) == metrics.counts["RoundFormed"]


def test_a_listener_that_shows_the_status_keeps_waits_from_being_told(story: Story) -> None:
    listener = Metrics()
    chronicle = Chronicle(listener)
    chronicle.waits(0, "slots")
    assert (chronicle.live, chronicle.look(100)) == (False, True)
    listener.live = True
    assert (chronicle.live, chronicle.look(100)) == (True, False)
    chronicle.status("waiting")
    assert listener.counts == {"MomentPassed": 2, "Status": 1}


@pytest.mark.parametrize("verbose", [False, True])
def test_a_check_of_the_network(tmp_path: Path, verbose: bool) -> None:
    story = Story(tmp_path, verbose=verbose)
    links = [LinkMeasured(("a", "b"), 1.5e-3, 9e6 / 8), LinkMeasured(("a", "c"), 2e-4, 940e6 / 8)]
    story.chronicle.network_checked(NetworkChecked(["b", "c"], {"d": "why"}, ["e"], links, ["it is slow"], 0.42))
    story.chronicle.network_checked(NetworkChecked(["f"], {}, [], [], [], 1.0))
    details = [
        "elasticrun: the network of hosts b, c, d was checked in 0.4 s: 2 links of 9 to 940 Mbit/s, round trips of "
        "0.20 to 1.50 ms; no answer from: e",
        "elasticrun: the network of host f was checked in 1.0 s",
    ]
    slow = "elasticrun: warning: it is slow"
    assert story.said() == ([details[0], slow, details[1]] if verbose else [slow])
    first, second = story.events("network_checked")
    del first["time"], first["at_s"]
    assert first == {
        "event": "network_checked",
        "admitted": ["b", "c"],
        "barred": {"d": "why"},
        "unheard": ["e"],
        "links": [
            {"hosts": ["a", "b"], "rtt_ms": 1.5, "mbit_s": 9.0},
            {"hosts": ["a", "c"], "rtt_ms": 0.2, "mbit_s": 940.0},
        ],
        "slow": ["it is slow"],
        "took_s": 0.42,
    }
    assert second["links"] == []
    story.close()


LIMIT = "10 times the slowest of the last 100 steps, 0.8 s, is 8 s"
AWAITED = WorkerSuspected(
    WorkerId("a", 1, 0),
    2,
    "awaited",
    "it has not submitted allreduce 'loss', for which others have waited 9 s",
    "allreduce 'loss'",
    "Thread 0x01",
    ("train.py:12 in step", "train.py:40 in main"),
    9.2,
    8.0,
    LIMIT,
    60.0,
    0,
)
SUSPICIONS = {
    "awaited": (
        AWAITED,
        "worker a[1] (rank 2) may hang: it has not submitted allreduce 'loss', for which others have waited 9 s "
        f"(the limit: {LIMIT}); it will be killed if it uses no CPU, does no I/O and does not wake for 60 s (with "
        "--hang-action warn it would only be reported)",
    ),
    "only a warning": (
        replace(AWAITED, ends_s=None, more=31),
        "worker a[1] (rank 2) (and 31 others like it) may hang: it has not submitted allreduce 'loss', for which "
        f"others have waited 9 s (the limit: {LIMIT}); no worker is killed for this (--hang-action warn)",
    ),
    "stopped": (
        replace(AWAITED, kind="stopped", why="it is stopped by a signal (state T)", rank=None, still_s=1.0, ends_s=9.0),
        "worker a[1] may hang: it is stopped by a signal (state T); it will be killed in 9 s unless that changes "
        "(with --hang-action warn it would only be reported)",
    ),
    "waits for somebody else": (
        replace(AWAITED, ends_s=None, spared="its main thread waits for a file lock"),
        "worker a[1] (rank 2) may hang: it has not submitted allreduce 'loss', for which others have waited 9 s "
        f"(the limit: {LIMIT}); it is not killed for this: its main thread waits for a file lock",
    ),
    "traced": (
        replace(AWAITED, kind="traced", why="it is stopped by a debugger (state t)", still_s=1.0, ends_s=None),
        "worker a[1] (rank 2) may hang: it is stopped by a debugger (state t); a worker in a debugger is not killed",
    ),
    "at a prompt": (
        replace(AWAITED, kind="traced", why="others wait for it; it is in a debugger (pdb)", ends_s=None),
        f"worker a[1] (rank 2) may hang: others wait for it; it is in a debugger (pdb) (the limit: {LIMIT}); a "
        "worker in a debugger is not killed",
    ),
    "deadlock": (
        replace(AWAITED, kind="deadlock", why="the ranks wait for each other", ends_s=None),
        f"worker a[1] (rank 2) may hang: the ranks wait for each other (the limit: {LIMIT}); no worker is killed, "
        "since it is unclear which of them is at fault",
    ),
    "idle": (
        replace(AWAITED, kind="idle", why="it has used no CPU and done no I/O for 9 s", ends_s=None),
        "worker a[1] (rank 2) may hang: it has used no CPU and done no I/O for 9 s (the limit: "
        f"{LIMIT}); no worker is killed as long as none waits for it",
    ),
}


@pytest.mark.parametrize("case", SUSPICIONS)
def test_who_may_hang_why_where_and_what_comes_of_it(story: Story, case: str) -> None:
    suspected, line = SUSPICIONS[case]
    story.chronicle.found(suspected)
    story.chronicle.found(WorkerCleared(suspected.worker, suspected.rank, "it goes on", 12.34))
    who = line.partition(" (and ")[0].partition(" may ")[0]
    assert story.said() == [
        f"elasticrun: warning: {line}",
        "elasticrun: warning:   train.py:12 in step",
        "elasticrun: warning:   train.py:40 in main",
        f"elasticrun: {who} is no longer suspected of hanging: it goes on; it made no progress for 12.3 s",
    ]
    (event,) = story.events("worker_suspected")
    told = ("worker", "rank", "kind", "collective", "frames", "still_s", "limit_s", "limit", "ends_s", "more", "spared")
    assert {name: event[name] for name in told} == {
        "worker": "a[1]#0",
        "rank": suspected.rank,
        "kind": suspected.kind,
        "collective": "allreduce 'loss'",
        "frames": ["train.py:12 in step", "train.py:40 in main"],
        "still_s": suspected.still_s,
        "limit_s": 8.0,
        "limit": LIMIT,
        "ends_s": suspected.ends_s,
        "more": suspected.more,
        "spared": suspected.spared,
    }


def test_a_process_whose_death_was_foretold_is_told_of_once(story: Story) -> None:
    process: Any = Process(WorkerId("a", 0, 0), "0", ["last words"])
    story.chronicle.worker_dying(process.worker, process, "killed by SIGKILL")
    story.chronicle.worker_exited(process.worker, process, ExitStatus(-9), expected=False)
    assert story.said() == ["elasticrun: warning: worker a[0] (pid 7) killed by SIGKILL"]
    assert [event["pid"] for kind in ("worker_dying", "worker_exited") for event in story.events(kind)] == [7, 7]


def test_of_workers_that_are_lost_with_their_host_only_the_host_is_told(story: Story) -> None:
    story.chronicle.host_lost("a", "it did not respond for 5.0 s")
    for slot in (0, 1):
        process: Any = Process(WorkerId("a", slot, 0), str(slot), [])
        story.chronicle.worker_exited(process.worker, process, ExitStatus(-9, "lost with its host"), expected=False)
    assert story.said() == ["elasticrun: warning: host a is lost: it did not respond for 5.0 s"]
    assert [event["returncode"] for event in story.events("worker_exited")] == [-9, -9]


def test_many_folders_are_cut(story: Story) -> None:
    for number in range(200):
        story.chronicle.on_disk(disk(f"h{number}", number, number))
    story.chronicle.ended(0, "done")
    said = story.said()
    assert said[0] == "elasticrun: on disk: commit 199 in /d on h199"
    assert said[6] == "elasticrun: on disk: 58 more folders, none with a newer commit", "the oldest are forgotten"
    assert len(said) == 8


def test_who_watches_and_fails_is_told_of_once_and_keeps_nobody_from_hearing(tmp_path: Path) -> None:
    story = Story(tmp_path)

    class Broken:
        live = False

        def hear(self, happening: Happening) -> None:
            raise ValueError("a bug")

    story.chronicle._listeners.insert(0, Broken())
    story.chronicle.started("http://a:1", "j")
    story.chronicle.remark("it goes on")
    told = "\n".join(story.said())
    assert told.count("Broken failed on an event of the job") == 1
    assert "from here on: ValueError: a bug, " in told
    assert "it goes on" in told
