"""Objects between ranks: nothing is unpickled that the sender has not sealed for this very call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import pytest

from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.api.objects import allgather_among, broadcast_among
from elastic_driver.worker.engine.protocol import Kind, Operation, Result, region
from elastic_driver.worker.engine.seal import Place, Seal
from elastic_driver.worker.rounds.process_sets import Members

pytestmark = pytest.mark.unit

KEY = b"k" * 32


class Bomb:
    """Ends the test when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], NoReturn], tuple[()]]:
        return explode, ()


def explode() -> NoReturn:
    raise AssertionError("unpickled")


class Wire:
    """An engine of two ranks: what rank 0 broadcasts is kept, and what rank 1 gets is whatever the test puts there."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.coming: list[bytes] = []
        self.gathered: list[bytes] = []

    def submit(self, operation: Operation) -> Any:
        result = Result()
        specs = operation.tensors
        if operation.kind is Kind.BROADCAST and self.coming:
            region(specs[0].output, specs[0].nbytes)[:] = np.frombuffer(self.coming.pop(0), np.uint8)
        elif operation.kind is Kind.BROADCAST:
            self.sent.append(region(specs[0].address, specs[0].nbytes).tobytes())
        else:
            own = region(specs[1].address, specs[1].nbytes).tobytes()
            self.sent.append(own)
            parts = [part or own for part in self.gathered]
            lengths = np.array([len(part) for part in parts], np.int64)
            result.arrays = [lengths.view(np.uint8), np.frombuffer(b"".join(parts), np.uint8)]
        return SimpleNamespace(done=lambda: True, result=lambda: result)


class Rank:
    """A member of a round of two, as objects.py sees it."""

    def __init__(self, rank: int, *, key: bytes = KEY, round_id: int = 1) -> None:
        self.seal, self.engine = Seal(key, round_id), Wire()
        self.slot = SimpleNamespace(rank=rank)
        self._calls: Counter[tuple[int, str]] = Counter()

    def calls_of(self, process_set: int, label: str) -> int:
        return self._calls[process_set, label]

    def note_call(self, process_set: int, label: str) -> None:
        self._calls[process_set, label] += 1

    def members(self, number: int = 0) -> Members:
        context: Any = self
        return Members(context, number, range(2), self.slot.rank)

    def sends(self, obj: object, name: str | None = None, *, number: int = 0) -> list[bytes]:
        self.engine.sent.clear()
        broadcast_among(self.members(number), obj, 0, name)
        return list(self.engine.sent)

    def gets(self, messages: list[bytes], name: str | None = None, *, number: int = 0) -> object:
        self.engine.coming = list(messages)
        return broadcast_among(self.members(number), None, 0, name)


def test_what_was_sealed_is_taken() -> None:
    root, other = Rank(0), Rank(1)
    for value in ({"a": 1}, "b", "b"):
        assert other.gets(root.sends(value)) == value
    assert other.gets(root.sends("in a set", "n", number=2), "n", number=2) == "in a set"


def test_a_pickle_that_was_swapped_on_the_way_is_not_unpickled() -> None:
    length, payload, mark = Rank(0).sends({"a": 1})
    bomb = cloudpickle.dumps(Bomb())
    other = len(bomb).to_bytes(8, "little")
    for messages in ([other, bomb, mark], [other, bomb, bytes(32)], [length, payload[:-1] + b"!", mark]):
        with pytest.raises(HorovodInternalError, match="not sealed with this job's key"):
            Rank(1).gets(messages)


@pytest.mark.parametrize("which", ["another job", "another round", "another name", "another set", "an older call"])
def test_a_sealed_object_fits_nothing_else(which: str) -> None:
    """Each was sealed by a rank, and is genuine elsewhere."""
    root = Rank(0, key=b"x" * 32 if which == "another job" else KEY, round_id=2 if which == "another round" else 1)
    number = 3 if which == "another set" else 0
    old = root.sends(Bomb(), "other" if which == "another name" else None, number=number)
    other = Rank(1)
    if which == "an older call":
        other.gets(Rank(0).sends("the first"))
    with pytest.raises(HorovodInternalError, match="belongs to another call"):
        other.gets(old)


def test_gathered_objects() -> None:
    one, other = Rank(0), Rank(1)
    other.engine.gathered = [b"", b""]
    with pytest.raises(HorovodInternalError, match=r"from ranks \[1, 1\]"):
        allgather_among(other.members(), "mine", None)
    theirs = sealed(other, "theirs")
    one.engine.gathered = [b"", theirs]
    assert allgather_among(one.members(), "mine", None) == ["mine", "theirs"]
    # The second call: what came in the first is too old, though it was genuine.
    with pytest.raises(HorovodInternalError, match="another call"):
        allgather_among(one.members(), "mine", None)
    # Nobody may be missing: while a rank has joined there are no such calls.
    alone = Rank(1)
    alone.engine.gathered = [b""]
    with pytest.raises(HorovodInternalError, match=r"from ranks \[1\]"):
        allgather_among(alone.members(), "alone", None)


def sealed(rank: Rank, obj: object) -> bytes:
    pickled = cloudpickle.dumps(obj)
    place = Place(0, rank.slot.rank, 0)
    mark = rank.seal.mark(pickled, "allgather_object.object", place)
    return int(rank.slot.rank).to_bytes(8, "little") + mark + pickled


def test_bombs_go_off() -> None:
    """Or the tests above would show nothing."""
    root, other = Rank(0), Rank(1)
    with pytest.raises(AssertionError, match="unpickled"):
        other.gets(root.sends(Bomb()))
