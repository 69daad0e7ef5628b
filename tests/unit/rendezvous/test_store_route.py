"""Who waits for which key of a torch Store: woken once, in order, and never with what is for somebody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import PIECE_BYTES
from elastic_driver.rendezvous.routes import RouteRequest
from elastic_driver.rendezvous.server.store_route import Answer, StoreRoute
from elastic_driver.rendezvous.server.values import Values
from elastic_driver.rendezvous.store_messages import StoreOp, StoreReply, StoreRequest

pytestmark = pytest.mark.unit


class Route:
    """A route, and clients that ask it."""

    def __init__(self) -> None:
        self.route = StoreRoute(Values(1))
        self.number = 0

    def ask(
        self,
        op: StoreOp,
        *parts: bytes,
        wait_s: float = 60.0,
        number: int | None = None,
        client: int = 1,
        has_hung_up: Callable[[], bool] = lambda: False,
    ) -> Answer | Awaitable[Answer]:
        if number is None:
            self.number = number = self.number + 1
        request = StoreRequest(op, "s", parts, wait_s, 0, client, number)
        return self.route.answer(RouteRequest(Identity(Role.MEMBER), (), {}, request.to_bytes(), has_hung_up))

    def park(self, op: StoreOp, *parts: bytes, **options: object) -> asyncio.Future[Answer]:
        answer = self.ask(op, *parts, **options)  # type: ignore[arg-type]
        assert isinstance(answer, asyncio.Future)
        return answer


def parts(answer: object) -> list[bytes]:
    assert isinstance(answer, tuple)
    assert answer[0] == 200
    return list(StoreReply.from_bytes(answer[1]).parts)


def test_all_keys_have_to_be_there_at_once() -> None:
    async def main() -> None:
        route = Route()
        both, one = route.park(StoreOp.GET, b"a", b"b"), route.park(StoreOp.WAIT, b"a")
        assert route.route.parked == 2
        route.ask(StoreOp.SET, b"a", b"1")
        assert (one.done(), both.done()) == (True, False)
        route.ask(StoreOp.DELETE, b"a")
        route.ask(StoreOp.SET, b"b", b"2")
        assert not both.done(), "the other one was deleted meanwhile"
        route.ask(StoreOp.ADD, b"a", b"3")
        assert parts(both.result()) == [b"3", b"2"]
        await asyncio.sleep(0)
        assert (route.route.parked, route.route._waiting) == (0, {})

    asyncio.run(main())


def test_an_answer_for_which_there_is_no_room_fails_its_own_request_only() -> None:
    async def main() -> None:
        route = Route()
        route.route = StoreRoute(Values(1, max_kept=2 * PIECE_BYTES))
        size = PIECE_BYTES + PIECE_BYTES // 2
        first, second = (route.park(StoreOp.GET, b"k", number=1, client=client) for client in (2, 3))
        assert parts(route.ask(StoreOp.SET, b"k", b"x" * size)) == [], "who sets the key has nothing to do with it"
        assert first.exception() is None
        assert "await acknowledgment" in str(second.exception())
        await asyncio.sleep(0)
        assert (route.route.parked, route.route._waiting) == (0, {})

    asyncio.run(main())


def test_queues_serve_in_order_and_each_once() -> None:
    async def main() -> None:
        route = Route()
        first, second = route.park(StoreOp.POP, b"q"), route.park(StoreOp.POP, b"q")
        route.ask(StoreOp.PUSH, b"q", b"1")
        assert (parts(first.result()), second.done()) == ([b"1"], False)
        await asyncio.sleep(0)
        route.ask(StoreOp.PUSH, b"q", b"2")
        assert parts(second.result()) == [b"2"]
        assert parts(route.ask(StoreOp.LENGTH, b"q")) == [b"0"]

    asyncio.run(main())


def test_one_that_is_gone_takes_nothing() -> None:
    async def main() -> None:
        route = Route()
        gone = route.park(StoreOp.POP, b"q")
        gone.cancel()
        route.ask(StoreOp.PUSH, b"q", b"1")
        await asyncio.sleep(0)
        assert parts(route.ask(StoreOp.POP, b"q")) == [b"1"]
        assert route.route.parked == 0

    asyncio.run(main())


def test_one_that_has_hung_up_takes_nothing_though_the_loop_has_not_come_to_that() -> None:
    async def main() -> None:
        route = Route()
        gone: list[int] = []
        waits = route.park(StoreOp.POP, b"q", has_hung_up=lambda: bool(gone))
        looks = route.park(StoreOp.GET, b"k", has_hung_up=lambda: True)
        gone.append(1)
        route.ask(StoreOp.PUSH, b"q", b"1")
        assert waits.result() == (204, b"")
        assert route.ask(StoreOp.POP, b"q", has_hung_up=lambda: True) == (204, b""), "a request that is read late"
        assert parts(route.ask(StoreOp.POP, b"q")) == [b"1"]
        route.ask(StoreOp.SET, b"k", b"v")
        assert parts(looks.result()) == [b"v"], "that takes nothing from anybody"
        await asyncio.sleep(0)
        assert (route.route.parked, route.route._waiting) == (0, {})

    asyncio.run(main())


def test_one_that_asks_again_takes_the_place_of_its_first_request() -> None:
    async def main() -> None:
        route = Route()
        cut = route.park(StoreOp.POP, b"q", number=1)
        again = route.park(StoreOp.POP, b"q", number=1)
        assert cut.cancelled()
        await asyncio.sleep(0)
        route.ask(StoreOp.PUSH, b"q", b"1", number=2)
        assert parts(again.result()) == [b"1"]
        assert parts(route.ask(StoreOp.POP, b"q", number=1)) == [b"1"], "its answer was lost: the same once more"
        assert parts(route.ask(StoreOp.LENGTH, b"q", number=3)) == [b"0"]

    asyncio.run(main())


def test_the_time_is_over() -> None:
    async def main() -> None:
        route = Route()
        assert route.ask(StoreOp.GET, b"k", wait_s=0.0) == (204, b"")
        late = route.ask(StoreOp.GET, b"k", wait_s=0.01)
        assert isinstance(late, asyncio.Future)
        assert await late == (204, b"")
        await asyncio.sleep(0)
        assert route.route.parked == 0

    asyncio.run(main())


def test_a_large_answer_goes_in_pieces_also_to_one_that_waited() -> None:
    async def main() -> None:
        route = Route()
        waits = route.park(StoreOp.GET, b"k", number=5)
        value = b"v" * (PIECE_BYTES + 5)
        assert parts(route.ask(StoreOp.SET, b"k", value, number=6)) == []
        reply = StoreReply.from_bytes(waits.result()[1])
        assert reply.pieces == 2
        whole = b"".join(
            parts(route.ask(StoreOp.REST, str(place).encode(), number=5))[0] for place in range(reply.pieces)
        )
        assert StoreReply.from_bytes(whole).parts == (value,)

    asyncio.run(main())


def test_a_thousand_wait_for_one_key() -> None:
    async def main() -> None:
        route = Route()
        waiting = [route.park(StoreOp.GET, b"k", client=client + 1, number=1) for client in range(1000)]
        route.ask(StoreOp.SET, b"k", b"v", client=2000, number=1)
        assert all(parts(one.result()) == [b"v"] for one in waiting)

    asyncio.run(main())
