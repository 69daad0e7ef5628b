"""A running elasticrun for tests: its hosts file, its workers' steps, its event log, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

import psutil

from tests.support.fakes.event_schema import complaints
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import forked
from tests.support.processes.carriers import carriers_of, in_words
from tests.support.processes.json_lines import JsonLines

PROGRAM = PROGRAMS / "step_program.py"
# elasticrun as its users have it.
AFRESH = ("-m", "elastic_driver")
# Itself and its machine's agent forked from a process that has imported them; a release starts both afresh.
FORKED = (str(PROGRAMS / "forked_elasticrun.py"),)
# That forks its first workers, too: a host's workers import nothing, instead of each what it needs, and the warmed
# process once more.
FORKING = (str(PROGRAMS / "forking_elasticrun.py"),)
# Likewise, with a fault: to be followed by that (see there).
FAULTY = (str(PROGRAMS / "faulty_elasticrun.py"),)
PATIENCE_S = 150.0
Process = subprocess.Popen[bytes] | forked.ForkedProcess
_IMPORTS_TORCH = re.compile(r"^\s*(?:import|from) [\w., ]*torch", re.MULTILINE)


class Job:
    """Starts ``elasticrun`` with the hosts given in a file that a script prints. Use as a context manager.

    Its first workers are forked, too, but for another ``elasticrun`` than FORKING.

    Attributes:
        words: its command line from the caller's flags on.
    """

    discovery_flags: Sequence[str] = ("--discovery-interval", "0.2")
    patience_s = PATIENCE_S

    def __init__(
        self,
        folder: Path,
        hosts: str | None,
        *flags: str,
        command: list[str] | None = None,
        env: dict[str, str] | None = None,
        elasticrun: tuple[str, ...] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._has_parent = "--journal" in flags
        self.hosts_file, self.script = folder / "hosts.txt", folder / "discover.sh"
        self.step_log = folder / "steps.jsonl"
        self.event_log = folder / "events.jsonl"
        self.step_log.touch()
        self._steps, self._events = JsonLines(self.step_log), JsonLines(self.event_log)
        is_afresh = bool(prefix) or forked.starts_afresh() or elasticrun == AFRESH
        elasticrun = elasticrun or (AFRESH if is_afresh else FORKING)
        self.words = list(flags)
        if hosts is not None:
            self.set_hosts(hosts)
            self.set_script(f"#!/bin/sh\nexec cat {self.hosts_file}\n")
            self.words += ["--host-discovery-script", str(self.script), *self.discovery_flags]
        self.words += command or [sys.executable, str(PROGRAM)]
        arguments = [*prefix, *self.launcher(elasticrun), *self.words]
        self.stdout = folder / "stdout.txt"
        self.stderr = folder / "stderr.txt"
        # hash() of bytes is compared between workers
        env = {**os.environ, "PYTHONHASHSEED": "0", "STEP_LOG": str(self.step_log), **(env or {})}
        self.process: Process
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            if is_afresh:
                self.process = subprocess.Popen(
                    arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=ROOT
                )
            else:
                self.process = _start_forked(elasticrun, arguments[1:], env, out, err, ROOT)

    def launcher(self, elasticrun: Sequence[str]) -> list[str]:
        """The command line up to the flags of the one who starts the job."""
        return [sys.executable, *elasticrun, "--event-log", str(self.event_log)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(self.patience_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert not self.leftovers(), f"left running: {self.leftovers()}"
        assert complaints(self.events()) == []

    def set_hosts(self, text: str) -> None:
        new = self.hosts_file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.hosts_file)

    def set_script(self, text: str) -> None:
        """What lists the hosts from now on. A driver may run it at any moment, also while the next one is started."""
        new = self.script.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o755)
        new.replace(self.script)

    def steps(self) -> list[dict[str, Any]]:
        return self._steps.all()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [line for line in self._events.all() if kind is None or line["event"] == kind]

    def said(self) -> str:
        return self.stderr.read_text(errors="replace")

    def wait_for(self, what: str, found: Callable[[], Any]) -> Any:
        end = time.monotonic() + self.patience_s
        while time.monotonic() < end:
            answer = found()
            if answer:
                return answer
            if self.process.poll() is not None:
                answer = found()
                if answer:
                    return answer
                break
            time.sleep(0.02)
        raise AssertionError(f"{what}: not seen (exit code {self.process.poll()})\n{self.said()[-4000:]}")

    def wait_to_say(self, text: str) -> None:
        """Waits for a line of the driver's: that a round has resumed it hears after workers have done their steps."""
        self.wait_for(f"it says {text!r}", lambda: text in self.said())

    def wait_for_steps(self, size: int, count: int = 5, *, after: float = 0.0) -> list[dict[str, Any]]:
        """Waits until every rank of a round of this size has done so many steps since then; gives those lines."""

        def found() -> list[dict[str, Any]]:
            lines = [line for line in self.steps() if line["size"] == size and line["time"] > after]
            per_rank = [sum(line["rank"] == rank for line in lines) for rank in range(size)]
            return lines if min(per_rank) >= count else []

        answer: list[dict[str, Any]] = self.wait_for(f"{count} steps at size {size}", found)
        return answer

    def wait(self) -> int:
        try:
            return self.process.wait(self.patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end\n{self.said()[-4000:]}") from None

    def driver_pid(self) -> int:
        """The driver's process: with a journal the child of the one that was started."""
        if not self._has_parent:
            return self.process.pid
        [driver] = psutil.Process(self.process.pid).children()
        return int(driver.pid)

    def leftovers(self) -> list[str]:
        """Processes of the job that still run."""
        started = self.events("job_started")
        if not started:
            return []
        job_id = started[-1]["job_id"]
        return in_words(carriers_of("ELASTIC_DRIVER_MARK", lambda mark: mark.partition("-")[0] == job_id))


def _start_forked(
    elasticrun: tuple[str, ...],
    command: Sequence[str],
    env: dict[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes] | int,
    cwd: Path,
) -> forked.ForkedProcess:
    """Forks an elasticrun, from what has imported all that its workers need where they are forked, too."""
    workers = elasticrun != FORKED
    torch = workers and any(map(_is_of_torch, command[1:]))
    return forked.start_driver(command, env, stdout, stderr, cwd, workers=workers, torch=torch)


def _is_of_torch(word: str) -> bool:
    """Whether a word of a command line names PyTorch, or a script that imports it."""
    if "/" not in word:
        return "torch" in word
    return word.endswith(".py") and os.path.isfile(word) and bool(_IMPORTS_TORCH.search(Path(word).read_text()))


def run_elasticrun(*words: str, env: dict[str, str], elasticrun: tuple[str, ...] = FORKED) -> tuple[int, str]:
    """Runs it to its end. Gives its exit code, and its output and errors.

    Args:
        words: of its command line.
        env: all of its environment.
        elasticrun: see Job.
    """
    with tempfile.TemporaryFile() as output:
        code = _run(words, env, output, output, elasticrun, ROOT)
        output.seek(0)
        return code, output.read().decode(errors="replace")


@contextlib.contextmanager
def heard_elasticrun(
    *words: str | Path, cwd: Path, elasticrun: tuple[str, ...] = FORKED
) -> Iterator[tuple[Process, IO[str]]]:
    """One whose errors are read as it writes them; killed in the end.

    Args:
        words: of its command line.
        cwd: its folder.
        elasticrun: see Job.
    """
    reading_end, writing_end = os.pipe()
    with open(reading_end) as errors, open(os.devnull, "wb") as nothing:
        try:
            process = _start(list(map(str, words)), dict(os.environ), nothing, writing_end, elasticrun, cwd)
        finally:
            os.close(writing_end)
        try:
            yield process, errors
        finally:
            process.kill()
            process.wait()


def capture_elasticrun(
    *words: str, env: dict[str, str] | None = None, elasticrun: tuple[str, ...] = FORKED, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Likewise, in a folder, and with its errors apart.

    Args:
        words: of its command line.
        env: all of its environment; None for that of this process.
        elasticrun: see Job.
        cwd: the folder.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _run(words, dict(os.environ) if env is None else env, out, err, elasticrun, cwd)
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(words, code, out.read().decode(), err.read().decode())


def _run(
    words: Sequence[str],
    env: dict[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    elasticrun: tuple[str, ...],
    cwd: Path,
) -> int:
    process = _start(words, env, stdout, stderr, elasticrun, cwd)
    try:
        return process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()


def _start(
    words: Sequence[str],
    env: dict[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes] | int,
    elasticrun: tuple[str, ...],
    cwd: Path,
) -> Process:
    if forked.starts_afresh() or elasticrun == AFRESH:
        program = elasticrun if elasticrun[:1] == FAULTY else AFRESH
        command = [sys.executable, *program, *words]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env, cwd=cwd)
    return _start_forked(elasticrun, [*elasticrun, *words], env, stdout, stderr, cwd)


def check_agreement(lines: list[dict[str, Any]]) -> None:
    """All ranks have the same weights, bit for bit, after the same step of the same size."""
    seen: dict[tuple[int, int], int] = {}
    for line in lines:
        key = (line["size"], line["step"])
        assert seen.setdefault(key, line["weights"]) == line["weights"], f"ranks differ at step {line['step']}"
