"""The history: what is kept of a job, for how long, and what becomes of the job where nothing can be kept."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.happenings import (
    FirstFailure,
    Happening,
    JobEnded,
    JobStarted,
    Member,
    MomentPassed,
    ProcessEnded,
    Remark,
    RoundFormed,
    Summary,
    TimeBooked,
    TookOver,
)
from elastic_driver.reporting.history import History
from elastic_driver.reporting.history_folder import (
    EVENTS,
    FACTS,
    PAGE,
    Facts,
    NoHistoryError,
    history_folder,
    kept_jobs,
    make_history_folder,
    open_job,
    put_facts,
    tidy,
)
from elastic_driver.reporting.instant import Instant
from elastic_driver.reporting.story import Reader
from elastic_driver.words import ExitCode
from tests.support.fakes.event_schema import complaints

pytestmark = pytest.mark.unit

JOB, OTHER = "53c682932df80430", "0f00000000000000"
WORKER = WorkerId("a", 0, 0)
STARTED = JobStarted("http://127.0.0.1:1", JOB)
ENDED = JobEnded(0, "all is done", Summary())
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def formed(number: int = 1, workers: int = 2) -> RoundFormed:
    members = [Member(rank, WorkerId("a", rank, 0), 7) for rank in range(workers)]
    return RoundFormed(number, 0, "start", 0, True, None, 0.5, members, reinit=False)


class Kept:
    """A job in the history of this test's own state folder, and what its user is told."""

    def __init__(self, state: Path, job_id: str = JOB, **more: Any) -> None:
        self.said: list[str] = []
        self.details: list[str] = []
        self.state = state
        self.now = 1000.0
        self.history = History(
            job_id,
            ("python", "train.py"),
            environ={"XDG_STATE_HOME": str(state)},
            on_warning=self.said.append,
            on_detail=self.details.append,
            instant=Instant(lambda: self.now, **({"before_s": more.pop("before_s")} if "before_s" in more else {})),
            **more,
        )

    def hear(self, *happenings: Happening) -> Kept:
        for happening in happenings:
            self.history.hear(happening)
        return self

    def settle(self) -> Kept:
        """All that was heard so far is written, if it can be."""
        done, writer = threading.Event(), self.history._writer
        assert writer is not None
        writer.put(done.set)
        done.wait()
        return self

    def close(self) -> Kept:
        self.history.close()
        return self

    @property
    def folder(self) -> Path:
        return self.state / "elasticrun" / "history" / JOB

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / EVENTS).read_text().splitlines()]

    @property
    def listed(self) -> Any:
        [job] = kept_jobs(self.folder.parent)
        return job


