"""The agent's keeper of its workers: orders and news that cross, with real processes and no wire."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import psutil
import pytest

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.workers import HostWorkers
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Dying,
    Exited,
    Finished,
    Kill,
    KillAll,
    Labels,
    NotStarted,
    Output,
    Start,
    Started,
    Stop,
    Welcome,
    WorkerLevel,
    WorkerPhase,
)
from elastic_driver.system.tasks import Tasks
from tests.support.processes.launching import NEVER_S, PATIENCE_S, run

pytestmark = pytest.mark.integration

A = WorkerId("a", 0, 0)
# Says which process it is, and lives until a signal ends it; of which only SIGKILL does if it is deaf.
LIVES = """
import os, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", os.environ.get("PLACE"), flush=True)
time.sleep(3600)
"""
_T = TypeVar("_T", bound=AgentMessage)


class Host:
    """An agent's workers, and a driver that keeps what it is told.

    Attributes:
        told: all but output.
        gone: the workers that were reported as gone to the rounds.
        gate: the environment of a worker is complete only while it is set: a worker stays on its way that long.
        trouble: raised instead of completing the environment.
    """

    def __init__(self) -> None:
        self.told: list[AgentMessage] = []
        self.text = b""
        self.gone: list[WorkerId] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0
        self.trouble: LaunchError | None = None
        self.tasks = Tasks()
        self._news = asyncio.Event()
        welcome = Welcome(
            0,
            "a",
            "job",
            0.0,
            os.getcwd(),
            -1,
            warm=False,
            preload=None,
            prefix_timestamp=False,
            agent_timeout_s=15.0,
        )
        self.workers = HostWorkers(
            welcome,
            uuid.uuid4().hex,
            "unix:/none",
            send=self._send,
            has_room=lambda: True,
            has_room_for_bars=lambda: True,
            on_gone=self.gone.append,
            more_of=self._more_of,
            tasks=self.tasks,
            environ=lambda given: {**os.environ, **given},
        )

    def _send(self, message: AgentMessage) -> None:
        if isinstance(message, Output):
            self.text += message.blob
        else:
            self.told.append(message)
        self._news.set()

    async def _more_of(self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
        self.asked += 1
        self._news.set()
        await self.gate.wait()
        if self.trouble is not None:
            raise self.trouble
        return {}

    def start(self, *arguments: str, command: Sequence[str] = (), worker: WorkerId = A, place: str = "one") -> None:
        words = list(command) or [sys.executable, "-c", LIVES, *arguments]
        self.workers.take(Start(worker.key, words, {"PLACE": place}, "0", 0))

    async def until(self, what: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                self._news.clear()
                await self._news.wait()

    async def hears(self, kind: type[_T]) -> _T:
        """Blocks until there is such a message."""
        await self.until(lambda: self.of(kind))
        return self.of(kind)[0]

    def of(self, kind: type[_T]) -> list[_T]:
        return [each for each in self.told if isinstance(each, kind)]

    async def up(self, place: str = "one") -> psutil.Process:
        """The process of the worker, once it speaks from this place."""
        await self.until(lambda: f"up {place}".encode() in self.text)
        pid = self.workers.pid(A)
        assert pid is not None
        return psutil.Process(pid)

    def story(self) -> list[type[AgentMessage]]:
        """What the driver has heard of; that a worker is dying may go before its end, or not."""
        return [type(each) for each in self.told if not isinstance(each, Dying)]


def on_host(main: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
    """Runs a test; afterwards all must be over."""

    @contextlib.asynccontextmanager
    async def host() -> AsyncIterator[Host]:
        one = Host()
        try:
            yield one
        finally:
            one.gate.set()
            await one.workers.close()
            await one.tasks.end()
        assert not one.workers.runs(A)
        assert not one.workers.has(A)

    async def body() -> None:
        async with host() as one:
            await main(one)

    run("asyncio", body)


@pytest.mark.parametrize(
    "order", [Stop(A.key, 0.0), Kill(A.key, 0.0, exits=False), Kill(A.key, 1.0, exits=True), KillAll()]
)
def test_an_order_to_end_a_worker_that_is_being_started(order: AgentMessage) -> None:
    async def main(host: Host) -> None:
        host.gate.clear()
        host.start("deaf")
        await host.until(lambda: host.asked)
        assert host.workers.runs(A)
        assert host.workers.pid(A) is None
        host.workers.take(order)
        host.gate.set()
        assert (await host.hears(Exited)).returncode == -signal.SIGKILL
        await host.hears(Finished)
        assert host.story() == [Started, Exited, Finished]
        assert host.gone == [A]

    on_host(main)


def test_of_several_orders_for_one_that_is_being_started_the_nearest_end_and_the_first_signal_hold() -> None:
    async def main(host: Host) -> None:
        host.gate.clear()
        host.start(command=["sleep", "3600"])
        await host.until(lambda: host.asked)
        host.workers.take(Stop(A.key, NEVER_S, signal=signal.SIGINT))
        host.workers.take(Stop(A.key, 2 * NEVER_S))
        host.gate.set()
        assert (await host.hears(Exited)).returncode == -signal.SIGINT
        await host.hears(Finished)

    on_host(main)


def test_a_label_that_comes_while_a_worker_is_being_started() -> None:
    async def main(host: Host) -> None:
        host.gate.clear()
        host.start()
        host.workers.take(Labels({A.key: "7"}))
        host.gate.set()
        await host.up()
        assert host.text.startswith(b"[7]<stdout>:up")

    on_host(main)


def test_a_worker_that_is_ordered_twice_is_one() -> None:
    async def main(host: Host) -> None:
        host.start()
        host.start()
        await host.up()
        host.start()
        host.workers.take(Stop(A.key, NEVER_S))
        await host.hears(Finished)
        assert host.story() == [Started, Exited, Finished]

    on_host(main)


def test_one_that_could_not_be_started_is_gone_and_may_be_ordered_again() -> None:
    async def main(host: Host) -> None:
        host.trouble = LaunchError("no port for it")
        host.start()
        said = await host.hears(NotStarted)
        assert (said.error, said.bad_command) == ("no port for it", False)
        assert host.gone == [A]
        assert not host.workers.runs(A)
        assert not host.workers.has(A)
        host.trouble = None
        host.start()
        await host.up()

    on_host(main)


def test_the_end_of_the_agent_while_a_worker_is_being_started() -> None:
    async def main(host: Host) -> None:
        host.gate.clear()
        host.start()
        await host.until(lambda: host.asked)
        await host.workers.close()
        assert host.story() == [NotStarted]

    on_host(main)


# --- a process that is replaced by another ---------------------------------------------------------------------------


def test_a_process_that_is_replaced_is_one_worker_to_the_driver() -> None:
    async def main(host: Host) -> None:
        host.start("deaf")
        first = await host.up("one")
        host.workers.take(Labels({A.key: "3"}))
        host.workers.start_again(A, {"PLACE": "two"})
        second = await host.up("two")
        assert second.pid != first.pid
        assert b"[3]<stdout>:up two" in host.text
        assert (host.story(), host.gone) == ([Started], [])
        host.workers.take(Kill(A.key, 0.0, exits=False))
        await host.hears(Finished)
        assert host.story() == [Started, Exited, Finished]
        assert host.gone == [A]

    on_host(main)


@pytest.mark.parametrize("order", [Stop(A.key, NEVER_S), Kill(A.key, 0.0, exits=False), KillAll()])
def test_an_end_that_is_ordered_while_a_process_is_about_to_be_replaced(order: AgentMessage) -> None:
    async def main(host: Host) -> None:
        host.start("deaf")
        await host.up()
        host.workers.start_again(A, {"PLACE": "two"})
        host.workers.take(order)
        await host.hears(Finished)
        assert host.story() == [Started, Exited, Finished]
        assert b"up two" not in host.text

    on_host(main)


@pytest.mark.parametrize("order", [Stop(A.key, NEVER_S), Kill(A.key, 0.0, exits=False), KillAll()])
def test_an_end_that_is_ordered_when_the_first_process_is_dead_and_not_everything_of_it_is_gone(
    order: AgentMessage,
) -> None:
    """The driver has heard nothing of that death, and would take a worker that is finished without one for a lie."""

    async def main(host: Host) -> None:
        host.start("deaf")
        process = await host.up()
        host.workers.start_again(A, {"PLACE": "two"})
        async with asyncio.timeout(PATIENCE_S):
            while host.workers.pid(A) is not None:
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # whoever waits for its end has heard of it
        assert not host.of(Finished)
        host.workers.take(order)
        await host.hears(Finished)
        assert host.story() == [Started, Exited, Finished]
        assert host.of(Exited)[0].returncode == -signal.SIGKILL
        assert host.gone == [A]
        assert not process.is_running()

    on_host(main)


def test_an_end_that_is_ordered_while_the_second_process_is_being_started() -> None:
    async def main(host: Host) -> None:
        host.start("deaf")
        await host.up()
        host.gate.clear()
        host.workers.start_again(A, {"PLACE": "two"})
        await host.until(lambda: host.asked == 2)
        host.workers.take(Stop(A.key, 0.0))
        host.gate.set()
        await host.hears(Finished)
        assert host.story() == [Started, Exited, Finished]

    on_host(main)


def test_a_second_process_that_cannot_be_started_is_the_end_of_the_worker() -> None:
    async def main(host: Host) -> None:
        host.start("deaf")
        await host.up()
        host.trouble = LaunchError("no port for it")
        host.workers.start_again(A, {"PLACE": "two"})
        await host.hears(Finished)
        assert host.story() == [Started, Exited, Finished]
        assert host.gone == [A]

    on_host(main)


def test_who_is_being_ended_is_not_replaced() -> None:
    async def main(host: Host) -> None:
        host.start()
        await host.up()
        host.workers.take(Stop(A.key, NEVER_S))
        await asyncio.sleep(0)
        host.workers.start_again(A, {"PLACE": "two"})
        await host.hears(Finished)
        assert host.story() == [Started, Exited, Finished]
        assert host.of(Exited)[0].returncode == -signal.SIGTERM
        assert b"up two" not in host.text

    on_host(main)


def test_the_end_of_the_agent_while_a_process_is_about_to_be_replaced() -> None:
    async def main(host: Host) -> None:
        host.start("deaf")
        await host.up()
        host.workers.start_again(A, {"PLACE": "two"})
        await host.workers.close()
        assert host.story() == [Started, Exited, Finished]

    on_host(main)


def test_a_process_is_not_replaced_once_the_agent_ends() -> None:
    async def main(host: Host) -> None:
        host.start("deaf")
        await host.up()
        closing = asyncio.create_task(host.workers.close())
        await asyncio.sleep(0)
        host.workers.start_again(A, {"PLACE": "two"})
        await closing
        assert host.story() == [Started, Exited, Finished]

    on_host(main)


@pytest.mark.parametrize("code", [0, 3])
def test_one_that_fails_is_told_of_before_it_is_gone(code: int) -> None:
    """Whose round is broken knows its members only as long as they are there."""

    async def main(host: Host) -> None:
        gone: list[list[WorkerId]] = []
        failing: set[tuple[WorkerId, str]] = set()

        def fails(worker: WorkerId, how: str) -> None:
            gone.append(host.gone[:])
            failing.add((worker, how))

        host.workers._on_failing = fails
        host.start(command=[sys.executable, "-c", f"raise SystemExit({code})"])
        await host.hears(Finished)
        assert failing == ({(A, "exited with code 3")} if code else set())
        assert all(before == [] for before in gone)
        assert host.gone == [A]

    on_host(main)


def test_levels_from_the_order_to_the_end() -> None:
    async def main(host: Host) -> None:
        assert host.workers.levels() == []
        host.gate.clear()
        host.start()
        await host.until(lambda: host.asked)
        host.workers.take(Labels({A.key: "7"}))
        (ordered,) = host.workers.levels()
        assert ordered == WorkerLevel(A.key, WorkerPhase.ORDERED, 0, "7", 0, leaving=False, exiting=False)
        host.gate.set()
        process = await host.up()
        (runs,) = host.workers.levels()
        assert runs == replace(ordered, phase=WorkerPhase.RUNS, pid=process.pid)
        phases: list[list[WorkerPhase]] = []
        host.workers._on_gone = lambda worker: phases.append([each.phase for each in host.workers.levels()])
        process.kill()
        await host.hears(Finished)
        assert phases == [[WorkerPhase.ENDED]]
        assert host.workers.levels() == []

    on_host(main)
