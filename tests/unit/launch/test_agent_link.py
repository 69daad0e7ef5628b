"""The agent's connection to its driver: when another is dialled beside it, and used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.launch.agent import link as link_module
from elastic_driver.launch.agent.agent import Agent, AgentEnd
from elastic_driver.launch.agent.link import Driver, DriverLink, DriverLostError, RefusedError
from elastic_driver.launch.agent.pauses import PausesBeside, ask_again_after_s
from elastic_driver.rendezvous.agent_messages import AgentMessage, Bootstrap, Refused, Welcome
from elastic_driver.rendezvous.frames import Frame
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit


class Owner:
    """Is told of nothing here."""

    def not_welcomed_yet(self, why: str, left_s: float) -> None: ...

    def welcomed(self, welcome: Welcome) -> None: ...

    def take(self, message: AgentMessage) -> None: ...

    def seen(self) -> None: ...

    def alone(self) -> None: ...

    def taken_over(self, untold: Sequence[AgentMessage]) -> None: ...


class Connection:
    """What a link knows of one: for how long it does not work, and when something came last."""

    def __init__(self, unheard_s: float, silent_s: float) -> None:
        self.unheard_s = unheard_s
        self.heard_at = asyncio.get_running_loop().time() - silent_s
        self.aborted = False

    def abort(self, why: str) -> None:
        self.aborted = True


class Looked:
    """A link that looks at a connection for a while, with others to dial."""

    def __init__(self, unheard_s: float, silent_s: float, *, works: bool = True) -> None:
        bootstrap = Bootstrap(("http://127.0.0.1:1",), "ticket 00", "00" * 32, "a")
        self.link: Any = DriverLink(bootstrap, Owner())
        self.works = works
        self.dialled: list[Any] = []
        self.trying = self.most_trying = 0
        self.line = self.link._line = self.made(unheard_s, silent_s)
        self.link._connect = self.connect

    def made(self, unheard_s: float, silent_s: float) -> Any:
        line: Any = link_module._Line("http://127.0.0.1:1")
        connection: Any = Connection(unheard_s, silent_s)
        line.met = link_module.AuthenticatedConnection(connection, None)  # type: ignore[arg-type]
        return line

    async def connect(self, url: str) -> Any:
        self.trying += 1
        self.most_trying = max(self.most_trying, self.trying)
        try:
            self.dialled.append(self.made(0.0, 0.0))
            if not self.works:
                await asyncio.Event().wait()
            return self.dialled[-1]
        finally:
            self.trying -= 1

    async def look(self, until: Callable[[], bool]) -> None:
        looking = asyncio.create_task(self.link._look(self.line))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(150):
                while not until():
                    await asyncio.sleep(0.01)
        looking.cancel()
        await asyncio.wait([looking])


def test_one_that_is_silent_both_ways_is_replaced() -> None:
    async def main(_: VirtualLoop) -> None:
        looked = Looked(unheard_s=2.0, silent_s=2.0)
        await looked.look(looked.line.broken.done)
        assert looked.link._next is looked.dialled[0]

    run_virtually(main)


def test_one_on_which_nothing_comes_is_replaced_though_the_drivers_kernel_acknowledges() -> None:
    """What the driver has sent was lost, and TCP sends it again in half a minute; what we send arrives."""

    async def main(_: VirtualLoop) -> None:
        looked = Looked(unheard_s=0.1, silent_s=4.0)
        await looked.look(looked.line.broken.done)
        assert looked.link._next is looked.dialled[0]
        assert len(looked.dialled) == 1

    run_virtually(main)


def test_a_driver_that_is_stopped_is_dialled_one_at_a_time_and_less_and_less_often() -> None:
    """It may only be busy, with a thousand other agents that find it silent, too."""

    async def main(loop: VirtualLoop) -> None:
        looked = Looked(unheard_s=0.1, silent_s=4.0, works=False)
        looked.link._pauses_beside = PausesBeside(3.0, lambda: 1.0)
        ends = loop.time() + 50.0
        await looked.look(lambda: loop.time() > ends)
        assert (len(looked.dialled), looked.most_trying) == (5, 1)  # after 0, 3, 9, 21 and 45 seconds
        assert looked.link._line is looked.line
        assert not looked.line.broken.done()

    run_virtually(main)


def test_an_agent_that_stood_still_itself_dials_nobody_before_it_has_read_what_came() -> None:
    async def main(loop: VirtualLoop) -> None:
        looked = Looked(unheard_s=0.1, silent_s=0.0)
        looking = asyncio.create_task(looked.link._look(looked.line))
        await asyncio.sleep(0.1)
        loop.stand_still(10.0)
        loop.call_later(0.1, lambda: setattr(looked.line.met.connection, "heard_at", loop.time()))
        await asyncio.sleep(2.0)
        looking.cancel()
        assert looked.dialled == []

    run_virtually(main)


def test_an_agent_that_is_late_each_time_replaces_a_dead_connection_all_the_same() -> None:
    async def main(loop: VirtualLoop) -> None:
        looked = Looked(unheard_s=2.0, silent_s=2.0)
        looked.line.met.connection.unheard_s = 2.0

        async def is_busy() -> None:
            while True:
                await asyncio.sleep(0.1)
                loop.stand_still(1.2)

        busy = asyncio.create_task(is_busy())
        looked.works = False  # nobody answers for now
        ends = loop.time() + 5.0
        await looked.look(lambda: loop.time() > ends)
        busy.cancel()
        assert looked.most_trying > 1

    run_virtually(main)


def test_one_that_works_is_left_alone() -> None:
    async def main(loop: VirtualLoop) -> None:
        looked = Looked(unheard_s=0.4, silent_s=0.6)
        ends = loop.time() + 2.0
        await looked.look(lambda: loop.time() > ends)
        assert looked.dialled == []

    run_virtually(main)


@pytest.mark.parametrize(
    ("epoch", "name", "known", "may"),
    [
        (0, "", (0, ""), True),
        (0, "a", (0, ""), True),
        (0, "a", (0, "a"), True),
        (0, "b", (0, "a"), False),
        (2, "b", (1, "a"), True),
        (1, "b", (2, "a"), False),
        (1, "a", (2, "a"), False),
        (1, "b", (1, "a"), False),
        (0, "b", (1, "a"), False),
        (1, "b", (0, "a"), True),
    ],
)
def test_whom_an_agent_may_obey(*, epoch: int, name: str, known: tuple[int, str], may: bool) -> None:
    assert Driver(epoch, name).may_follow(Driver(*known)) is may


@pytest.mark.parametrize("is_over", [True, False])
def test_a_refusal_says_whether_the_job_is_over(*, is_over: bool) -> None:
    """What its sentence says is for people."""

    async def main() -> None:
        looked = Looked(unheard_s=0.0, silent_s=0.0)
        answered = looked.link._answered = asyncio.get_running_loop().create_future()
        refused = Refused("perhaps the job is over", is_over=is_over)
        looked.link._received(looked.line, Frame(0, 0, 0, (refused.message(),)))
        with pytest.raises(RefusedError, match="perhaps the job is over") as raised:
            await answered
        assert raised.value.is_over is is_over
        agent = Agent(Bootstrap(("http://127.0.0.1:1",), "ticket 00", "00" * 32, "a"))
        agent._refused(str(raised.value), is_over=raised.value.is_over)
        end = await agent._ended
        assert end.how is (AgentEnd.TOO_LATE if is_over else AgentEnd.REFUSED)

    asyncio.run(main())


def test_silent_addresses_together_take_no_longer_than_the_lease() -> None:
    """Else workers would train on when the driver has given their host up."""

    async def main(loop: VirtualLoop) -> None:
        urls = tuple(f"https://10.0.0.{number}:1" for number in range(1, 5))
        link: Any = DriverLink(Bootstrap(urls, "ticket 00", "00" * 32, "a", first_s=15.0), Owner())
        tried: list[str] = []

        async def try_(url: str) -> None:
            tried.append(url)
            await asyncio.Event().wait()

        link._try = try_
        began = loop.time()
        with pytest.raises(DriverLostError):
            await link.keep()
        assert tried == list(urls[:2])
        assert loop.time() - began == pytest.approx(15.0, abs=0.2)

    run_virtually(main)


@pytest.mark.parametrize("comes", ["at the last moment", "too late", "never"])
def test_a_welcome_at_the_last_moment_counts(comes: str) -> None:
    """Else the driver would find the connection cut on which it has just welcomed this agent, and give it up."""

    async def main(loop: VirtualLoop) -> None:
        looked = Looked(unheard_s=0.0, silent_s=0.0)
        link = looked.link
        link._hello = lambda connection: Refused("stands for a hello")
        tried = link._line = looked.made(0.0, 0.0)
        tried.met.connection.write = lambda *frame: None
        link._next = tried

        async def try_() -> Any:
            async with asyncio.timeout(None) as link._trying:
                return await link._try("http://127.0.0.1:1")

        trying = asyncio.create_task(try_())
        await asyncio.sleep(1.0)

        # All in one turn of the loop.
        if comes == "at the last moment":
            loop.call_soon(link._answered.set_result, None)
        link._trying.reschedule(loop.time())
        if comes == "too late":
            loop.call_soon(lambda: link._answered.done() or link._answered.set_result(None))
        await asyncio.wait([trying])
        if comes == "at the last moment":
            assert trying.result() is link._line is tried
            assert not tried.met.connection.aborted
        else:
            assert isinstance(trying.exception(), TimeoutError)
            assert link._line is None
            assert tried.met.connection.aborted

    run_virtually(main)


def test_an_earlier_drivers_refusal_is_not_obeyed() -> None:
    async def main() -> None:
        looked = Looked(unheard_s=0.0, silent_s=0.0)
        looked.link.driver = Driver(4, "a")
        answered = looked.link._answered = asyncio.get_running_loop().create_future()
        for word in (Refused("its host was silent for too long", epoch=3), Refused("it has no journal")):
            with pytest.raises(RendezvousProtocolError, match="an earlier driver of the job answered"):
                looked.link._received(looked.line, Frame(0, 0, 0, (word.message(),)))
        assert not answered.done()

    asyncio.run(main())


def test_a_driver_that_somebody_listens_for_is_asked_for_less_and_less_often() -> None:
    """But often enough for a lease, and at once as often as ever when its machine refuses."""
    pauses = [0.5]
    for _ in range(4):
        pauses.append(ask_again_after_s(pauses[-1], 15.0, is_refused=False))
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert ask_again_after_s(pauses[-1], 15.0, is_refused=True) == 0.5
    assert ask_again_after_s(0.5, 1.0, is_refused=False) == 0.5


def test_pauses_beside_are_short_again_when_nothing_was_dialled_for_long() -> None:
    pauses = PausesBeside(3.0, lambda: 1.5)
    now, dialled = 100.0, list[float]()
    while now < 200.0:
        if pauses.is_over(now):
            dialled.append(now)
        now += 0.5
    assert dialled == [100.0, 104.5, 113.5, 131.5, 167.5]
    assert pauses.is_over(300.0)
    assert pauses.is_over(304.5)
