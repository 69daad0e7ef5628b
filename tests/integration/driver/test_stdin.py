"""A worker that has the user's terminal, or reads what the driver is given: real jobs on pseudo-terminals."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import forked
from tests.support.processes.jobs import AFRESH, FORKING, PATIENCE_S
from tests.support.processes.subcommands import elasticrun

pytestmark = pytest.mark.integration


class Terminal:
    """elasticrun on a terminal of its own. The test is who sits before it.

    Attributes:
        process: it.
        seen: all that it has shown.
    """

    def __init__(self, *words: str, stdin: int | None = None, env: Mapping[str, str] | None = None) -> None:
        self.ours, self.theirs = os.openpty()
        self.resize(30, 90, tell=False)
        self.before = termios.tcgetattr(self.theirs)
        self.seen = b""
        self._looked_at = 0
        stdin = self.theirs if stdin is None else stdin
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **(env or {})}
        self.process: subprocess.Popen[bytes] | forked.ForkedProcess
        if forked.starts_afresh():
            command, out = [sys.executable, *AFRESH, *words], self.theirs
            self.process = subprocess.Popen(
                command, stdin=stdin, stdout=out, stderr=out, env=env, start_new_session=True
            )
        else:
            command = [str(PROGRAMS / "session_elasticrun.py"), *words]
            self.process = forked.start_driver(
                command, env, self.theirs, self.theirs, Path.cwd(), stdin=stdin, workers=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self.ours)
        os.close(self.theirs)

    def resize(self, rows: int, columns: int, *, tell: bool = True) -> None:
        """Gives the terminal another size."""
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if tell:  # it is no shell's job, so the kernel does not
            self.process.send_signal(signal.SIGWINCH)

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self.ours, text.encode())

    def sees(self, text: str, *, pressing: str = "") -> None:
        """Blocks until this is shown, behind what it has seen last.

        Args:
            text: what.
            pressing: keys that are pressed each second meanwhile.
        """
        limit = time.monotonic() + PATIENCE_S
        while (at := self.seen.find(text.encode(), self._looked_at)) < 0:
            left_s = limit - time.monotonic()
            if select.select([self.ours], [], [], min(1.0, left_s) if pressing else left_s)[0]:
                self.seen += os.read(self.ours, 65536)
            else:
                assert pressing, self.seen.decode()
                assert time.monotonic() < limit, self.seen.decode()
                self.type(pressing)
        self._looked_at = at + len(text)

    def ends(self) -> int:
        """Its exit code. Blocks until it has ended; reads on meanwhile."""
        process = os.pidfd_open(self.process.pid)
        try:
            while True:
                ready = select.select([self.ours, process], [], [], PATIENCE_S)[0]
                assert ready, self.seen.decode()
                if self.ours in ready:
                    self.seen += os.read(self.ours, 65536)
                elif process in ready:
                    return self.process.wait()
        finally:
            os.close(process)


def python(source: str) -> Sequence[str]:
    return sys.executable, "-u", "-c", source


_DEBUGGED = """
import os, signal
signal.signal(signal.SIGWINCH, lambda number, frame: print("now", os.get_terminal_size().columns))
number = 6
breakpoint()
print("number", number)
"""


def test_a_debugger_works_in_the_only_worker(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_DEBUGGED)
    with Terminal("-np", "1", sys.executable, str(script)) as terminal:
        terminal.sees("(Pdb) ")
        terminal.type("number = 7\n")
        terminal.sees("(Pdb) ")
        terminal.type("nonsense\x03")
        # Of a signal that comes just before Python waits for a key it knows at the next one.
        terminal.sees("--KeyboardInterrupt--", pressing="\n")
        terminal.sees("(Pdb) ")
        terminal.type("resize = 1\n")
        terminal.sees("(Pdb) ")
        terminal.resize(40, 120)
        terminal.sees("now 120", pressing="\n")
        terminal.type("c\n")
        terminal.sees("number 7\r\n")
        assert terminal.ends() == 0
        assert b"[0]<stdout>" not in terminal.seen
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_ctrl_c_ends_a_job_that_computes() -> None:
    source = "import signal\ntry:\n    print('computes')\n    signal.pause()\nfinally:\n    print('in order')\n"
    with Terminal("-np", "1", *python(source)) as terminal:
        terminal.sees("computes")
        terminal.type("\x03")
        terminal.sees("^C")
        assert terminal.ends() == 130, terminal.seen.decode()
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_a_rank_keeps_the_terminal_when_it_is_restarted_and_others_show_lines() -> None:
    source = (
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('line of 0', repr(sys.stdin.read()))\n"
        "    sys.exit() if int(os.environ['TORCHELASTIC_RESTART_COUNT']) else signal.pause()\n"
        "word = input('word? ')\n"
        "print('got', word)\n"
        "sys.exit(word == 'again')\n"
    )
    flags = ("--nproc-per-node", "2", "--stdin", "1", "--max-restarts", "1", "--on-change", "restart")
    with Terminal(*flags, *python(source)) as terminal:
        terminal.sees("word? ")
        terminal.type("again\n")
        terminal.sees("got again")
        terminal.sees("word? ")
        terminal.type("enough\n")
        terminal.sees("got enough")
        assert terminal.ends() == 0, terminal.seen.decode()
        assert b"[0]<stdout>:line of 0 ''\r\n" in terminal.seen
        assert b"[1]<stdout>" not in terminal.seen


def test_a_killed_driver_leaves_the_terminal_as_it_was() -> None:
    with Terminal("-np", "1", *python("print('up'); input()")) as terminal:
        terminal.sees("up")
        limit = time.monotonic() + PATIENCE_S
        terminal.process.kill()
        while termios.tcgetattr(terminal.theirs) != terminal.before:
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_of_a_pipe_no_more_is_read_than_the_worker_reads() -> None:
    """A script that is itself read from standard input would lose its rest (bash -s < script)."""
    command = [sys.executable, *FORKING, "-np", "1", "--quiet", "sh", "-c", "read word; echo $word"]
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    with open(reader, "rb") as rest:
        ran = subprocess.run(command, stdin=rest, capture_output=True, timeout=PATIENCE_S, check=False, cwd=ROOT)
        assert (ran.returncode, ran.stdout) == (0, b"[0]<stdout>:one\n"), ran.stderr
        assert os.read(reader, 100) == b"two\n"


def test_nobody_has_it_where_there_are_several_or_none_is_wanted() -> None:
    source = "import sys; print('read', repr(sys.stdin.read()))"
    for words in (("-np", "2"), ("-np", "1", "--stdin", "none")):
        ran = subprocess.run(
            [sys.executable, *FORKING, *words, "--quiet", *python(source)],
            input=b"one\n",
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=ROOT,
        )
        assert ran.returncode == 0
        assert b"read ''" in ran.stdout
        assert b"one" not in ran.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("-np", "2", "--stdin", "2"), "--stdin 2 is no rank of a job of 2 workers at most"),
        (("-np", "2", "--stdin", "first"), "--stdin first is neither a rank nor none"),
        (("-np", "2", "--parameter-servers", "1", "--stdin", "0"), "--stdin is not for jobs with --parameter-servers"),
    ],
)
def test_what_is_refused(words: Sequence[str], complaint: str) -> None:
    ran = elasticrun(*words, "-H", "localhost:4", "true")
    assert ran.returncode == 2
    assert complaint in ran.stderr
