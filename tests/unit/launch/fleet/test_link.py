"""When an agent counts as lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Bye,
    Exited,
    Finished,
    Kill,
    Levels,
    Output,
    Spared,
    WarmUp,
    Warning,
    worker_named,
)
from elastic_driver.system.keeping import Keeping
from tests.support.fakes.fleet_fakes import AGENT_TIMEOUT_S, HOST_TIMEOUT_S, FakeAgent, facts
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

LEVELS = Levels([], 0, 0)
A, B = WorkerId("a", 0, 0), WorkerId("a", 1, 0)


class Owner:
    """Takes what an agent says."""

    keepings: Sequence[Keeping] = ()
    counts_from = -math.inf

    def __init__(self) -> None:
        self.said: list[AgentMessage] = []
        self.lost: list[str] = []
        self.done: set[WorkerId] = set()  # whose orders are carried out
        self.silent: list[float] = []  # when, by the loop's clock
        self.heard: list[float] = []
        self.link = AgentLink(facts("a"), self, agent_timeout_s=AGENT_TIMEOUT_S, host_timeout_s=HOST_TIMEOUT_S)
        self.agent = FakeAgent(self.link)
        self.beating: asyncio.Task[None] | None = None

    def take(self, link: AgentLink, message: AgentMessage) -> None:
        self.said.append(message)
        if isinstance(message, Exited | Spared):
            self.done.add(worker_named(message.worker))

    def link_silent(self, link: AgentLink, silent_s: float) -> None:
        assert silent_s >= HOST_TIMEOUT_S
        self.silent.append(asyncio.get_running_loop().time())

    def link_heard(self, link: AgentLink) -> None:
        self.heard.append(asyncio.get_running_loop().time())

    def link_lost(self, link: AgentLink, why: str) -> None:
        self.lost.append(why)

    def link_back(self, link: AgentLink) -> None:
        """See LinkOwner."""

    def kill(self, worker: WorkerId, *, takes_s: float = 0.0) -> None:
        """It is told to kill a worker, and may take so long."""
        self.link.send(Kill(worker.key, 0.0, exits=False))
        self.link.overdue(f"kill worker {worker}", lambda: worker in self.done, takes_s=takes_s)

    def lives(self) -> None:
        """From now on it is heard."""

        async def beat() -> None:
            while True:
                self.agent.beat()
                await asyncio.sleep(0.5)

        self.beating = asyncio.create_task(beat())

    def vanishes(self) -> None:
        """Neither it nor its machine says anything any more."""
        self.is_stopped()
        self.agent.vanishes()

    def is_stopped(self) -> None:
        """It says nothing any more; its kernel acknowledges."""
        assert self.beating is not None
        self.beating.cancel()


class Kept(Owner):
    """An owner of whose messages something comes that is not kept at once: of warnings at one place, of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.screen = Keeping(), Keeping()
        self.link = AgentLink(
            facts("a"),
            self,
            agent_timeout_s=AGENT_TIMEOUT_S,
            host_timeout_s=HOST_TIMEOUT_S,
        )
        self.keepings = (self.disk, self.screen)
        self.agent = FakeAgent(self.link)

    def take(self, link: AgentLink, message: AgentMessage) -> None:
        super().take(link, message)
        match message:
            case Warning("both"):
                self.disk.comes()
                self.screen.comes()
            case Warning("no agent may say that"):
                self.disk.comes()
                raise RendezvousProtocolError("no agent may say that")
            case Warning():
                self.disk.comes()
            case Output():
                self.screen.comes()

    async def is_told(self) -> tuple[int, int]:
        """What the agent was told last of what is taken, and of what is kept."""
        await asyncio.sleep(1)
        frame = self.agent.transport.frames[-1]
        assert frame.kept == self.link.kept
        return frame.seen, frame.kept


def test_what_is_not_kept_yet_is_taken_all_the_same() -> None:
    """The disk hangs, then the terminal; messages behind them are kept when those before them are."""

    async def main(loop: VirtualLoop) -> None:
        owner = Kept()
        owner.agent.say(Bye(), Warning("1"), Output(A.key, "stdout", b""), Bye(), Warning("both"))
        owner.agent.say(Bye())
        assert await owner.is_told() == (6, 1)
        owner.screen.keep(1)
        assert await owner.is_told() == (6, 1)
        owner.disk.keep(1)
        assert await owner.is_told() == (6, 4)
        owner.screen.keep(2)
        assert await owner.is_told() == (6, 4)
        owner.disk.keep(2)
        assert await owner.is_told() == (6, 6)
        owner.link.close("that was it")

    run_virtually(main)


