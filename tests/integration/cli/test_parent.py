"""The parent of a program: as process 1 of a container, and of one that it starts again."""

from __future__ import annotations

import os
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil
import pytest

from elastic_driver.journal.entries import Closed
from elastic_driver.journal.folder import JournalFolder
from elastic_driver.journal.past import read_job
from elastic_driver.launch.agent.control import agents_here
from elastic_driver.rendezvous.job_files import running_jobs
from tests.support.fakes.left_jobs import leave
from tests.support.processes.jobs import AFRESH, FAULTY, FORKING, Job, Process, heard_elasticrun, run_elasticrun
from tests.support.processes.subcommands import elasticrun as subcommand

pytestmark = pytest.mark.integration

# Says its number and that of a process whose parent has died; ends when it is told to, or that one is gone altogether.
_PROGRAM = """
import os, signal, subprocess, sys, time
from elastic_driver.system import parent
if os.getpid() == 1:
    parent.hold_signals()
    parent.go_on_in_a_child()
what = sys.argv[1]
if what == "orphan":
    orphan = subprocess.run(["sh", "-c", "sleep 0.1 >&- & echo $!"], stdout=subprocess.PIPE, check=True).stdout.decode()
    while os.path.exists(f"/proc/{int(orphan)}"):
        time.sleep(0.01)
    sys.exit(7)
if what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
counted = 0
def count(*_):
    global counted
    counted += 1
signal.signal(signal.SIGTERM, count)
print(os.getpid(), flush=True)
while not counted:
    signal.pause()
sys.exit(counted)
"""


@pytest.fixture
def in_container() -> list[str]:
    """Words before a command that has it run as process 1."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0:
        words[1:1] = ["--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of processes here")
    return words


@pytest.mark.parametrize(("what", "code"), [("orphan", 7), ("die", 128 + signal.SIGKILL)])
def test_orphans_are_reaped_and_the_end_is_told(in_container: list[str], what: str, code: int) -> None:
    done = subprocess.run([*in_container, sys.executable, "-c", _PROGRAM, what], timeout=150, check=False)
    assert done.returncode == code


def test_signals_are_passed_on_once(in_container: list[str]) -> None:
    command = [*in_container, sys.executable, "-c", _PROGRAM, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 1
        [first] = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        assert process.wait(150) == 1


def test_elasticrun_is_not_process_1(in_container: list[str], tmp_path: Path) -> None:
    flags = ["-np", "1", sys.executable, "-c", "import os; print(os.getppid(), open('/proc/1/cmdline').read())"]
    command = [*in_container, sys.executable, "-m", "elastic_driver", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "elastic_driver" in done.stdout
    assert not done.stdout.startswith("1 ")


# --- one that is started again --------------------------------------------------------------------------------------

# Does at each start what it is told to, and prints a line of what it is.
_AGAIN = """
import os, signal, sys
from pathlib import Path
from elastic_driver.system import parent
started = parent.started_again()
journal, starts, *acts = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
if started is None:
    parent.PAUSE_RANGE_S = (0.01, 0.01) if acts[0] == "quick" else parent.PAUSE_RANGE_S
    program = [str(journal.parent / "python")] if acts[0] == "absent" else [sys.executable]
    command = [*program, *parent.this_command()[1:]]
    there = None if acts[0] == "elsewhere" else journal
    parent.go_on_in_a_child(parent.Again(command, dict(os.environ), there))
is_elsewhere = acts[0] == "elsewhere"
acts = acts[acts[0] in ("quick", "absent", "elsewhere"):]
number = starts.stat().st_size if starts.exists() else 0
with starts.open("a") as file:
    file.write("x")
word, _, rest = acts[number].partition("+")
was_begun = parent.was_begun(None if is_elsewhere else journal)
if rest == "write" and is_elsewhere:
    parent.has_begun()
elif rest == "write":
    journal.unlink(missing_ok=True)
    journal.touch()
