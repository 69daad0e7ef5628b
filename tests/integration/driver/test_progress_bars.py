"""Progress bars of workers: real jobs, with a bar of a few lines."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes.terminals import Terminal

pytestmark = pytest.mark.integration

# Draws, and draws on when it is told to.
_BAR = """
import os, sys

def draw(text):
    sys.stderr.write("\\r" + text)
    sys.stderr.flush()

rank = os.environ["HOROVOD_RANK"]
for percent in range(0, 50, 10):
    draw(f"bar {rank} {percent}%")
open(sys.argv[1]).read()
print("an ordinary line", file=sys.stderr)
for percent in range(50, 101, 10):
    draw(f"bar {rank} {percent}%")
print(file=sys.stderr)
"""


def test_a_terminal_shows_the_newest_bar_of_each_rank_and_files_have_the_last_state(tmp_path: Path) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "kept"
    script.write_text(_BAR)
    os.mkfifo(tmp_path / "go")
    words = ("--output-filename", str(kept), sys.executable, str(script), str(tmp_path / "go"))
    with Terminal("-np", "2", "-H", "localhost:1,127.0.0.1:1", *words) as terminal:
        both = rb"\[0\]<stderr>:bar 0 40%\r?\n\[1\]<stderr>:bar 1 40%\r?\n\x1b\[2m\[\d\d:\d\d\] "
        terminal.sees_match(both)
        go = os.open(tmp_path / "go", os.O_WRONLY)
        os.close(go)
        assert terminal.ends() == 0
        shown = terminal.seen.decode()
    for rank in range(2):
        # Its last state is a line, and stands behind the ordinary one, whose beginning was redrawn.
        assert re.search(rf"\[{rank}\]<stderr>:bar {rank} 100%\r?\n", shown)
        lines = (kept / f"rank.{rank}" / "stderr").read_bytes().splitlines()
        assert [line.partition(b">:")[2] for line in lines[-2:]] == [
            b"bar %d 40%%an ordinary line" % rank,
            b"bar %d 100%%" % rank,
        ]
        assert b"\r" not in (kept / f"rank.{rank}" / "stderr").read_bytes()
