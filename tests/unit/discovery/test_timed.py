"""How long host discovery takes, whoever it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from elastic_driver.discovery.source import TimedDiscovery
from elastic_driver.errors import DiscoveryError
from elastic_driver.hosts import Departure, Host

pytestmark = [pytest.mark.unit]

HOSTS = (Host("a", 2),)


class Source:
    """Answers with what it was given, or raises it."""

    def __init__(self, *answers: Exception | tuple[Host, ...]) -> None:
        self.answers = list(answers)
        self.waited: list[float] = []

    async def find_hosts(self) -> tuple[Host, ...]:
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def wait_change(self, limit_s: float) -> None:
        self.waited.append(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        return (Departure("a", "it goes", 5.0),)

    def remark(self) -> str:
        return "slow"


def test_each_run_is_told_with_what_became_of_it() -> None:
    runs: list[tuple[float, bool]] = []
    began = time.monotonic()
    timed = TimedDiscovery(Source(HOSTS, DiscoveryError("no"), OSError(24, "too many files"), ()), _noting(runs))

    async def ask() -> None:
        assert await timed.find_hosts() == HOSTS
        for kind in (DiscoveryError, OSError):
            with pytest.raises(kind):
                await timed.find_hosts()
        assert await timed.find_hosts() == ()

    asyncio.run(ask())
    assert [failed for _, failed in runs] == [False, True, True, False]
    assert min(took_s for took_s, _ in runs) >= 0
    assert sum(took_s for took_s, _ in runs) <= time.monotonic() - began


def test_a_run_that_is_given_up_is_not_told() -> None:
    runs: list[tuple[float, bool]] = []

    async def ask() -> None:
        asking = asyncio.ensure_future(TimedDiscovery(Source(), _noting(runs)).find_hosts())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))

    asyncio.run(ask())
    assert runs == []


def test_all_else_is_the_sources() -> None:
    source = Source()
    timed = TimedDiscovery(source, lambda took_s, failed: None)
    asyncio.run(timed.wait_change(3.0))
    found: Sequence[object] = (timed.remark(), [each.hostname for each in timed.departures()], source.waited)
    assert found == ("slow", ["a"], [3.0])


def _noting(runs: list[tuple[float, bool]]) -> Callable[[float, bool], None]:
    return lambda took_s, failed: runs.append((took_s, failed))
