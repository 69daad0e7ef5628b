"""One worker's port: what it asks over real connections, what its agent then asks for it, and what it is answered."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pickle
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from elastic_driver.dialects.horovod import ENV_PORT, place_variables
from elastic_driver.errors import RendezvousProtocolError, StaleRoundError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.agent.horovod import port as port_module
from elastic_driver.launch.agent.horovod.port import HorovodPort, PortContext
from elastic_driver.rendezvous.messages import (
    JobOver,
    NextRoundReply,
    NextRoundRequest,
    Removed,
    RoundAssignment,
    RunningReport,
)
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Backend, ReadyCause

pytestmark = pytest.mark.integration
WORKER = WorkerId("h", 1, 0)
SLOT, OTHER = SlotInfo(1, 2, 1, 2, 0, 1), SlotInfo(2, 3, 1, 2, 0, 1)
PLACE, LAST = "/rank_and_size/h:1", "/cross_1_process_set_hash_1f/0"
RECORD = struct.pack("=H", socket.AF_INET) + struct.pack("!H", 4000) + socket.inet_aton("127.0.0.1") + bytes(128)


class Agent:
    """What a port needs: rounds that the test answers, and a store of the present one."""

    def __init__(self) -> None:
        self.asked: list[tuple[NextRoundRequest, asyncio.Future[NextRoundReply]]] = []
        self.ran: list[int] = []
        self.again: list[tuple[WorkerId, dict[str, str]]] = []
        self.round_id = 0
        self.keys: dict[tuple[str, str], bytes] = {}
        self.waiting: dict[tuple[str, str], list[asyncio.Future[bytes]]] = {}
        self.stirred = asyncio.Event()

    def next_round(self, request: NextRoundRequest) -> asyncio.Future[NextRoundReply]:
        self.asked.append((request, asyncio.get_running_loop().create_future()))
        self.stirred.set()
        return self.asked[-1][1]

    def running(self, report: RunningReport) -> None:
        assert report.worker == WORKER
        if report.round_id != self.round_id:
            raise RendezvousProtocolError("not of this round")
        self.ran.append(report.round_id)
        self.stirred.set()

    def set_key(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        self._check(round_id)
        self.keys[scope, key] = value
        for future in self.waiting.pop((scope, key), []):
            if not future.done():
                future.set_result(value)

    def key_when_there(self, round_id: int, scope: str, key: str) -> asyncio.Future[bytes]:
        self._check(round_id)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if (scope, key) in self.keys:
            future.set_result(self.keys[scope, key])
        else:
            self.waiting.setdefault((scope, key), []).append(future)
        self.stirred.set()
        return future

    def _check(self, round_id: int) -> None:
        if round_id != self.round_id:
            raise StaleRoundError(round_id, self.round_id)

    def start_again(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        self.again.append((worker, dict(env)))

    def form(self, slot: SlotInfo = SLOT) -> None:
        """A round, in which the worker that has asked is."""
        self.round_id += 1
        self.keys.clear()
        self.asked[-1][1].set_result(
            RoundAssignment(self.round_id, slot, sync=True, commits=0, backend=Backend.HOROVOD)
        )

    async def until(self, found: Callable[[], Any]) -> None:
        async with asyncio.timeout(150):
            while not found():
                self.stirred.clear()
                await self.stirred.wait()


class Case:
    """A port, and the worker at its other end."""

    def __init__(self, agent: Agent, port: HorovodPort, number: int) -> None:
        self.agent, self.port, self._number = agent, port, number

    async def ask(self, method: str, path: str, body: bytes = b"", more: str = "") -> tuple[int, bytes]:
        """Status and body; 0 if it was cut off."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._number)
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        try:
            writer.write(head.encode() + body)
            async with asyncio.timeout(150):
                said = await reader.read()
        except ConnectionError:
            said = b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        head_said, _, body_said = said.partition(b"\r\n\r\n")
        return (int(head_said.split()[1]), body_said) if said else (0, b"")

    def begin(self, *request: Any) -> asyncio.Task[tuple[int, bytes]]:
        return asyncio.create_task(self.ask(*request))

    async def asks(self, number: int) -> NextRoundRequest:
        """The question for a round, which is that many's."""
        await self.agent.until(lambda: len(self.agent.asked) >= number)
        assert len(self.agent.asked) == number
        return self.agent.asked[-1][0]

    async def starts(self) -> None:
        """It is in round 1."""
        first = self.begin("PUT", "/global/rank_1", b"host")
        await self.asks(1)
        self.agent.form()
        assert await first == (200, b"")