def a_job(history: Path, number: int, *, at: float, size: int = 100) -> Path:
    """One that has ended."""
    folder, descriptor = open_job(history, f"{number:016x}")
    os.write(descriptor, b"x" * size)
    os.close(descriptor)
    os.utime(folder / EVENTS, (at, at))
    return folder


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return make_history_folder({"XDG_STATE_HOME": str(tmp_path / "state")})


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_job_is_kept_for_its_user_alone(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state")
    kept.history.page = lambda is_last: b'{"version":1}'
    kept.hear(STARTED, formed()).history.hear(ENDED)
    kept.close()
    assert kept.said == kept.details == []
    paths = [tmp_path / "state", *sorted((tmp_path / "state").rglob("*"))]
    assert {path.name: oct(path.stat().st_mode & 0o7777) for path in paths} == {
        **dict.fromkeys(("state", "elasticrun", "history", JOB), "0o700"),
        **dict.fromkeys((EVENTS, FACTS, PAGE, ".tidying"), "0o600"),
    }
    assert [event["event"] for event in kept.events] == ["job_started", "round_formed", "job_ended"]
    assert complaints(kept.events) == []
    assert json.loads((kept.folder / PAGE).read_text()) == {"version": 1}
    facts = kept.listed.facts
    assert (facts.job_id, facts.command, facts.directory) == (JOB, ("python", "train.py"), os.getcwd())
    assert (facts.workers, facts.exit_code, facts.message) == (2, 0, "all is done")
    assert facts.began <= facts.ended
    assert not kept.listed.is_running


def test_one_whose_driver_is_killed_has_no_end(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state").hear(STARTED, formed())
    while not (kept.folder / FACTS).exists():
        threading.Event().wait(0.01)
    assert kept.listed.is_running
    assert kept.listed.ended is None
    kept.close()  # the kernel does as much for one that is killed
    job = kept.listed
    assert (job.is_running, job.facts.exit_code) == (False, None)
    assert job.ended == job.last > 0


def test_one_that_is_left_to_another_driver_has_not_ended(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state")
    pages = iter((b"{}",))
    kept.history.page = lambda is_last: next(pages)
    kept.hear(STARTED, formed(), JobEnded(ExitCode.OTHER_DRIVER, "this driver ends", Summary())).close()
    assert kept.listed.facts.ended is None
    assert kept.history.told() == ""
    assert list(pages) == [b"{}"], "the next driver's page stays"


def test_the_next_driver_goes_on_with_the_same(tmp_path: Path) -> None:
    Kept(tmp_path / "state").hear(STARTED, formed()).close()
    second = Kept(tmp_path / "state", before_s=500.0)
    second.hear(JobStarted("http://127.0.0.1:2", JOB, again=True), TookOver(2, 1.5, 2, 1, 1, trained=True))
    second.hear(ENDED).close()
    assert [event["event"] for event in second.events] == ["job_started", "round_formed", "took_over", "job_ended"]
    facts = second.listed.facts
    assert facts.workers == 2
    assert facts.ended - facts.began == pytest.approx(500.0, abs=60)
    none_left = Kept(tmp_path / "state", before_s=500.0)
    none_left.hear(JobStarted("http://127.0.0.1:2", JOB, again=True), TookOver(3, 1.5, 0, 0, 1, trained=False)).close()
    assert none_left.listed.facts.workers == 2, "of its last round"
    third = Kept(tmp_path / "elsewhere").hear(JobStarted("http://127.0.0.1:3", JOB, again=True)).close()
    assert [event["event"] for event in third.events] == ["job_started"], "on another machine it begins there"


def test_the_page_is_kept_each_minute_and_when_workers_end(tmp_path: Path) -> None:
    kept, looks = Kept(tmp_path / "state"), list[float]()
    gone = ProcessEnded(WORKER, 7, "0", 1, "exited with code 1", expected=False, foretold=False)

    def page(is_last: bool) -> bytes:
        looks.append(kept.now if not is_last else -kept.now)
        return b"{}"

    kept.history.page = page
    kept.hear(STARTED)
    for now in range(1000, 1200):
        kept.now = float(now)
        kept.hear(MomentPassed(), *([gone] * 100 if 1099 <= now <= 1103 else []))
        kept.history._page_is_waiting = False  # the thread may take its time
    assert looks == [1005.0, 1065.0, 1099.0, 1159.0]
    kept.hear(ENDED).close()
    assert looks[4:] == [-1199.0]


def test_the_last_page_is_kept_also_while_another_is_on_its_way(tmp_path: Path) -> None:
    kept, answers = Kept(tmp_path / "state"), threading.Event()
    writer = kept.history._writer
    assert writer is not None
    writer.put(answers.wait)
    kept.history.page = lambda is_last: b"[%d]" % is_last
    kept.now += 10
    kept.hear(STARTED, MomentPassed())
    kept.now += 100
    kept.hear(MomentPassed(), ENDED)
    answers.set()
    kept.close()
    assert json.loads((kept.folder / PAGE).read_text()) == [1]


def test_a_page_that_finds_no_room_on_its_way_is_followed_by_the_next(tmp_path: Path) -> None:
    kept, answers = Kept(tmp_path / "state"), threading.Event()
    pages = iter((b"[1]", b"[2]"))
    kept.history.page = lambda is_last: next(pages)
    writer = kept.settle().history._writer
    assert writer is not None
    writer.put(answers.wait, 16 << 20)
    kept.now += 10
    kept.hear(STARTED, MomentPassed())
    answers.set()
    kept.settle()
    kept.now += 100
    kept.hear(MomentPassed()).close()
    assert json.loads((kept.folder / PAGE).read_text()) == [2]


def test_a_driver_that_has_lost_the_job_leaves_what_the_next_one_keeps(tmp_path: Path) -> None:
    """It was stopped, or cut off, and does not know yet."""
    old = Kept(tmp_path / "state").hear(STARTED, formed()).settle()
    new = Kept(tmp_path / "state", before_s=500.0)
    old.history.page, new.history.page = lambda is_last: b"[1]", lambda is_last: b"[2]"
    new.hear(JobStarted("http://127.0.0.1:2", JOB, again=True), TookOver(2, 1.5, 2, 1, 1, trained=True), ENDED).close()
    old.now += 600
    old.hear(MomentPassed(), formed(2, workers=1)).close()
    assert json.loads((new.folder / PAGE).read_text()) == [2]
    facts = new.listed.facts
    assert (facts.workers, facts.exit_code) == (2, 0)


def test_a_job_that_never_begins_is_not_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state").settle()
    assert kept.folder.exists()
    kept.close()
    assert not kept.folder.exists()


def test_a_page_that_cannot_be_shown_is_not_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state")
    kept.history.page = lambda is_last: b""
    kept.hear(STARTED, ENDED).close()
    assert not (kept.folder / PAGE).exists()
    assert kept.said == []


@pytest.mark.parametrize(
    ("happenings", "seconds", "pages", "told"),
    [
        ([formed()], 10.0, True, ""),
        ([formed()], 61.0, True, "to see this job again: elasticrun page 53c68293, elasticrun report 53c68293"),
        ([formed(1), formed(2)], 10.0, True, "to see this job again: elasticrun page 53c68293, "),
        ([formed(1), formed(2)], 10.0, False, "to see this job again: elasticrun report 53c68293"),
    ],
)
def test_the_way_back_is_told_where_there_was_something_to_see(
    tmp_path: Path, happenings: list[Happening], seconds: float, pages: bool, told: str
) -> None:
    kept = Kept(tmp_path / "state", before_s=seconds)
    if pages:
        kept.history.page = lambda is_last: b"{}"
    kept.hear(STARTED, *happenings, ENDED).close()
    assert kept.history.told().startswith(told)
    assert bool(kept.history.told()) == bool(told)


def test_of_a_huge_job_the_log_is_cut_and_says_so(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state", most_bytes=2000)
    kept.hear(STARTED, *[Remark("x" * 100, warning=False)] * 50)
    kept.hear(TimeBooked({"training": 99.0, "unexplained": 0.0}, 100.0, 0.99))
    kept.hear(FirstFailure(WORKER, 0, "exited with code 1", [], []), JobEnded(1, "it failed", Summary())).close()
    kinds = [event["event"] for event in kept.events]
    assert kinds[-4:] == ["log_cut", "goodput", "first_failure", "job_ended"]
    assert kinds.count("log_cut") == 1
    assert (kept.folder / EVENTS).stat().st_size < 3000
    assert complaints(kept.events) == []
    story = Reader().read((kept.folder / EVENTS).read_bytes().splitlines())
    assert story is not None
    assert (story.exit_code, story.booked.seconds["training"], story.booked.seconds["unexplained"]) == (1, 99.0, 0.0)
    assert any("reached its size limit" in mark.text for mark in story.marks)
    again = Kept(tmp_path / "state", most_bytes=2000)
    while again.history._folder is None:
        threading.Event().wait(0.01)
    again.hear(*[Remark("x" * 100, warning=False)] * 50).close()
    assert (again.folder / EVENTS).stat().st_size < 3500, "nor by another driver"


# --- where nothing can be kept ---------------------------------------------------------------------------------------


def is_a_file(state: Path) -> None:
    state.write_text("")


def is_open(state: Path) -> None:
    (state / "elasticrun" / "history").mkdir(parents=True)
    (state / "elasticrun" / "history").chmod(0o755)


def is_a_link(state: Path) -> None:
    (state / "elasticrun").mkdir(parents=True)
    (state / "elsewhere").mkdir(mode=0o700)
    (state / "elasticrun" / "history").symlink_to(state / "elsewhere")


def has_a_link_for_a_job(state: Path) -> None:
    make_history_folder({"XDG_STATE_HOME": str(state)})
    (state / "elsewhere").mkdir(mode=0o700)
    (state / "elasticrun" / "history" / JOB).symlink_to(state / "elsewhere")


def has_a_link_for_a_log(state: Path) -> None:
    folder = make_history_folder({"XDG_STATE_HOME": str(state)}) / JOB
    folder.mkdir(mode=0o700)
    (folder / EVENTS).symlink_to(state / "secret")


def has_a_pipe_for_a_log(state: Path) -> None:
    folder = make_history_folder({"XDG_STATE_HOME": str(state)}) / JOB
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / EVENTS)


def is_anothers(state: Path) -> None:
    os.chown(make_history_folder({"XDG_STATE_HOME": str(state)}), 65534, 65534)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (is_a_file, "Not a directory"),
        (is_open, "it is open to other users (chmod 700)"),
        (is_a_link, "it is a symbolic link"),
        (has_a_link_for_a_job, "it is a symbolic link"),
        (has_a_link_for_a_log, "it is a symbolic link"),
        (has_a_pipe_for_a_log, "it is a pipe"),
        pytest.param(is_anothers, "it belongs to user nobody, and this process to user root", marks=ROOT_ONLY),
    ],
)
def test_a_home_that_cannot_be_written_to_costs_one_line(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(tmp_path / "state")
    kept = Kept(tmp_path / "state")
    kept.history.page = lambda is_last: b"{}"
    kept.hear(STARTED, formed(1), formed(2))
    kept.hear(ENDED).close()
    [said] = kept.said
    assert said.startswith(f"cannot write the history of this job: {tmp_path}/state/elasticrun")
    assert said.endswith(f": {why}; continuing without it; elasticrun --no-history turns it off")
    assert kept.history.told() == ""
    assert not kept.history.is_kept
    assert not (tmp_path / "state" / "secret").exists()
    assert not list((tmp_path / "state").glob("elsewhere/*"))


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"HOME": "/"}, "there is no home folder (HOME)"),
        ({"HOME": "no/path", "XDG_STATE_HOME": "relative"}, "there is no home folder (HOME)"),
        ({"HOME": "/no/such/home"}, "there is no home folder /no/such/home"),
    ],
)
def test_who_has_no_home_of_their_own_is_not_warned(environ: dict[str, str], why: str) -> None:
    """A container: nobody there can do anything about it."""
    said, details = list[str](), list[str]()
    history = History(JOB, (), environ=environ, on_warning=said.append, on_detail=details.append)
    history.hear(STARTED)
    history.hear(ENDED)
    history.close()
    assert said == []
    assert details == [f"cannot write the history of this job: {why}; continuing without it"]
    assert history.told() == ""


