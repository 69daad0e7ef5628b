"""The stacks of all workers: what agents say, and who of them says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from elastic_driver.driver.stacks import LIMIT_S, StackDump, Stacks
from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import AgentMessage, Bye, Stacked, StacksTold, TakeStacks
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

A, A1, B, LOST = WorkerId("a", 0, 0), WorkerId("a", 1, 0), WorkerId("b", 0, 0), WorkerId("lost", 0, 0)
SILENT = StackDump(reason="its agent did not answer within 5 s")


class Link:
    def __init__(self) -> None:
        self.sent: list[AgentMessage] = []

    def send(self, message: AgentMessage) -> None:
        self.sent.append(message)


class Job:
    def __init__(self) -> None:
        self.links = {"a": Link(), "b": Link()}
        self.living = [A, A1, B, LOST]
        self.stacks = Stacks(lambda: self.living, host_of=cast("Any", self.links.get))

    def says(self, host: str, *messages: AgentMessage) -> None:
        for message in messages:
            assert self.stacks.take(cast("AgentLink", self.links[host]), message)

    async def asked(self, count: int = 1) -> None:
        while len(self.links["b"].sent) < count:
            await asyncio.sleep(0)


def told(worker: WorkerId, number: int = 1, text: bytes = b"stacks", reason: str = "") -> Stacked:
    return Stacked(number, worker.key, 7, "S", reason, "202", "futex_wait", text)


def play(test: Callable[[Job], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        await test(Job())

    run_virtually(main)


def test_all_are_asked_at_once_and_each_has_an_answer() -> None:
    async def test(job: Job) -> None:
        answer = asyncio.create_task(job.stacks.take_all())
        await job.asked()
        assert job.links["a"].sent == [TakeStacks(1, [A.key, A1.key])]
        job.says("b", told(B, text=b"", reason="stopped"), StacksTold(1))
        job.says("a", told(A, text=b"\xffA"), StacksTold(1))
        assert await answer == {
            A: StackDump(7, "S", "\ufffdA", "", "202", "futex_wait"),
            A1: StackDump(reason="it has ended"),
            B: StackDump(7, "S", "", "stopped", "202", "futex_wait"),
            LOST: StackDump(reason="its host has no agent"),
        }

    play(test)


def test_who_does_not_answer_is_named() -> None:
    async def test(job: Job) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = asyncio.create_task(job.stacks.take_all([A, A1, B]))
        second = asyncio.create_task(job.stacks.take_all([B, WorkerId("b", 9, 9)]))
        await job.asked(2)
        assert job.links["b"].sent == [TakeStacks(1, [B.key]), TakeStacks(2, [B.key])]
        job.says("a", told(A))
        job.says("b", told(B, 2), told(B, 99), StacksTold(99), StacksTold(2), told(B, 2, b"late"))
        assert await second == {B: StackDump(7, "S", "stacks", "", "202", "futex_wait")}
        found = await first
        assert loop.time() == began + LIMIT_S
        assert (found[A].text, found[A1], found[B]) == ("stacks", SILENT, SILENT)

    play(test)


def test_a_lost_agent_is_not_waited_for_and_nobody_speaks_for_others() -> None:
    async def test(job: Job) -> None:
        answer = asyncio.create_task(job.stacks.take_all([B]))
        await job.asked()
        with pytest.raises(RendezvousProtocolError):
            job.says("a", told(B))
        with pytest.raises(RendezvousProtocolError):
            job.says("a", Stacked(1, "nobody", 7, "S", "", "", "", b""))
        assert not job.stacks.take(cast("AgentLink", job.links["a"]), Bye())
        job.says("a", StacksTold(1))
        assert not answer.done(), "it was not asked"
        job.stacks.lost(cast("AgentLink", job.links["b"]), "it is gone")
        assert (await answer)[B].reason == "it has ended"
        assert await job.stacks.take_all([LOST]) == {LOST: StackDump(reason="its host has no agent")}

    play(test)
