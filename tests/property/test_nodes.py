"""Nodes of a torchrun job come, fail, fall silent, come back and are restarted, in any order.

Each node is a model of torch's agent: it trains in the generation that it was given, hears RESTART at its next poll,
and joins again. Whatever happens: generations have the sizes that the job allows, no node trains in a generation that
has a successor once it has been heard, ranks of those who stay do not change their order, and nobody is stuck forever.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_driver.rendezvous.node_messages import Formed, Member, Outcome, Standing, Terms
from elastic_driver.service.nodes import (
    Event,
    Job,
    NodeClaimed,
    NodeJoined,
    NodeLeft,
    NodesLost,
    TimePassed,
    explain,
    next_deadline,
    reply_to,
    step,
)
from tests.support.extent import examples

pytestmark = pytest.mark.property


class Agent:
    """One agent of torchrun."""

    def __init__(self, name: str, place: int) -> None:
        self.member = Member(f"{name}-{place}", name, "10.0.0.1", 1)
        self.formed: Formed | None = None  # that its workers train in, or trained in last
        self.trains = False
        self.stopped = False

    @property
    def node(self) -> str:
        return self.member.node

    @property
    def number(self) -> int:
        return 0 if self.formed is None else self.formed.number


class NodesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.agents: list[Agent] = []
        self.made = 0

    @initialize(
        least=st.integers(1, 3), more=st.integers(0, 2), grow_now=st.booleans(), not_before=st.sampled_from([0.0, 3.0])
    )
    def begin(self, least: int, more: int, grow_now: bool, not_before: float) -> None:
        self.terms = Terms(least, least + more, 1.0, grow_now)
        self.job = Job(self.terms, not_before=not_before, empty_at=0.0)

    # --- what happens ----------------------------------------------------------------------------------------------

    def happens(self, event: Event) -> None:
        before = self.job
        self.job = step(before, event, self.now, f"{self.made}")
        formed = self.job.formed
        if formed is not before.formed and formed is not None and not isinstance(event, NodeClaimed):
            self.check_new(before, formed)
        if (formed, self.job.broken, self.job.over) != (before.formed, before.broken, before.over):
            assert self.job.version > before.version, "nobody would be told"

    def check_new(self, before: Job, formed: Formed) -> None:
        assert self.terms.least <= len(formed.members) <= self.terms.most
        assert formed.number > (0 if before.formed is None else before.formed.number)
        asked = set(self.job.nodes)
        assert {member.node for member in formed.members} <= asked, "one that is not there"
        if before.formed is not None:
            old = [member.node for member in before.formed.members]
            ranks = {node.member.node: node.rank for node in before.nodes.values()}
            stay = [member.node for member in formed.members if ranks.get(member.node) is not None]
            assert stay == sorted(stay, key=old.index), "those who stay keep their order"
            assert [member.node for member in formed.members][: len(stay)] == stay
        trains = {agent.node for agent in self.agents if agent.trains and not agent.stopped}
        assert not trains & {member.node for member in formed.members}, "one that trains was given a new place"

    @rule(name=st.sampled_from(["node-2", "node-10", "x"]))
    def comes(self, name: str) -> None:
        if len(self.agents) < 6:
            self.made += 1
            agent = Agent(name, self.made)
            self.agents.append(agent)
            self.join(agent)

    def join(self, agent: Agent) -> None:
        agent.trains = False
        self.happens(NodeJoined(agent.member, self.terms, agent.number))
        self.answer()

    def answer(self) -> None:
        """Those who wait for a place are answered."""
        known = self.job.nodes
        for agent in list(self.agents):
            if agent.trains or agent.stopped:
                continue
            reply = reply_to(self.job, known.get(agent.node), agent.number, joins=True)
            if reply.standing is Standing.PLACED:
                assert reply.formed is not None
                assert reply.formed.number > agent.number
                agent.formed, agent.trains = reply.formed, True
            elif reply.standing is Standing.OVER:
                self.agents.remove(agent)
                self.happens(NodeLeft(agent.node, Outcome.LEFT))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def workers_fail(self, data: st.DataObject) -> None:
        agent = data.draw(st.sampled_from(self.agents))
        if agent.trains and not agent.stopped:
            self.join(agent)

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def leaves(self, data: st.DataObject, outcome: Outcome) -> None:
        agent = data.draw(st.sampled_from(self.agents))
        if not agent.stopped:
            self.agents.remove(agent)
            self.happens(NodeLeft(agent.node, outcome))
            self.answer()

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), dies=st.booleans())
    def falls_silent(self, data: st.DataObject, dies: bool) -> None:
        agent = data.draw(st.sampled_from(self.agents))
        if dies:
            self.agents.remove(agent)
        else:
            agent.stopped = True
        self.happens(NodesLost((agent.node,)))
        self.answer()

    @precondition(lambda self: any(agent.stopped for agent in self.agents))
    @rule()
    def goes_on(self) -> None:
        for agent in self.agents:
            if agent.stopped:
                agent.stopped = False
                if agent.trains:
                    self.poll(agent)
                else:
                    self.join(agent)

    def poll(self, agent: Agent) -> None:
        assert agent.formed is not None
        known = self.job.nodes
        reply = reply_to(self.job, known.get(agent.node), agent.number, joins=False)
        if reply.standing is Standing.UNKNOWN:
            self.happens(NodeClaimed(agent.member, self.terms, agent.formed))
            known = self.job.nodes
            reply = reply_to(self.job, known.get(agent.node), agent.number, joins=False)
        if reply.standing is Standing.RESTART:
            self.join(agent)
        else:
            assert reply.standing is Standing.PLACED
            assert self.job.formed is not None
            assert agent.number == self.job.formed.number

    @rule()
    def all_poll(self) -> None:
        for agent in list(self.agents):
            if agent in self.agents and agent.trains and not agent.stopped:
                self.poll(agent)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.happens(TimePassed())
        self.answer()

    @rule()
    def the_service_is_started_again(self) -> None:
        """It knows nothing; those who train say so within the time that it forms nothing."""
        self.job = Job(self.terms, not_before=self.now + 3.0, empty_at=self.now)
        for agent in list(self.agents):
            if not agent.stopped:
                if agent.trains:
                    self.poll(agent)
                else:
                    self.join(agent)

    # --- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def the_state_makes_sense(self) -> None:
        if not hasattr(self, "job"):
            return
        job = self.job
        assert explain(job)
        nodes = job.nodes.values()
        assert [node.member.node for node in nodes] == list(job.nodes)
        joining = {node for node in nodes if node.joining}
        ranked = {node for node in nodes if node.rank is not None}
        assert (job.joining, job.ranked, job.awaited) == (len(joining), len(ranked), len(ranked - joining))
        ranks = [node.rank for node in job.nodes.values() if node.rank is not None]
        assert len(set(ranks)) == len(ranks)
        due = next_deadline(job)
        assert due is None or due > self.now or job.empty_at is not None, "a time limit that is over was not seen to"
        assert (job.empty_at is None) == bool(job.nodes)

    @invariant()
    def two_halves_never_train(self) -> None:
        """Once all that can speak have been told, those who train are in one generation."""
        if not hasattr(self, "job") or self.job.formed is None:
            return
        awake = [agent for agent in self.agents if agent.trains and not agent.stopped]
        known = self.job.nodes
        content = [
            agent.number
            for agent in awake
            if reply_to(self.job, known.get(agent.node), agent.number, joins=False).standing is Standing.PLACED
        ]
        assert len(set(content)) <= 1

    def teardown(self) -> None:
        """When nothing happens any more but polls and time, whoever can train does."""
        if not hasattr(self, "job") or self.job.over:
            return
        self.goes_on()
        for _ in range(6):
            self.time_passes(50.0)
            self.all_poll()
        if self.job.over:
            return
        training = [agent for agent in self.agents if agent.trains]
        if len(self.agents) >= self.terms.least and not self.job.finished:
            assert training, explain(self.job)


NodesMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestNodes = NodesMachine.TestCase
