"""Whatever an agent says to the driver, or a driver to an agent: a broken connection at most, no internal error."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import tempfile
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_driver.codec import ROW, to_data
from elastic_driver.discovery.source import FixedHosts
from elastic_driver.errors import LaunchError, RendezvousProtocolError
from elastic_driver.hosts import Host, SlotInfo, WorkerId
from elastic_driver.launch.agent.host_rounds import HostRounds
from elastic_driver.launch.agent.ports import HeldPorts
from elastic_driver.launch.agent.probes import Probes
from elastic_driver.launch.agent.workers import HostWorkers
from elastic_driver.launch.local.keeper import Launch
from elastic_driver.launch.words import ExitStatus
from elastic_driver.rendezvous import agent_messages as words
from elastic_driver.rendezvous.agent_messages import AgentMessage, Start, Started, Welcome, decoded
from elastic_driver.rendezvous.entries import pack_entries
from elastic_driver.rendezvous.frames import Message
from elastic_driver.rendezvous.messages import (
    DiskReport,
    JobOver,
    LeaveRequest,
    NextRoundRequest,
    Notice,
    PublishRequest,
    Removed,
    RoundAssignment,
    RunningReport,
)
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.event_log import EventLog
from elastic_driver.reporting.narrator import Narrator
from elastic_driver.settings.settings import Settings
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.tasks import Tasks, start_task
from elastic_driver.vitals import Vitals
from elastic_driver.words import Backend, NoticeKind, ReadyCause
from tests.support.extent import examples
from tests.support.fakes.driver_fakes import FakeConsole, driver_of
from tests.support.fakes.fleet_fakes import AtOnce, FakeAgent, FakeFleet
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.property

A, B, OTHER = WorkerId("a", 0, 0), WorkerId("a", 1, 0), WorkerId("b", 0, 0)
TO_DRIVER = (
    *(words.Started, words.NotStarted, words.Dying, words.Exited, words.Finished, words.Spared, words.Output),
    *(words.Ready, words.Running, words.Heard, words.OnDisk, words.Ask, words.Put, words.Want, words.Warmed),
    words.VitalsSeen,
    *(words.Warning, words.Leaves, words.Bye, words.Listening, words.Probed),
    *(words.PortHeld, words.Stacked, words.StacksTold),
)
TO_AGENT = (
    *(words.Start, words.Stop, words.Kill, words.KillAll, words.Labels, words.WarmUp, words.Round, words.Reply),
    *(
        words.RoundRefused,
        words.NoticeSet,
        words.Answer,
        words.Value,
        words.Values,
        words.Listen,
        words.Probe,
        words.Unlisten,
    ),
    *(words.HoldPort, words.LetGo, words.TakeStacks),
)

_KEYS = st.sampled_from([A.key, B.key, OTHER.key, "c[0]#0", "a[0]#7", "a[0]", "a[٣]#0", "a[" + "9" * 5000 + "]#0"])
_TEXTS = (
    _KEYS | st.sampled_from(["stdout", "leave", "status", "publish", "call", "outcome", "\ud800"]) | st.text(max_size=9)
)
_INTEGERS = st.integers(-2, 3) | st.sampled_from([-(10**30), 2**63, 10**400])
_FLOATS = st.floats() | _INTEGERS


_BLOBS = (
    st.builds(LeaveRequest, st.sampled_from([A, B, OTHER]), st.just("SIGTERM")).map(LeaveRequest.to_json)
    | st.builds(PublishRequest, st.integers(0, 3), st.integers(0, 3)).map(PublishRequest.to_json)
    | st.binary(max_size=9)
    | st.sampled_from([b"[]", b"{}", b"[" * 9000, b'["/x", 1, 2, null, true, "y"]', pack_entries([("a", b"b")])])
)
_JSON = st.recursive(
    st.none() | st.booleans() | _FLOATS | _TEXTS,
    lambda more: st.lists(more, max_size=3) | st.dictionaries(_TEXTS, more, max_size=3),
    max_leaves=4,
)


@st.composite
def _of_rounds(draw: st.DrawFn, kind: type) -> Any:
    """What stands in messages of rounds and workers, as data."""
    worker = draw(st.sampled_from([A, B, OTHER]))
    number, other = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    value = {
        NextRoundRequest: NextRoundRequest(
            worker, number, other, ReadyCause.START, "\ud800", (Backend.NATIVE,), number, steps=draw(_INTEGERS)
        ),
        RunningReport: RunningReport(worker, number, other),
        Notice: Notice(number, other, draw(st.sampled_from(NoticeKind)), ""),
        RoundAssignment: RoundAssignment(
            number, SlotInfo(0, 2, 0, 2, 0, 1), sync=True, commits=other, backend=Backend.NATIVE
        ),
        Removed: Removed("y"),
        JobOver: JobOver("x"),
        DiskReport: DiskReport("id", "/d", number, other, "full", drivers=True),
        Vitals: Vitals(1.0, 2, state="S", round_id=number, rank=other, steps=30, own_s=0.5, waits_s=3.0),
    }[kind]
    return to_data(Annotated[Vitals, ROW] if kind is Vitals else kind, value)


def _value(hint: Any) -> st.SearchStrategy[Any]:
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(_value(of[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(_TEXTS, _value(of[1]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(_value, of)).map(list)
    if of:
        return st.one_of(*(_value(each).map(partial(_tagged, each)) for each in of))
    if dataclasses.is_dataclass(hint):
        return _of_rounds(hint) | _JSON  # type: ignore[arg-type]
    return {str: _TEXTS, int: _INTEGERS, float: _FLOATS, bool: st.booleans(), bytes: _BLOBS}.get(hint, st.none())


def _tagged(kind: Any, data: Any) -> Any:
    return {"is": kind.__name__, **data} if dataclasses.is_dataclass(kind) and isinstance(data, dict) else data


@st.composite
def _messages(draw: st.DrawFn, kinds: tuple[type[AgentMessage], ...]) -> Message:
    """One of these kinds as it should be, or with a field that is none, or anything."""
    kind = draw(st.sampled_from([*kinds, None]))
    if kind is None:
        return Message(draw(_TEXTS), draw(st.dictionaries(_TEXTS, _JSON, max_size=2)), draw(_BLOBS))
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind) if each.name != "blob"]  # type: ignore[arg-type]
    values = {name: draw(_value(hints[name])) for name in names}
    if draw(st.sampled_from([False, False, True])):
        values[draw(st.sampled_from([*names, "more"]))] = draw(_JSON)
    return Message(kind.name, values, draw(_BLOBS))


class _Console(FakeConsole):
    """Says only what can be written."""

    def _say(self, text: str) -> None:
        text.encode()
        super()._say(text)

    line = detail = warning = error = status = _say


class _Job:
    """A driver with one fake agent, whose two workers run."""

    def __init__(self, folder: Path) -> None:
        self.fleet = fleet = FakeFleet(check=True)
        self.console = _Console()
        self.log = EventLog(folder / "events.jsonl")
        chronicle = Chronicle(self.log, Narrator(self.console))  # type: ignore[arg-type]
        hosts = (Host("a", 2), Host("b", 1))
        self.driver = driver_of(
            Settings(command=("true",), num_proc=2, min_num_proc=1, hosts=hosts, elastic=True),
            fleet,
            FixedHosts(hosts),
            chronicle,
            clock=JobClock(asyncio.get_running_loop().time),
        )
        self.running = asyncio.create_task(self.driver.run())

    async def agent(self) -> FakeAgent:
        while not self.fleet.remote.dials:
            await asyncio.sleep(0.01)
        agent = self.fleet.arrives("a")
        while not agent.of(words.HoldPort):
            await asyncio.sleep(0.1)
        agent.say(words.PortHeld(agent.of(words.HoldPort)[0].generation, 1234, ""))
        while len(agent.of(Start)) < 2:
            await asyncio.sleep(0.1)
        agent.say(Started(A.key, 1), Started(B.key, 2))
        return agent


def _lies(messages: list[Message], *, trains: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        loop.set_default_executor(AtOnce())
        with tempfile.TemporaryDirectory() as folder:
            job = _Job(Path(folder))
            agent = await job.agent()
            if trains:
                for worker in (A, B):
                    request = NextRoundRequest(worker, 0, 0, ReadyCause.START, "", (Backend.NATIVE,), 0)
                    agent.say(words.Ready(request))
                await asyncio.sleep(0.1)
                agent.say(*(words.Running(RunningReport(worker, 1, 0)) for worker in (A, B)))
            job.fleet.arrives("b")  # which has the network checked
            await asyncio.sleep(0.01)
            for message in messages:
                if not agent.link.connected and not agent.link.is_lost:
                    agent.connect()
                agent.say(message)
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            job.driver.interrupts.interrupt(signal.SIGTERM)
            await job.running
            job.log.close()
            text = "\n".join(job.console.said)
            assert "internal error" not in text, text
            for line in (Path(folder) / "events.jsonl").read_text().splitlines():
                json.loads(line)

    run_virtually(main)


async def _nothing_more(worker: WorkerId, command: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    return {}


@given(st.lists(_messages(TO_DRIVER), min_size=1, max_size=12), st.booleans())
@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
def test_an_agent_that_lies_ends_no_job_by_an_error(messages: list[Message], trains: bool) -> None:
    _lies(messages, trains=trains)


@pytest.mark.parametrize("kind", TO_DRIVER, ids=lambda kind: kind.name)
def test_each_message_of_an_agent(kind: type[AgentMessage]) -> None:
    @given(st.lists(_messages((kind,)), min_size=3, max_size=12), st.booleans())
    @settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check(messages: list[Message], trains: bool) -> None:
        _lies(messages, trains=trains)

    check()


class _Process:
    """In place of a ProcessTree."""

    pid = 1
    is_ending = False
    last_lines = ()

    def __init__(self, end: Callable[[], None]) -> None:
        self.is_alive = True
        self.kill = end

    def kill_hung(self, *, stacks_s: float, exits: bool) -> bool:
        self.kill()
        return not exits


class _Keeper:
    """In place of a ProcessKeeper: every second start fails, and whoever is stopped ends at once."""

    def __init__(self, listener: HostWorkers) -> None:
        self._listener = listener
        self._workers: dict[WorkerId, _Process | None] = {}

    def start(self, worker: WorkerId, label: str, launch: Callable[[], Coroutine[Any, Any, Launch]]) -> None:
        async def start() -> None:
            await launch()
            if worker.slot % 2:
                del self._workers[worker]
                self._listener.not_started(worker, LaunchError("it cannot be started"))
            else:
                process = self._workers[worker] = _Process(lambda: self._end(worker))
                self._listener.started(worker, process)  # type: ignore[arg-type]

        self._workers[worker] = None
        start_task(start())

    def _end(self, worker: WorkerId) -> None:
        process = self._workers.get(worker)
        if process is not None and process.is_alive:
            process.is_alive = False
            asyncio.get_running_loop().call_soon(self._listener.exited, worker, process, ExitStatus(-9))
            asyncio.get_running_loop().call_later(0.015, self._finished, worker)

    def _finished(self, worker: WorkerId) -> None:
        del self._workers[worker]
        self._listener.finished(worker)

    def process(self, worker: WorkerId) -> _Process | None:
        return self._workers.get(worker)

    def runs(self, worker: WorkerId) -> bool:
        process = self._workers.get(worker)
        return worker in self._workers and (process is None or process.is_alive)

    def stop(self, worker: WorkerId, grace_s: float, *, sever: bool, number: int) -> None:
        self._end(worker)

    def kill(self, worker: WorkerId) -> None:
        self._end(worker)

    def kill_all(self) -> None:
        for worker in self._workers:
            self._end(worker)

    def label(self, worker: WorkerId, label: str) -> None:
        """Nothing."""

    def pass_on(self, number: int) -> None:
        """Nothing."""

    async def prepare(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Nothing."""

    def warm_up(self) -> None:
        """Nothing."""