@ROOT_ONLY
def test_root_in_anothers_home_keeps_nothing_there(tmp_path: Path) -> None:
    """sudo leaves HOME as it was on some machines: that user's own jobs would find root's folder in their way."""
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(NoHistoryError, match=f"the home folder {tmp_path} is not this user's"):
        history_folder({"HOME": str(tmp_path)})
    with pytest.raises(NoHistoryError, match=rf"the folder {tmp_path} \(XDG_STATE_HOME\) is not this user's"):
        history_folder({"XDG_STATE_HOME": str(tmp_path / "state")})


def test_a_disk_that_is_full_costs_one_line(tmp_path: Path) -> None:
    program = (
        "import resource, sys\nfrom elastic_driver.reporting.history import History\n"
        "from elastic_driver.reporting.happenings import JobEnded, JobStarted, Remark, Summary\n"
        "history = History(sys.argv[1], (), environ={'XDG_STATE_HOME': sys.argv[2]}, on_warning=print)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for number in range(20):\n    history.hear(Remark('x' * 100, warning=False))\n"
        "history.hear(JobEnded(0, '', Summary()))\nhistory.close()\n"
    )
    state = tmp_path / "state"
    done = subprocess.run([sys.executable, "-c", program, JOB, state], capture_output=True, text=True, check=True)
    [said] = done.stdout.splitlines()
    assert re.fullmatch(
        "cannot write the history of this job: (no space left for a whole line|File too large); continuing "
        "without it; elasticrun --no-history turns it off",
        said,
    )


