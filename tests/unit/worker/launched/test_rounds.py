"""The rounds of a launched job: who is answered what, and when there are none any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from elastic_driver.errors import RendezvousClosedError, StaleRoundError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.messages import NextRoundReply, NextRoundRequest, RoundAssignment, WatchRequest
from elastic_driver.words import Backend, NoticeKind, ReadyCause
from elastic_driver.worker.launched.places import places
from elastic_driver.worker.launched.rounds import LaunchedRounds

pytestmark = pytest.mark.unit

WORKERS = [WorkerId("a", rank, 0) for rank in range(3)]
SLOTS: list[SlotInfo] = places("aaa")


class Keys:
    def __init__(self) -> None:
        self.rounds: list[int] = []

    def begin_round(self, round_id: int) -> None:
        self.rounds.append(round_id)


def in_loop(test: Callable[[LaunchedRounds, Keys], Coroutine[Any, Any, None]], start_timeout_s: float = 60.0) -> None:
    async def run() -> None:
        rounds, keys = LaunchedRounds(WORKERS, SLOTS, start_timeout_s=start_timeout_s), Keys()
        rounds.serve(keys)
        await asyncio.wait_for(test(rounds, keys), 150)
        rounds.close()

    asyncio.run(run())


def ready(rank: int, after_round: int = 0, *, pid: int = 0, backends: tuple[Backend, ...] = ()) -> NextRoundRequest:
    return NextRoundRequest(
        worker=WORKERS[rank],
        after_round=after_round,
        commits=0,
        cause=ReadyCause.START,
        detail="",
        backends=backends or (Backend.NATIVE, Backend.TORCH),
        pid=pid or 100 + rank,
        thread=0,
    )


def watch(rank: int, round_id: int = 1, **more: Any) -> WatchRequest:
    return WatchRequest(WORKERS[rank], round_id, 0, **more)


async def form(rounds: LaunchedRounds, after_round: int = 0) -> list[RoundAssignment]:
    asked: list[Awaitable[NextRoundReply]] = [rounds.next_round(ready(rank, after_round)) for rank in range(3)]
    replies = [await each for each in asked]
    assert all(isinstance(reply, RoundAssignment) for reply in replies)
    return [reply for reply in replies if isinstance(reply, RoundAssignment)]


def test_a_round_is_formed_when_all_have_asked() -> None:
    async def test(rounds: LaunchedRounds, keys: Keys) -> None:
        first = rounds.next_round(ready(0))
        second = rounds.next_round(ready(2, backends=(Backend.TORCH,)))
        again = rounds.next_round(ready(2, backends=(Backend.TORCH,)))  # its poll time was over
        assert isinstance(second, asyncio.Future)
        assert second.cancelled()
        assert keys.rounds == []
        last = rounds.next_round(ready(1))
        replies = [await each for each in (first, last, again)]
        assert keys.rounds == [1]
        assert [
            (reply.round_id, reply.slot, reply.backend) for reply in replies if isinstance(reply, RoundAssignment)
        ] == [(1, slot, Backend.TORCH) for slot in SLOTS]
        lost = await rounds.next_round(ready(1))  # the answer was lost on the way
        assert lost == replies[1]

    in_loop(test)


def test_no_backend_in_common() -> None:
    async def test(rounds: LaunchedRounds, keys: Keys) -> None:
        asked = [rounds.next_round(ready(rank, backends=(list(Backend)[rank % 2],))) for rank in range(3)]
        for each in asked:
            with pytest.raises(RendezvousClosedError, match="no backend in common"):
                await each

    in_loop(test)


def test_a_lost_rank_breaks_the_round_and_ends_what_waits() -> None:
    async def test(rounds: LaunchedRounds, keys: Keys) -> None:
        await form(rounds)
        notice = rounds.watch(watch(0))
        rounds.gone(WORKERS[2])
        heard = await notice
        assert (heard.kind, heard.round_id) == (NoticeKind.ABORT, 1)
        assert "rank 2 (a[2], process 102) is lost" in heard.reason
        assert (await rounds.watch(watch(1))).kind is NoticeKind.ABORT, "who asks later is told, too"
        with pytest.raises(RendezvousClosedError, match="rank 2"):
            rounds.next_round(ready(0, 1))

    in_loop(test)


def test_goodbyes_break_nothing() -> None:
    async def test(rounds: LaunchedRounds, keys: Keys) -> None:
        await form(rounds)
        notice = rounds.watch(watch(0))
        assert isinstance(notice, asyncio.Future)
        await rounds.watch(watch(1, leaving=True))
        rounds.gone(WORKERS[1])
        assert not rounds.all_gone.is_set()
        await rounds.watch(watch(2, exiting=True))
        rounds.gone(WORKERS[2])
        assert not notice.done()
        assert rounds.all_gone.is_set()
        with pytest.raises(RendezvousClosedError, match=r"rank 2 .* has ended, so there will be no further round"):
            rounds.next_round(ready(1, 1))

    in_loop(test)


def test_all_leave_and_come_back() -> None:
    async def test(rounds: LaunchedRounds, keys: Keys) -> None:
        await form(rounds)
        for rank in range(3):
            await rounds.watch(watch(rank, leaving=True))
            rounds.gone(WORKERS[rank])
        assert {reply.round_id for reply in await form(rounds, 1)} == {2}
        with pytest.raises(StaleRoundError):
            rounds.watch(watch(0, 1))

    in_loop(test)


def test_an_end_while_others_wait_for_a_round() -> None:
    async def test(rounds: LaunchedRounds, keys: Keys) -> None:
        await form(rounds)
        waiting = rounds.next_round(ready(0, 1))
        await rounds.watch(watch(1, exiting=True))
        with pytest.raises(RendezvousClosedError, match="rank 1"):
            await waiting

    in_loop(test)


def test_a_second_process_of_a_rank_is_refused() -> None:
    async def test(rounds: LaunchedRounds, keys: Keys) -> None:
        rounds.next_round(ready(0))
        with pytest.raises(RendezvousClosedError, match="process 7 does not belong to the job: rank 0 is process 100"):
            rounds.next_round(ready(0, pid=7))

    in_loop(test)


def test_who_does_not_come_is_named() -> None:
    async def test(rounds: LaunchedRounds, keys: Keys) -> None:
        with pytest.raises(RendezvousClosedError, match=r"ranks 0, 2 of 3 did not call init\(\) within 0.01 s"):
            await rounds.next_round(ready(1))

    in_loop(test, 0.01)