def run(main: Callable[[Case], Coroutine[Any, Any, None]], plan: SlotInfo | None = SLOT) -> None:
    async def whole() -> None:
        agent, tasks, warned = Agent(), Tasks(), list[str]()
        around = PortContext(agent, agent, tasks, lambda address: "lo", agent.start_again, warned.append)
        port = HorovodPort(WORKER, plan, around)
        try:
            await main(Case(agent, port, int((await port.open(os.getuid()))[ENV_PORT])))
        finally:
            port.close()
            await tasks.end()
        assert warned == []

    asyncio.run(whole())


# --- its place -----------------------------------------------------------------------------------------------------


def test_a_first_put_is_held_until_the_round_is_formed() -> None:
    async def main(case: Case) -> None:
        assert not case.port.is_known
        first = case.begin("PUT", "/global/rank_1", b"host")
        request = await case.asks(1)
        assert case.port.is_known
        assert (request.worker, request.after_round, request.cause) == (WORKER, 0, ReadyCause.START)
        assert request.backends == (Backend.HOROVOD,)
        assert not first.done()
        assert case.agent.keys == {}
        case.agent.form()
        assert await first == (200, b"")
        assert case.agent.keys == {("horovod global", "rank_1"): b"host"}
        assert case.agent.again == []

    run(main)


@pytest.mark.parametrize("plan", [OTHER, None])
def test_who_was_started_for_another_place_is_started_again(plan: SlotInfo | None) -> None:
    async def main(case: Case) -> None:
        first = case.begin("PUT", "/global/rank_1", b"host")
        await case.asks(1)
        case.agent.form(SLOT)
        assert await first == (0, b"")
        assert case.agent.again == [(WORKER, place_variables(SLOT))]
        assert case.agent.keys == {}

    run(main, plan)


@pytest.mark.parametrize("reply", [Removed("no place"), JobOver("over")])
def test_a_first_put_without_a_place_is_cut_off(reply: NextRoundReply) -> None:
    async def main(case: Case) -> None:
        first = case.begin("PUT", "/global/rank_1", b"host")
        await case.asks(1)
        case.agent.asked[0][1].set_result(reply)
        assert await first == (0, b"")

    run(main)


def test_the_hook_asks_and_any_plan_will_do() -> None:
    async def main(case: Case) -> None:
        asked = case.begin("GET", PLACE, b"", "X-Elastic-Driver-Process: 77 78\r\n")
        request = await case.asks(1)
        assert (request.pid, request.thread, case.port.pid) == (77, 78, 77)
        case.agent.form(OTHER)
        assert await asked == (200, b"2,3,1,2,0,1")
        assert (await case.ask("PUT", "/global/rank_2", b"host"))[0] == 200
        assert len(case.agent.asked) == 1
        assert case.agent.again == []

    run(main)


@pytest.mark.parametrize("said", ["", "x y", "1", "1 2 3", "-5 -6"])
def test_rubbish_for_a_process_is_none(said: str) -> None:
    async def main(case: Case) -> None:
        asked = case.begin("GET", PLACE, b"", f"X-Elastic-Driver-Process: {said}\r\n")
        request = await case.asks(1)
        assert (request.pid, request.thread) == (0, 0)
        case.agent.form()
        assert (await asked)[0] == 200

    run(main)