got = 0
warnings, ends = parent.numbers_of(signal.SIGUSR1), parent.numbers_of(signal.SIGTERM)
hangups = parent.numbers_of(signal.SIGHUP)
if word == "wait":  # one after the other: a handler may be interrupted by the next
    signal.pthread_sigmask(signal.SIG_BLOCK, (*warnings, *ends))
if word == "hangup":
    signal.pthread_sigmask(signal.SIG_BLOCK, hangups)
if word == "second":
    assert list(parent.early_signals()) == [signal.SIGTERM]
    for number in parent.numbers_of(signal.SIGTERM):
        signal.signal(number, lambda number, _: parent.news(number) and sys.exit(60))
if word == "deaf":
    for number in parent.numbers_of(signal.SIGTERM):
        signal.signal(number, lambda *_: print("deaf", flush=True))
print(os.getpid(), os.getppid(), os.environ.get("ELASTIC_DRIVER_PARENT"), was_begun, flush=True)
if word == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if word == "fail":
    assert parent.leave_to_another()
    sys.exit(parent.exit_code(70))
if word == "term":
    os.kill(os.getpid(), signal.SIGTERM)
if word == "early":
    early = list(parent.early_signals())
    sys.exit(50 + early.count(signal.SIGTERM) + 10 * early.count(signal.SIGINT))
if word == "hangup":
    sys.exit(30 + (parent.news(signal.sigwait(hangups)) is signal.SIGHUP))
while word == "wait":
    number = signal.sigwait((*warnings, *ends))
    if number in ends:
        sys.exit(40 + got)
    got += parent.news(number) is not None
while word in ("deaf", "second"):
    signal.pause()
sys.exit(int(word))
"""


@contextmanager
def again(
    folder: Path, *acts: str, group: bool = False, stderr: int = subprocess.PIPE, terminal: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A program that does these at its starts, in the session of a terminal where there is one."""
    words = [sys.executable, "-c", _AGAIN, str(folder / "journal"), str(folder / "starts"), *acts]
    if terminal is not None:
        words = ["setsid", "--ctty", *words]
    with subprocess.Popen(
        words,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        process_group=0 if group else None,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def starts(said: str) -> list[list[str]]:
    return [line.split() for line in said.splitlines()]


@pytest.mark.parametrize("where", [(), ("elsewhere",)], ids=["a file", "none here"])
@pytest.mark.parametrize(
    ("how", "told"),
    [("kill", "was killed by SIGKILL"), ("fail", "failed")],
)
def test_who_is_killed_or_fails_is_started_again(tmp_path: Path, how: str, told: str, where: tuple[str, ...]) -> None:
    with again(tmp_path, *where, f"{how}+write", "7") as process:
        said, warned = process.communicate(timeout=150)
        first, second = starts(said)
        assert process.returncode == 7
        assert first[0] != second[0]
        assert first[1] == second[1] == str(process.pid), "one parent"
        assert first[2:] == ["None", "False"]
        assert second[2:] == ["None", "True"], "nobody inherits the former"
        assert warned == f"elasticrun: warning: the driver (process {first[0]}) {told}: restarting it\n"


@pytest.mark.parametrize(
    ("acts", "journal", "code", "count"),
    [
        (("kill", "7"), False, 128 + signal.SIGKILL, 1),
        (("70+write", "7"), False, 70, 1),
        (("kill", "7"), True, 7, 2),
        (("elsewhere", "kill", "7"), True, 128 + signal.SIGKILL, 1),
        (("elsewhere", "kill+write", "kill", "7"), False, 7, 3),
        (("75+write", "7"), False, 75, 1),
        (("1+write", "7"), False, 1, 1),
        (("0+write", "7"), False, 0, 1),
        (("term+write", "7"), False, 128 + signal.SIGTERM, 1),
    ],
)
def test_who_is_not(tmp_path: Path, acts: tuple[str, ...], journal: bool, code: int, count: int) -> None:
    """Neither one that has ended its job or lost it, nor one that had none, nor one that was told to end."""
    if journal:
        (tmp_path / "journal").touch()
    with again(tmp_path, *acts) as process:
        said, _ = process.communicate(timeout=150)
        assert (process.returncode, len(starts(said))) == (code, count)


def test_a_hangup_is_passed_on_by_the_leader_of_the_session(tmp_path: Path) -> None:
    """The kernel tells nobody else that the terminal is gone."""
    controlling, terminal = os.openpty()
    with again(tmp_path, "hangup", terminal=terminal) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.close(terminal)
        os.close(controlling)
        assert process.wait(150) == 31


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "journal").touch()
    with again(tmp_path, "kill", "wait") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        child = os.pidfd_open(int(lines[1].split()[0]))
        process.kill()
        assert select.select([child], [], [])[0]
        os.close(child)


