"""Random lives of the elastic coordinator's core: no closure is lost, or run twice without need; indices are unique."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_driver.tensorflow.schedule import Member, Phase, Schedule
from tests.support.extent import examples

pytestmark = pytest.mark.property

ADDRESSES = tuple(f"host{number}:1" for number in range(4))


class Coordinator(RuleBasedStateMachine):
    """What the threads of the shell do, one step at a time."""

    schedule: Schedule[str]

    @initialize(workers=st.integers(0, 3))
    def begin(self, workers: int) -> None:
        self.schedule = Schedule(dict(enumerate(ADDRESSES[:workers])))
        self.waiting: set[str] = set()  # put, and neither finished nor canceled
        self.made = 0
        self.indices: dict[int, str] = dict(enumerate(ADDRESSES[:workers]))
        self.wanted = set(ADDRESSES[:workers])

    def one(self, data: st.DataObject, *phases: Phase) -> Member[str] | None:
        members = [member for member in self.schedule.members if not phases or member.phase in phases]
        return data.draw(st.sampled_from(members)) if members else None

    @rule()
    def put(self) -> None:
        self.made += 1
        self.waiting.add(f"c{self.made}")
        self.schedule.put(f"c{self.made}")

    @rule(address=st.sampled_from(ADDRESSES))
    def add(self, address: str) -> None:
        before = self.schedule.find(address)
        was_stopped = before is not None and before.phase is Phase.STOPPED
        member = self.schedule.add(address)
        self.wanted.add(address)
        if before is None:
            assert member.index not in self.indices, "an index is given twice"
            self.indices[member.index] = address
        assert not was_stopped or member.phase is Phase.JOINING

    @rule(address=st.sampled_from(ADDRESSES))
    def remove(self, address: str) -> None:
        if self.schedule.find(address) is None:
            with pytest.raises(KeyError):
                self.schedule.remove(address)
            return
        member = self.schedule.remove(address)
        if member.phase is Phase.JOINING:
            self.schedule.abandoned(member.index)
        self.wanted.discard(address)
        assert member.phase in (Phase.STOPPING, Phase.STOPPED)

    @rule(data=st.data())
    def told(self, data: st.DataObject) -> None:
        silent = data.draw(st.sets(st.sampled_from(sorted(self.indices) or [0])))
        asked = self.schedule.wanted(silent)
        gone = self.schedule.told(asked)
        assert all(self.indices[index] not in self.wanted for index in gone), "one that is wanted is forgotten"

    @rule(data=st.data(), server=st.sampled_from("st"))
    def connected(self, data: st.DataObject, server: str) -> None:
        member = self.one(data, Phase.JOINING, Phase.LOST)
        if member is None:
            return
        if not member.belongs:
            with pytest.raises(ValueError, match="does not belong"):
                self.schedule.connected(member.index, server)
            return
        self.schedule.connected(member.index, server)
        self.schedule.build(member.index, f"iterator of {member.index}")

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        member = self.one(data)
        if member is None or not member.is_idle:
            return
        could = self.schedule.has_work(member.index)
        ticket = self.schedule.take(member.index)
        assert could == (ticket is not None)
        if ticket is not None:
            assert member.phase is Phase.RUNNING
            assert ticket in self.waiting or ticket == f"iterator of {member.index}"

    @rule(data=st.data(), how=st.sampled_from(["ends", "fails", "is lost", "comes back"]))
    def end(self, data: st.DataObject, how: str) -> None:
        member = self.one(data, Phase.RUNNING, Phase.STOPPING)
        if member is None:
            return
        if member.building is not None:
            self.schedule.built(member.index)
        elif member.in_hand is not None:
            ticket = member.in_hand
            if how == "ends":
                self.schedule.finished(member.index)
                self.waiting.remove(ticket)
            elif how == "fails":
                self.schedule.failed(member.index, RuntimeError(ticket))
                self.waiting.remove(ticket)
            else:
                cancelled = self.schedule.put_back(member.index)
                assert (cancelled is None) == (self.schedule.error is None)
                self.waiting.discard(cancelled or "")
        if how == "is lost":
            was_running = member.phase is Phase.RUNNING
            self.schedule.lost(member.index)
            assert member.phase is (Phase.LOST if was_running else Phase.STOPPED)
            assert not member.to_build

    @precondition(lambda self: self.schedule.error is not None)
    @rule()
    def raise_error(self) -> None:
        if not self.schedule.is_raising:
            self.schedule.begin_raising()
        if self.schedule.in_hand:
            with pytest.raises(ValueError, match="closures are running"):
                self.schedule.end_raising()
            return
        _, cancelled = self.schedule.end_raising()
        self.waiting -= set(cancelled)
        assert not self.waiting

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "schedule"):
            return
        members = self.schedule.members
        in_hand = [member.in_hand for member in members if member.in_hand is not None]
        assert len(in_hand) == len(set(in_hand)) == self.schedule.in_hand
        assert len(in_hand) + self.schedule.waiting == len(self.waiting)
        assert set(in_hand) <= self.waiting
        assert self.schedule.is_done == (not self.waiting)

    @invariant()
    def who_is_wanted_is_there(self) -> None:
        if not hasattr(self, "schedule"):
            return
        members = self.schedule.members
        there = {m.address for m in members if m.phase not in (Phase.STOPPED, Phase.STOPPING)}
        assert there == self.wanted
        assert len({member.address for member in members}) == len(members)
        assert all(self.indices[member.index] == member.address for member in members)
        assert all(member.is_idle for member in members if member.phase in (Phase.STOPPED, Phase.LOST, Phase.JOINING))


TestCoordinator = Coordinator.TestCase
TestCoordinator.settings = settings(max_examples=examples(100))