def test_two_questions_at_once_have_one_answer_and_so_has_one_asked_again() -> None:
    async def main(case: Case) -> None:
        await case.starts()
        both = [case.begin("GET", PLACE), case.begin("GET", PLACE)]
        request = await case.asks(2)
        assert (request.after_round, request.cause) == (1, ReadyCause.INTERNAL_ERROR)
        case.agent.form(OTHER)
        answer = (200, b"2,3,1,2,0,1")
        assert [await one for one in both] == [answer, answer]
        assert await case.ask("GET", PLACE) == answer  # the answer was lost on its way
        assert len(case.agent.asked) == 2
        assert (await case.ask("PUT", "/global/rank_2", b"host"))[0] == 200
        again = case.begin("GET", PLACE)
        assert (await case.asks(3)).after_round == 2
        again.cancel()

    run(main)


def test_who_leaves_while_it_is_held_has_asked() -> None:
    async def main(case: Case) -> None:
        asked = case.begin("GET", PLACE)
        await case.asks(1)
        asked.cancel()
        case.agent.form()
        assert (await case.ask("GET", PLACE)) == (200, b"1,2,1,2,0,1")
        assert len(case.agent.asked) == 1

    run(main)


def test_an_answer_of_a_round_that_is_broken_by_now_is_not_given_again() -> None:
    async def main(case: Case) -> None:
        asked = case.begin("GET", PLACE)
        await case.asks(1)
        case.agent.form()
        assert (await asked)[0] == 200
        case.port.broken()
        again = case.begin("GET", PLACE)
        assert (await case.asks(2)).after_round == 1
        again.cancel()

    run(main)


@pytest.mark.parametrize(("breaks", "cause"), [(False, ReadyCause.HOSTS_UPDATED), (True, ReadyCause.INTERNAL_ERROR)])
def test_why_it_asks(breaks: bool, cause: ReadyCause) -> None:
    async def main(case: Case) -> None:
        await case.starts()
        case.port.planned()
        if breaks:
            case.port.broken()
        asked = case.begin("GET", PLACE)
        assert (await case.asks(2)).cause is cause
        asked.cancel()

    run(main)


def test_who_is_removed_is_told_so_and_who_asks_at_the_jobs_end_waits_for_its_own() -> None:
    async def main(case: Case) -> None:
        await case.starts()
        asked = case.begin("GET", PLACE)
        await case.asks(2)
        case.agent.asked[1][1].set_result(Removed("no place"))
        assert await asked == (200, b"-1,-1,-1,-1,-1,-1")

    run(main)

    async def over(case: Case) -> None:
        await case.starts()
        asked = case.begin("GET", PLACE)
        hook = case.begin("GET", PLACE, b"", "X-Elastic-Driver-Process: 7 7\r\n")
        await case.asks(2)
        case.agent.asked[1][1].set_result(JobOver("over"))
        assert await hook == (200, b"-1,-1,-1,-1,-1,-1")
        assert not asked.done()
        case.port.close()
        assert await asked == (0, b"")

    run(over)


# --- keys ----------------------------------------------------------------------------------------------------------


def test_a_get_is_held_until_the_key_is_there_and_both_name_ends() -> None:
    async def main(case: Case) -> None:
        await case.starts()
        got = case.begin("GET", "/global/0")
        await case.agent.until(lambda: case.agent.waiting)
        assert not got.done()
        case.agent.set_key(1, "horovod global", "0", RECORD)
        assert await got == (200, RECORD)
        assert case.port.endpoints == {("127.0.0.1", 4000)}
        assert await case.ask("GET", "/global/0") == (200, RECORD)

    run(main)


def test_gets_are_cut_off_when_the_round_breaks() -> None:
    async def main(case: Case) -> None:
        await case.starts()
        got = [case.begin("GET", f"/global/{key}") for key in (0, 5)]
        await case.agent.until(lambda: len(case.agent.waiting) == 2)
        case.port.broken()
        assert [await one for one in got] == [(0, b""), (0, b"")]
        assert await case.ask("GET", "/global/7") == (0, b"")

    run(main)


