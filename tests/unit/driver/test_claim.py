"""What a driver says and does while it is not sure that the job is still its own. The lock is the test's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from elastic_driver.driver.claim import Claim
from elastic_driver.rendezvous.agent_messages import AgentMessage, InDoubt
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

LIMIT_S = 600.0
URLS = ("https://a:1", "https://b:1")


class Lock:
    def __init__(self) -> None:
        self.is_in_doubt = False
        self.announced: list[dict[str, Any]] = []
        self.on_doubt: Callable[[], object] = lambda: None

    def announce(self, **said: Any) -> None:
        self.announced.append(said)

    def comes_to_be(self, in_doubt: bool) -> None:
        self.is_in_doubt = in_doubt
        self.on_doubt()


class Link:
    def __init__(self) -> None:
        self.told: list[AgentMessage] = []

    def send(self, message: AgentMessage) -> None:
        self.told.append(message)


class Fleet:
    def __init__(self) -> None:
        self.counts_from = -math.inf
        self.there = [Link(), Link()]

    def links(self) -> list[Link]:
        return self.there


class Chronicle:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


class Scene:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.lock, self.fleet, self.chronicle = Lock(), Fleet(), Chronicle()
        self.lost: list[str] = []
        self.claim = Claim(
            self.lock,
            3,
            "third",
            LIMIT_S,
            fleet=self.fleet,  # type: ignore[arg-type]
            chronicle=self.chronicle,  # type: ignore[arg-type]
            call_later=loop.call_later,
            on_lost=self.lost.append,
        )

    @property
    def told(self) -> list[list[AgentMessage]]:
        return [link.told for link in self.fleet.there]


def test_agents_find_the_driver_by_its_lock() -> None:
    async def main(loop: VirtualLoop) -> None:
        one = Scene(loop)
        one.claim.begin(URLS, "ab")
        assert one.lock.announced == [{"epoch": 3, "name": "third", "urls": URLS, "fingerprint": "ab"}]
        assert (one.told, one.chronicle.warnings) == ([[], []], [])

    run_virtually(main)


def test_a_doubt_is_told_to_all_agents_and_to_who_comes_and_so_is_its_end() -> None:
    async def main(loop: VirtualLoop) -> None:
        one = Scene(loop)
        one.claim.begin(URLS, "")
        one.lock.comes_to_be(in_doubt=True)
        one.lock.comes_to_be(in_doubt=True)
        await asyncio.sleep(1.0)
        assert one.told == [[InDoubt(is_so=True)]] * 2
        assert one.fleet.counts_from == math.inf
        newcomer = Link()
        one.claim.came(newcomer)  # type: ignore[arg-type]
        assert newcomer.told == [InDoubt(is_so=True)]
        (warning,) = one.chronicle.warnings
        assert "may have lost the job" in warning
        one.lock.comes_to_be(in_doubt=False)
        await asyncio.sleep(1.0)
        assert one.told == [[InDoubt(is_so=True), InDoubt(is_so=False)]] * 2
        assert one.fleet.counts_from == loop.time() - 1.0
        assert "still has the job" in one.chronicle.warnings[1]
        one.claim.came(newcomer)  # type: ignore[arg-type]
        assert len(newcomer.told) == 1
        await asyncio.sleep(2 * LIMIT_S)
        assert one.lost == []

    run_virtually(main)


def test_what_is_told_late_counts_as_it_is_by_then() -> None:
    async def main(loop: VirtualLoop) -> None:
        one = Scene(loop)
        one.claim.begin(URLS, "")
        one.lock.comes_to_be(in_doubt=False)
        one.lock.is_in_doubt = True  # two threads tell of it, and the former is overtaken
        await asyncio.sleep(0.1)
        assert one.told == [[InDoubt(is_so=True)]] * 2

    run_virtually(main)


def test_a_driver_that_begins_in_doubt_says_so() -> None:
    async def main(loop: VirtualLoop) -> None:
        one = Scene(loop)
        one.lock.is_in_doubt = True
        one.claim.begin(URLS, "")
        assert one.told == [[InDoubt(is_so=True)]] * 2

    run_virtually(main)


def test_it_lets_go_when_its_agents_do() -> None:
    async def main(loop: VirtualLoop) -> None:
        one = Scene(loop)
        one.claim.begin(URLS, "")
        one.lock.comes_to_be(in_doubt=True)
        await asyncio.sleep(LIMIT_S - 1.0)
        assert one.lost == []
        await asyncio.sleep(2.0)
        assert one.lost == ["etcd has not answered for 600 s (--driver-timeout)"]

    run_virtually(main)


def test_a_driver_that_has_ended_says_nothing_any_more() -> None:
    async def main(loop: VirtualLoop) -> None:
        one = Scene(loop)
        one.claim.begin(URLS, "")
        one.lock.comes_to_be(in_doubt=True)
        await asyncio.sleep(1.0)
        one.claim.close()
        one.lock.comes_to_be(in_doubt=False)
        await asyncio.sleep(2 * LIMIT_S)
        assert one.told == [[InDoubt(is_so=True)]] * 2
        assert one.lost == []

    run_virtually(main)
