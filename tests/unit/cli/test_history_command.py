"""``elasticrun history``, and what subcommands say and do of jobs that have ended."""

from __future__ import annotations

import json
import os
import re
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.reporting.event_log import EventLog
from elastic_driver.reporting.happenings import JobEnded, JobStarted, Summary
from elastic_driver.reporting.history_folder import EVENTS, PAGE, SHOWN, Facts, make_history_folder, open_job, put_facts
from tests.support.processes.subcommands import elasticrun

pytestmark = pytest.mark.unit

GOOD, BAD, KILLED, RUNS = "aa00000000000000", "ab00000000000000", "b000000000000000", "c000000000000000"


def put(
    history: Path, job_id: str, age_s: float, code: int | None, message: str = "", command: str = "train.py"
) -> int:
    """A job that began so long ago, and lasted for a minute."""
    folder, descriptor = open_job(history, job_id)
    began = time.time() - age_s
    with EventLog(folder / EVENTS) as log:
        log.hear(JobStarted("unix:/x", job_id))
        if code is not None:
            log.hear(JobEnded(code, message, Summary()))
    ended = None if code is None else began + 60
    put_facts(folder, Facts(job_id, ("python", command), "/srv/work", began, "", 4, ended, code, message))
    os.utime(folder / EVENTS, (began + 60, began + 60))
    return descriptor


@pytest.fixture
def history(runtime: Path) -> Iterator[Path]:
    """With a job of each kind."""
    folder = make_history_folder(os.environ)
    os.close(put(folder, GOOD, 3 * 86400, 0, "all is done"))
    os.close(put(folder, BAD, 7200, 1, "worker a[0] failed\x1b[31m", command="x\x1b[31m.py"))
    os.close(put(folder, KILLED, 600, None))
    descriptor = put(folder, RUNS, 100, None)
    yield folder
    os.close(descriptor)


def test_the_last_jobs_are_listed(history: Path) -> None:
    lines = [re.split(r"  +", line) for line in elasticrun("history").stdout.splitlines()]
    assert lines[0] == ["JOB", "ENDED", "HOW", "DURATION", "WORKERS", "FOLDER", "COMMAND"]
    assert [line[:3] for line in lines[1:]] == [
        [RUNS, "-", "runs"],
        [KILLED, "9 min ago", "driver was killed"],
        [BAD, "119 min ago", "failed (1)"],
        [GOOD, "2 d ago", "finished"],
    ]
    assert lines[4][3:] == ["60 s", "4", "/srv/work", "python train.py"]
    assert "\x1b" not in elasticrun("history").stdout


def test_programs_read_json_and_shells_ids(history: Path) -> None:
    jobs = json.loads(elasticrun("history", "--json").stdout)
    assert [(job["job"], job["how"], job["exit_code"]) for job in jobs] == [
        (RUNS, "runs", None),
        (KILLED, "driver was killed", None),
        (BAD, "failed (1)", 1),
        (GOOD, "finished", 0),
    ]
    assert jobs[3]["command"] == ["python", "train.py"]
    assert (jobs[0]["ended"], round(jobs[3]["ended"] - jobs[3]["began"])) == (None, 60)
    assert elasticrun("history", "--ids").stdout.split() == [RUNS, KILLED, BAD, GOOD]


def test_an_empty_one(runtime: Path) -> None:
    assert elasticrun("history").stdout == "the history holds no job of yours yet\n"
    assert elasticrun("history", "--json").stdout == "[]\n"
    assert "the history holds no job of yours yet: name a file" in elasticrun("report").stderr
    assert elasticrun("history", XDG_STATE_HOME="", HOME="/").stderr == (
        "elasticrun: error: cannot find the history of jobs: there is no home folder (HOME); set XDG_STATE_HOME to "
        "a folder for it\n"
    )


def test_one_that_is_open_to_others_is_not_read(history: Path) -> None:
    history.chmod(0o750)
    ran = elasticrun("history")
    assert ran.returncode == 2
    assert ran.stderr == (
        f"elasticrun: error: cannot read the history of jobs in {history}: it is open to other users (chmod 700)\n"
    )
    assert "no job of yours runs" in elasticrun("status").stderr, "who asks for what runs is told of that"
    assert elasticrun("status", "aa").stderr == elasticrun("page", "aa").stderr == ran.stderr
    nowhere = {"XDG_STATE_HOME": "", "HOME": "/"}
    assert "no job of yours runs" in elasticrun("status", "aa", **nowhere).stderr


@pytest.mark.parametrize(
    ("words", "job"), [((), RUNS), ((GOOD,), GOOD), (("aa",), GOOD), (("b",), KILLED), (("c0",), RUNS)]
)
def test_a_report_of_a_job_of_the_history(history: Path, words: tuple[str, ...], job: str) -> None:
    ran = elasticrun("report", *words)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"job {job}, ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("a",), f"several job ids begin with a: {BAD}, {GOOD}"),
        (
            ("d",),
            f"there is no file d, and no job in the history has an id that begins so: {RUNS}, {KILLED}, {BAD} and 1 "
            "more",
        ),
        (("aa", "--job", "aa"), "--job selects a job in a file with several jobs: name the file, too"),
        (("aa/bb",), "cannot read the event log aa/bb: No such file"),
    ],
)
def test_a_report_of_what_is_not_there(history: Path, words: tuple[str, ...], why: str) -> None:
    ran = elasticrun("report", *words)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"elasticrun: error: {why}")


