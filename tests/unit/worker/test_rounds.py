"""The round that a process is in, and what it counts, without a driver."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from elastic_driver.errors import ForkedProcessError, HorovodInternalError, NotInitializedError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.messages import NextRoundRequest, RoundAssignment
from elastic_driver.words import Backend, ReadyCause
from elastic_driver.worker.engine.choice import Limits
from elastic_driver.worker.engine.protocol import Kind, Operation
from elastic_driver.worker.rounds import context as context_module
from elastic_driver.worker.rounds import devices, runtime
from elastic_driver.worker.rounds.context import Context, MemberFacts
from elastic_driver.worker.rounds.current import CurrentRound
from elastic_driver.worker.rounds.patience import Patience
from elastic_driver.worker.rounds.runtime import Runtime
from elastic_driver.worker.settings import WorkerSettings

pytestmark = pytest.mark.unit

ALONE = RoundAssignment(1, SlotInfo(0, 1, 0, 1, 0, 1), True, 0, Backend.NATIVE)


def a_round(round_id: int = 1, commits: int = 0, **more: Any) -> Context:
    assignment = replace(ALONE, round_id=round_id, commits=commits)
    return Context(assignment, worker=None, address="127.0.0.1", limits=Limits(), client=None, **more)


class Listener:
    def __init__(self) -> None:
        self.changes = 0

    def on_round_changed(self) -> None:
        self.changes += 1


def test_there_is_no_round_before_the_first() -> None:
    current = CurrentRound()
    assert (current.initialized, current.joined, current.planned) == (False, None, None)
    for ask in (lambda: current.context, lambda: current.slot):
        with pytest.raises(NotInitializedError, match="not been initialized"):
            ask()


def test_a_late_process_has_its_planned_place_until_its_round_is_asked_for() -> None:
    current, joined, late = CurrentRound(), a_round(3), SlotInfo(4, 5, 0, 1, 0, 1)

    def join() -> None:
        assert current.drop_plan() == late
        current.enter(joined)

    current.plan(late, join)
    assert (current.initialized, current.joined, current.slot) == (True, None, late)
    assert current.context is joined
    assert (current.planned, current.slot) == (None, ALONE.slot)


def test_a_plan_that_was_dropped_joins_nothing() -> None:
    current = CurrentRound()
    current.plan(ALONE.slot, lambda: pytest.fail("it joined"))
    current.drop_plan()
    with pytest.raises(NotInitializedError):
        _ = current.context


def test_the_first_round_and_the_most_commits_are_remembered() -> None:
    current = CurrentRound()
    for round_id, commits in ((2, 7), (3, 9), (4, 8)):
        current.leave()
        current.enter(a_round(round_id, commits))
    assert (current.first_round, current.commits_seen) == (2, 9)


def test_listeners_hear_of_a_new_round_for_as_long_as_they_live() -> None:
    current, listener, other = CurrentRound(), Listener(), Listener()
    current.listen(listener)
    current.listen(other)
    del other
    current.tell_of_change()
    current.tell_of_change()
    assert listener.changes == 2


def test_a_forked_child_is_in_no_round_and_nobody_listens() -> None:
    current, listener, notified = CurrentRound(), Listener(), lambda: None
    current.leave_listeners.append(notified)
    current.listen(listener)
    current.enter(a_round(2, 5))
    current.abandon()
    current.tell_of_change()
    assert (current.joined, current.first_round, current.commits_seen, listener.changes) == (None, 0, 0, 0)
    assert current.leave_listeners == [notified], "who was told by the parent is told by the child, too"


def test_a_forked_child_keeps_its_place_until_it_forgets_it() -> None:
    current, late = CurrentRound(), SlotInfo(4, 5, 0, 1, 0, 1)
    current.abandon()
    assert current.inherited is None, "of a process that was no worker"
    current.enter(a_round(2, 5))
    for _ in range(2):  # its child, and the child's
        current.abandon()
        assert current.slot == ALONE.slot
        assert not current.initialized
        with pytest.raises(ForkedProcessError, match="forked from process"):
            _ = current.context
    current.drop_inherited()
    with pytest.raises(NotInitializedError, match="not been initialized"):
        _ = current.slot
    current.plan(late, lambda: pytest.fail("it joined"))
    current.abandon()
    assert current.slot == late
    with pytest.raises(ForkedProcessError):
        _ = current.context


def test_a_round_counts_what_is_lost_when_it_breaks() -> None:
    context = a_round()
    finished = 0

    def progress() -> tuple[int, bool]:
        return finished, False

    context.progress = progress  # type: ignore[method-assign]
    assert context.steps == 0, "no training yet"
    finished = 5
    context.note_restore_point()
    assert context.steps == 0
    finished = 8
    assert context.steps == 3


def test_a_round_knows_how_long_ago_its_restore_point_was(monkeypatch: pytest.MonkeyPatch) -> None:
    context, now = a_round(), 100.0
    monkeypatch.setattr("elastic_driver.worker.rounds.context.time.monotonic", lambda: now)
    assert context.uncommitted_s == 0.0, "no training yet"
    context.note_restore_point()
    now = 107.5
    assert context.uncommitted_s == 7.5
    context.note_restore_point()
    assert context.uncommitted_s == 0.0


def test_a_round_counts_calls_and_joins() -> None:
    context = a_round()
    context.note_call(0, "a")
    context.note_call(0, "a")
    context.note_call(1, "a")
    context.note_join()
    assert [context.calls_of(*call) for call in ((0, "a"), (1, "a"), (0, "b"))] == [2, 1, 0]
    assert context.joins == 1


def test_a_round_knows_what_its_members_have_said() -> None:
    context = a_round()
    assert (context.homogeneous, context.devices) == (True, [])
    context.note_members([MemberFacts(2, {"torch": "gpu"}), MemberFacts(1, {})])
    assert (context.homogeneous, context.devices) == (False, [{"torch": "gpu"}, {}])


def test_the_driver_is_told_whom_a_worker_could_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the round that broke, and of nothing else."""
    worker, requests = WorkerId("a", 0, 0), []

    class Client:
        def next_round(self, request: NextRoundRequest, *, poll_s: float) -> RoundAssignment:
            requests.append(request)
            return ALONE

    class Engine:
        def unreachable(self) -> tuple[int, ...]:
            return (2, 5)

    current = CurrentRound()
    process = Runtime(current)
    monkeypatch.setattr(runtime, "worker_settings", lambda: WorkerSettings(rendezvous="unix:/nowhere/agent.sock"))
    process._client, process._worker = Client(), worker  # type: ignore[assignment]
    for round_id, engine, cause in (
        (0, None, ReadyCause.START),
        (1, Engine(), ReadyCause.HOSTS_UPDATED),
        (2, Engine(), ReadyCause.INTERNAL_ERROR),
        (3, None, ReadyCause.INTERNAL_ERROR),
    ):
        if round_id:
            current.leave()
            context = a_round(round_id)
            context._engine = engine  # type: ignore[assignment]
            current.enter(context)
        process._after_round = round_id
        process._ask(cause, commits=0, detail="", where="", raised=False)
    assert [(request.after_round, request.unreachable) for request in requests] == [
        (0, ()),
        (1, ()),
        (2, (2, 5)),
        (3, ()),
    ]


