"""The driver's terminal, through real pipes and a real pseudo-terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.reporting import console as console_module
from elastic_driver.reporting import tracebacks
from elastic_driver.reporting.console import Console
from elastic_driver.reporting.happenings import RoundSummary, Summary
from elastic_driver.reporting.tracebacks import Tracebacks
from elastic_driver.system.keeping import Keeping
from elastic_driver.words import Bar

pytestmark = [pytest.mark.unit]

ERASE = "\r\x1b[2K"


class Reader:
    """Reads a descriptor to its end on a thread of its own, ended by the close of the other side."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._data = bytearray()
        self._thread = threading.Thread(target=self._read, name="test-reader")
        self._thread.start()

    def _read(self) -> None:
        # EIO is a pseudo-terminal's end of file.
        with contextlib.suppress(OSError):
            while piece := os.read(self._descriptor, 65536):
                self._data += piece
        os.close(self._descriptor)

    def text(self) -> str:
        self._thread.join(150)
        assert not self._thread.is_alive()
        return self._data.decode()


class Screen:
    """A console on two pipes, or with standard error (or both) on a terminal."""

    def __init__(self, *, terminal: bool = False, columns: int = 60, both: bool = False, **values: Any) -> None:
        out, self._stdout = (0, 0) if both else os.pipe()
        if terminal:
            err, self._stderr = pty.openpty()
            fcntl.ioctl(self._stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        else:
            err, self._stderr = os.pipe()
        self._err = Reader(err)
        self._out = self._err if both else Reader(out)
        self._both = both
        self.console = Console(stdout=self._stderr if both else self._stdout, stderr=self._stderr, **values)

    def end(self) -> tuple[str, str]:
        """Everything written to stdout and to stderr."""
        self.console.__exit__(None, None, None)
        if not self._both:
            os.close(self._stdout)
        # A terminal's last close throws away what is not read yet, but for what it has already handed on.
        termios_wait(self._stderr)
        os.close(self._stderr)
        err = self._err.text().replace("\r\n", "\n")
        return ("" if self._both else self._out.text()), err


def termios_wait(descriptor: int) -> None:
    with contextlib.suppress(termios.error, OSError):
        termios.tcdrain(descriptor)


@pytest.fixture(autouse=True)
def colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


def test_each_word_goes_to_its_stream() -> None:
    screen = Screen()
    screen.console.line("one")
    screen.console.write("stdout", b"[0]<stdout>:a\n")
    screen.console.write("stderr", b"[0]<stderr>:b\n")
    screen.console.warning("two")
    screen.console.error("three")
    screen.console.detail("not asked for")
    screen.console.status("nobody sees this")
    assert not screen.console.live
    assert screen.end() == (
        "[0]<stdout>:a\n",
        "elasticrun: one\n[0]<stderr>:b\nelasticrun: warning: two\nelasticrun: three\n",
    )


@pytest.mark.parametrize(
    ("values", "heard"),
    [
        ({}, "line warning error"),
        ({"verbose": True}, "detail line warning error"),
        ({"log_level": "TRACE"}, "detail line warning error"),
        ({"log_level": "DEBUG"}, "detail line warning error"),
        ({"log_level": "WARNING"}, "warning error"),
        ({"log_level": "WARNING", "verbose": True}, "warning error"),
        ({"log_level": "ERROR"}, "error"),
        ({"log_level": "FATAL"}, "error"),
    ],
)
def test_levels(values: dict[str, Any], heard: str) -> None:
    screen = Screen(**values)
    for kind in ("detail", "line", "warning", "error"):
        getattr(screen.console, kind)(kind)
    screen.console.summary(Summary(), exit_code=0, message="fine")
    said = [line.split()[-1] for line in screen.end()[1].splitlines() if "job succeeded" not in line]
    assert said == heard.split()


def test_control_characters_stay_out_of_our_lines() -> None:
    screen = Screen()
    screen.console.error("a\x1b[2J\nb\x00c\udcff")
    # The second set, which has an escape sequence of one character; new lines of other kinds; turned directions.
    screen.console.error("a\x9b2J\x85b\u2028c\u202ed\u2066 é \u200d e\x7f")
    assert screen.end()[1] == "elasticrun: a [2J b c?\nelasticrun: a 2J b c d  é \u200d e \n"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_second_set_of_control_characters_of_a_worker_reaches_no_terminal(terminal: bool) -> None:
    screen = Screen(terminal=terminal)
    screen.console.write("stderr", "[0]<stderr>:\x1b[31mred\x1b[0m \x9b2J\x85 Â é\n".encode())
    shown = "\ufffd2J\ufffd" if terminal else "\x9b2J\x85"
    assert f"[0]<stderr>:\x1b[31mred\x1b[0m {shown} Â é" in screen.end()[1]


def test_control_characters_stay_out_of_the_status_line() -> None:
    screen = Screen(terminal=True)
    screen.console.status("on a\x9b2Jb\x1b[2Jc")
    assert "on a 2Jb [2Jc" in screen.end()[1]


def test_a_failed_job_is_told_at_every_level() -> None:
    screen = Screen(log_level="FATAL")
    screen.console.summary(Summary([RoundSummary(1, 2, "start", 1.0, None)]), exit_code=3, message="too few slots")
    assert screen.end()[1] == "elasticrun: job failed: too few slots (exit code 3)\n"


def test_the_summary() -> None:
    rounds = [
        RoundSummary(1, 4, "start", 3.0, None),
        RoundSummary(2, 2, "host b lost", 0.081, 120),
        RoundSummary(13, 10, "host c added", None, 7),
    ]
    screen = Screen()
    screen.console.summary(Summary(rounds, lost_s=0.081, unknown=1), exit_code=0, message="done")
    assert screen.end()[1] == (
        "elasticrun:   round  workers  time lost  from commit  cause\n"
        "elasticrun:       1        4          -            -  start\n"
        "elasticrun:       2        2     0.08 s          120  host b lost\n"
        "elasticrun:      13       10    unknown            7  host c added\n"
        "elasticrun: 2 changes, at least 0.08 s lost in total\n"
        "elasticrun: job succeeded: done (exit code 0)\n"
    )


def test_the_summary_of_workers_without_commits() -> None:
    screen = Screen()
    rounds = [RoundSummary(1, 2, "start", 3.0, None), RoundSummary(2, 2, "worker a[0] killed", 0.5, None)]
    screen.console.summary(Summary(rounds, lost_s=0.5), exit_code=0, message="done")
    assert screen.end()[1] == (
        "elasticrun:   round  workers  time lost  cause\n"
        "elasticrun:       1        2          -  start\n"
        "elasticrun:       2        2     0.50 s  worker a[0] killed\n"
        "elasticrun: 1 change, 0.50 s lost in total\n"
        "elasticrun: job succeeded: done (exit code 0)\n"
    )


def test_a_summary_without_changes_has_no_table() -> None:
    screen = Screen()
    screen.console.summary(Summary([RoundSummary(1, 2, "start", 1.0, None)]), exit_code=0, message="done")
    assert screen.end()[1] == "elasticrun: job succeeded: done (exit code 0)\n"


def test_an_interruption_is_no_failure() -> None:
    screen = Screen()
    screen.console.summary(Summary(), exit_code=130, message="interrupted by SIGINT")
    assert screen.end()[1] == "elasticrun: job ended: interrupted by SIGINT (exit code 130)\n"


@pytest.mark.parametrize("log", [None, Path("/dev/null")])
def test_a_long_summary_is_cut_in_its_middle(log: Path | None) -> None:
    first = [RoundSummary(1, 4, "start", 3.0, None), RoundSummary(2, 4, "host b lost", 0.5, 3)]
    summary = Summary(first, 281, 12.25, [RoundSummary(284, 4, "host b lost", 0.5, 9)], lost_s=13.25)
    screen = Screen(event_log=log)
    screen.console.summary(summary, exit_code=0, message="done")
    where = "see /dev/null" if log else "use --event-log FILE"
    assert screen.end()[1] == (
        "elasticrun:   round  workers  time lost  from commit  cause\n"
        "elasticrun:       1        4          -            -  start\n"
        "elasticrun:       2        4     0.50 s            3  host b lost\n"
        f"elasticrun:     ...             12.25 s               281 more rounds; for all of them, {where}\n"
        "elasticrun:     284        4     0.50 s            9  host b lost\n"
        "elasticrun: 283 changes, 13.25 s lost in total\n"
        "elasticrun: job succeeded: done (exit code 0)\n"
    )


def test_a_traceback_that_several_print_is_shown_once() -> None:
    def traceback(label: int, error: str) -> bytes:
        prefix = f"[{label}]<stderr>:"
        lines = ("warming up", "Traceback (most recent call last):", '  File "t.py", line 1', error)
        return "".join(f"{prefix}{line}\n" for line in lines).encode()

    screen = Screen()
    for label in range(3):
        screen.console.write("stderr", traceback(label, "ImportError: no" if label < 2 else "OSError: else"))
    assert [screen.console.worker_ended(str(label), has_failed=True) for label in range(4)] == ["", "0", "", ""]
    assert screen.console.shows(["Traceback (most recent call last):", "ImportError: no"])
    screen.console.write("stderr", traceback(3, "ImportError: no"))
    assert screen.end()[1] == (
        f"{traceback(0, 'ImportError: no').decode()}"
        "[1]<stderr>:warming up\n"
        f"{traceback(2, 'OSError: else').decode()}"
        "[3]<stderr>:warming up\n"
        f"{traceback(3, 'ImportError: no').decode().partition(chr(10))[2]}"
    )


def test_what_a_worker_printed_that_has_not_failed_is_shown() -> None:
    """It was a message that looks like an end."""
    screen = Screen()
    for label in range(2):
        screen.console.write("stderr", b"[%d]<stderr>:Traceback (most recent call last):\n" % label)
    assert [screen.console.worker_ended(str(label), has_failed=False) for label in range(2)] == ["", ""]
    assert screen.end()[1].count("Traceback") == 2


def test_what_is_held_at_the_end_is_shown() -> None:
    screen = Screen()
    for label in range(2):
        screen.console.write("stderr", b"[%d]<stderr>:Traceback (most recent call last):\n" % label)
    assert screen.end()[1].count("Traceback") == 2


def said(label: int | str, *lines: str) -> bytes:
    """What a worker prints on its standard error."""
    return "".join(f"[{label}]<stderr>:{line}\n" for line in lines).encode()


FIRST, WHERE, ERROR = "Traceback (most recent call last):", '  File "t.py", line 1', "ImportError: no"


def test_a_message_that_only_looks_like_an_end_is_shown_after_a_moment() -> None:
    held = Tracebacks()
    assert held.take(said(0, "one", FIRST, "going on"), 9.0) == said(0, "one", FIRST, "going on")
    assert held.take(said(1, "one", FIRST), 10.0) == said(1, "one")
    assert held.take(said(1, "going on"), 10.4) == b""
    assert held.take(said(2, "another worker"), 10.4) == said(2, "another worker")
    assert held.overdue(10.5) == b""
    assert held.overdue(11.5) == said(1, FIRST, "going on")
    assert held.take(said(1, "going on"), 11.6) == said(1, "going on")
    assert held.ended("1", has_failed=True) == (b"", "")
    assert held.take(said(1, FIRST), 13.0) == b""
    assert (held.first_held, held.rest(), held.rest(), held.first_held) == (0, said(1, FIRST), b"", None)


def test_what_differs_from_all_that_is_known_is_shown_as_it_comes() -> None:
    held = Tracebacks()
    assert held.take(said(0, FIRST, WHERE, ERROR), 1.0, 7) == said(0, FIRST, WHERE, ERROR)
    assert held.take(said(0, "and more"), 1.0, 8) == said(0, "and more")
    assert held.first_held is None
    assert held.take(said(1, FIRST, WHERE), 1.0, 9) == b""
    assert held.first_held == 9
    assert held.take(said(1, "OSError: else"), 1.0, 10) == said(1, FIRST, WHERE, "OSError: else")
    assert held.take(said(1, "and more"), 1.0, 11) == said(1, "and more")
    assert held.first_held is None
    assert held.ended("1", has_failed=True) == held.ended("0", has_failed=True) == (b"", "")


def test_a_worker_that_failed_as_it_did_before() -> None:
    """One that was restarted."""
    held = Tracebacks()
    assert held.take(said(0, FIRST, ERROR), 1.0) == said(0, FIRST, ERROR)
    assert held.ended("0", has_failed=True) == (b"", "")
    assert held.take(said(0, FIRST, ERROR), 9.0) == b""
    assert held.ended("0", has_failed=True) == (b"", "0")


@pytest.mark.parametrize("error", [ERROR, "OSError: else", None])
def test_one_that_has_ended_before_the_one_that_is_shown_has_come_so_far(error: str | None) -> None:
    held = Tracebacks()
    assert held.take(said(0, FIRST), 1.0, 1) == said(0, FIRST)
    for label in ("1", "2"):
        assert held.take(said(label, FIRST, WHERE, ERROR), 1.0, 2) == b""
        assert held.ended(label, has_failed=True) == (b"", ""), "it is not known yet"
    assert held.first_held == 2
    if error is None:
        shown = said(1, FIRST, WHERE, ERROR) + said(2, "the same traceback as rank 1")
        assert held.ended("0", has_failed=True) == (shown, "")
    else:
        assert held.take(said(0, WHERE), 1.0, 3) == said(0, WHERE)
        same = b"".join(said(label, "the same traceback as rank 0") for label in (1, 2))
        others = same if error == ERROR else said(1, FIRST, WHERE, ERROR) + said(2, "the same traceback as rank 1")
        assert held.take(said(0, error), 1.0, 4) == said(0, error) + others
    assert held.first_held is None
    assert held.rest() == b""


def test_what_is_held_is_bounded() -> None:
    held = Tracebacks()
    flood = said(0, "x" * 70000)
    assert held.take(said(0, FIRST) + flood, 1.0) == said(0, FIRST) + flood
    assert held.take(said(0, "going on"), 1.0) == said(0, "going on")
    assert held.take(said(1, FIRST), 1.0) == said(1, FIRST)
    assert held.take(said(2, FIRST), 1.0) == b""
    for line in range(1000):
        held.take(said(1, f"line {line} {'x' * 80}"), 1.0)
    assert held.ended("2", has_failed=True) == (said(2, FIRST), "")


def test_tracebacks_of_torchs_ranks_are_compared_without_their_numbers() -> None:
    held = Tracebacks()

    def of(label: int) -> bytes:
        return said(label, f"[rank{label}]: {FIRST}", f"[rank{label}]: RuntimeError: Connection reset by peer")

    assert held.take(of(0), 1.0) == of(0)
    assert held.take(of(2), 1.0) == b""
    assert held.ended("0", has_failed=True) == (b"", "")
    assert held.ended("2", has_failed=True) == (b"", "0")


@pytest.mark.parametrize(
    "lines",
    [
        ['  File "train.py", line 3', "    x = = 1", "        ^", "SyntaxError: invalid syntax"],
        ["/usr/bin/python3: can't open file '/home/me/nosuch.py': [Errno 2] No such file or directory"],
        ["  + Exception Group Traceback (most recent call last):", '  |   File "t.py"', "  | ExceptionGroup: two"],
    ],
)
def test_a_script_that_python_does_not_take_is_told_of_once(lines: list[str]) -> None:
    held = Tracebacks()
    assert held.take(said(0, *lines), 1.0) == said(0, *lines)
    assert held.take(said(1, *lines), 1.0) == b""
    assert held.ended("1", has_failed=True) == (b"", "0")


def test_times_before_the_prefix_do_not_make_tracebacks_differ() -> None:
    held = Tracebacks()
    first, second = (f"Sat Nov 21 20:00:0{label} 2026".encode() + said(label, FIRST) for label in range(2))
    assert held.take(first, 1.0) == first
    assert held.take(second, 1.0) == b""
    assert held.ended("1", has_failed=True) == (b"", "0")


def test_the_status_line_makes_room_and_comes_back() -> None:
    screen = Screen(terminal=True)
    assert screen.console.live
    screen.console.status("waiting")
    screen.console.status("waiting")
    screen.console.line("hello")
    screen.console.write("stderr", b"[0]<stderr>:oops\n")
    screen.console.write("stdout", b"[0]<stdout>:fine\n")
    screen.console.summary(Summary(), exit_code=0, message="done")
    out, err = screen.end()
    assert out == "[0]<stdout>:fine\n"
    assert err == (
        f"[00:00] waiting{ERASE}elasticrun: hello\n[00:00] waiting{ERASE}[0]<stderr>:oops\n"
        f"[00:00] waiting{ERASE}elasticrun: job succeeded: done (exit code 0)\n"
    )


def test_the_status_line_makes_room_for_output_on_the_same_terminal() -> None:
    screen = Screen(terminal=True, both=True)
    screen.console.status("waiting")
    screen.console.write("stdout", b"[0]<stdout>:fine\n")
    assert screen.end()[1] == f"[00:00] waiting{ERASE}[0]<stdout>:fine\n[00:00] waiting{ERASE}"


def test_the_status_line_fits_the_terminal_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    screen = Screen(terminal=True, columns=30)
    screen.console.status("x" * 100)
    shown = screen.end()[1].removesuffix(ERASE)
    assert shown == "[00:00] " + "x" * 20 + "…"


def test_a_worker_that_has_the_terminal_is_alone_there() -> None:
    screen = Screen(terminal=True, both=True)
    screen.console.status("round 1 runs")
    screen.console.lend(True)
    screen.console.status("round 1 runs on")
    screen.console.show(b"\x1b[1m(Pdb)\x1b[0m ")
    screen.console.status("round 2 runs")
    screen.console.write("stdout", b"[1]<stdout>:other\n")
    screen.console.line("something")
    screen.console.show(b"> ")
    screen.console.lend(False)
    screen.console.line("more")
    _, err = screen.end()
    assert "round 2 runs" not in err, "but until it writes something"
    # As it is. Whatever else is said begins a line, and ends it as a terminal needs it that adds nothing.
    begin = "\x1b[1m(Pdb)\x1b[0m \r\n[1]<stdout>:other\r\nelasticrun: something\r\n> \n"
    assert f"{begin}elasticrun: more\n" in err


def test_no_status_line_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen(terminal=True)
    screen.console.status("waiting")
    screen.console.line("hello")
    assert screen.end()[1] == "elasticrun: hello\n"


def test_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    screen = Screen(terminal=True)
    screen.console.error("bad")
    assert screen.end()[1] == "\x1b[31melasticrun: bad\x1b[0m\n"


def test_a_reader_that_has_gone_is_said_once_and_borne() -> None:
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    os.close(out_read)
    reader = Reader(err_read)
    with Console(stdout=out_write, stderr=err_write) as console:
        console.write("stdout", b"lost\n")
        console.write("stdout", b"lost\n")
        console.line("still here")
    os.close(out_write)
    os.close(err_write)
    assert reader.text() == (
        "elasticrun: warning: cannot write to stdout: its reader has closed it (broken pipe); continuing without "
        "it\nelasticrun: still here\n"
    )


def test_both_readers_gone() -> None:
    ends = [os.pipe(), os.pipe()]
    for read, _ in ends:
        os.close(read)
    with Console(stdout=ends[0][1], stderr=ends[1][1]) as console:
        console.write("stdout", b"lost\n")
        console.line("lost")
    for _, write in ends:
        os.close(write)


def test_a_stopped_reader_stops_nobody_and_loses_nothing() -> None:
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    console = Console(stdout=out_write, stderr=err_write)
    lines = [b"%06d %s\n" % (number, b"x" * 1000) for number in range(1000)]
    for line in lines:
        console.write("stdout", line)  # far more than a pipe holds: would block forever
    out, err = Reader(out_read), Reader(err_read)
    console.__exit__(None, None, None)
    os.close(out_write)
    os.close(err_write)
    assert out.text().encode() == b"".join(lines)
    assert err.text() == ""


def test_output_is_kept_when_it_is_written() -> None:
    async def play() -> None:
        keeping, is_kept = Keeping(), asyncio.Event()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        console = Console(stdout=out_write, stderr=err_write, keeping=keeping)
        for _ in range(1000):
            console.write("stdout", b"x" * 999 + b"\n")
        console.line("that is no output")
        keeping.when_kept(1000, is_kept.set)
        await asyncio.sleep(0)
        assert keeping.kept < keeping.came == 1000, "a pipe holds less"
        reader = Reader(out_read)
        await is_kept.wait()
        console.__exit__(None, None, None)
        os.close(out_write)
        os.close(err_write)
        os.close(err_read)
        assert len(reader.text()) == 1_000_000

    asyncio.run(play())


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_reader_that_has_stopped_is_waited_for_unless_files_have_the_same(is_copy: bool) -> None:
    async def play() -> None:
        keeping, is_kept = Keeping(), asyncio.Event()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        console = Console(stdout=out_write, stderr=err_write, keeping=keeping)
        console.is_copy = lambda: is_copy
        line = b"x" * 9999 + b"\n"
        console.write("stdout", line)
        keeping.when_kept(1000, is_kept.set)
        for _ in range(999):
            console.write("stdout", line)
        reader = None
        if not is_copy:
            await asyncio.sleep(0)
            assert not is_kept.is_set()
            reader = Reader(out_read)
        await is_kept.wait()
        reader = reader or Reader(out_read)
        console.__exit__(None, None, None)
        os.close(out_write)
        os.close(err_write)
        os.close(err_read)
        assert reader.text().encode() == line * 1000

    asyncio.run(play())


@pytest.mark.parametrize("shown", ["when it ends", "after a while"])
def test_output_that_is_held_is_not_kept_yet(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        keeping, is_kept = Keeping(), asyncio.Event()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        with Console(stdout=out_write, stderr=err_write, keeping=keeping) as console:
            console.write("stderr", b"[0]<stderr>:begins\n")
            for label in range(2):
                console.write("stderr", b"[%d]<stderr>:Traceback (most recent call last):\n" % label)
            for _ in range(2):  # the second is read when all is done of the first
                console.write("stdout", b"[1]<stdout>:behind it\n")
                assert os.read(out_read, 100) == b"[1]<stdout>:behind it\n"
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert keeping.kept <= 2
            keeping.when_kept(5, is_kept.set)
            if shown == "when it ends":
                console.worker_ended("1", has_failed=False)
            else:
                monkeypatch.setattr(tracebacks, "_HOLD_S", 0.0)
                console.look()
            await is_kept.wait()
            assert b"Traceback" in os.read(err_read, 1000)
        for descriptor in (out_read, out_write, err_read, err_write):
            os.close(descriptor)

    asyncio.run(play())


def test_what_a_stopped_reader_leaves_unread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "_BACKLOG_BYTES", 200_000)
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    console = Console(stdout=out_write, stderr=err_write)
    for _ in range(1000):
        console.write("stdout", b"x" * 999 + b"\n")
    err = Reader(err_read)
    out = Reader(out_read)
    while console._backlog > 200_000:
        os.sched_yield()
    console.write("stdout", b"last\n")
    console.__exit__(None, None, None)
    os.close(out_write)
    os.close(err_write)
    kept = out.text()
    lines = err.text().splitlines()
    dropped = [
        re.fullmatch(r"elasticrun: warning: (\d+) bytes of output dropped: the reader cannot keep up", line)
        for line in lines
    ]
    assert kept.endswith("\nlast\n")
    # More than one line where the pipe takes its first bytes only when something has been dropped.
    assert len(kept) - 5 + sum(int(found[1]) for found in dropped if found) == 1_000_000, (
        "what is not written is counted"
    )
    assert lines
    assert all(dropped)


def test_a_descriptor_that_someone_made_non_blocking() -> None:
    out_read, out_write = os.pipe()
    os.set_blocking(out_write, False)
    console = Console(stdout=out_write, stderr=2)
    for _ in range(500):
        console.write("stdout", b"y" * 999 + b"\n")
    reader = Reader(out_read)
    console.__exit__(None, None, None)
    os.close(out_write)
    assert len(reader.text()) == 500_000


def test_figures_stand_behind_the_sentence_also_where_there_is_little_room() -> None:
    screen = Screen(terminal=True, columns=40)
    screen.console.status("round 2 runs with 4 workers", ("12.5 steps/s", "commit 7"))
    shown = screen.end()[1].removesuffix(ERASE)
    assert shown == "[00:00] round 2 runs wi… | 12.5 steps/s"


def test_quiet_leaves_warnings_errors_output_and_the_end() -> None:
    screen = Screen(terminal=True, quiet=True)
    assert not screen.console.live
    screen.console.status("round 2 runs")
    screen.console.line("a line")
    screen.console.detail("a detail")
    screen.console.warning("look")
    screen.console.write("stderr", b"[0]<stderr> said\n")
    screen.console.summary(Summary([], 0, 0.0, [], 0.0, 0, []), exit_code=0, message="all done")
    _, err = screen.end()
    assert err.replace("\r\n", "\n").splitlines() == [
        "elasticrun: warning: look",
        "[0]<stderr> said",
        "elasticrun: job succeeded: all done (exit code 0)",
    ]


def test_quiet_and_a_higher_level_both_hold() -> None:
    screen = Screen(quiet=True, log_level="ERROR")
    screen.console.warning("look")
    screen.console.error("wrong")
    assert screen.end()[1] == "elasticrun: wrong\n"


# --- progress bars -------------------------------------------------------------------------------------------------

ABOVE = "\x1b[A\x1b[2K"


def bar(rank: int, text: str, *, is_line: bool = False) -> tuple[WorkerId, Bar]:
    data = f"[{rank}]<stderr>:{text}\n".encode()
    return WorkerId("a", rank, 0), Bar("stderr", str(rank), data, is_line)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is drawn as it comes."""
    monkeypatch.setattr(console_module, "_STATUS_PERIOD_S", 0.0)
    monkeypatch.setattr(console_module, "_BACK_PERIOD_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_bars_stand_above_the_status_line_and_below_the_lines() -> None:
    screen = Screen(terminal=True)
    screen.console.bar(*bar(1, "10%"))
    screen.console.status("runs")
    screen.console.bar(*bar(0, "20%"))
    screen.console.write("stderr", b"[0]<stderr>:line\n")
    screen.console.bar(WorkerId("a", 1, 0), None)
    drawn = "[0]<stderr>:20%\n[1]<stderr>:10%\n[00:00] runs"
    assert screen.end()[1] == (
        f"[1]<stderr>:10%{ERASE}[1]<stderr>:10%\n[00:00] runs{ERASE}{ABOVE}{drawn}"
        f"{ERASE}{ABOVE}{ABOVE}[0]<stderr>:line\n{drawn}"
        f"{ERASE}{ABOVE}{ABOVE}[0]<stderr>:20%\n[00:00] runs{ERASE}{ABOVE}"
    )


def test_a_bar_is_not_drawn_more_often_than_an_eye_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "_STATUS_PERIOD_S", 1e9)
    screen = Screen(terminal=True)
    screen.console._shown_at = -2e9
    for percent in range(100):
        screen.console.bar(*bar(0, f"{percent}%"))
    assert screen.end()[1] == f"[0]<stderr>:0%{ERASE}"


@pytest.mark.usefixtures("at_once")
def test_where_not_all_bars_find_room_those_of_the_lowest_ranks_are_shown() -> None:
    screen = Screen(terminal=True)
    for rank in (10, *range(9)):
        screen.console.bar(*bar(rank, "5%"))
    rows = screen.end()[1].rpartition("\r\x1b[2K")[0].rpartition("\x1b[2K")[2].splitlines()
    assert rows == [*(f"[{rank}]<stderr>:5%" for rank in range(7)), "3 more progress bars"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("whose", "seen"), [("all", "01"), ("1", "1"), ("none", "")])
@pytest.mark.parametrize("terminal", [True, False])
def test_whose_bars_are_shown(whose: str, seen: str, terminal: bool) -> None:
    screen = Screen(terminal=terminal, progress_rank=whose)
    assert screen.console.bars_shown == (whose if terminal else "none")
    for rank in range(2):
        screen.console.bar(*bar(rank, "5%", is_line=True))
    assert "".join(sorted(set(re.findall(r"\[(\d)\]", screen.end()[1])))) == seen


@pytest.mark.parametrize("terminal", [True, False])
def test_where_no_bars_are_drawn_one_is_a_line_now_and_then(terminal: bool) -> None:
    screen = Screen(terminal=terminal, quiet=terminal)
    screen.console.bar(*bar(0, "5%"))
    screen.console.bar(*bar(0, "6%", is_line=True))
    screen.console.bar(WorkerId("a", 0, 0), None)
    assert screen.end()[1] == "[0]<stderr>:6%\n"


@pytest.mark.usefixtures("at_once")
def test_bars_are_cut_by_the_columns_that_they_take_and_only_their_colors_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR")
    screen = Screen(terminal=True, columns=20)
    screen.console.bar(*bar(0, "\x1b[32m進進進進\x1b[5C"))
    assert screen.end()[1] == f"[0]<stderr>:\x1b[32m進進進…\x1b[0m{ERASE}"


@pytest.mark.usefixtures("at_once")
def test_a_terminal_that_has_become_narrower_is_cleaned_of_broken_rows() -> None:
    screen = Screen(terminal=True, columns=60)
    screen.console.bar(*bar(0, "x" * 30))
    fcntl.ioctl(screen._stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    screen.console.bar(WorkerId("a", 0, 0), None)
    assert screen.end()[1] == f"[0]<stderr>:{'x' * 30}{ERASE}{ABOVE}{ABOVE}"


@pytest.mark.usefixtures("at_once")
def test_nothing_is_drawn_on_a_terminal_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(terminal=True)
    screen.console.bar(*bar(0, "1%"))
    # Whatever is unread is too much.
    monkeypatch.setattr(console_module, "_DRAWN_BYTES", -1)
    screen.console.bar(*bar(0, "2%"))
    monkeypatch.setattr(console_module, "_DRAWN_BYTES", 1 << 20)
    screen.console.write("stderr", b"line\n")
    assert screen.end()[1] == f"[0]<stderr>:1%{ERASE}line\n[0]<stderr>:2%{ERASE}"


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_has_the_terminal_has_it_without_bars() -> None:
    screen = Screen(terminal=True, both=True)
    screen.console.bar(*bar(0, "1%"))
    screen.console.lend(True)
    screen.console.show(b"> ")
    screen.console.bar(*bar(0, "2%"))
    assert screen.end()[1] == f"[0]<stderr>:1%{ERASE}> "


@pytest.mark.usefixtures("at_once")
def test_the_bar_of_a_worker_whose_rank_is_no_longer_asked_for_goes() -> None:
    screen = Screen(terminal=True, progress_rank="0")
    worker, first = bar(0, "10%")
    screen.console.bar(worker, first)
    screen.console.bar(worker, bar(5, "20%")[1])
    screen.console.write("stderr", b"line\n")
    assert screen.end()[1] == f"[0]<stderr>:10%{ERASE}line\n"


@pytest.mark.usefixtures("at_once")
def test_of_two_streams_the_bar_that_was_drawn_last_is_shown_and_the_end_of_one_leaves_the_other() -> None:
    screen = Screen(terminal=True, both=True)
    worker, on_stderr = bar(0, "10%")
    screen.console.bar(worker, on_stderr)
    screen.console.bar(worker, Bar("stdout", "0", b"[0]<stdout>:20%\n"))
    screen.console.bar(worker, Bar("stdout", "0", b""))
    screen.console.bar(worker, Bar("stdout", "0", b""))
    assert screen.end()[1] == f"[0]<stderr>:10%{ERASE}[0]<stdout>:20%{ERASE}[0]<stderr>:10%{ERASE}"


def test_lines_that_come_fast_are_not_followed_by_the_bars_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "_BACK_PERIOD_S", 1e9)
    screen = Screen(terminal=True)
    screen.console._shown_at = -2e9
    screen.console.bar(*bar(0, "1%"))
    for number in range(100):
        screen.console.write("stderr", b"%d\n" % number)
    assert screen.end()[1] == f"[0]<stderr>:1%{ERASE}" + "".join(f"{number}\n" for number in range(100))


@pytest.mark.parametrize("lines", [b"", b"line\n"])
def test_what_could_not_be_drawn_at_once_is_drawn_without_anything_else_that_comes(lines: bytes) -> None:
    async def play() -> str:
        screen = Screen(terminal=True)
        screen.console.bar(*bar(0, "100%"))
        if lines:
            screen.console.write("stderr", lines)
            shows = b"line\r\n[0]<stderr>:100%"
        else:
            screen.console.bar(*bar(1, "100%"))
            shows = b"[1]<stderr>:100%"
        while shows not in screen._err._data:
            await asyncio.sleep(0.01)
        return screen.end()[1]

    assert asyncio.run(play()).endswith(f"100%{ERASE}{'' if lines else ABOVE}")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("lines", "rows"), [(1, 0), (2, 0), (3, 1), (24, 1)])
def test_a_terminal_of_few_lines_shows_no_bars(lines: int, rows: int) -> None:
    screen = Screen(terminal=True)
    fcntl.ioctl(screen._stderr, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 60, 0, 0))
    screen.console.bar(*bar(0, "10%"))
    assert screen.end()[1].count("10%") == rows