def test_a_file_goes_before_a_job_of_that_name(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with EventLog(Path("aa")) as log:
        log.hear(JobStarted("unix:/x", "0123"))
    assert elasticrun("report", "aa").stdout.startswith("job 0123, ")


@pytest.mark.parametrize("subcommand", ["status", "stacks", "end", "jobs"])
def test_whoever_asks_for_a_job_that_has_ended_is_led_to_the_history(history: Path, subcommand: str) -> None:
    ran = elasticrun(subcommand, "ab")
    assert ran.returncode == 2
    assert ran.stderr == (
        f"elasticrun: error: job {BAD} ended 119 min ago with exit code 1: worker a[0] failed [31m; see elasticrun "
        "page ab000000 or elasticrun report ab000000\n"
    )
    ran = elasticrun(subcommand, "b0")
    assert f"the driver of job {KILLED} was killed 9 min ago; see elasticrun page b0000000" in ran.stderr
    assert elasticrun(subcommand, "d").stderr == (
        "elasticrun: error: no job of yours runs on this machine; elasticrun history lists jobs that have ended\n"
    )


def keep_page(history: Path, job_id: str, text: str = "") -> None:
    job = {"job_id": job_id, "command": ["python"], "ended": None}
    frame = {"whole": True, "id": 1, "at": 1.0, "job": job, "hosts": {}, "workers": {}, "story": []}
    document = {"version": 1, "frame": frame, "outputs": {"a[0]#0": ["</script><b>its last words"]}}
    (history / job_id / PAGE).write_text(text or json.dumps(document))


def test_the_page_of_a_job_that_has_ended_is_a_file(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_page(history, BAD)
    ran = elasticrun("page", "ab")
    path = history / BAD / SHOWN
    assert (ran.returncode, ran.stdout) == (0, f"{path.as_uri()}\n")
    assert ran.stderr.startswith(f"job {BAD} ended 119 min ago with exit code 1: worker a[0] failed")
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert "its last words" in path.read_text()
    assert "<b>its last words" not in path.read_text()
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert elasticrun("page", "ab", "-o", "shown.html", "--open").returncode == 0
    assert opened == [(tmp_path / "shown.html").as_uri()]
    assert (tmp_path / "shown.html").read_text() == path.read_text()


def test_a_page_goes_through_a_link_and_into_the_standard_output(
    history: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rename over /dev/stdout would leave a file there: as root, for all programs of the machine."""
    keep_page(history, BAD)
    for name, target in (("link.html", tmp_path / "there.html"), ("stdout", Path("/proc/self/fd/1"))):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "there.html").touch()
    ran = elasticrun("page", "ab", "-o", str(tmp_path / "link.html"))
    assert ran.stdout == f"{(tmp_path / 'link.html').as_uri()}\n"
    assert elasticrun("page", "ab", "-o", str(tmp_path / "stdout")).stdout == "", "a link would be in the page"
    assert capfd.readouterr().out == (tmp_path / "there.html").read_text()
    assert elasticrun("report", "ab", "-o", str(tmp_path / "link.html")).returncode == 0
    assert BAD in (tmp_path / "there.html").read_text()
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "stdout").is_symlink()


@pytest.mark.parametrize("subcommand", ["page", "status", "stacks", "end", "jobs"])
def test_one_of_several_jobs_that_have_ended_is_to_be_named(history: Path, subcommand: str) -> None:
    assert elasticrun(subcommand, "a").stderr == (f"elasticrun: error: several job ids begin with a: {BAD}, {GOOD}\n")


@pytest.mark.parametrize(
    ("page", "words", "why"),
    [
        ("", ("--operator",), "exit code 0: all is done: there is nothing left to operate"),
        (None, (), f"no page was kept for job {GOOD}: it was started with --no-page, or its driver was killed early"),
        ("{", (), f"the page of job {GOOD} is damaged ("),
        ("[]", (), f"the page of job {GOOD} is damaged ("),
        ('{"version": 7}', (), "cannot show a page that was recorded in version 7: this is version 1"),
        ("", ("-o", "/no/such/folder/x.html"), "cannot write /no/such/folder/x.html: No such file or directory"),
    ],
)
def test_a_page_that_cannot_be_shown(history: Path, page: str | None, words: tuple[str, ...], why: str) -> None:
    if page is not None:
        keep_page(history, GOOD, page)
    ran = elasticrun("page", "aa", *words)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert why in ran.stderr
    if not words:
        assert ran.stderr.endswith("; elasticrun report aa000000 shows what happened\n")


def test_a_page_of_no_job_is_written_nowhere(history: Path) -> None:
    assert "-o is for a job that has ended" in elasticrun("page", "-o", "x.html").stderr
    assert "no job of yours runs on this machine; elasticrun history" in elasticrun("page").stderr
