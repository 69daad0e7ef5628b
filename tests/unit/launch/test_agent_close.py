"""The last words of an agent that its driver ends: not before the driver keeps how its workers have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from elastic_driver.launch.agent.agent import Agent, AgentEnd
from elastic_driver.rendezvous.agent_messages import Bootstrap, Bye, Close, Exited, decoded
from elastic_driver.rendezvous.frames import Frame, messages_in
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit


class Workers:
    """All dead at once."""

    has_said_all = True

    async def close(self) -> None: ...

    def resume(self) -> None: ...


class Ending:
    """An agent that has said how a worker has ended, and is told to end."""

    def __init__(self) -> None:
        self.agent: Any = Agent(Bootstrap(("http://127.0.0.1:1",), "ticket 00", "00" * 32, "a"))
        self.agent._workers = Workers()
        self.channel = self.agent._link.channel
        self.heard: list[Any] = []
        self.agent._send(Exited("a:0:0", 1, []))
        self.closing = asyncio.create_task(self.agent._close(Close()))

    def write(self, first: int, seen: int, kept: int, messages: Sequence[bytes]) -> None:
        """What comes at the driver."""
        self.heard += [decoded(message) for packed in messages for message in messages_in(packed)]

    def connects(self) -> None:
        self.channel.attach(self, 0)

    def driver_has(self, *, seen: int, kept: int) -> None:
        self.channel.received(Frame(0, seen, kept, ()))

    @property
    def has_said_bye(self) -> bool:
        return any(isinstance(message, Bye) for message in self.heard)


def run(test: Callable[[Ending], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        ending = Ending()
        await test(ending)
        ending.closing.cancel()

    run_virtually(main)


def test_an_end_that_is_not_even_taken_is_waited_for() -> None:
    async def test(ending: Ending) -> None:
        ending.connects()
        await asyncio.sleep(2.0)
        assert not ending.has_said_bye
        ending.driver_has(seen=1, kept=0)
        await asyncio.sleep(2.0)
        assert not ending.has_said_bye
        ending.driver_has(seen=1, kept=1)
        await asyncio.sleep(0.1)
        assert ending.has_said_bye
        ending.driver_has(seen=2, kept=2)
        assert (await ending.agent._ended).how is AgentEnd.LEFT

    run(test)


@pytest.mark.parametrize("seen", [0, 1])
def test_a_driver_that_does_not_come_to_keep_it_is_not_waited_for_any_longer(seen: int) -> None:
    """A terminal that is stopped by Ctrl-S is enough."""

    async def test(ending: Ending) -> None:
        ending.connects()
        ending.driver_has(seen=seen, kept=0)
        assert (await ending.agent._ended).how is AgentEnd.LEFT
        assert ending.has_said_bye

    run(test)


def test_while_there_is_no_driver_the_next_one_is_waited_for() -> None:
    async def test(ending: Ending) -> None:
        await asyncio.sleep(300.0)
        ending.connects()
        await asyncio.sleep(2.0)
        assert not ending.has_said_bye
        ending.driver_has(seen=1, kept=1)
        await asyncio.sleep(0.1)
        assert ending.has_said_bye

    run(test)
