"""Which nodes of a torchrun job run together: histories of one job."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.node_messages import (
    Formed,
    Member,
    NodeReply,
    NodeRequest,
    Outcome,
    Saying,
    Standing,
    Terms,
)
from elastic_driver.service.liveness import CUT_S, Liveness
from elastic_driver.service.nodes import (
    FORGET_S,
    STRAGGLER_S,
    Event,
    Job,
    NodeClaimed,
    NodeJoined,
    NodeLeft,
    NodesLost,
    TimePassed,
    explain,
    is_forgotten,
    next_deadline,
    reply_to,
    step,
)

pytestmark = pytest.mark.unit


class History:
    """A job, and what its nodes know."""

    def __init__(self, least: int, most: int, *, grow_now: bool = False, not_before: float = 0.0) -> None:
        self.terms = Terms(least, most, 1.0, grow_now)
        self.job = Job(self.terms, not_before=not_before, empty_at=0.0)
        self.now = 0.0
        self.numbers: dict[str, int] = {}

    def happens(self, event: Event) -> None:
        self.job = step(self.job, event, self.now, "salt")

    def member(self, node: str) -> Member:
        return Member(node, node, "10.0.0.1", 1)

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.happens(NodeJoined(self.member(node), self.terms, self.numbers.get(node, 0)))
        self.hear()

    def hear(self) -> None:
        """All that wait for a place are answered."""
        for known in self.job.nodes.values():
            node = known.member.node
            reply = reply_to(self.job, known, self.numbers.get(node, 0), joins=True)
            if reply.formed is not None and not known.joining:
                self.numbers[node] = reply.formed.number

    def lose(self, *nodes: str) -> None:
        self.happens(NodesLost(nodes))
        self.hear()

    def leave(self, node: str, outcome: Outcome = Outcome.LEFT) -> None:
        self.happens(NodeLeft(node, outcome))
        self.hear()

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.happens(TimePassed())
        self.hear()

    def told(self, node: str, *, joins: bool = False) -> NodeReply:
        known = self.job.nodes.get(node)
        return reply_to(self.job, known, self.numbers.get(node, 0), joins=joins)

    @property
    def ranks(self) -> Sequence[str]:
        return [] if self.job.formed is None else [member.node for member in self.job.formed.members]

    @property
    def number(self) -> int:
        return 0 if self.job.formed is None else self.job.formed.number

    def restart(self, *nodes: str) -> None:
        """Those who are told to, stop their workers and join again."""
        for node in nodes:
            assert self.told(node).standing is Standing.RESTART, node
        self.join(*nodes)


def formed(least: int, most: int, *nodes: str, grow_now: bool = False) -> History:
    history = History(least, most, grow_now=grow_now)
    history.join(*nodes)
    history.after(1.0)
    assert history.number == 1
    return history


def test_a_last_call_after_enough_have_come() -> None:
    history = History(2, 4)
    history.join("a")
    assert history.told("a", joins=True).why == "waiting for nodes: 1 of at least 2 have joined (a)"
    assert next_deadline(history.job) is None
    history.join("b")
    assert (history.number, next_deadline(history.job)) == (0, 1.0)
    history.now = 0.9
    history.join("c")
    assert history.number == 0
    history.now = 1.0
    history.happens(TimePassed())
    assert history.ranks == ["a", "b", "c"]


def test_all_that_there_may_be_are_enough_at_once() -> None:
    history = History(1, 2)
    history.join("a", "b")
    assert history.ranks == ["a", "b"]


def test_who_comes_together_stands_in_natural_order() -> None:
    assert formed(1, 4, "node-10", "node-9", "node-1").ranks == ["node-1", "node-9", "node-10"]


def test_a_failure_restarts_all_and_ranks_stay() -> None:
    history = formed(2, 4, "b", "c", "d")
    history.join("c")
    assert history.told("b") == NodeReply(Standing.RESTART, "node c is restarting its workers", history.job.version)
    assert explain(history.job) == "waiting for 2 nodes to stop their workers (b, d)"
    history.join("a")  # a newcomer, at the restart
    history.restart("d", "b")
    assert (history.number, history.ranks) == (2, ["b", "c", "d", "a"])


def test_newcomers_wait_for_the_next_restart() -> None:
    history = formed(1, 3, "a")
    history.join("b")
    assert history.told("a").standing is Standing.PLACED
    assert history.told("b", joins=True).standing is Standing.SPARE
    history.join("a")
    assert history.ranks == ["a", "b"]


def test_or_enter_at_once() -> None:
    history = formed(1, 2, "a", grow_now=True)
    history.join("b")
    assert history.told("a").why == "node b is joining"
    history.restart("a")
    assert history.ranks == ["a", "b"]
    history.join("c")
    assert history.told("a").standing is Standing.PLACED, "there is no room"


def test_a_spare_takes_over() -> None:
    history = formed(4, 4, "a", "b", "c", "d")
    history.join("e")
    assert history.told("e", joins=True).standing is Standing.SPARE
    history.lose("b")
    assert history.told("a").why == "node b lost"
    history.restart("a", "c", "d")
    assert history.ranks == ["a", "c", "d", "e"]


def test_spares_that_have_waited_longest_are_first() -> None:
    history = formed(2, 2, "a", "b")
    history.join("z", "c")
    history.lose("a")
    history.restart("b")
    assert history.ranks == ["b", "z"]


def test_enough_survivors_do_not_wait_for_others() -> None:
    history = formed(2, 4, "a", "b", "c")
    history.lose("a")
    history.restart("b", "c")
    assert history.ranks == ["b", "c"]


def test_a_loss_is_no_fault_of_those_who_stay() -> None:
    history = formed(1, 3, "a", "b", "c")
    history.join("b")  # its workers have noticed before anybody knew of the loss
    history.lose("a")
    history.restart("c")
    assert history.job.after_loss
    assert reply_to(history.job, next(iter(history.job.nodes.values())), 1, joins=True).after_loss
    history.join("b")
    history.restart("c")
    assert not history.job.after_loss, "this was a failure"


def test_too_few_survivors_wait() -> None:
    history = formed(2, 2, "a", "b")
    history.lose("a")
    history.restart("b")
    assert history.told("b", joins=True).why == "waiting for nodes: 1 of at least 2 have joined (b)"
    history.after(100.0)
    assert history.number == 1
    history.join("c")
    assert history.ranks == ["b", "c"]


def test_one_that_was_gone_on_without_is_told_so() -> None:
    """It was stopped, and knows nothing of it: whatever it says, it is to stop its workers."""
    history = formed(1, 2, "a", "b")
    history.lose("a")
    assert history.told("a").standing is Standing.RESTART
    history.restart("b")
    assert history.ranks == ["b"]
    assert history.told("a").standing is Standing.RESTART
    history.happens(NodeClaimed(history.member("a"), history.terms, Formed(1, "1-salt", (history.member("a"),))))
    assert (history.told("a").standing, history.ranks) == (Standing.RESTART, ["b"])
    history.join("a")
    assert history.told("a", joins=True).standing is Standing.SPARE
    history.join("b")
    assert history.ranks == ["b", "a"]


def test_a_leaving_node_closes_nothing() -> None:
    history = formed(1, 2, "a", "b")
    history.leave("a")
    assert history.told("b").why == "node a left"
    history.restart("b")
    assert history.ranks == ["b"]
    history.join("c")
    history.join("b")
    assert history.ranks == ["b", "c"]


def test_success_ends_the_job_for_its_spares_and_breaks_nothing() -> None:
    history = formed(2, 2, "a", "b")
    history.join("spare")
    history.leave("a", Outcome.SUCCEEDED)
    assert history.told("b").standing is Standing.PLACED
    history.leave("b", Outcome.SUCCEEDED)
    assert history.told("spare", joins=True).standing is Standing.OVER


def test_an_id_is_used_again() -> None:
    history = formed(1, 1, "a")
    history.leave("a", Outcome.SUCCEEDED)
    assert history.job.over
    history.join("b")
    assert (history.number, history.ranks) == (2, ["b"])
    assert history.told("b").standing is Standing.PLACED


def test_with_other_terms_where_nobody_is_left() -> None:
    history = formed(2, 2, "a", "b")
    other = Terms(1, 1)
    with pytest.raises(RendezvousProtocolError, match=r"nnodes 2:2, .* than this one .nnodes 1:1"):
        history.happens(NodeJoined(history.member("c"), other, 0))
    history.leave("a", Outcome.FAILED)
    history.leave("b", Outcome.FAILED)
    history.happens(NodeJoined(history.member("c"), other, 0))
    assert history.ranks == ["c"]


def test_one_that_finished_is_not_waited_for() -> None:
    history = formed(1, 2, "a", "b")
    history.leave("a", Outcome.SUCCEEDED)
    history.join("b")
    assert history.ranks == ["b"]


def test_stragglers_are_gone_on_without() -> None:
    history = formed(1, 3, "a", "b")
    history.join("a")
    assert next_deadline(history.job) == history.now + STRAGGLER_S
    history.after(STRAGGLER_S)
    assert history.ranks == ["a"]
    assert history.told("b").standing is Standing.RESTART
    history.join("b")
    assert history.told("b", joins=True).standing is Standing.SPARE


def test_an_answer_that_was_lost_is_given_again() -> None:
    history = formed(2, 2, "a", "b")
    history.numbers["a"] = 0
    before = history.job
    history.happens(NodeJoined(history.member("a"), history.terms, 0))
    assert history.job == before
    reply = history.told("a", joins=True)
    assert (reply.standing, reply.formed) == (Standing.PLACED, before.formed)


def test_a_service_that_was_started_again_learns_what_there_is() -> None:
    old = formed(2, 3, "a", "b", "c")
    old.join("a")
    old.restart("b", "c")
    assert old.job.formed is not None
    assert old.number == 2
    new = History(2, 3, not_before=3.0)
    new.numbers = dict(old.numbers)
    assert new.told("a").standing is Standing.UNKNOWN
    new.join("b")  # its workers have failed meanwhile
    assert new.number == 0
    new.happens(NodeClaimed(new.member("a"), new.terms, old.job.formed))
    assert new.ranks == ["a", "b", "c"]
    assert new.told("c").why == "node b is restarting its workers"
    new.after(3.0)
    new.restart("a", "c")
    assert (new.number, new.ranks) == (3, ["a", "b", "c"])


def test_it_forms_nothing_before_it_could_learn() -> None:
    history = History(1, 1, not_before=3.0)
    history.join("a")
    assert (history.number, next_deadline(history.job)) == (0, 3.0)
    history.after(3.0)
    assert history.number == 1


def test_nobody_is_left() -> None:
    history = formed(1, 1, "a")
    history.lose("a")
    assert next_deadline(history.job) == history.now + FORGET_S
    assert not is_forgotten(history.job, history.now)
    assert is_forgotten(history.job, history.now + FORGET_S)


def test_who_is_silent() -> None:
    liveness = Liveness(3.0)
    liveness.heard("a", 0.0)
    liveness.heard("b", 1.0)
    assert (liveness.next_deadline(), liveness.take_lost(2.9)) == (3.0, ())
    liveness.heard("a", 2.9)
    assert liveness.take_lost(4.0) == ("b",)
    liveness.cut("a", 4.0)
    assert liveness.next_deadline() == 4.0 + CUT_S
    liveness.heard("a", 4.5)
    assert liveness.take_lost(4.0 + CUT_S) == (), "it has come back"
    liveness.cut("a", 6.0)
    assert liveness.take_lost(6.0 + CUT_S) == ("a",)
    liveness.cut("nobody", 6.0)
    assert (liveness.take_lost(100.0), liveness.next_deadline()) == ((), None)


MEMBER = Member("n", "host", "10.0.0.1", 29500)
REQUEST = NodeRequest(
    Saying.BEAT, "j", MEMBER, Terms(1, 2, 0.5, grow_now=True), 3, Formed(3, "s", (MEMBER,)), 4, 1 << 63, 1.5
)


def test_messages_travel() -> None:
    assert NodeRequest.from_json(REQUEST.to_json()) == REQUEST
    reply = NodeReply(Standing.PLACED, "why", 3, Formed(3, "s", (MEMBER,)))
    assert NodeReply.from_json(reply.to_json()) == reply


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        (b'"job":"j"', b'"job":""'),
        (b'"node":"n"', b'"node":""'),
        (b"29500", b"65536"),
        (b'"least":1', b'"least":3'),
        (b'"least":1', b'"least":0'),
        (b'"last_call_s":0.5', b'"last_call_s":-0.5'),
        (b'"lost_s":3.0', b'"lost_s":0'),
        (b'"wait_s":1.5', b'"wait_s":1e8'),
        (b'"formed":{"number":3', b'"formed":{"number":0'),
        (b'"members":[', b'"members":[{"node":"n","name":"h","address":"10.0.0.2","port":1},'),
        (b'"version":4', b'"version":-1'),
    ],
)
def test_others_are_refused(word: bytes, instead: bytes) -> None:
    body = REQUEST.to_json()
    assert word in body
    with pytest.raises(RendezvousProtocolError):
        NodeRequest.from_json(body.replace(word, instead, 1))