@given(st.lists(_messages(TO_AGENT), min_size=1, max_size=20))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_driver_that_says_rubbish_is_cut_and_no_more(messages: list[Message]) -> None:
    async def main(loop: VirtualLoop) -> None:
        failed: list[Any] = []
        loop.set_exception_handler(lambda _, context: failed.append(context))
        told: list[AgentMessage] = []
        tasks = Tasks()
        welcome = Welcome(
            0,
            "a",
            "fake",
            0.0,
            os.getcwd(),
            -1,
            warm=False,
            preload=None,
            prefix_timestamp=False,
            agent_timeout_s=15.0,
        )
        workers = HostWorkers(
            welcome,
            "fake",
            "unix:/x",
            send=told.append,
            has_room=lambda: True,
            has_room_for_bars=lambda: True,
            on_gone=lambda worker: rounds.gone(worker),
            more_of=_nothing_more,
            tasks=tasks,
            environ=dict,
        )
        workers._keeper = _Keeper(workers)  # type: ignore[assignment]
        rounds = HostRounds(told.append, workers, is_heard=lambda: True)
        rounds.serve(KeyRoutes(upstream=rounds))
        ports = HeldPorts(told.append)
        probes = Probes(told.append, tasks, is_held=ports.holds)
        for message in messages:
            try:
                value = decoded(message)
                if isinstance(value, words.Round):
                    rounds.begin_round(value.round_id)
                else:
                    workers.take(value) or rounds.take(value) or probes.take(value) or ports.take(value)
            except RendezvousProtocolError:
                pass
            await asyncio.sleep(0.01)
        probes.close()
        ports.close()
        await tasks.end()
        rounds.close()
        for each in told:
            each.message().pack()
        assert failed == []

    run_virtually(main)
