"""The end of a process that must not run on, with standard errors of all kinds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

# A round's own method, as far as it needs no round.
PROGRAM = """
import sys
from types import SimpleNamespace
from elastic_driver.worker.rounds.context import Context
if sys.argv[1:] == ["none"]:
    sys.stderr = None
Context.end_process(SimpleNamespace(assignment=SimpleNamespace(round_id=3)))
"""


def test_it_says_why_and_where_its_threads_are() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 70
    assert done.stderr.startswith("elastic_driver: an operation of round 3 did not end within 5 s"), done.stderr
    assert "(most recent call first)" in done.stderr
    assert "in end_process" in done.stderr


def test_it_ends_where_nobody_reads_what_it_says() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(size))
    os.set_blocking(writing, True)
    try:
        assert subprocess.run([sys.executable, "-c", PROGRAM], stderr=writing).returncode == 70
    finally:
        os.close(reading)
        os.close(writing)


def test_it_ends_without_a_standard_error() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM, "none"], stdout=subprocess.DEVNULL).returncode == 70
    assert subprocess.run([sys.executable, "-c", PROGRAM], preexec_fn=lambda: os.close(2)).returncode == 70
