"""What workers read: their terminals and pipes, and what comes for these."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from elastic_driver.launch.local.input import WorkerInput
from elastic_driver.launch.local.process_tree import ProcessTree
from elastic_driver.launch.words import ExitStatus
from tests.support.processes.launching import PATIENCE_S, Job, job, run

pytestmark = pytest.mark.integration

_ASK = """
import os, sys
print(*(os.isatty(number) for number in range(3)), sys.stdin.isatty(), sys.stdout.isatty())
print(os.get_terminal_size(), os.tcgetpgrp(0) == os.getpgrp())
for line in sys.stdin:
    print("read", line.strip())
"""


class Given:
    """A WorkerInput whose worker the test is."""

    def __init__(self, kind: str, *, stderr_too: bool = False) -> None:
        self.taken = 0
        self.interrupts = 0
        self.shown = bytearray()
        self._changed = asyncio.Event()
        self.input = WorkerInput(
            kind, taken=self._taken, interrupted=self._interrupted, stderr_too=stderr_too, rows=33, columns=77
        )

    def _taken(self, size: int) -> None:
        self.taken += size
        self._changed.set()

    def _interrupted(self) -> None:
        self.interrupts += 1

    def show(self, data: bytes) -> None:
        self.shown += data
        self._changed.set()

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                self._changed.clear()
                await self._changed.wait()


async def start(one: Job, given: Given, command: Sequence[str], env: Mapping[str, str] = os.environ) -> ProcessTree:
    process = await one.start(command, env=env, given=given.input.given, shown=given.show)
    given.input.started()
    return process


def test_a_worker_on_a_terminal() -> None:
    async def main() -> None:
        async with job() as one:
            given = Given("terminal")
            process = await start(one, given, [sys.executable, "-c", _ASK])
            await given.until(lambda: b"lines=33) True\r\n" in given.shown)
            given.input.write(b"one\ntwo\n\x04")
            assert await process.wait() == ExitStatus(0)
            text = bytes(given.shown).decode()
            assert "True True False True True\r\n" in text
            assert "os.terminal_size(columns=77, lines=33) True\r\n" in text, (
                "its own terminal, of the size that was told"
            )
            assert "read one\r\nread two\r\n" in text
            lines = one.sink.lines()
            assert "[0]<stdout>:read two" in lines, "files get it, too"
            assert given.taken == len(b"one\ntwo\n\x04")
            given.input.close()

    run("uvloop", main)


def test_a_forked_worker_on_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_ASK)

    async def main() -> None:
        async with job() as one:
            one.keeper = one.new_keeper(warm=True, preload=["json"], warm_first=True)
            given = Given("terminal", stderr_too=True)
            process = await start(one, given, [sys.executable, str(script)])
            assert type(process._popen).__name__ == "ForkedProcess", one.warnings
            await given.until(lambda: b"lines=33) True\r\n" in given.shown)
            given.input.write(b"one\n\x04")
            assert await process.wait() == ExitStatus(0)
            text = bytes(given.shown).decode()
            assert "True True True True True\r\n" in text
            assert "os.terminal_size(columns=77, lines=33) True\r\n" in text
            assert "read one\r\n" in text
            given.input.close()

    run("uvloop", main)


def test_ctrl_c_is_the_jobs_but_where_a_program_reads_keys() -> None:
    async def main() -> None:
        given = Given("terminal")
        terminal = given.input.given.descriptor
        given.input.write(b"abc\x03")
        assert (given.interrupts, given.taken) == (1, 4)
        attributes = termios.tcgetattr(terminal)
        attributes[3] &= ~(termios.ICANON | termios.ISIG)
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)
        given.input.write(b"\x03")
        assert (given.interrupts, given.taken) == (1, 5)
        read = b""
        while len(read) < 4:  # the kernel passes on later what is written
            read += os.read(terminal, 10)
        assert read == b"abc\x03"
        given.input.close()

    asyncio.run(main())


def test_a_pipe_takes_what_fits_and_the_rest_as_it_is_read() -> None:
    async def main() -> None:
        given = Given("pipe")
        reader = os.dup(given.input.given.descriptor)
        given.input.started()
        data = os.urandom(1 << 20)
        given.input.write(data)
        given.input.end()
        assert 0 < given.taken < len(data)
        read = bytearray()
        while part := await asyncio.to_thread(os.read, reader, 1 << 16):
            read += part
        assert bytes(read) == data
        assert given.taken == len(data)
        os.close(reader)
        given.input.close()

    asyncio.run(main())


def test_what_nobody_reads_any_more_is_taken() -> None:
    """Whoever sends it goes on; it does not wait for a worker that has closed its standard input, or has died."""

    async def main() -> None:
        given = Given("pipe")
        given.input.started()  # its only reader
        given.input.write(bytes(1 << 20))
        assert given.taken == 1 << 20
        given.input.close()
        blocked = Given("pipe")
        blocked.input.write(bytes(1 << 20))
        blocked.input.close()
        assert blocked.taken == 1 << 20

    asyncio.run(main())