def test_each_device_lane_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[str, Context]] = []

    class Lane:
        def __init__(self, name: str) -> None:
            self.name = name

        def describe(self) -> str:
            return f"devices of {self.name}"

        def prepare_join(self, context: Context) -> None:
            prepared.append((self.name, context))

    monkeypatch.setattr(devices, "_lanes", {})
    lanes = [Lane("torch"), Lane("jax")]
    for lane in (*lanes, lanes[0]):
        devices.register(lane.name, lane)
    with pytest.raises(ValueError, match="another of this name"):
        devices.register("torch", Lane("torch"))
    assert devices.describe() == {"torch": "devices of torch", "jax": "devices of jax"}
    context = a_round()
    devices.prepare_join(context)
    assert prepared == [("torch", context), ("jax", context)]


class FakeCompanion:
    """What ends with a round."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.cut = False

    def abort(self, reason: str) -> None:
        self.happened.append(reason)

    def is_cut(self) -> bool:
        return self.cut

    def close(self) -> None:
        self.happened.append("closed")

    def free(self) -> None:
        self.happened.append("freed")

    def abandon(self) -> None:
        self.happened.append("abandoned")


def test_a_companion_ends_with_its_round() -> None:
    round_ = a_round()
    round_.open()
    companion, late, gone = FakeCompanion(), FakeCompanion(), FakeCompanion()
    round_.attach(companion)
    round_.attach(gone)
    round_.detach(gone)
    round_.abort("a peer is gone")
    round_.attach(late)
    assert companion.happened == late.happened == ["a peer is gone"]
    round_.close()
    assert round_.join(150)
    assert companion.happened[1:] == late.happened[1:] == ["closed", "freed"]
    assert gone.happened == []


def test_what_a_framework_raises_in_a_broken_round_is_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = a_round()
    round_.open()
    assert not round_.accounts_for(RuntimeError("before there was a group"))
    companion = FakeCompanion()
    round_.attach(companion)
    monkeypatch.setattr(context_module, "_WORD_S", 0.05)
    assert not round_.accounts_for(RuntimeError("the user's own"))
    companion.cut = True
    assert round_.accounts_for(RuntimeError("Connection closed by peer"))
    assert not round_.accounts_for(ValueError("no such thing"))
    wrapped = ValueError("cannot write the checkpoint")
    wrapped.__cause__ = RuntimeError("Connection closed by peer")
    assert round_.accounts_for(wrapped)
    companion.cut = False
    # The driver's word may be behind the error.
    monkeypatch.setattr(context_module, "_WORD_S", 60.0)
    word = threading.Timer(0.05, round_.abort, ["a peer is gone"])
    word.start()
    assert round_.accounts_for(RuntimeError("timed out"))
    word.join()
    round_.close()
    assert round_.join(150)


def test_a_planned_change_waits_for_what_is_one_for_its_caller() -> None:
    """Several operations of another thread's: all of them are completed, and none is begun."""
    context = a_round()
    context.open()
    inside, go_on, settled = threading.Event(), threading.Event(), threading.Event()
    parts: list[str] = []

    def whole() -> None:
        inside.set()
        go_on.wait()
        context.wholes.write(lambda: context.run(Operation(Kind.BARRIER)))  # a part that is a whole by itself
        parts.append("settled" if settled.is_set() else "not settled")

    def settle() -> None:
        context.settle()
        settled.set()

    threads = [threading.Thread(target=context.wholes.write, args=(whole,)), threading.Thread(target=settle)]
    threads[0].start()
    assert inside.wait(150)
    threads[1].start()
    while not context.wholes.is_shut:
        time.sleep(0.001)
    with pytest.raises(HorovodInternalError, match="this rank has left the round"):
        context.wholes.write(pytest.fail)
    go_on.set()
    for thread in threads:
        thread.join()
    assert parts == ["not settled"]
    context.close()
    assert context.join(150)


