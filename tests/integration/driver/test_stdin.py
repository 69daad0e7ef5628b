"""A worker that has the user's terminal, or reads what the driver is given: real jobs on pseudo-terminals."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes.jobs import FORKING, PATIENCE_S
from tests.support.processes.subcommands import elasticrun
from tests.support.processes.terminals import Terminal

pytestmark = pytest.mark.integration


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
        # The terminal adds a \r if it is no longer raw when the line arrives.
        terminal.sees_match(rb"number 7\r{1,2}\n")
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
        (("-np", "2", "--stdin", "2"), "--stdin 2 is not a rank of a job of at most 2 workers"),
        (("-np", "2", "--stdin", "first"), "--stdin first is neither a rank nor none"),
        (
            ("-np", "2", "--parameter-servers", "1", "--stdin", "0"),
            "--stdin does not apply to jobs with --parameter-servers",
        ),
    ],
)
def test_what_is_refused(words: Sequence[str], complaint: str) -> None:
    ran = elasticrun(*words, "-H", "localhost:4", "true")
    assert ran.returncode == 2
    assert complaint in ran.stderr
