"""A driver with nothing real around it: processes that are futures, hosts that the test names, words that it keeps."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_driver.dialects.dialect import Dialect
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.hosts import Departure, Host, WorkerId
from elastic_driver.launch.launcher import ExitStatus
from elastic_driver.rendezvous.messages import NextRoundReply, NextRoundRequest, RunningReport
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.event_log import EventLog
from elastic_driver.report.narrator import Narrator
from elastic_driver.settings.settings import Settings
from elastic_driver.system.job_clock import JobClock
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.virtual_loop import VirtualLoop

PATIENCE_S = 150.0
OURS = OurDialect({}, exported={})


class FakeProcess:
    """See WorkerProcess."""

    def __init__(self, worker: WorkerId, pid: int) -> None:
        loop = asyncio.get_running_loop()
        self.worker, self.pid, self.label = worker, pid, "?"
        self.exited: asyncio.Future[ExitStatus] = loop.create_future()
        self.dying: asyncio.Future[str] = loop.create_future()
        self.last_lines: Sequence[str] = ()
        self.error_file = ""
        self.stops: list[tuple[float, bool]] = []
        self.is_stubborn = False
        self.runs_script = False
        self.printed = 0
        self.stop_error: Exception | None = None

    def end(self, returncode: int) -> None:
        if not self.exited.done():
            self.dying.cancel()
            self.exited.set_result(ExitStatus(returncode))

    def watch_threads(self, pid: int, thread: int) -> None:
        self.runs_script = True

    async def kill_hung(self, *, stacks_s: float, exits: bool) -> bool:
        if self.exited.done() or (exits and not self.runs_script):
            return False
        if stacks_s:
            self.printed += 1
            if not self.is_stubborn:
                self.end(-6)
            asyncio.get_running_loop().call_later(stacks_s, self.kill)
        else:
            self.kill()
        return True

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self.exited)

    async def stop(self, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM) -> ExitStatus:
        self.stops.append((grace_s, sever))
        if self.stop_error is not None:
            raise self.stop_error
        if not self.is_stubborn:
            self.end(-15)
        return await self.wait()

    def kill(self) -> None:
        self.end(-9)


class FakeLauncher:
    """See Launcher."""

    descriptors_each = 1

    def __init__(self) -> None:
        self.started: dict[WorkerId, FakeProcess] = {}
        self.asked: list[WorkerId] = []
        self.passed_on: list[signal.Signals] = []
        self.start_error: BaseException | None = None
        self.close_error: Exception | None = None
        self.on_start: Callable[[FakeProcess], None] = lambda process: None

    def check_hosts(self, hosts: Sequence[Host]) -> None:
        """Any will do."""

    def cores(self, hostname: str) -> int:
        return 2

    def addresses(self, hostnames: Sequence[str]) -> Mapping[str, str]:
        return dict.fromkeys(hostnames, "127.0.0.1")

    async def hold_port(self, hostname: str, generation: int) -> int:
        return 20000 + generation

    def let_go(self, hostname: str, generation: int) -> None:
        """Ports are plenty here."""

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> FakeProcess:
        self.asked.append(worker)
        await asyncio.sleep(0)
        if self.start_error is not None:
            raise self.start_error
        process = FakeProcess(worker, len(self.asked))
        self.started[worker] = process
        self.on_start(process)
        return process

    def pass_on(self, number: signal.Signals) -> None:
        self.passed_on.append(number)

    def kill(self) -> None:
        for process in self.started.values():
            process.kill()

    async def close(self) -> None:
        if self.close_error is not None:
            raise self.close_error
        self.kill()

    def living(self) -> list[WorkerId]:
        return [worker for worker, process in self.started.items() if not process.exited.done()]


class FakeHosts:
    """See HostDiscovery."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = hosts
        self.error: Exception | None = None

    async def find_hosts(self) -> tuple[Host, ...]:
        if self.error is not None:
            raise self.error
        return self.hosts

    async def wait_change(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """None."""
        return ()

    def down(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def answers(self) -> bool:
        """It does."""
        return True

    def remark(self) -> str:
        return ""


class FakeConsole:
    """See Console: keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.live = False
        self.fail_at = ""  # raises where a text holds this

    def _say(self, text: str) -> None:
        self.said.append(text)
        if self.fail_at and self.fail_at in text:
            raise ValueError("a bug of the console")

    line = detail = warning = error = _say

    def status(self, text: str, figures: Sequence[str] = ()) -> None:
        """The present."""
        self._say(text)

    def look(self) -> None:
        """There are no tracebacks to let go of."""

    def training_began(self) -> None:
        """Likewise."""

    def worker_ended(self, label: str) -> str:
        return ""

    def shows(self, lines: Sequence[str]) -> bool:
        return False

    def summary(self, summary: Any, *, exit_code: int, message: str) -> None:
        self._say(f"summary: {message}")


class Job:
    """A driver among fakes, to be used on a running loop."""

    def __init__(
        self, folder: Path, *hosts: Host, clock: JobClock | None = None, dialect: Dialect = OURS, **settings: Any
    ) -> None:
        self.launcher = FakeLauncher()
        self.discovery = FakeHosts(*hosts)
        self.console = FakeConsole()
        self.events = folder / "events.jsonl"
        self.log = EventLog(self.events)
        slots = sum(host.slots for host in hosts)
        values = {
            "command": ("true",),
            "num_proc": slots,
            "min_num_proc": 1,
            "hosts": hosts,
            "elastic": True,
        } | settings
        self.driver = ElasticDriver(
            Settings(**values),
            discovery=self.discovery,
            launcher=self.launcher,
            chronicle=Chronicle(self.log, Narrator(self.console)),  # type: ignore[arg-type]
            dialect=dialect,
            job_id="fake",
            clock=clock,
        )
        self._running = asyncio.get_running_loop().create_task(self.driver.run())

    async def end(self) -> int:
        """Blocks until the job has ended."""
        async with asyncio.timeout(None if isinstance(self._running.get_loop(), VirtualLoop) else PATIENCE_S):
            code = await self._running
        self.log.close()
        return code

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Blocks until it holds; looked at whenever the loop has worked, and less often when that takes real time."""
        end = time.monotonic() + PATIENCE_S
        takes_time = not isinstance(self._running.get_loop(), VirtualLoop)
        for looks in itertools.count():
            if condition():
                return
            assert not self._running.done(), f"{what}; but the job has ended: {self.text()}"
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.002 if takes_time and looks > 1000 else 0)
        raise AssertionError(f"not seen: {what}; {self.text()}")

    async def started(self, count: int) -> list[WorkerId]:
        await self.until(lambda: len(self.launcher.started) >= count, f"{count} workers started")
        return list(self.launcher.started)

    def ready(
        self, worker: WorkerId, *, after: int = 0, commits: int = 0, cause: ReadyCause = ReadyCause.START
    ) -> asyncio.Future[NextRoundReply]:
        """The worker asks for its round, as the server would pass it on."""
        request = NextRoundRequest(worker, after, commits, cause, "", (Backend.NATIVE,), 0)
        return asyncio.ensure_future(self.driver.rounds.next_round(request))

    async def train(self, count: int) -> list[WorkerId]:
        """Has that many workers come to their first round and train."""
        workers = await self.started(count)
        answers = [self.ready(worker) for worker in workers]
        await self.until(lambda: all(answer.done() for answer in answers), "the first round")
        for worker in workers:
            self.driver.rounds.running(RunningReport(worker, 1, 0))
        return workers

    def text(self) -> str:
        return "\n".join(self.console.said)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        if self.log._writer is not None:
            written = threading.Event()
            self.log._writer.put(written.set)
            assert written.wait(PATIENCE_S)
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]