def said_where_mounted(state: Path, mount: str, program: str) -> list[str]:
    """What a program prints for which something is mounted over a state folder."""
    state.mkdir(exist_ok=True)
    mounted = f'{mount} "$3" && exec "$0" -c "$1" "$2" "$3"'
    words = ("unshare", "-m", "sh", "-c", mounted, sys.executable, program, JOB, str(state))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "permission denied" in done.stderr.lower() or "not permitted" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    assert done.stderr == ""
    return done.stdout.splitlines()


@ROOT_ONLY
def test_a_home_that_is_read_only_by_now_shows_its_jobs_and_warns_of_nothing(tmp_path: Path) -> None:
    Kept(tmp_path / "state", OTHER).hear(STARTED, ENDED).close()
    program = (
        "import sys\nfrom pathlib import Path\nfrom elastic_driver.reporting.history import History\n"
        "from elastic_driver.reporting.happenings import JobEnded, JobStarted, Summary\n"
        "from elastic_driver.reporting.history_folder import kept_jobs\n"
        "print(*[job.job_id for job in kept_jobs(Path(sys.argv[2]) / 'elasticrun/history')])\n"
        "history = History(sys.argv[1], (), environ={'XDG_STATE_HOME': sys.argv[2]}, on_warning=print)\n"
        "history.hear(JobStarted('unix:/x', sys.argv[1]))\n"
        "history.hear(JobEnded(0, '', Summary()))\nhistory.close()\n"
    )
    state = tmp_path / "state"
    assert said_where_mounted(state, f"mount --bind {state} {state} && mount -o remount,bind,ro", program) == [OTHER]


