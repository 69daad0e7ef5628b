"""What torch Stores hold: each request once, bounds, and the bytes in which requests travel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError
from elastic_driver.rendezvous.server.values import Values
from elastic_driver.rendezvous.store_messages import (
    PIECE_BYTES,
    StoreOp,
    StoreReply,
    StoreRequest,
    pieces_of,
)

pytestmark = pytest.mark.unit

PARTS = st.lists(st.binary(max_size=20), max_size=4).map(tuple)
U64 = st.integers(0, 2**64 - 1)


def kept(values: Values) -> int:
    """Bytes of answers."""
    return values._kept


class Asker:
    """One client of a store."""

    def __init__(self, values: Values, client: int = 1, scope: str = "") -> None:
        self.values, self.client, self.scope = values, client, scope
        self.number = 0
        self.done = 0

    def request(self, op: StoreOp, *parts: bytes, number: int | None = None) -> StoreRequest:
        if number is None:
            self.number = number = self.number + 1
        return StoreRequest(op, self.scope, parts, 0.0, 0, self.client, number, self.done)

    def send(self, request: StoreRequest) -> list[bytes]:
        answered = self.values.answered(request)
        if answered is not None:
            return list(answered.parts)
        assert self.values.lacks(request) == []
        return list(self.values.carry_out(request)[0].parts)

    def __call__(self, op: StoreOp, *parts: bytes) -> list[bytes]:
        return self.send(self.request(op, *parts))


@given(
    st.builds(
        StoreRequest,
        st.sampled_from(StoreOp),
        st.text(st.characters(codec="utf-8"), max_size=20),
        PARTS,
        st.floats(0, 1e6),
        U64,
        U64,
        U64,
        U64,
    )
)
def test_requests_travel(request: StoreRequest) -> None:
    assert StoreRequest.from_bytes(request.to_bytes()) == request


@given(st.builds(StoreReply, U64, PARTS, st.integers(0, 100)))
def test_replies_travel(reply: StoreReply) -> None:
    assert StoreReply.from_bytes(reply.to_bytes()) == reply


@given(st.binary(max_size=120), st.data())
def test_rubbish_is_refused(rubbish: bytes, data: st.DataObject) -> None:
    whole = StoreRequest(StoreOp.SET, "s", (b"k", b"v")).to_bytes()
    place = data.draw(st.integers(0, len(whole)))
    for body in (rubbish, whole[:place], whole + b"x", whole[:place] + rubbish):
        try:
            StoreRequest.from_bytes(body)
        except RendezvousProtocolError:
            continue
        assert body == StoreRequest.from_bytes(body).to_bytes()


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0])
def test_no_such_wait(wait_s: float) -> None:
    with pytest.raises(RendezvousProtocolError, match="cannot wait"):
        StoreRequest.from_bytes(StoreRequest(StoreOp.GET, "", (), wait_s).to_bytes())


def test_a_request_that_comes_again_is_not_done_again() -> None:
    ask = Asker(Values(1))
    add, append = ask.request(StoreOp.ADD, b"n", b"2"), ask.request(StoreOp.APPEND, b"a", b"x")
    push, swap = ask.request(StoreOp.PUSH, b"q", b"1"), ask.request(StoreOp.COMPARE_SET, b"c", b"", b"new")
    for _ in range(3):
        assert ask.send(add) == [b"2"]
        assert ask.send(append) == []
        assert ask.send(push) == []
        assert ask.send(swap) == [b"new"]
    assert ask(StoreOp.GET, b"n", b"a") == [b"2", b"x"]
    assert ask(StoreOp.LENGTH, b"q") == [b"1"]
    ask(StoreOp.SET, b"c", b"other")
    assert ask.send(swap) == [b"new"], "what it was answered then"
    assert ask(StoreOp.GET, b"c") == [b"other"]
    pop = ask.request(StoreOp.POP, b"q")
    ask(StoreOp.PUSH, b"q", b"2")
    assert [ask.send(pop), ask.send(pop)] == [[b"1"], [b"1"]]
    assert ask(StoreOp.LENGTH, b"q") == [b"1"]


def test_numbers_are_of_one_client() -> None:
    values = Values(1)
    one, other = Asker(values, 1), Asker(values, 2)
    assert one(StoreOp.ADD, b"n", b"1") == [b"1"]
    assert other(StoreOp.ADD, b"n", b"1") == [b"2"]


def test_an_echo_of_what_was_heard_is_refused() -> None:
    ask = Asker(Values(1))
    late = ask.request(StoreOp.ADD, b"n", b"1")
    ask.send(late)
    ask.done = 2
    assert ask(StoreOp.ADD, b"n", b"1") == [b"2"]
    with pytest.raises(RendezvousProtocolError, match="its answer was acknowledged"):
        ask.send(late)
    assert ask(StoreOp.GET, b"n") == [b"2"]


def test_what_was_answered_and_heard_is_forgotten() -> None:
    values = Values(1)
    ask = Asker(values)
    for number in range(1, 100):
        ask.done = number
        ask(StoreOp.ADD, b"n", b"1")
    assert len(values._clients[1].answers) == 1


def test_a_server_that_was_started_again_says_so() -> None:
    values = Values(7)
    values.check(StoreRequest(StoreOp.GET, "", instance=0))
    values.check(StoreRequest(StoreOp.GET, "", instance=7))
    with pytest.raises(RendezvousClosedError, match="was restarted"):
        values.check(StoreRequest(StoreOp.GET, "", instance=6))


def test_scopes_know_nothing_of_each_other() -> None:
    values = Values(1)
    one, other = Asker(values, 1, "one"), Asker(values, 2, "other")
    one(StoreOp.SET, b"k", b"1")
    assert other(StoreOp.CHECK, b"k") == [b"0"]
    assert other(StoreOp.COUNT) == [b"0"]
    one(StoreOp.DROP)
    assert one(StoreOp.CHECK, b"k") == [b"0"]
    assert values.scopes == []


def test_nothing_is_left_of_what_was_deleted() -> None:
    values = Values(1, max_keys=2, max_bytes=20)
    ask = Asker(values)
    for _ in range(10):
        ask(StoreOp.SET, b"a", b"12345", b"b", b"12345")
        with pytest.raises(RendezvousProtocolError, match="the store is full"):
            ask(StoreOp.SET, b"c", b"")
        ask(StoreOp.DELETE, b"a")
        ask(StoreOp.DELETE, b"b")
        ask(StoreOp.PUSH, b"q", b"1234567")
        ask(StoreOp.PUSH, b"q", b"1234567")
        ask(StoreOp.POP, b"q")
        ask(StoreOp.DROP)
    assert (values._keys, values._bytes, values.scopes) == (0, 0, [])


def test_what_does_not_fit_changes_nothing() -> None:
    ask = Asker(Values(1, max_bytes=10))
    ask(StoreOp.SET, b"a", b"1")
    with pytest.raises(RendezvousProtocolError, match="full"):
        ask(StoreOp.SET, b"a", b"2", b"b", b"123456789")
    with pytest.raises(RendezvousProtocolError, match="full"):
        ask(StoreOp.APPEND, b"a", b"1234567890")
    assert ask(StoreOp.GET, b"a") == [b"1"]


@pytest.mark.parametrize(
    ("value", "amount"), [(b"x", b"1"), (b"1", b"x"), (b"9223372036854775807", b"1"), (b"1" * 5000, b"1")]
)
def test_what_cannot_be_added(value: bytes, amount: bytes) -> None:
    ask = Asker(Values(1))
    ask(StoreOp.SET, b"n", value)
    with pytest.raises(RendezvousProtocolError):
        ask(StoreOp.ADD, b"n", amount)
    assert ask(StoreOp.GET, b"n") == [value]


def test_what_is_lacking() -> None:
    ask = Asker(Values(1))
    ask(StoreOp.SET, b"a", b"")
    ask(StoreOp.PUSH, b"q", b"")
    values = ask.values
    assert values.lacks(ask.request(StoreOp.GET, b"a", b"b", b"c", b"b")) == [b"b", b"c"]
    assert values.lacks(ask.request(StoreOp.WAIT, b"a", b"q")) == []
    assert values.lacks(ask.request(StoreOp.GET, b"q")) == [b"q"], "a queue is no value"
    assert values.lacks(ask.request(StoreOp.POP, b"a")) == [b"a"]


def test_requests_in_pieces() -> None:
    ask = Asker(Values(1))
    inner = ask.request(StoreOp.APPEND, b"k", b"v" * (2 * PIECE_BYTES))
    pieces = pieces_of(inner.to_bytes())
    assert len(pieces) == 3
    for place, piece in reversed(list(enumerate(pieces))):
        part = ask.request(StoreOp.PIECE, str(place).encode(), piece, number=inner.number)
        for _ in range(2):  # each may come again
            ask.values.take_piece(part)
    whole = ask.request(StoreOp.WHOLE, b"3", number=inner.number)
    assert ask.values.whole(whole) == inner
    ask.send(inner)
    assert ask.values.whole(whole) == StoreReply(1), "answered already"
    assert ask(StoreOp.GET, b"k")[0] == b"v" * (2 * PIECE_BYTES)
    assert ask.values._bytes == 1 + 2 * PIECE_BYTES, "no piece is kept"


def test_pieces_that_are_missing_or_of_another() -> None:
    ask = Asker(Values(1))
    inner = ask.request(StoreOp.SET, b"k", b"v")
    with pytest.raises(RendezvousProtocolError, match="0 have arrived"):
        ask.values.whole(ask.request(StoreOp.WHOLE, b"1", number=1))
    ask.values.take_piece(ask.request(StoreOp.PIECE, b"0", inner.to_bytes(), number=9))
    with pytest.raises(RendezvousProtocolError, match="names another request"):
        ask.values.whole(ask.request(StoreOp.WHOLE, b"1", number=9))
    with pytest.raises(RendezvousProtocolError, match="no piece"):
        ask.values.rest(ask.request(StoreOp.REST, b"0"))
    for place in (b"-1", b"1000", b"x"):
        with pytest.raises(RendezvousProtocolError):
            ask.values.take_piece(ask.request(StoreOp.PIECE, place, b""))


@given(st.lists(st.tuples(st.sampled_from(StoreOp), PARTS), max_size=30))
def test_whatever_is_asked_the_books_are_right(asked: list[tuple[StoreOp, tuple[bytes, ...]]]) -> None:
    """Any parts, also too few: refused, or done; and what is counted is what is there."""
    ask = Asker(Values(1))
    for op, parts in asked:
        request = ask.request(op, *parts)
        if ask.values.lacks(request):
            continue
        try:
            ask.values.carry_out(request)
        except RendezvousProtocolError:
            continue
    keys = size = 0
    for scope in ask.values._scopes.values():
        keys += len(scope.values) + sum(map(len, scope.queues.values()))
        size += sum(len(key) + len(value) for key, value in scope.values.items())
        size += sum(len(key) + len(value) for key, queue in scope.queues.items() for value in queue)
    assert (ask.values._keys, ask.values._bytes) == (keys, size)


def test_answers_that_nobody_has_heard_are_bounded() -> None:
    """A client that never says what it has heard fills nobody's memory, however it goes about it."""
    values = Values(1, max_kept=4000)
    ask = Asker(values)

    def push_and_pop(times: int) -> None:
        for _ in range(times):
            values.carry_out(ask.request(StoreOp.PUSH, b"q", b"x" * 500))
            values.carry_out(ask.request(StoreOp.POP, b"q"))

    with pytest.raises(RendezvousProtocolError, match=r"\d+ bytes of answers await acknowledgment; 4000 are allowed"):
        push_and_pop(100)
    assert kept(values) <= 4000 + 500
    assert values._bytes <= 501, "what was popped is in the store no more"
    for client in range(2, 9):
        reader = Asker(values, client)
        with pytest.raises(RendezvousProtocolError, match="await acknowledgment"):
            values.keep_rest(reader.request(StoreOp.GET, b"k"), [b"x" * 3000, b"y" * 1000])
    # When it says so there is room again, for others too.
    ask.done = ask.number + 1
    assert values.carry_out(ask.request(StoreOp.ADD, b"n", b"1"))[0].parts == (b"1",)
    assert kept(values) < 1000
    reader = Asker(values, 9)
    request = reader.request(StoreOp.GET, b"k")
    for _ in range(3):  # one that asks again
        values.keep_rest(request, [b"x" * 1000])
    assert 1000 <= kept(values) < 2000