def test_so_does_the_first(tmp_path: Path) -> None:
    with again(tmp_path, "wait") as process:
        assert process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline().split()[0]))
        process.kill()
        assert select.select([child], [], [])[0]
        os.close(child)


@pytest.mark.parametrize("again_at", [0, 1])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_is_passed_on_and_counts_once(tmp_path: Path, again_at: int, to_all: bool) -> None:
    (tmp_path / "journal").touch()
    with again(tmp_path, *(["kill"] * again_at), "wait", group=True) as process:
        assert process.stdout is not None
        for _ in range(again_at + 1):
            line = process.stdout.readline()
        child = int(line.split()[0])
        if to_all:
            os.killpg(process.pid, signal.SIGUSR1)
        else:
            process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)  # passed on behind the other, whose number is lower
        assert process.wait(150) == 41
        assert not psutil.pid_exists(child)


def test_a_signal_in_a_pause_ends_it_and_is_for_the_next(tmp_path: Path) -> None:
    with again(tmp_path, "kill+write", "kill", "early") as process:
        assert process.stderr is not None
        process.stderr.readline()
        assert process.stderr.readline().endswith("restarting it in 2 s\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(150) == 51


def test_a_second_one_counts(tmp_path: Path) -> None:
    with again(tmp_path, "kill+write", "kill", "second") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stderr.readline()
        assert process.stderr.readline().endswith("restarting it in 2 s\n")
        process.send_signal(signal.SIGTERM)
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(150) == 60


def test_it_is_for_each_that_comes_after(tmp_path: Path) -> None:
    with again(tmp_path, "kill+write", "kill", "kill", "early") as process:
        assert process.stderr is not None
        process.stderr.readline()
        assert process.stderr.readline().endswith("restarting it in 2 s\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(150) == 51


def test_what_is_ignored_ends_no_pause(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with again(tmp_path, "kill+write", "kill", "kill", "early") as process:
            assert process.stderr is not None
            process.stderr.readline()
            assert process.stderr.readline().endswith("restarting it in 2 s\n")
            process.send_signal(signal.SIGHUP)
            assert process.stderr.readline().endswith("restarting it in 4 s\n"), "nobody has asked for the end"
            process.send_signal(signal.SIGTERM)
            assert process.wait(150) == 51
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminals_signal_whose_receiver_dies_is_for_the_next(tmp_path: Path) -> None:
    """The terminal sends it to both; the parent does not pass it on."""
    controlling, terminal = os.openpty()
    with again(tmp_path, "wait+write", "early", terminal=terminal) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline().split()[0]))
        parent = psutil.Process(process.pid)
        parent.suspend()
        child.suspend()
        os.write(controlling, b"\x03")
        assert os.read(controlling, 2) == b"^C", "both have it"
        child.kill()
        parent.resume()
        assert process.wait(150) == 60
    os.close(controlling)
    os.close(terminal)


@pytest.mark.parametrize("before", [True, False])
def test_a_signal_that_finds_nobody_any_more_is_for_the_next(tmp_path: Path, before: bool) -> None:
    """Or finds somebody who is killed before it has ended."""
    with again(tmp_path, "deaf+write", "early") as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[0])
        if before:
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "deaf\n"
            os.kill(child, signal.SIGKILL)
        else:
            parent = psutil.Process(process.pid)
            parent.suspend()
            os.kill(child, signal.SIGKILL)
            process.send_signal(signal.SIGTERM)
            parent.resume()
        assert process.wait(150) == 51