def test_a_disk_that_is_full_for_a_while_costs_what_happened_then(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state").settle()
    descriptor = kept.history._descriptor
    disk = os.dup(descriptor)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor, inheritable=False)
    kept.hear(STARTED, *[formed(1)] * 2).settle()
    os.dup2(disk, descriptor, inheritable=False)
    os.close(disk)
    os.close(full)
    kept.hear(formed(2)).settle().hear(ENDED).close()
    assert [event["event"] for event in kept.events] == ["job_started", "round_formed", "report", "job_ended"]
    assert kept.events[2]["text"] == "events before this one may be missing: the log could not be written"
    assert complaints(kept.events) == []
    assert kept.listed.facts.exit_code == 0
    [said] = kept.said
    assert "No space left on device; continuing without it" in said


def test_a_home_that_is_not_there_at_first_keeps_what_comes_later(tmp_path: Path) -> None:
    is_a_file(tmp_path / "state")
    kept = Kept(tmp_path / "state").hear(STARTED).settle()
    (tmp_path / "state").unlink()
    kept.hear(formed(1), formed(2)).settle().hear(ENDED).close()
    assert [event["event"] for event in kept.events] == ["job_started", "round_formed", "report", "job_ended"]
    assert kept.listed.facts.exit_code == 0
    assert len(kept.said) == 1


@ROOT_ONLY
def test_a_job_that_ends_on_a_full_disk_is_not_listed_as_killed(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom elastic_driver.reporting.history import History\n"
        "from elastic_driver.reporting.happenings import JobEnded, JobStarted, Remark, Summary\n"
        "from elastic_driver.reporting.history_folder import kept_jobs\n"
        "history = History(sys.argv[1], (), environ={'XDG_STATE_HOME': sys.argv[2]}, on_warning=print)\n"
        "history.page = lambda is_last: b' ' * 100000\n"
        "history.hear(JobStarted('unix:/x', sys.argv[1]))\n"
        "for number in range(2000):\n    history.hear(Remark('x' * 100, warning=False))\n"
        "history.hear(JobEnded(3, 'oh', Summary()))\nhistory.close(60)\n"
        "[job] = kept_jobs(Path(sys.argv[2]) / 'elasticrun/history')\n"
        "print(job.facts.exit_code, job.facts.message)\n"
    )
    *said, last = said_where_mounted(tmp_path / "state", "mount -t tmpfs -o size=32k,mode=700 full", program)
    assert len(said) == 1
    assert "cannot write the history of this job: " in said[0]
    assert last == "3 oh"