def test_a_broken_round_ends_the_wait_for_other_threads() -> None:
    context = a_round()
    context.open()
    inside, go_on = threading.Event(), threading.Event()

    def whole() -> None:
        inside.set()
        go_on.wait()

    thread = threading.Thread(target=context.wholes.write, args=(whole,))
    thread.start()
    assert inside.wait(150)
    threading.Timer(0.05, context.abort, ("a peer is gone",)).start()
    with pytest.raises(HorovodInternalError, match="a peer is gone"):
        context.settle()
    go_on.set()
    thread.join()
    context.close()
    assert context.join(150)


def test_an_abort_that_was_interrupted_is_finished_by_the_next() -> None:
    aborted: list[str] = []

    class Interrupted:
        def abort(self, reason: str) -> None:
            aborted.append(reason)
            if len(aborted) == 1:
                raise KeyboardInterrupt

    context = a_round()
    context._engine = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        context.abort("a peer is gone")
    context.abort("another reason")
    assert aborted == ["a peer is gone"] * 2


def test_who_leaves_waits_for_as_long_as_its_operations_come_to_an_end() -> None:
    patience = Patience(2.0, 1800.0, 100.0)
    for finished in range(1, 50):
        # Looked at between two operations, each time; then in the middle of the next.
        assert not patience.is_over(100.0 + 1.9 * finished, finished=finished, carries_out=False)
        assert not patience.is_over(101.0 + 1.9 * finished, finished=finished, carries_out=True)
    assert not patience.is_over(194.9, finished=49, carries_out=False)
    assert patience.is_over(195.2, finished=49, carries_out=False)


def test_who_leaves_waits_for_what_is_being_done_and_not_for_the_next_of_others() -> None:
    patience = Patience(2.0, 1800.0, 100.0)
    assert not patience.is_over(500.0, finished=3, carries_out=True)
    assert not patience.is_over(501.9, finished=3, carries_out=True)
    assert not patience.is_over(600.0, finished=3, carries_out=True)
    assert patience.is_over(600.1, finished=3, carries_out=False)


def test_who_leaves_waits_after_a_long_operation_as_after_a_short_one() -> None:
    patience = Patience(2.0, 1800.0, 100.0)
    assert not patience.is_over(160.0, finished=0, carries_out=True)
    assert not patience.is_over(160.1, finished=1, carries_out=False)
    assert not patience.is_over(162.0, finished=1, carries_out=False)
    assert patience.is_over(162.1, finished=1, carries_out=False)


def test_who_leaves_gives_up_an_operation_that_takes_longer_than_any_may() -> None:
    patience = Patience(2.0, 30.0, 100.0)
    assert not patience.is_over(110.0, finished=1, carries_out=True)
    assert not patience.is_over(139.9, finished=1, carries_out=True)
    assert patience.is_over(140.1, finished=1, carries_out=True)