def test_who_cannot_be_executed_yet_is_started_later(tmp_path: Path) -> None:
    (tmp_path / "journal").touch()
    with again(tmp_path, "absent", "kill", "early") as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith("was killed by SIGKILL: restarting it\n")
        assert "cannot restart the driver" in process.stderr.readline()
        assert process.stderr.readline().endswith("could not be started: restarting it in 2 s\n")
        new = tmp_path / "new"
        new.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        new.chmod(0o755)
        new.rename(tmp_path / "python")
        process.send_signal(signal.SIGTERM)  # ends the pause
        assert process.wait(150) == 51


def test_who_ends_before_it_knows_whose_child_it_is_is_started_later(tmp_path: Path) -> None:
    """Python does so where the package cannot be imported, with the code of a script that has failed."""
    (tmp_path / "journal").touch()
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with again(tmp_path, "absent", "kill", "early") as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith("was killed by SIGKILL: restarting it\n")
        assert process.stderr.readline().endswith("could not be started: restarting it in 2 s\n")
        new = tmp_path / "new"
        new.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        new.chmod(0o755)
        new.rename(program)
        process.send_signal(signal.SIGTERM)  # ends the pause
        assert process.wait(150) == 51


def test_a_parent_that_can_have_no_child_tries_again(tmp_path: Path) -> None:
    with again(tmp_path, "wait+write", "early") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        child = int(process.stdout.readline().split()[0])
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        os.kill(child, signal.SIGKILL)
        assert process.stderr.readline().endswith("was killed by SIGKILL: restarting it\n")
        told = "elasticrun: warning: the driver cannot be started (Too many open files): restarting it in 2 s\n"
        assert process.stderr.readline() == told
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        process.send_signal(signal.SIGTERM)  # ends the pause
        assert process.wait(150) == 51


def test_nobody_has_to_read_what_is_said(tmp_path: Path) -> None:
    reading_end, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing_end, b"x")
    os.set_blocking(writing_end, True)
    with again(tmp_path, "kill+write", "7", stderr=writing_end) as process:
        assert process.wait(150) == 7
    os.close(reading_end)
    os.close(writing_end)


def test_the_tenth_failure_ends_the_job(tmp_path: Path) -> None:
    """By a driver that is told to."""
    with again(tmp_path, "quick", "kill+write", *["kill"] * 8, "fail+write", "early") as process:
        said, warned = process.communicate(timeout=150)
        assert process.returncode == 70
        assert len(starts(said)) == 11
        last = starts(said)[-2][0]
        assert warned.endswith(f"the driver (process {last}) failed, 10 times in a row: ending the job\n")


def test_nobody_ends_the_job_where_the_last_is_killed(tmp_path: Path) -> None:
    """That is said, at least."""
    with again(tmp_path, "quick", "kill+write", *["kill"] * 10) as process:
        said, warned = process.communicate(timeout=150)
        last = starts(said)[-1][0]
        told = (
            f"the driver (process {last}) that should end the job was killed by SIGKILL: no process is left to end "
            "the job\n"
        )
        assert warned.endswith(told)


# --- whole jobs -----------------------------------------------------------------------------------------------------

RUN = ("-np", "2", "--min-np", "1", "--on-change", "in-place")
# Fails when it is to have the members of the first round go on, which are ready by then.
_FAILS_ONCE = """
import sys
from pathlib import Path
from elastic_driver.driver.rounds import Rounds
mark, publish = Path(sys.argv.pop(1)), Rounds.publish
def fail(*args, **more):
    if not mark.exists():
        mark.touch()
        raise ZeroDivisionError("a bug")
    return publish(*args, **more)
Rounds.publish = fail
"""


