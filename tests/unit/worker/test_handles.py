"""What is made of an operation's result, by which thread, and what becomes of it when that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import elastic_driver as hvd
from elastic_driver.errors import MismatchError
from elastic_driver.worker.api.handles import begin, poll, synchronize
from elastic_driver.worker.engine.protocol import Kind, Operation, Result
from elastic_driver.worker.rounds.current import current, current_round
from elastic_driver.worker.rounds.process_sets import global_process_set, members_of

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("job_of_one")]


class Struck(Exception):
    """What a signal's handler raises."""


class Given:
    """A handle that does what the test says, once for each call of result()."""

    def __init__(self, *outcomes: BaseException | None, done: bool = True) -> None:
        self._outcomes, self._done = list(outcomes), done

    def done(self) -> bool:
        return self._done

    def result(self) -> Result:
        outcome = self._outcomes.pop(0) if self._outcomes else None
        if outcome is not None:
            raise outcome
        self._done = True
        return Result()


def begun(handle: Given, finish: Callable[[Result], Any]) -> int:
    return begin(members_of(global_process_set), Operation(Kind.BARRIER), finish=finish, submit=lambda _: handle)


def deliver() -> None:
    """What is done when a round is about to be left."""
    current_round().deliver(current())


def test_a_result_is_made_once_for_a_thread_that_waits_and_for_the_end_of_the_round() -> None:
    made: list[object] = []
    inside, leave = threading.Event(), threading.Event()

    def finish(_: Result) -> object:
        inside.set()
        assert leave.wait(60)
        made.append(object())
        return made[-1]

    number, got = begun(Given(), finish), []
    waits = threading.Thread(target=lambda: got.append(synchronize(number)))
    waits.start()
    assert inside.wait(60)
    delivers = threading.Thread(target=deliver)
    delivers.start()
    leave.set()
    waits.join()
    delivers.join()
    assert got == made
    assert len(made) == 1


def test_a_result_that_cannot_be_written_is_an_error_and_the_others_are_written() -> None:
    written: list[str] = []

    def fail(_: Result) -> None:
        raise ValueError("the tensor has another shape by now")

    first = begun(Given(), fail)
    second = begun(Given(), lambda _: written.append("second"))
    with pytest.raises(ValueError, match="another shape by now"):
        deliver()
    assert written == ["second"]
    with pytest.raises(ValueError, match="another shape by now"):
        synchronize(first)
    synchronize(second)
    deliver()


def test_an_operation_that_failed_is_told_to_who_synchronizes_it_only() -> None:
    number = begun(Given(MismatchError("they differ"), MismatchError("they differ")), lambda _: None)
    deliver()
    with pytest.raises(MismatchError):
        synchronize(number)
    with pytest.raises(ValueError, match="was already synchronized"):
        poll(number)


@pytest.mark.parametrize("struck", [Struck(), KeyboardInterrupt()])
def test_what_a_signal_interrupts_can_be_synchronized_again(struck: BaseException) -> None:
    number = begun(Given(struck, done=False), lambda _: "the result")
    with pytest.raises(type(struck)):
        synchronize(number)
    assert synchronize(number) == "the result"
    assert synchronize(number) is None


def test_shutdown_ends_the_round_whatever_cannot_be_written() -> None:
    def fail(_: Result) -> None:
        raise ValueError("the tensor has another shape by now")

    begun(Given(), fail)
    with pytest.raises(ValueError, match="another shape by now"):
        hvd.shutdown()
    assert not hvd.is_initialized()
