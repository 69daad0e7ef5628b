"""Drivers that die in the middle of what they do, and agents that come back late, in any order, or not at all.

That a driver which dies at any command, and whose agents are all back at once, brings them to what they would know
otherwise, is part of the audit of every step of every history (``membership_job.Job``). Here steps are made while
agents are away: starts, stops and kills that one of them has never heard of, and that were taken back meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from elastic_driver.core.deadlines import next_deadline
from elastic_driver.core.events import Event, HostsDiscovered, TimerExpired
from elastic_driver.core.state import JobPhase, State
from elastic_driver.hosts import Host
from elastic_driver.words import OnChange
from tests.property.test_membership import Membership, OtherWorkers, host_lists, limits_of_others
from tests.property.test_membership_exhaustive import WORLDS, hosts_of, possible
from tests.support import extent
from tests.support.extent import examples
from tests.support.fakes.mortal_job import MortalJob

pytestmark = pytest.mark.property


class DyingDrivers(Membership):
    """Random worlds whose driver dies now and then."""

    job_of = MortalJob
    job: MortalJob

    @rule(after=st.integers(0, 4))
    def the_driver_dies_in_a_step(self, after: int) -> None:
        self.job.dies_after = after

    @precondition(lambda self: self.job.started)
    @rule()
    def the_driver_dies(self) -> None:
        self.job.die()

    @precondition(lambda self: self.job.away)
    @rule(data=st.data())
    def an_agent_comes_back(self, data: st.DataObject) -> None:
        self.job.come_back(data.draw(st.sampled_from(sorted(self.job.away))))

    def teardown(self) -> None:
        if self.job.audited:
            self.job.fork().all_come_back()
        super().teardown()


# For how many events they are walked, and for how many before a release.
WORLDS_OF_DEATHS = {
    "one host, from the start": (4, 2),
    "two hosts, from the start": (5, 2),
    "shrink and come back": (4, 2),
    "one worker moves": (5, 3),
    "a standby": (3, 2),
    "one is silent": (3, 2),
    "restarted, from the start": (4, 2),
    "restarted, grows and shrinks": (4, 2),
    "restarted, until init()": (4, 2),
}


@pytest.mark.parametrize("name", WORLDS_OF_DEATHS)
def test_every_death_in_every_order_of_events(name: str) -> None:
    """It dies once, after any number of commands of any step. Each host is back at once, or after any event."""
    world = WORLDS[name]
    job = MortalJob(**world.limits)
    job.rereads_each = 50
    if world.trained:
        job.train(*world.answers[0].split(), commits=1)
    frontier = [job]
    if not world.trained:
        frontier = list(_with_deaths(job, HostsDiscovered(hosts_of(world.answers[0])), job.now))
    returns = 0
    whole, before_release = WORLDS_OF_DEATHS[name]
    for _ in range(whole if extent.is_whole else before_release):
        reached = []
        seen: set[tuple[State, float, Hashable]] = set()
        for here in frontier:
            for event in possible(here, world):
                at = next_deadline(here.state) if isinstance(event, TimerExpired) else here.now
                assert at is not None
                for there in _with_deaths(here, event, at):
                    known = there.state, there.now, there.what_is_met()
                    if known not in seen:
                        seen.add(known)
                        late = there.fork()
                        late.all_come_back()
                        returns += late.returns > there.returns
                        if there.state.phase is not JobPhase.ENDED:
                            reached.append(there)
        frontier = reached
    assert returns > 10
    for there in frontier[:: 1 if extent.is_whole else 7]:
        there.fork().cooperate()


def _with_deaths(job: MortalJob, event: Event, at: float) -> Iterator[MortalJob]:
    """The job after an event, and as it is when the driver dies in that step, if it has not died yet."""
    whole = job.fork()
    commands = whole.feed(event, at=at)
    yield whole
    for number in range(len(commands)) if not job.deaths else ():
        cut = job.fork()
        cut.dies_after = number
        cut.feed(event, at=at)
        yield cut


class OfRestarted(DyingDrivers, OtherWorkers):
    """Likewise, with workers that are restarted each round, or until one of them calls ``init()``."""

    @initialize(
        given_limits=limits_of_others().filter(lambda given: given["on_change"] is OnChange.RESTART),
        hosts=host_lists,
        starts=st.booleans(),
    )
    def begin(self, given_limits: dict[str, object], hosts: tuple[Host, ...], *, starts: bool) -> None:  # type: ignore[override]
        self.of_these(given_limits, hosts, starts=starts)


TestDyingDrivers = DyingDrivers.TestCase
TestDyingDrivers.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)

TestOfRestarted = OfRestarted.TestCase
TestOfRestarted.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