def test_an_agent_that_comes_back_while_a_write_is_under_way_goes_on_from_what_was_taken() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Kept()
        owner.agent.say(Warning("1"), Bye())
        owner.agent.hang_up()
        owner.disk.keep(0)
        owner.agent.connect()
        assert (owner.link.seen, owner.link.kept) == (2, 0)
        owner.agent.say(Warning("2"))
        owner.agent.hang_up()
        owner.disk.keep(1)  # while there is no connection
        owner.agent.connect()
        assert await owner.is_told() == (3, 2)
        owner.agent.hang_up()
        await asyncio.sleep(2)
        assert owner.link.is_lost
        owner.disk.keep(2)  # that concerns nobody any more

    run_virtually(main)


def test_what_has_come_of_a_message_that_may_not_be_said_is_not_kept_either() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Kept()
        owner.agent.say(Bye(), Warning("no agent may say that"))
        assert (owner.link.seen, owner.link.kept) == (2, 1)

    run_virtually(main)


def test_a_second_order_is_watched_like_the_first() -> None:
    """A worker was killed in time; soon after its agent is stopped, and is told to kill another."""

    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        owner.kill(A)
        await asyncio.sleep(0.1)
        owner.agent.say(Exited(A.key, -9, []), Finished(A.key))
        await asyncio.sleep(1)
        owner.is_stopped()
        await asyncio.sleep(4)
        owner.kill(B)
        await asyncio.sleep(AGENT_TIMEOUT_S + 1.5)
        assert owner.lost == ["its agent did not kill worker a[1]: it is stopped, or its machine hangs"]

    run_virtually(main)


def test_an_order_is_watched_until_it_is_carried_out() -> None:
    """A process that the kernel holds is no fault of its agent's; that agent may be stopped later."""

    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        owner.kill(A)
        await asyncio.sleep(3 * AGENT_TIMEOUT_S)
        assert owner.lost == []
        owner.is_stopped()
        await asyncio.sleep(2 * AGENT_TIMEOUT_S)
        assert len(owner.lost) == 1

    run_virtually(main)


def test_an_order_may_take_its_time() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.kill(A, takes_s=30.0)
        await asyncio.sleep(30.0 + AGENT_TIMEOUT_S)
        assert owner.lost == []
        await asyncio.sleep(1.5)
        assert len(owner.lost) == 1

    run_virtually(main)


def test_who_is_spared_was_not_overdue() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.kill(A)
        await asyncio.sleep(0.1)
        owner.agent.say(Spared(A.key))
        await asyncio.sleep(2 * AGENT_TIMEOUT_S)
        assert owner.lost == []

    run_virtually(main)


def test_a_driver_that_was_stopped_reads_before_it_judges() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        owner.kill(A)
        await asyncio.sleep(0.1)
        loop.stand_still(100)
        await asyncio.sleep(0.01)
        # What the agent has said meanwhile is read now.
        owner.agent.say(Exited(A.key, -9, []))
        await asyncio.sleep(2 * AGENT_TIMEOUT_S)
        assert owner.lost == []

    run_virtually(main)


def test_a_driver_that_was_stopped_lets_an_agent_come_back() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.agent.hang_up()
        await asyncio.sleep(0.3)
        loop.stand_still(100)
        await asyncio.sleep(0.01)
        assert owner.lost == []
        owner.agent.connect()
        await asyncio.sleep(5)
        assert owner.lost == []
        owner.agent.hang_up()
        await asyncio.sleep(1.1)
        assert len(owner.lost) == 1

    run_virtually(main)


def test_what_was_sent_meanwhile_comes_once_when_an_agent_is_back() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.link.send(WarmUp())
        await asyncio.sleep(0.1)
        assert owner.agent.heard() == [WarmUp()]
        owner.agent.hang_up()
        owner.link.send(WarmUp())
        owner.agent.connect()
        await asyncio.sleep(0.1)
        assert owner.agent.heard() == [WarmUp()] * 2
        owner.link.close("the test is over")

    run_virtually(main)


def test_a_wrong_number_breaks_the_connection_and_no_more() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.agent.say(Warning("one"))
        owner.agent._last = 7
        owner.agent.say(Warning("eight"))
        assert owner.agent.transport.is_closed
        assert owner.said == [Warning("one")]
        owner.agent._seen = 99
        with pytest.raises(RendezvousProtocolError, match="cannot accept an acknowledgment of message"):
            owner.agent.connect()
        owner.agent.connection.abort("as the admission does")
        await asyncio.sleep(1.1)
        assert len(owner.lost) == 1

    run_virtually(main)