def test_what_comes_late_is_not_of_the_next_round() -> None:
    async def main(case: Case) -> None:
        await case.starts()
        asked = case.begin("GET", PLACE)
        await case.asks(2)
        assert await case.ask("PUT", "/global/1", RECORD) == (200, b"")  # while it is held
        assert await case.ask("GET", "/global/0") == (404, b"")
        case.agent.form(OTHER)
        assert (await asked)[0] == 200
        assert case.agent.keys == {}
        assert case.port.endpoints == set()

    run(main)


def test_keys_of_a_round_that_the_store_has_left_are_dropped() -> None:
    async def main(case: Case) -> None:
        await case.starts()
        case.agent.round_id = 2
        assert await case.ask("PUT", "/global/1", RECORD) == (200, b"")
        assert await case.ask("GET", "/global/0") == (0, b"")
        assert case.agent.keys == {("horovod global", "rank_1"): b"host"}

    run(main)


# --- that it has met the others ------------------------------------------------------------------------------------


def test_it_runs_when_the_last_context_is_there() -> None:
    async def main(case: Case) -> None:
        await case.starts()
        for scope in ("global", "local_h", "global_process_set_hash_1f", "local_h_process_set_hash_1f"):
            assert (await case.ask("DELETE", f"/{scope}/1"))[0] == 200
        assert not case.port.met
        assert (await case.ask("DELETE", LAST))[0] == 200
        assert case.port.met
        assert case.agent.ran == [1]
        assert (await case.ask("DELETE", LAST))[0] == 200
        assert case.agent.ran == [1]

    run(main)


def test_it_has_the_state_a_while_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_SYNCED_S", 0.01)

    async def main(case: Case) -> None:
        await case.starts()
        await case.ask("DELETE", LAST)
        await case.agent.until(lambda: case.agent.ran == [1, 1])

    run(main)


def test_without_process_sets_the_third_context_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_QUIET_S", 0.01)

    async def main(case: Case) -> None:
        await case.starts()
        await case.ask("DELETE", "/cross_1/0")
        await case.agent.until(lambda: case.port.met)

    run(main)


@pytest.mark.parametrize("is_broken", [False, True])
def test_who_still_meets_others_or_cannot_does_not_run(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_QUIET_S", 150.0)

    async def main(case: Case) -> None:
        await case.starts()
        if is_broken:
            case.port.broken()
        await case.ask("DELETE", "/cross_1/0")
        assert bool(case.port._timers) is not is_broken
        await case.ask("PUT", "/global_process_set_hash_1f/rank_1", b"host")
        assert not case.port._timers, "quiet or not, it does not run"
        assert not case.port.met
        assert case.agent.ran == []

    run(main)


# --- notices, and what it may not ask ------------------------------------------------------------------------------


def test_where_it_takes_notices() -> None:
    async def main(case: Case) -> None:
        said = base64.b64encode(pickle.dumps(({"lo": [("127.0.0.1", 1234)]}, bytes(32)), 5))
        assert (await case.ask("PUT", "/worker_addresses/h:1", b"rubbish"))[0] == 400
        assert case.port.registration is None
        assert (await case.ask("PUT", "/worker_addresses/h:1", said))[0] == 200
        assert case.port.registration is not None
        assert case.port.registration.addresses == (("127.0.0.1", 1234),)
        assert not case.port.is_known

    run(main)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/a/b", 405),
        ("POST", "/a/b", 405),
        ("OPTIONS", "*", 400),
        ("GET", "/", 400),
        ("GET", "/a", 400),
        ("GET", "/a/b/c", 400),
        ("PUT", "/../etc/passwd", 400),
        ("GET", "/global/0", 404),
        ("DELETE", LAST, 200),
    ],
)
def test_what_it_may_not_ask_before_it_has_a_place(method: str, path: str, status: int) -> None:
    async def main(case: Case) -> None:
        assert (await case.ask(method, path))[0] == status
        assert case.agent.asked == []
        assert not case.port.met

    run(main)