def test_a_disk_that_hangs_holds_up_the_end_for_a_moment_and_costs_one_line(tmp_path: Path) -> None:
    kept, answers = Kept(tmp_path / "state"), threading.Event()
    writer = kept.history._writer
    assert writer is not None
    writer.put(answers.wait)
    kept.hear(STARTED, *[Remark("x" * (1 << 20), warning=False)] * 20, ENDED)
    kept.history.close(0.01)
    answers.set()
    assert kept.said == [
        "the history of this job is missing events: the disk cannot keep up; elasticrun --no-history turns it off"
    ]
    assert kept.history.told() == ""


def test_a_disk_that_hangs_at_the_end_is_told_of(tmp_path: Path) -> None:
    kept, answers = Kept(tmp_path / "state"), threading.Event()
    writer = kept.history._writer
    assert writer is not None
    writer.put(answers.wait)
    kept.hear(STARTED, formed(1), formed(2), ENDED)
    kept.history.close(0.01)
    answers.set()
    [said] = kept.said
    assert " bytes are missing from the history of this job: the disk cannot keep up; " in said


# --- where it is -----------------------------------------------------------------------------------------------------


def test_where_it_is(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"}
    assert history_folder(home) == tmp_path / ".local/state/elasticrun/history"
    assert history_folder({**home, "XDG_STATE_HOME": "/x"}) == Path("/x/elasticrun/history")
    assert kept_jobs(tmp_path / "absent") == []


# --- how much stays --------------------------------------------------------------------------------------------------


def names(history: Path) -> list[int]:
    return sorted(int(folder.name, 16) for folder in history.iterdir() if not folder.name.startswith("."))


def test_the_jobs_that_ended_first_go_first(history: Path) -> None:
    for number in range(8):
        a_job(history, number, at=1000.0 - number)
    (history / "notes").mkdir()
    tidy(history, most_jobs=5)
    (history / "notes").rmdir()
    assert names(history) == [0, 1, 2, 3, 4]
    tidy(history, most_bytes=250)
    assert names(history) == [0, 1]


def test_a_job_that_runs_stays(history: Path) -> None:
    folder, descriptor = open_job(history, f"{1:016x}")
    os.utime(folder / EVENTS, (1.0, 1.0))
    for number in range(2, 5):
        a_job(history, number, at=float(number))
    tidy(history, most_jobs=0)
    assert names(history) == [1]
    os.close(descriptor)
    tidy(history, most_jobs=0)
    assert names(history) == []


def test_whoever_looks_is_in_nobodys_way(history: Path) -> None:
    """One that has ended is not said to run because another one looks at the same time, as shells do at each TAB."""
    a_job(history, 1, at=1.0)
    said = [False] * 2

    def look(number: int) -> None:
        said[number] = any(job.is_running for _ in range(1000) for job in kept_jobs(history))

    threads = [threading.Thread(target=look, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [False, False]


@pytest.mark.parametrize(("ended", "age_s", "runs"), [(None, 5.0, True), (None, 700.0, False), (9.5, 5.0, False)])
def test_on_a_disk_without_locks_what_is_written_says_whether_a_job_runs(
    history: Path, monkeypatch: pytest.MonkeyPatch, ended: float | None, age_s: float, runs: bool
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # Lustre without -o flock

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = a_job(history, 1, at=time.time() - age_s)
    put_facts(folder, Facts(folder.name, (), "", 7.5, ended=ended))
    assert [job.is_running for job in kept_jobs(history)] == [runs]
    tidy(history, most_jobs=0)
    assert folder.exists() == runs


def test_a_job_that_is_being_made_stays(history: Path) -> None:
    (history / JOB).mkdir(mode=0o700)
    tidy(history, most_jobs=0)
    assert (history / JOB).is_dir()
    os.utime(history / JOB, (1.0, 1.0))
    tidy(history, most_jobs=0)
    assert not (history / JOB).exists()


def test_what_a_link_leads_to_stays(history: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    (history / JOB).symlink_to(outside)
    (a_job(history, 1, at=1.0) / "inside").symlink_to(outside)
    tidy(history, most_jobs=0)
    assert (outside / "precious").exists()
    assert [path.name for path in history.iterdir() if not path.name.startswith(".")] == [JOB]


def test_several_drivers_tidy_at_once(history: Path) -> None:
    for number in range(60):
        a_job(history, number, at=float(number))
    failed: list[BaseException] = []
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait()
        try:
            tidy(history, most_jobs=10)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert names(history) == list(range(50, 60))


def test_a_driver_that_comes_while_its_folder_goes_makes_it_anew(
    history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remove = a_job(history, 1, at=1.0), shutil.rmtree
    opened: list[tuple[Path, int]] = []
    thread = threading.Thread(target=lambda: opened.append(open_job(history, folder.name)))

    def remove_late(path: Path, **more: Any) -> None:
        thread.start()
        while not re.search(rb"-> OFDLCK .* READ ", Path("/proc/locks").read_bytes()):
            pass
        remove(path, **more)

    monkeypatch.setattr(shutil, "rmtree", remove_late)
    tidy(history, most_jobs=0)
    thread.join()
    [(path, descriptor)] = opened
    os.write(descriptor, b"here")
    os.close(descriptor)
    assert (path / EVENTS).read_bytes() == b"here"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"command": 7}', '{"began": "x"}'])
def test_a_job_of_which_little_is_known_is_listed(history: Path, text: str) -> None:
    folder = a_job(history, 1, at=1000.0)
    (folder / FACTS).write_text(text)
    [job] = kept_jobs(history)
    assert (job.job_id, job.facts.command, job.facts.began, job.is_running) == (folder.name, (), 1000.0, False)


def test_facts_are_read_as_they_were_written(history: Path) -> None:
    folder = a_job(history, 1, at=1000.0)
    facts = Facts(folder.name, ("a", "\udcff"), "/x", 7.5, "/journal", 3, 9.5, 1, "oh")
    put_facts(folder, facts)
    assert kept_jobs(history)[0].facts == facts


@pytest.mark.parametrize(
    "command", [("python", *["\N{SNOWMAN}" * 40] * 45000), ("sh", "-c", "\N{SNOWMAN}" * (1 << 20))]
)
def test_of_a_very_long_command_the_beginning_is_kept(history: Path, command: tuple[str, ...]) -> None:
    folder = a_job(history, 1, at=1000.0)
    put_facts(folder, Facts(folder.name, command, "/x", 7.5, ended=9.5, exit_code=0))
    facts = kept_jobs(history)[0].facts
    *words, cut, more = facts.command
    assert (words, facts.exit_code) == (list(command[: len(words)]), 0)
    assert command[len(words)].startswith(cut.removesuffix("..."))
    assert more == f"({len(command) - len(words) - 1} more)"


def test_a_job_without_an_end_was_heard_of_last_when_its_page_was_written(history: Path) -> None:
    folder = a_job(history, 1, at=1000.0)
    (folder / PAGE).write_text("{}")
    os.utime(folder / PAGE, (1060.0, 1060.0))
    assert kept_jobs(history)[0].ended == 1060.0


def test_what_a_driver_that_was_killed_left_half_written_is_removed(history: Path) -> None:
    folder, descriptor = open_job(history, JOB)
    left = folder / f".{PAGE}.0123456789abcdef.tmp"
    left.write_text("{")
    os.close(open_job(history, JOB)[1])
    assert left.exists(), "that driver lives"
    os.close(descriptor)
    os.close(open_job(history, JOB)[1])
    assert [path.name for path in folder.iterdir()] == [EVENTS]
