"""All workers of a host that run Horovod's own library: who is told what, and to which process it is done."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import pytest

from elastic_driver.dialects.horovod import ENV_PORT, ENV_PROTOCOL, place_variables
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.agent.horovod import front as module
from elastic_driver.launch.agent.horovod.front import HorovodFront
from elastic_driver.rendezvous.messages import (
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RoundAssignment,
    RunningReport,
)
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Backend, NoticeKind

pytestmark = pytest.mark.unit

WORKER = WorkerId("host-1", 0, 1)
SLOT = SlotInfo(0, 2, 0, 2, 0, 1)
KEY = bytes(range(32))


class Around:
    """The agent's other parts. Each question is answered with the round."""

    poll_s = 0.1

    def __init__(self, pid: int | None) -> None:
        self.started = pid
        self.round_id = 7
        self.heard = 0
        self.severed: list[frozenset[tuple[str, int]]] = []

    async def next_round(self, request: NextRoundRequest) -> NextRoundReply:
        return RoundAssignment(self.round_id, SLOT, sync=True, commits=0, backend=Backend.HOROVOD)

    def running(self, report: RunningReport) -> None:
        pass

    def hear(self, worker: WorkerId, progress: int, *, waiting: bool) -> None:
        self.heard += 1

    def set_key(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        pass

    def key_when_there(self, round_id: int, scope: str, key: str) -> asyncio.Future[bytes]:
        return asyncio.get_running_loop().create_future()

    async def sever(self, worker: WorkerId, endpoints: Iterable[tuple[str, int]]) -> None:
        self.severed.append(frozenset(endpoints))

    def pid(self, worker: WorkerId) -> int | None:
        return self.started

    def start_again(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        raise AssertionError


Say = Callable[..., Awaitable[int]]


def run(body: Callable[[HorovodFront, Around, Say], Awaitable[None]], pid: int | None = None) -> None:
    """With a front that has one worker, and what sends its requests."""

    async def main() -> None:
        around, tasks = Around(pid), Tasks()
        front = HorovodFront(around, around, around, tasks=tasks, warn=lambda text: None)
        try:
            async with asyncio.timeout(150):
                env = {ENV_PROTOCOL: "on", **place_variables(SLOT)}
                port = int((await front.environment(WORKER, ("python",), env))[ENV_PORT])

                async def say(method: str, path: str, data: bytes = b"", header: str = "") -> int:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    start = f"{method} {path} HTTP/1.1\r\nContent-Length: {len(data)}\r\n{header}\r\n"
                    writer.write(start.encode() + data)
                    answer = await reader.read()
                    writer.close()
                    return int(answer.split()[1])

                await body(front, around, say)
        finally:
            front.close()
            await tasks.end()

    asyncio.run(main())


async def meet(say: Say, header: str = "") -> None:
    """It asks for its place, and meets the others."""
    assert await say("GET", "/rank_and_size/host-1:0", header=header) == 200
    assert await say("PUT", "/global/0") == 200
    assert await say("DELETE", "/cross_0_process_set_hash_1f/0") == 200


class Seen(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (), {})


class Service:
    """A worker's notification service."""

    def __init__(self) -> None:
        self.timestamps: list[float] = []

    async def open(self) -> tuple[asyncio.Server, bytes]:
        """Returns it, and what the worker says of it."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        said = ({"lo": [("127.0.0.1", server.sockets[0].getsockname()[1])]}, KEY)
        return server, base64.b64encode(pickle.dumps(said))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("i", (await reader.readexactly(36))[32:])
        request = Seen(io.BytesIO(await reader.readexactly(length))).load()
        self.timestamps.append(request.timestamp)
        writer.write(hmac.digest(KEY, b"", hashlib.sha256) + struct.pack("i", 0))
        writer.close()


async def settled(done: Callable[[], object]) -> None:
    while not done():
        await asyncio.sleep(0.01)


def test_each_notice_is_greater_than_those_before_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    clock = iter(range(1_000_000, 0, -1))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))

    async def body(front: HorovodFront, around: Around, say: Say) -> None:
        service = Service()
        server, said = await service.open()
        async with server:
            await meet(say)
            assert await say("PUT", "/worker_addresses/host-1:0", said) == 200
            front.notified(Notice(20, 7, NoticeKind.HOSTS_UPDATED, "a host has come"))
            await settled(lambda: len(service.timestamps) > 2)
            first = set(service.timestamps)
            assert len(first) == 1  # repeated, it is the same
            around.round_id = 8
            front.notified(Notice(21, 8, NoticeKind.NONE, ""))
            await meet(say)
            service.timestamps.clear()
            front.notified(Notice(22, 8, NoticeKind.HOSTS_UPDATED, "a host has gone"))
            await settled(lambda: service.timestamps)
            assert min(service.timestamps) > max(first)
            front.notified(Notice(23, 8, NoticeKind.NONE, ""))

    run(body)


def test_who_has_not_met_the_others_yet_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)

    async def body(front: HorovodFront, around: Around, say: Say) -> None:
        service = Service()
        server, said = await service.open()
        async with server:
            front.notified(Notice(20, 7, NoticeKind.HOSTS_UPDATED, "a host has come"))
            assert await say("GET", "/rank_and_size/host-1:0") == 200
            assert await say("PUT", "/worker_addresses/host-1:0", said) == 200
            assert await say("PUT", "/global/0") == 200
            await asyncio.sleep(0.1)
            assert service.timestamps == []
            assert await say("DELETE", "/cross_0_process_set_hash_1f/0") == 200
            await settled(lambda: service.timestamps)
            front.notified(Notice(21, 7, NoticeKind.NONE, ""))

    run(body)


@pytest.mark.parametrize("says", ["its own", "somebody else's", "nothing"])
def test_only_the_workers_own_process_is_ended(monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    # A worker in a namespace of process ids of its own says an id that is somebody else's here.
    monkeypatch.setattr(module, "_SHUT_AT_S", (0.0, 0.05))
    monkeypatch.setattr(module, "_MEET_S", 0.05)
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as own,
        subprocess.Popen(command, stdin=subprocess.PIPE) as other,
    ):

        async def body(front: HorovodFront, around: Around, say: Say) -> None:
            pid = {"its own": own.pid, "somebody else's": other.pid, "nothing": 0}[says]
            assert await say("GET", "/rank_and_size/host-1:0", header=f"x-elastic-driver-process: {pid} 0\r\n") == 200
            assert await say("PUT", "/global/0") == 200
            front.notified(Notice(20, 7, NoticeKind.ABORT, "a worker is lost"))
            await settled(lambda: own.poll() is not None)

        run(body, own.pid)
        assert own.returncode == -signal.SIGABRT
        other.communicate(b"\n")
        assert other.returncode == 0


def test_who_is_stopped_is_not_heard() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:

        async def body(front: HorovodFront, around: Around, say: Say) -> None:
            assert await say("GET", "/rank_and_size/host-1:0") == 200
            await settled(lambda: around.heard)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            heard = around.heard
            await asyncio.sleep(0.3)  # six looks
            assert around.heard == heard
            process.send_signal(signal.SIGCONT)
            await settled(lambda: around.heard > heard)

        try:
            run(body, process.pid)
        finally:
            process.kill()