def test_texts_that_no_log_can_be_written_with_are_made_sound() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.agent.say(Warning("half \ud83d, whole \U0001f600"))
        assert owner.said == [Warning("half ?, whole \U0001f600")]
        owner.link.close("the test is over")

    run_virtually(main)


def test_a_host_is_silent_at_the_time_and_not_at_the_next_look() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        await asyncio.sleep(3.3)
        owner.vanishes()
        gone_at = loop.time()
        await asyncio.sleep(HOST_TIMEOUT_S - 0.1)
        assert owner.silent == []
        await asyncio.sleep(0.2)
        (silent_at,) = owner.silent
        assert 0 <= silent_at - gone_at - HOST_TIMEOUT_S <= 0.05
        # Nobody gives it up: it is lost when its lease has ended, as ever.
        await asyncio.sleep(AGENT_TIMEOUT_S + 1 - HOST_TIMEOUT_S - 0.5)
        assert owner.lost == []
        await asyncio.sleep(1)
        assert len(owner.lost) == 1
        assert (len(owner.silent), owner.heard) == (1, [])

    run_virtually(main)


def test_silence_counts_from_when_the_driver_is_sure_of_its_job() -> None:
    """While it is not, its agents may be told that nobody drives, and keep their workers for that."""

    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        await asyncio.sleep(3.3)
        owner.counts_from = math.inf
        owner.vanishes()
        await asyncio.sleep(3 * AGENT_TIMEOUT_S)
        assert (owner.silent, owner.lost) == ([], [])
        owner.counts_from = loop.time()
        await asyncio.sleep(AGENT_TIMEOUT_S + 0.9)
        assert (len(owner.silent), owner.lost) == (1, [])
        await asyncio.sleep(0.7)
        assert len(owner.lost) == 1

    run_virtually(main)


def test_an_agent_that_may_have_gone_to_another_driver_is_not_lost() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        owner.kill(A)
        owner.counts_from = math.inf
        await asyncio.sleep(0.3)
        owner.agent.hang_up()
        await asyncio.sleep(3 * AGENT_TIMEOUT_S)
        assert owner.lost == []
        owner.counts_from = loop.time()
        await asyncio.sleep(0.5)
        assert owner.lost == []
        await asyncio.sleep(2.0)
        assert len(owner.lost) == 1

    run_virtually(main)


def test_neither_a_stopped_agent_nor_one_whose_acknowledgements_are_not_known_is_silent() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        owner.is_stopped()
        await asyncio.sleep(3 * AGENT_TIMEOUT_S)
        owner.agent.vanishes()
        owner.lives()
        await asyncio.sleep(3 * AGENT_TIMEOUT_S)
        assert (owner.silent, owner.lost) == ([], [])
        owner.link.close("the test is over")

    run_virtually(main)


@pytest.mark.parametrize("how", ["a word", "an acknowledgement", "another connection"])
def test_a_silent_host_is_heard_again(how: str) -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        owner.vanishes()
        await asyncio.sleep(HOST_TIMEOUT_S + 1)
        match how:
            case "a word":
                owner.agent.beat()
                assert len(owner.heard) == 1
            case "an acknowledgement":
                owner.agent.is_back()
            case "another connection":
                owner.agent.hang_up()
                owner.agent.connect()
        await asyncio.sleep(0.6)
        assert (len(owner.silent), len(owner.heard)) == (1, 1)
        owner.agent.is_back()
        owner.lives()
        owner.vanishes()
        await asyncio.sleep(HOST_TIMEOUT_S + 0.1)
        assert (len(owner.silent), owner.lost) == (2, [])
        owner.link.close("the test is over")

    run_virtually(main)


def test_a_host_at_which_nothing_arrives_is_silent_though_it_is_heard() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        await asyncio.sleep(3.3)
        owner.agent.hears_nothing()
        await asyncio.sleep(HOST_TIMEOUT_S - 0.1)
        assert owner.silent == []
        await asyncio.sleep(0.2)
        assert len(owner.silent) == 1
        await asyncio.sleep(AGENT_TIMEOUT_S - HOST_TIMEOUT_S)
        assert (len(owner.silent), owner.heard) == (1, [])
        await asyncio.sleep(1.5)
        assert owner.lost == ["nothing has reached it for 16 s"]

    run_virtually(main)