def test_a_job_goes_on_while_its_driver_is_killed_and_started_again(tmp_path: Path, runtime: Path) -> None:
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(tmp_path / "kept"), elasticrun=AFRESH) as job:
        workers = {line["pid"] for line in job.wait_for_steps(2)}
        killed = job.driver_pid()
        os.kill(killed, signal.SIGKILL)
        job.wait_for("the next driver", lambda: "took over: no driver for" in job.said())
        assert f"the driver (process {killed}) was killed by SIGKILL: restarting it\n" in job.said()
        lines = job.wait_for_steps(2, after=max(line["time"] for line in job.steps()))
        assert {line["pid"] for line in lines} == workers
        assert job.driver_pid() != killed
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
        assert job.said().count("SIGTERM: stopping all workers") == 1
        assert "killing all workers now" not in job.said()


def test_a_driver_that_fails_leaves_its_workers_to_the_next(tmp_path: Path, runtime: Path) -> None:
    elasticrun = (*FAULTY, _FAILS_ONCE, str(tmp_path / "mark"))
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(tmp_path / "kept"), elasticrun=elasticrun) as job:
        job.wait_for_steps(2)
        # Training goes on before the driver has seen all who are back.
        job.wait_for("the takeover", lambda: "took over: no driver for" in job.said())
        said = job.said()
        assert "ZeroDivisionError: a bug" in said
        assert said.count("failed: restarting it\n") == 1
        assert len({line["pid"] for line in job.steps()}) == 2, "nobody was started again"
        assert [each["event"] for each in job.events()].count("job_ended") == 0
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM


# Whose second driver fails before it has written anything.
_FAILS_AT_ONCE = """
import sys
from elastic_driver.driver import job
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import SettingsError
from elastic_driver.system import parent
from pathlib import Path
mark, how, build, begin = Path(sys.argv.pop(1)), sys.argv.pop(1), job.build, Stepper.begin
def fail():
    mark.touch()
    raise SettingsError("no port") if how == "refuses" else ZeroDivisionError("a bug")
def build_or_fail(*args, before, **more):
    if before is not None and how in ("fails", "refuses") and not mark.exists():
        fail()
    return build(*args, before=before, **more)
def begin_or_fail(self):
    if self.state.round_id and how == "begins" and not mark.exists():
        fail()
    begin(self)
console = job.Console
def console_or_fail(**more):
    if parent.started() is not None and how == "lacks" and not mark.exists():
        mark.touch()
        raise MemoryError
    return console(**more)
run = job.run_job
def run_or_fail(*args, **more):
    if parent.started() is not None and how == "lacks a part" and not mark.exists():
        mark.touch()
        raise ImportError("no part")
    return run(*args, **more)
job.build, Stepper.begin, job.Console, job.run_job = build_or_fail, begin_or_fail, console_or_fail, run_or_fail
"""


# Refused, and without a part, it ends as it does when it fails or lacks memory.
@pytest.mark.parametrize(
    "how",
    [
        "fails",
        "begins",
        "lacks",
        *(pytest.param(how, marks=pytest.mark.release) for how in ("refuses", "lacks a part")),
    ],
)
def test_a_takeover_that_fails_leaves_the_job_to_the_next(tmp_path: Path, runtime: Path, how: str) -> None:
    elasticrun = (*FAULTY, _FAILS_AT_ONCE, str(tmp_path / "mark"), how)
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(tmp_path / "kept"), elasticrun=elasticrun) as job:
        workers = {line["pid"] for line in job.wait_for_steps(2)}
        os.kill(job.driver_pid(), signal.SIGKILL)
        job.wait_for("the third driver", lambda: "took over: no driver for" in job.said())
        said = job.said()
        assert said.count("failed: restarting it in 2 s") == 1
        assert ("ZeroDivisionError: a bug" in said) == (how in ("fails", "begins"))
        assert ("elasticrun: error: cannot take over the job in " in said) == (how == "lacks")
        assert ("ImportError: no part" in said) == (how == "lacks a part")
        if how in ("fails", "refuses"):
            why = "no port" if how == "refuses" else "internal error: ZeroDivisionError('a bug')"
            assert f"{why}; its workers keep running, and wait 600 s for a driver\n" in said
        lines = job.wait_for_steps(2, after=max(line["time"] for line in job.steps()))
        assert {line["pid"] for line in lines} == workers
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM


