"""docs/first-script.md: its lines are those between two scripts of examples/, and what it shows is what one sees."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes.jobs import FORKING, capture_elasticrun

ROOT = Path(__file__).resolve().parents[2]
PLAIN, ELASTIC = ROOT / "examples/first_plain.py", ROOT / "examples/first_elastic.py"
PAGE = (ROOT / "docs/first-script.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
[DIFF] = [text for kind, text in BLOCKS if kind == "diff"]
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
SHOWN = [text for kind, text in BLOCKS if kind == "text"]
PATIENCE_S = 150.0

pytestmark = pytest.mark.integration


def test_the_lines_that_change_are_those_between_the_two_scripts() -> None:
    plain, elastic = PLAIN.read_text().splitlines(), ELASTIC.read_text().splitlines()
    _, _, _, *lines = difflib.unified_diff(plain, elastic, n=len(plain), lineterm="")
    assert DIFF.splitlines() == lines


def test_each_block_is_the_change_or_a_command_or_output() -> None:
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert {kind for kind, _ in BLOCKS} == {"diff", "sh", "text"}
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_the_elastic_script_trains() -> None:
    done = capture_elasticrun("-np", "2", sys.executable, str(ELASTIC), "1", elasticrun=FORKING)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[0\]<stdout>:epoch 0: accuracy 0\.\d{3}, 2 workers$", done.stdout, re.MULTILINE), done.stdout
    assert "warning" not in done.stderr


class Terminal:
    """Runs the page's commands in a folder, as a user does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for script in (PLAIN, ELASTIC):
            shutil.copy(script, folder)
        (folder / "run").mkdir(0o700)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # Other jobs of this machine's are not this user's.
        self._env = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(folder / "run")}

    def run(self, command: str) -> str:
        """What a command shows that must succeed."""
        assert command in COMMANDS
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    @contextmanager
    def job(self, command: str) -> Iterator[Job]:
        """A job that does not outlive the block."""
        assert command in COMMANDS
        shown = self.folder / "shown.txt"
        with shown.open("w") as file:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {command}"], cwd=self.folder, env=self._env, stdout=file, stderr=file
            )
        try:
            yield Job(process, shown)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


class Job:
    """A job that runs, and what it has shown."""

    def __init__(self, process: subprocess.Popen[bytes], shown: Path) -> None:
        self._process = process
        self._shown = shown

    @property
    def output(self) -> str:
        return self._shown.read_text()

    def wait_for(self, text: str, *, times: int = 1) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.output.count(text) < times:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.05)

    def interrupt(self) -> int:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(PATIENCE_S)


def shape(line: str) -> str:
    """A line without what is otherwise each time."""
    line = re.sub(r"\b[0-9a-f]{16}\b", "ID", line)
    line = re.sub(r"/\S*/commits", "commits", line)
    line = re.sub(r"(?<![\w.])\d+(\.\d+)?(?![\w.])", "N", line)
    return re.sub(r"(?<=epoch )N|\s+", " ", line).strip()


def check(shown: str, output: str) -> None:
    seen = {shape(line) for line in output.splitlines()}
    missing = [line for line in shown.splitlines() if shape(line) not in seen]
    assert not missing, f"{missing}\nnot in\n{output}"


@pytest.mark.release
def test_one_sees_what_the_page_shows(tmp_path: Path) -> None:
    terminal, shown = Terminal(tmp_path), iter(SHOWN)
    alone, twice, make_hosts, train, status, add_host = COMMANDS
    check(next(shown), terminal.run(alone))
    check(next(shown), terminal.run(twice))
    terminal.run(make_hosts)
    with terminal.job(train) as job:
        job.wait_for("epoch 2: ")
        check(next(shown), job.output)
        said = terminal.run(status)
        check(next(shown), said)
        [pid] = re.findall(r"^ *2  127\.0\.0\.1\[0\] .* (\d+)$", said, re.MULTILINE)
        os.kill(int(pid), signal.SIGKILL)
        job.wait_for(", 2 workers", times=2)
        check(next(shown), job.output)
        terminal.run(add_host)
        job.wait_for("round 3: ")
        before = job.output.count(", 3 workers")
        job.wait_for(", 3 workers", times=before + 2)
        check(next(shown), job.output)
        assert job.interrupt() == 130
        check(next(shown), job.output)
    with terminal.job(train) as job:
        job.wait_for(", 4 workers", times=2)
        check(next(shown), job.output)
    assert next(shown, None) is None