def test_a_driver_that_was_stopped_takes_nobody_for_silent() -> None:
    """Neither it nor, in a machine that was frozen, its kernel has heard what came; a moment later they have."""

    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        await asyncio.sleep(0.3)
        owner.is_stopped()
        owner.agent.vanishes()
        loop.stand_still(100)
        await asyncio.sleep(0.5)
        owner.agent.beat()
        await asyncio.sleep(HOST_TIMEOUT_S - 0.1)
        assert (owner.silent, owner.lost) == ([], [])
        await asyncio.sleep(0.2)
        assert len(owner.silent) == 1
        owner.link.close("the test is over")

    run_virtually(main)


def test_one_that_may_be_silent_soon_is_in_doubt_once_and_its_owner_hears_how_that_ends() -> None:
    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        assert not owner.link.is_in_doubt()
        owner.agent.vanishes()
        await asyncio.sleep(1.4)
        assert not owner.link.is_in_doubt()
        await asyncio.sleep(0.2)
        assert [owner.link.is_in_doubt(), owner.link.is_in_doubt()] == [True, False]
        owner.agent.beat()
        assert len(owner.heard) == 1
        await asyncio.sleep(2)
        assert owner.link.is_in_doubt()
        await asyncio.sleep(HOST_TIMEOUT_S - 2 + 0.1)
        assert (len(owner.silent), len(owner.heard)) == (1, 1)
        assert not owner.link.is_in_doubt()
        owner.link.close("the test is over")

    run_virtually(main)


def test_who_is_given_up_is_cut_off_at_once() -> None:
    """What was sent would only keep the connection from ending."""

    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.kill(A)
        owner.agent.vanishes()
        await asyncio.sleep(HOST_TIMEOUT_S + 0.1)
        owner.link.give_up("a test")
        assert owner.agent.transport.is_closed
        assert (owner.lost, owner.link.is_lost) == (["a test"], True)
        await asyncio.sleep(AGENT_TIMEOUT_S)
        assert len(owner.lost) == 1

    run_virtually(main)


def test_for_how_long_it_works_begins_with_each_connection() -> None:
    """What its workers have said comes after that, not with it."""

    async def main(loop: VirtualLoop) -> None:
        owner = Owner()
        owner.lives()
        await asyncio.sleep(5)
        assert owner.link.works_for_s == pytest.approx(5)
        owner.agent.hang_up()
        assert owner.link.works_for_s == 0.0
        await asyncio.sleep(0.5)
        owner.agent.connect()
        await asyncio.sleep(0.2)
        assert owner.link.works_for_s == pytest.approx(0.2)
        owner.link.close("the test is over")

    run_virtually(main)


def away() -> tuple[Owner, AgentLink, list[str]]:
    """Of an agent of another driver before this one; and when it is waited for no longer."""
    owner, due = Owner(), list[str]()
    link = AgentLink(facts("b"), owner, agent_timeout_s=AGENT_TIMEOUT_S, host_timeout_s=HOST_TIMEOUT_S, is_away=True)
    link.wait_for_return(100.0, lambda: due.append("due"))
    return owner, link, due


def test_an_agent_that_is_away_is_told_nothing_and_not_lost_by_a_connection_that_breaks() -> None:
    async def main(_: VirtualLoop) -> None:
        owner, link, due = away()
        link.send(WarmUp())
        agent = FakeAgent(link)
        assert not link.connected
        agent.hang_up()
        await asyncio.sleep(50)
        assert owner.lost == due == []
        link.begin_anew()
        again = FakeAgent(link)
        link.send(WarmUp())
        again.say(LEVELS)
        assert owner.said == [LEVELS]
        link.returned(LEVELS)
        link.send(WarmUp())
        await asyncio.sleep(0.1)
        assert again.heard() == [WarmUp()], "and not what was ordered before"
        await asyncio.sleep(100)
        assert due == []
        with pytest.raises(RendezvousProtocolError, match="has already obeyed this driver"):
            link.begin_anew()
        again.hang_up()
        await asyncio.sleep(2)
        assert len(owner.lost) == 1, "as any other now"

    run_virtually(main)


def test_an_agent_that_is_back_and_says_nothing_is_lost() -> None:
    async def main(_: VirtualLoop) -> None:
        owner, link, due = away()
        FakeAgent(link)
        await asyncio.sleep(AGENT_TIMEOUT_S + 1.5)
        assert owner.lost == ["its agent did not report its state: it is stopped, or its machine hangs"]
        await asyncio.sleep(100)
        assert due == []

    run_virtually(main)


def test_one_that_does_not_come_back_is_waited_for_so_long() -> None:
    async def main(_: VirtualLoop) -> None:
        owner, _link, due = away()
        await asyncio.sleep(101)
        assert due == ["due"]
        assert owner.lost == []

    run_virtually(main)