# Lacks memory once, when it has begun to take over.
_LACKS_ONCE = """
import sys
from pathlib import Path
from elastic_driver.driver import job
mark, console = Path(sys.argv.pop(1)), job.Console
def console_or_fail(**more):
    if not mark.exists():
        mark.touch()
        raise MemoryError
    return console(**more)
job.Console = console_or_fail
"""


@pytest.mark.parametrize("words", ["command", pytest.param("resume", marks=pytest.mark.release)])
def test_so_does_the_first_of_another_elasticrun(tmp_path: Path, runtime: Path, words: str) -> None:
    """No memory is left, before it has read the journal: no service manager would start it again after a 2."""
    kept, mark = tmp_path / "kept", tmp_path / "mark"
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(kept)) as job:
        job.wait_for_steps(2)
        job.process.kill()
        job.wait()
        again = ["--event-log", job.event_log, *job.words] if words == "command" else ["resume", kept]
        lacking = (*FAULTY, _LACKS_ONCE, str(mark))
        with heard_elasticrun(*again, cwd=tmp_path, elasticrun=lacking) as (second, errors):
            assert errors.readline() == f"elasticrun: error: cannot take over the job in {kept}: no memory is left\n"
            assert "failed: restarting it" in errors.readline()
            while not job.events("took_over"):
                assert second.poll() is None
                time.sleep(0.02)
            second.send_signal(signal.SIGTERM)
            errors.read()
            assert second.wait(150) == 128 + signal.SIGTERM


# No driver but the first ever has the job; the third is the last.
_NEVER_TAKES_OVER = """
import sys
from elastic_driver.driver import job
from elastic_driver.journal import held
from elastic_driver.errors import SettingsError
from elastic_driver.system import parent
parent.SETBACKS_LIMIT = 2
how, build, read_job = sys.argv.pop(1), job.build, held.read_job
def refuse(*args, before=None, **more):
    if parent.started() is None:
        return build(*args, before=before, **more)
    raise SettingsError("no port")
def fail(*args, **more):
    if parent.started() is None:
        return read_job(*args, **more)
    raise ZeroDivisionError("a bug")
if how == "refuses":
    job.build = refuse
else:
    held.read_job = fail
"""


@pytest.mark.parametrize("how", ["refuses", "fails"])
def test_the_last_driver_ends_what_it_can_though_it_cannot_take_over(tmp_path: Path, runtime: Path, how: str) -> None:
    elasticrun = (*FAULTY, _NEVER_TAKES_OVER, how)
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(tmp_path / "kept"), elasticrun=elasticrun) as job:
        job.wait_for_steps(2)
        os.kill(job.driver_pid(), signal.SIGKILL)
        assert job.wait() == 70
        said = job.said()
        assert "failed, 2 times in a row: ending the job\n" in said
        assert said.count("no port" if how == "refuses" else "ZeroDivisionError: a bug\n") == 2
        assert ": ended on this machine (localhost: 2 workers), without a driver; " in said
        # The agent ends when it has answered that nothing is left.
        job.wait_for("the end of all", lambda: not agents_here() and not job.leftovers())


# Fails before anything is written.
_NEVER_BEGINS = """
from elastic_driver.driver.stepper import Stepper
def fail(self):
    raise ZeroDivisionError("a bug")
Stepper.begin = fail
"""


