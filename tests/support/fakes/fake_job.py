"""A job with a driver that does what the test says: the real rendezvous server, real worker processes.

Owns the server's loop thread, the processes and their output. Rounds are formed when the members that the test named
are all READY; nothing else is decided here, except that (``auto=True``) a member's death aborts its round and plans
the next one with the rest.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_driver.errors import StaleRoundError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY, JobKey
from elastic_driver.rendezvous.environment import ENV_RENDEZVOUS, ENV_WORKER
from elastic_driver.rendezvous.messages import (
    NextRoundReply,
    NextRoundRequest,
    Notice,
    Removed,
    RoundAssignment,
    RunningReport,
    WatchRequest,
)
from elastic_driver.rendezvous.routes import ALL, Route, routes_of_rounds
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.system.local_socket import SocketFolder, url_of
from elastic_driver.words import Backend, NoticeKind
from tests.support.network.namespaces import NamespaceHost
from tests.support.paths import PROGRAMS
from tests.support.processes import forked

PROGRAM = PROGRAMS / "worker_program.py"
PATIENCE_S = 150.0


class Process:
    """One worker process and the JSON lines it printed."""

    def __init__(
        self, worker: WorkerId, popen: subprocess.Popen[str] | forked.ForkedProcess, changed: threading.Condition
    ) -> None:
        self.worker = worker
        self.popen = popen
        self.lines: list[dict[str, Any]] = []
        self.noise: list[str] = []
        self._changed = changed
        self.reader = threading.Thread(target=self._read, name=f"read-{worker}", daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for text in self.popen.stdout:
            with self._changed:
                if text.startswith("{"):
                    self.lines.append(json.loads(text))
                else:
                    self.noise.append(text)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class FakeJob:
    """The driver's side of a job, as a context manager; leaving it kills what still runs.

    Args:
        backend: of all rounds.
        auto: whether a member's death aborts its round and plans the next one with the rest.
        address: at which all workers listen.
        machines: hosts in networks of their own, for workers with their names; the server is on the first.
    """

    def __init__(
        self,
        *,
        backend: Backend = Backend.TORCH,
        auto: bool = True,
        address: str = "127.0.0.1",
        machines: Sequence[NamespaceHost] = (),
    ) -> None:
        self.backend = backend
        self._address = address
        self._machines = {machine.name: machine for machine in machines}
        self.auto = auto
        self.processes: dict[WorkerId, Process] = {}
        self.rounds: list[tuple[WorkerId, ...]] = []
        self.requests: list[NextRoundRequest] = []
        self.reports: list[RunningReport] = []
        self.changed = threading.Condition()
        self._plan: tuple[WorkerId, ...] = ()
        self._sync = True
        self._removed: set[WorkerId] = set()
        self._ready: dict[WorkerId, tuple[NextRoundRequest, asyncio.Future[NextRoundReply]]] = {}
        self._notice = Notice(0, 0, NoticeKind.NONE, "")
        self._news: asyncio.Event
        self.key = JobKey.new()
        self._loop = asyncio.new_event_loop()
        self._folder = SocketFolder.new()
        self._keys = KeyRoutes()
        status = Route("GET", "status", ALL, lambda _: {})
        self._server = RendezvousServer(
            (*routes_of_rounds(self), *self._keys.routes, status), admits=lambda identity: True
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-driver")

    def __enter__(self) -> FakeJob:
        self._thread.start()

        async def start() -> None:
            self._news = asyncio.Event()
            await self._server.start_local(self._folder.listen("workers.sock"), workers=64)

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.auto = False
        for process in self.processes.values():
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait()
            process.reader.join()
            assert process.popen.stdout is not None
            process.popen.stdout.close()
            if process.popen.stdin is not None:
                process.popen.stdin.close()

        async def stop() -> None:
            for _, future in self._ready.values():
                future.cancel()
            await self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.close()

    # --- what workers ask (on the loop) ----------------------------------------------------------------------------

    async def next_round(self, request: NextRoundRequest) -> NextRoundReply:
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
        if request.worker in self._removed:
            return Removed("the test says so")
        future: asyncio.Future[NextRoundReply] = self._loop.create_future()
        self._ready[request.worker] = (request, future)
        self._try_form()
        return await future

    async def watch(self, request: WatchRequest) -> Notice:
        while True:
            if request.round_id != len(self.rounds):
                raise StaleRoundError(request.round_id, len(self.rounds))
            if self._notice.version > request.version:
                return self._notice
            await self._news.wait()

    def running(self, report: RunningReport) -> None:
        if report.round_id != len(self.rounds):
            raise StaleRoundError(report.round_id, len(self.rounds))
        with self.changed:
            self.reports.append(report)
            self.changed.notify_all()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _try_form(self) -> None:
        if not self._plan or any(worker not in self._ready for worker in self._plan):
            return
        ready = {worker: self._ready.pop(worker) for worker in self._plan}
        former = self.rounds[-1] if self.rounds else ()
        order = list(self._plan)
        root = max(order, key=lambda w: (ready[w][0].commits, w in former, -order.index(w)))
        hosts = sorted({w.hostname for w in order}, key=lambda h: (h != root.hostname, h))
        order = [w for h in hosts for w in sorted((w for w in order if w.hostname == h), key=lambda w: (w != root, w))]
        self.rounds.append(tuple(order))
        self._plan = ()
        self._notice = Notice(self._notice.version + 1, len(self.rounds), NoticeKind.NONE, "")
        self._keys.begin_round(len(self.rounds))
        for rank, worker in enumerate(order):
            local = [index for index, other in enumerate(order) if other.hostname == worker.hostname]
            local_rank = local.index(rank)
            cross = []
            for host in hosts:
                members = [index for index, other in enumerate(order) if other.hostname == host]
                if local_rank < len(members):
                    cross.append(members[local_rank])
            reply = RoundAssignment(
                round_id=len(self.rounds),
                slot=SlotInfo(rank, len(order), local_rank, len(local), cross.index(rank), len(cross)),
                sync=self._sync,
                commits=ready[root][0].commits,
                backend=self.backend,
                address=self._machines[worker.hostname].ipv4 if self._machines else self._address,
            )
            ready[worker][1].set_result(reply)
        self._wake()
        with self.changed:
            self.changed.notify_all()

    # --- the test's orders (any thread) ----------------------------------------------------------------------------

    def _call(self, function: Callable[[], None]) -> None:
        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def plan(self, members: Sequence[WorkerId], *, sync: bool = True, removed: Sequence[WorkerId] = ()) -> None:
        """The next round: formed when all of these are READY."""

        def apply() -> None:
            self._plan, self._sync = tuple(members), sync
            self._removed |= set(removed)
            self._try_form()

        self._call(apply)

    def plan_until_all_have_ended(self, members: Sequence[WorkerId]) -> None:
        """One round after the other with these, each as soon as there is the one before. Blocks until they have."""

        def have_ended() -> bool:
            return all(self.processes[worker].popen.poll() is not None for worker in members)

        while not have_ended():
            count = len(self.rounds)
            self.plan(members)
            self.wait_for(lambda count=count: len(self.rounds) > count or have_ended(), "another round")

    def notify(self, kind: NoticeKind, reason: str) -> None:
        """Tells the members of the round."""

        def apply() -> None:
            self._notice = Notice(self._notice.version + 1, len(self.rounds), kind, reason)
            self._wake()

        self._call(apply)

    def spawn(
        self, worker: WorkerId, program: str, *args: str, env: dict[str, str] | None = None, file: Path = PROGRAM
    ) -> Process:
        """Starts a worker process that runs one of the file's programs."""
        full = forked.environment() | {
            ENV_RENDEZVOUS: url_of(self._folder.path / "workers.sock"),
            ENV_RANKS_KEY: self.key.of_ranks().hex(),
            ENV_WORKER: worker.key,
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",  # beyond a test's own: nothing ends by it
        }
        full |= env or {}
        prefix = []
        if self._machines:
            assert self.backend is Backend.NATIVE, "what is forked stays in the test's own network"
            full["ELASTIC_DRIVER_MACHINE"] = worker.hostname
            prefix = self._machines[worker.hostname].prefix
        popen: subprocess.Popen[str] | forked.ForkedProcess
        if prefix:
            popen = subprocess.Popen(
                [*prefix, sys.executable, "-X", "faulthandler", str(file), program, *args],
                env=full,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        else:
            torch = self.backend is Backend.TORCH or _imports_torch(file, program)
            popen = forked.start([str(file), program, *args], full, torch=torch)
        process = Process(worker, popen, self.changed)
        self.processes[worker] = process
        threading.Thread(target=self._reap, args=(process,), name=f"reap-{worker}", daemon=True).start()
        return process

    def start(
        self,
        workers: Sequence[WorkerId],
        program: str,
        *args: str,
        hold: dict[WorkerId, str] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        """Starts these workers and plans their round; ``hold`` names steps (HOLD_AT) at which a worker waits."""
        for worker in workers:
            self.spawn(worker, program, *args, env={"HOLD_AT": (hold or {}).get(worker, "")} | (env or {}))
        self.plan(workers)

    def _reap(self, process: Process) -> None:
        code = process.popen.wait()
        with self.changed:
            self.changed.notify_all()
        if self.auto and code != 0 and self.rounds and process.worker in self.rounds[-1]:
            rest = [worker for worker in self.rounds[-1] if worker != process.worker]
            self.notify(NoticeKind.ABORT, f"worker {process.worker} ended with {code}")
            self.plan(rest)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Blocks until the condition holds; looked at whenever something happened."""
        with self.changed:
            if not self.changed.wait_for(condition, timeout_s):
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.story()}")

    def wait_held(self, worker: WorkerId, step: int) -> None:
        """Blocks until the worker, started with HOLD_AT, waits before that step."""
        lines = self.processes[worker].lines
        self.wait_for(lambda: any(line.get("held") == step for line in lines), f"{worker} held at step {step}")

    def release(self, worker: WorkerId) -> None:
        """Lets a held worker go on."""
        stdin = self.processes[worker].popen.stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()

    def wait_end(self, worker: WorkerId, code: int = 0) -> Process:
        """Blocks until the worker has ended, and checks its exit code."""
        process = self.processes[worker]
        try:
            process.popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.popen.send_signal(signal.SIGABRT)  # faulthandler shows where it hangs
            time.sleep(0.5)
            raise AssertionError(f"{worker} does not end\n{self.story()}") from None
        process.reader.join()
        assert process.popen.returncode == code, self.story()
        return process

    def story(self) -> str:
        """All that the processes printed."""
        parts = []
        for worker, process in self.processes.items():
            parts.append(f"--- {worker}, exit code {process.popen.poll()}; last lines {process.lines[-3:]}")
            parts += [text.rstrip() for text in process.noise[-60:]]
        return "\n".join(parts)


@functools.cache
def _imports_torch(file: Path, program: str) -> bool:
    """Whether a program imports PyTorch: at the top of its file, or in its function."""
    module, _, name = program.rpartition(".")
    tree = ast.parse((file.with_name(f"{module}.py") if module else file).read_bytes())
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)]
    imports = [statement for body in bodies for statement in body if isinstance(statement, ast.Import)]
    return any(alias.name.partition(".")[0] == "torch" for statement in imports for alias in statement.names)


def workers_on(**hosts: int) -> list[WorkerId]:
    """Workers by host and slots: ``workers_on(a=2, b=1)``."""
    return [WorkerId(host, slot, 0) for host, slots in hosts.items() for slot in range(slots)]
