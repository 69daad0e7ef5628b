"""Whose the driver's standard input is, and how it gets there, with agents that are lists of what they were sent."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import termios
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet import stdin as stdin_module
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.rendezvous.agent_messages import AgentMessage, Input, InputTaken, Interrupted, Start
from elastic_driver.system.terminal import Terminal
from tests.support.fakes.fleet_fakes import facts

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("a", 0, 1)


class Link:
    """To an agent."""

    def __init__(self, *, local: bool = False, joined: bool = False) -> None:
        self.facts = facts("a", local=local, joined=joined)
        self.sent: list[AgentMessage] = []
        self._sent = asyncio.Event()

    def send(self, message: AgentMessage) -> None:
        self.sent.append(message)
        self._sent.set()

    async def has(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(150):
            while not what():
                self._sent.clear()
                await self._sent.wait()

    @property
    def data(self) -> bytes:
        return b"".join(message.blob for message in self.sent if isinstance(message, Input))

    @property
    def ends(self) -> int:
        return sum(isinstance(message, Input) and message.end for message in self.sent)


def order(rank: int, worker: WorkerId = A) -> Start:
    return Start(worker.key, ["train"], {}, str(rank), rank)


def kind(stdin: StandardInput, link: Link, rank: int = 0, worker: WorkerId = A) -> str:
    given: Any = link
    return stdin.given_by(order(rank, worker), worker, given).stdin


def on_pipe(main: Callable[[int, int], Awaitable[None]]) -> None:
    """Runs it with both ends of a pipe."""

    async def outer() -> None:
        reader, writer = os.pipe()
        try:
            await main(reader, writer)
        finally:
            os.close(reader)

    asyncio.run(outer())


def test_who_gets_it_and_how() -> None:
    async def main(reader: int, writer: int) -> None:
        os.close(writer)

        def new(rank: int | None = 0, *, only_here: bool = False) -> StandardInput:
            return StandardInput(rank, None, only_here=only_here, descriptor=reader)

        assert kind(new(), Link(local=True)) == "inherit", "it reads from it itself"
        assert kind(new(), Link(local=True, joined=True)) == "pipe", "its agent was not started by this driver"
        assert kind(new(), Link()) == "pipe"
        assert kind(new(only_here=True), Link()) == "", "nobody has asked for reading ahead of it"
        assert kind(new(1), Link(local=True)) == ""
        assert kind(new(None), Link(local=True)) == ""
        with open(os.devnull) as nothing:
            empty = StandardInput(0, None, descriptor=nothing.fileno())
            assert kind(empty, Link()) == "", "that is what workers have anyway"

    on_pipe(main)


def test_one_worker_has_it_until_it_ends_then_the_next() -> None:
    async def main(reader: int, writer: int) -> None:
        stdin, link = StandardInput(0, None, descriptor=reader), Link()
        os.write(writer, b"one\n")
        assert kind(stdin, link) == "pipe"
        assert kind(stdin, link, worker=B) == ""
        stdin.started(A)
        await link.has(lambda: link.data == b"one\n")
        stdin.gone(A)
        os.write(writer, b"two\n")
        os.close(writer)
        again = Link()
        assert kind(stdin, again, worker=B) == "pipe"
        stdin.started(B)
        await again.has(lambda: again.ends == 1)
        assert again.data == b"two\n"
        stdin.gone(B)
        late = Link()
        assert kind(stdin, late) == "pipe"
        stdin.started(A)
        assert late.sent == [Input(A.key, end=True, blob=b"")], "it has ended for all that come after"

    on_pipe(main)


def test_no_more_is_read_than_a_worker_takes(tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    path = tmp_path / "file"
    path.write_bytes(data)

    async def main() -> None:
        taken = 0
        with path.open("rb", buffering=0) as file:
            stdin, link = StandardInput(0, None, descriptor=file.fileno()), Link()
            assert kind(stdin, link) == "pipe"
            assert not link.sent, "its process is not there yet"
            stdin.started(A)
            while taken < len(data):
                due = min(taken + (64 << 10), len(data))
                await link.has(lambda due=due: len(link.data) >= due)  # type: ignore[misc]
                assert len(link.data) < taken + (80 << 10)
                new = len(link.data) - taken
                taken += new
                stdin.take(A, InputTaken(A.key, new))
            await link.has(lambda: bool(link.ends))
            assert link.data == data

    asyncio.run(main())


def test_in_the_background_nothing_is_read_from_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be stopped for that, and take what is typed for the shell."""
    is_front = False
    monkeypatch.setattr(Terminal, "in_foreground", lambda self: is_front)

    async def main() -> None:
        nonlocal is_front
        ours, theirs = os.openpty()
        before = termios.tcgetattr(theirs)
        stdin, link = StandardInput(0, None, descriptor=theirs), Link()
        assert kind(stdin, link) == "pipe", "its output is shown elsewhere"
        stdin.started(A)
        os.write(ours, b"for the shell\n")
        assert select.select([theirs], [], [], 150)[0]
        await asyncio.sleep(0)
        assert os.read(theirs, 100) == b"for the shell\n"
        assert termios.tcgetattr(theirs) == before
        is_front = True
        os.write(ours, b"for the worker\n\x04")
        await link.has(lambda: bool(link.ends))
        assert link.data == b"for the worker\n"
        stdin.gone(A)
        stdin.close()
        os.close(ours)
        os.close(theirs)

    asyncio.run(main())


class Keyboard:
    """A terminal with three descriptors in a row, and a screen that shows nothing."""

    def __enter__(self) -> Keyboard:
        self.keys, terminal = os.openpty()
        self.descriptor = fcntl.fcntl(terminal, fcntl.F_DUPFD_CLOEXEC, 200)
        self._open = [self.keys, terminal, self.descriptor]
        for number in (self.descriptor + 1, self.descriptor + 2):
            self._open.append(os.dup2(terminal, number, inheritable=False))
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def lend(self, lent: bool) -> None:
        """See Screen."""

    def show(self, data: bytes) -> None:
        """See Screen."""


@pytest.mark.parametrize("answers", [True, False])
def test_a_second_ctrl_c_is_the_jobs_when_nothing_comes_of_the_agent(
    monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(stdin_module, "_ANSWERS_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))

    async def main() -> None:
        with Keyboard() as keyboard:
            stdin, link = StandardInput(0, keyboard, descriptor=keyboard.descriptor), Link()
            assert kind(stdin, link) == "terminal"
            stdin.started(A)
            for count in (1, 2):
                os.write(keyboard.keys, b"\x03")
                await link.has(lambda count=count: link.data == b"\x03" * count)  # type: ignore[misc]
                if answers:
                    stdin.take(A, InputTaken(A.key, 1))
            stdin.close()

    asyncio.run(main())
    assert signals == ([] if answers else [(0, signal.SIGINT)])


def test_an_agent_without_the_terminal_interrupts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))

    async def main(reader: int, writer: int) -> None:
        os.close(writer)
        stdin, link = StandardInput(0, None, descriptor=reader), Link()
        assert kind(stdin, link) == "pipe"
        stdin.started(A)
        stdin.take(A, Interrupted(A.key))

    on_pipe(main)
    assert signals == []