def test_a_job_that_fails_before_it_has_begun_is_not_started_again(tmp_path: Path, runtime: Path) -> None:
    """It would do so again."""
    words = (*RUN, "--journal", str(tmp_path / "kept"), "true")
    code, said = run_elasticrun(*words, env=dict(os.environ), elasticrun=(*FAULTY, _NEVER_BEGINS))
    assert code == 70
    assert "ZeroDivisionError: a bug" in said
    assert "restarting it" not in said


# Waits for a long time before the second start.
_PAUSES = """
from elastic_driver.system import parent
parent.PAUSE_RANGE_S = (1000.0, 1000.0)
"""


def test_a_job_can_be_ended_in_the_pause_before_a_start(tmp_path: Path, runtime: Path) -> None:
    """By the elasticrun that waits, which has its exit code."""
    elasticrun = (*FAULTY, _PAUSES)
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(tmp_path / "kept"), elasticrun=elasticrun) as job:
        job.wait_for_steps(2)
        for number in (1, 2):
            os.kill(job.driver_pid(), signal.SIGKILL)
            if number == 1:
                job.wait_for("the next driver", lambda: "took over: no driver for" in job.said())
        job.wait_for("the pause", lambda: "restarting it in 1000 s" in job.said())
        ended = subcommand("end", job.events("job_started")[0]["job_id"])
        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"its elasticrun (process {job.process.pid}) starts another driver, which ends the job\n" in ended.stdout
        assert job.wait() == 128 + signal.SIGTERM
        assert not job.leftovers()


def test_process_1_of_a_container_starts_its_driver_again(
    in_container: list[str], tmp_path: Path, runtime: Path
) -> None:
    """And ends the job when its terminal is gone, or somebody says so."""
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(tmp_path / "kept"), prefix=in_container) as job:
        workers = {line["pid"] for line in job.wait_for_steps(2)}
        [first] = psutil.Process(job.process.pid).children()
        [driver] = [each for each in first.children() if each.cmdline() == first.cmdline()]
        driver.kill()
        job.wait_for("the next driver", lambda: "took over: no driver for" in job.said())
        lines = job.wait_for_steps(2, after=max(line["time"] for line in job.steps()))
        assert {line["pid"] for line in lines} == workers
        first.send_signal(signal.SIGHUP)
        assert job.wait() == 128 + signal.SIGHUP
        assert job.said().count("SIGHUP: stopping all workers") == 1
        assert "killing all workers now" not in job.said()


# Cannot say in its journal that nothing is left of a job.
_CANNOT_CLOSE = """
from elastic_driver.journal.journal import Journal
Journal.close = lambda self, exit_code: "No space left on device"
"""


@pytest.mark.parametrize("can_close", [True, False])
def test_where_no_agent_comes_back_another_job_begins(tmp_path: Path, runtime: Path, can_close: bool) -> None:
    """Unless it would be found again and again."""
    elasticrun = FORKING if can_close else (*FAULTY, _CANNOT_CLOSE)
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(tmp_path / "kept"), elasticrun=elasticrun) as job:
        before = {line["pid"] for line in job.wait_for_steps(2)}
        [number] = agents_here()
        agent = psutil.Process(agents_here()[number].pid)
        agent.suspend()  # it does not come back before it is killed
        try:
            killed = job.driver_pid()
            os.kill(killed, signal.SIGKILL)
            job.wait_for("the next driver", lambda: [each.pid for each in running_jobs() if each.pid != killed])
        finally:
            agent.kill()
        if not can_close:
            assert job.wait() == 70
            assert "and no new job is started because the journal could not be closed" in job.said()
            return
        job.wait_for("another job", lambda: "starting a new job\n" in job.said())
        lines = job.wait_for_steps(2, after=max(line["time"] for line in job.steps()))
        assert not before & {line["pid"] for line in lines}
        assert "none of its agents has reconnected" in job.said()
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM


@contextmanager
def standing_by(folder: Path) -> Iterator[tuple[Process, IO[str]]]:
    """elasticrun that stands by for a job of this process's, and what it says from then on."""
    kept = folder / "kept"
    leave(kept)
    words = (*RUN, "--journal", kept, "--standby-driver", "true")
    with JournalFolder.take(kept, "0123"), heard_elasticrun(*words, cwd=folder) as (process, errors):
        assert "standing by: job 0123 is driven by process" in errors.readline()
        yield process, errors


def test_signals_for_workers_mean_nothing_to_a_driver_that_stands_by(tmp_path: Path, runtime: Path) -> None:
    """It may do so for days, and has no workers."""
    with standing_by(tmp_path) as (process, errors):
        # Passed on in the order of their numbers.
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM):
            process.send_signal(number)
        said = errors.read()
        assert (process.wait(150), said) == (128 + signal.SIGTERM, "")


def test_one_that_stands_by_ends_though_it_was_killed_before_it_took_the_signal(tmp_path: Path, runtime: Path) -> None:
    """The next one is told of it. It is not for the job, which has a driver."""
    with standing_by(tmp_path) as (process, errors):
        [first] = psutil.Process(process.pid).children()
        first.kill()  # it has no handlers: what comes would kill it
        assert "was killed by SIGKILL: restarting it" in errors.readline()
        assert "standing by: job 0123" in errors.readline()
        [driver] = psutil.Process(process.pid).children()
        driver.suspend()
        process.send_signal(signal.SIGTERM)
        driver.kill()
        said = errors.read()
        assert process.wait(150) == 128 + signal.SIGTERM
        assert said.count("was killed by SIGKILL: restarting it") == 1


# Finds that nothing is left of a job before it takes the signal.
_LATE = """
import sys
from elastic_driver.cli.main import main
from elastic_driver.system import parent
parent.early_signals = lambda: iter(())
sys.exit(main())
"""


def test_no_other_job_begins_where_one_is_to_be_ended_whose_agent_does_not_come_back(
    tmp_path: Path, runtime: Path
) -> None:
    with Job(tmp_path, "localhost:2\n", *RUN, "--journal", str(tmp_path / "kept")) as job:
        job.wait_for_steps(2)
        [number] = agents_here()
        agent = psutil.Process(agents_here()[number].pid)
        driver = job.driver_pid()
        agent.suspend()
        job.process.kill()
        job.wait()
        words = [sys.executable, "-c", _LATE, "end", job.events("job_started")[0]["job_id"]]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as end:
            while not [each.pid for each in running_jobs() if each.pid != driver]:
                assert end.poll() is None
                time.sleep(0.02)
            agent.kill()
            _, said = end.communicate(timeout=150)
        assert end.returncode == 0, said
        assert "none of its agents has reconnected (exit code 143)" in said
        assert "starting a new job" not in said
        assert len(job.events("job_started")) == 1
    found = read_job(tmp_path / "kept")
    assert isinstance(found, Closed)
    assert found.exit_code == 128 + signal.SIGTERM


# Whose first driver locks the folder, leaves that to a child that outlives it, and is killed.
_HELD = """
import os, signal
from elastic_driver.journal import held
from elastic_driver.system import parent
os.setpgid(0, 0)
enter = held.read_job
def read_job(path):
    if parent.started() is None:
        (path / "journal").touch(mode=0o600)
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(1)
        os.close(2)
        signal.sigwait([signal.SIGUSR2])
        os._exit(0)
    return enter(path)
held.read_job = read_job
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.release)])
def test_a_driver_that_waits_for_a_dead_ones_lock_can_be_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    words = (*RUN, "--journal", tmp_path / "kept", "true")
    with heard_elasticrun(*words, cwd=tmp_path, elasticrun=(*FAULTY, _HELD)) as (process, errors):
        assert "was killed by SIGKILL: restarting it" in errors.readline()
        try:
            assert "which is dead: waiting until the kernel releases the lock" in errors.readline()
            process.send_signal(number)
            assert process.wait(150) == 128 + number
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the child, too
