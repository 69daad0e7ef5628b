"""A worker that does on the wire what a process with unmodified Horovod 0.28.1 does, without Horovod and torch.

It meets with the others in six contexts (the last three are process set 0's), sums a number round a ring at each step
over connections of process set 0, so that who is no neighbour of a dead rank waits for it, takes notices of changed
hosts, and aborts where Horovod does. Each line that it prints is ``WHAT rank R size S step N pid P``.

    python horovod_worker.py [--steps N] [--commit-each K] [--pace S] [--asks-first] [what goes wrong]
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import hmac
import http.client
import io
import json
import os
import pickle
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

RECORD = struct.Struct("=H2s4s120xQ")
LENGTH = struct.Struct("i")
NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
HASH = "_process_set_hash_1f2e"
POLL_S = 0.01
MIXED = 3


class LostError(Exception):
    """HorovodInternalError."""


class HostsUpdatedError(Exception):
    """HostsUpdatedInterrupt."""

    def __init__(self, *, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


def recv_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise OSError("the other end is gone")
        data += more
    return data


class Http:
    """Horovod's C++ client: a connection for each request, three tries, no read timeout."""

    def __init__(self) -> None:
        self.address = (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
        self.requests = 0

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        for attempt in range(3):
            if attempt:
                time.sleep(0.5)
            with contextlib.suppress(OSError):
                status, answer = self._once(method, path, body)
                if status in (200, 404):
                    return status, answer
        raise OSError(f"{method} {path}: no answer in three tries")

    def _once(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        self.requests += 1
        with socket.create_connection(self.address) as sock:
            sock.sendall(
                f"{method} {path} HTTP/1.1\r\nHost: {self.address[0]}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head, data = b"", b""
            while b"\r\n\r\n" not in head:
                more = sock.recv(4096)
                if not more:
                    raise OSError("closed without an answer")
                head += more
            head, _, data = head.partition(b"\r\n\r\n")
            status = int(head.split()[1])
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b": ")
                if name == b"Content-Length":  # in exactly this case
                    while len(data) < int(value):
                        data += sock.recv(4096)
                    return status, data
            return status, data


class Context:
    """One Gloo context: connections to all peers."""

    def __init__(self, http: Http, scope: str, rank: int, size: int, put_only: bool) -> None:
        limit_s = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
        self.rank, self.size = rank, size
        self.peers: dict[int, socket.socket] = {}
        http.ask("PUT", f"/{scope}/rank_{rank}", socket.gethostname().encode())
        for peer in range(rank):
            http.ask("GET", f"/{scope}/rank_{peer}")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            record = RECORD.pack(socket.AF_INET, struct.pack("!H", port), socket.inet_aton("127.0.0.1"), rank)
            http.ask("PUT", f"/{scope}/{rank}", record * (size - 1))
            if put_only:
                os.kill(os.getpid(), signal.SIGKILL)
            for peer in range(size):
                if peer == rank:
                    continue
                body = self._address(http, scope, peer, limit_s)
                if peer < rank:
                    at = RECORD.size * (rank - 1)
                    (there,) = struct.unpack("!H", RECORD.unpack(body[at : at + RECORD.size])[1])
                    sock = socket.create_connection(("127.0.0.1", there), limit_s)
                    sock.sendall(struct.pack("=I", rank))
                    self.peers[peer] = sock
            listener.settimeout(limit_s)
            while len(self.peers) < size - 1:
                sock, _ = listener.accept()
                sock.settimeout(limit_s)
                self.peers[struct.unpack("=I", recv_exactly(sock, 4))[0]] = sock
        for sock in self.peers.values():
            sock.sendall(b"b")
        for sock in self.peers.values():
            recv_exactly(sock, 1)
        http.ask("DELETE", f"/{scope}/{rank}")

    @staticmethod
    def _address(http: Http, scope: str, peer: int, limit_s: float) -> bytes:
        began = time.monotonic()
        while http.ask("GET", f"/{scope}/{peer}")[0] != 200:
            if time.monotonic() - began > limit_s:
                raise OSError(f"Wait timeout after {limit_s:g} seconds for key {peer}")
            time.sleep(POLL_S)
        return http.ask("GET", f"/{scope}/{peer}")[1]

    def sum(self, number: int) -> int:
        """Round a ring."""
        total = passed = number
        for _ in range(self.size - 1):
            self.peers[(self.rank + 1) % self.size].sendall(struct.pack("=q", passed))
            (passed,) = struct.unpack("=q", recv_exactly(self.peers[(self.rank - 1) % self.size], 8))
            total += passed
        return total

    def broadcast(self, value: Any) -> Any:
        """From rank 0, straight to all."""
        if self.rank:
            (length,) = struct.unpack("=I", recv_exactly(self.peers[0], 4))
            return json.loads(recv_exactly(self.peers[0], length))
        data = json.dumps(value).encode()
        for sock in self.peers.values():
            sock.sendall(struct.pack("=I", len(data)) + data)
        return value

    def close(self) -> None:
        for sock in self.peers.values():
            sock.close()


class _Named:
    pass


class _Unpickler(pickle.Unpickler):
    known = (
        ("horovod.runner.common.util.network", "PingRequest"),
        ("horovod.runner.elastic.worker", "HostsUpdatedRequest"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return type(name, (_Named,), {})


class Notifications:
    """The notification service."""

    def __init__(self, http: Http, args: argparse.Namespace) -> None:
        self.key = secrets.token_bytes(32)
        self.news: list[tuple[float, int]] = []
        self._args = args
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        said: Any = ({"lo": [("127.0.0.1", self._listener.getsockname()[1])]}, self.key)
        body = base64.b64encode(pickle.dumps(_Evil() if args.rubbish else said))
        slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
        if http._once("PUT", f"/worker_addresses/{slot}", body)[0] != 200:
            raise RuntimeError("worker_addresses: not 200")

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            with sock, contextlib.suppress(OSError, pickle.UnpicklingError):
                seal = recv_exactly(sock, 32)
                body = recv_exactly(sock, LENGTH.unpack(recv_exactly(sock, 4))[0])
                if not hmac.compare_digest(hmac.digest(self.key, body, hashlib.sha256), seal):
                    continue
                request = _Unpickler(io.BytesIO(body)).load()
                log("notice", res=getattr(request, "res", -1))
                if self._args.deaf:
                    continue
                if type(request).__name__ == "HostsUpdatedRequest":
                    self.news.append((request.timestamp, request.res))
                answer = pickle.dumps({"ack": True})
                sock.sendall(hmac.digest(self.key, answer, hashlib.sha256) + LENGTH.pack(len(answer)) + answer)


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/elastic_driver_was_here",)


class Worker:
    """The library and the script in one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.http = Http()
        self.place = [int(os.environ[f"HOROVOD_{name}"]) for name in NUMBERS]
        self.contexts: list[Context] = []
        self.step = self.committed = 0
        self.seen = 0.0
        self.inits = 0

    def init(self, *, again: bool) -> None:
        """Whatever fails here aborts the process."""
        try:
            if again or self.args.asks_first:
                slot = f"{os.environ['HOROVOD_HOSTNAME']}:{self.place[2]}"
                status, body = self.http.ask("GET", f"/rank_and_size/{slot}")
                self.place = list(map(int, body.decode().split(","))) if status == 200 and body else [0] * 6
                if self.place[0] < 0:
                    raise OSError(f"{slot} has been removed from elastic job")
            rank, size, local_rank, local_size, cross_rank, cross_size = self.place
            places = (
                ("global", rank, size),
                (f"local_{os.environ['HOROVOD_HOSTNAME']}", local_rank, local_size),
                (f"cross_{local_rank}", cross_rank, cross_size),
            )
            self.inits += 1
            self.contexts = []
            for scope, own, number in (*places, *((f"{scope}{HASH}", *numbers) for scope, *numbers in places)):
                dies = self.once("dies-meeting", f"{self.inits}:{rank}:{len(self.contexts)}", self.args.dies_meeting)
                self.contexts.append(Context(self.http, scope, own, number, dies))
        except OSError as error:
            log("aborts", self, why=str(error).replace(" ", "_"))
            abort()
        log("init", self)

    def shutdown(self, *, well: bool) -> None:
        for context in self.contexts if well else self.contexts[:3]:
            context.close()

    def commit(self, notifications: Notifications) -> None:
        self.committed = self.step
        before, newest, res = self.seen, self.seen, 0
        for timestamp, what in notifications.news:
            if timestamp > newest:
                newest, res = timestamp, res | what
        notifications.news.clear()
        before, newest, res = self.contexts[3].broadcast([before, newest, res])
        self.seen = newest
        if newest > before:
            raise HostsUpdatedError(skip_sync=res == 1)

    def train(self, notifications: Notifications) -> None:
        while self.step < self.args.steps:
            self.misbehave()
            total = self.contexts[3].sum(1)
            assert total == self.place[1]
            self.step += 1
            log("step", self)
            time.sleep(self.args.pace)
            if self.step % self.args.commit_each == 0:
                self.commit(notifications)

    def misbehave(self) -> None:
        for how in self.args.dies:
            where, _, way = how.partition("=")
            if not self.once("dies", f"{self.step}:{self.place[0]}", [where]):
                continue
            log("dies", self)
            if way.isdecimal():
                os._exit(int(way))
            os.kill(os.getpid(), getattr(signal, f"SIG{way}"))

    def once(self, what: str, here: str, where: list[str]) -> bool:
        """Whether this is the place, for the first process that comes there."""
        if here not in where:
            return False
        try:
            Path(os.environ["ONCE"], f"{what}-{here}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def run(self) -> None:
        self.init(again=False)
        if self.args.static:
            while self.step < self.args.steps:
                self.misbehave()
                self.contexts[3].sum(1)
                self.step += 1
            log("done", self)
            return
        notifications = Notifications(self.http, self.args)
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    self.step = self.committed = self.contexts[3].broadcast(self.step)
                self.train(notifications)
                log("done", self)
                return
            except OSError as error:
                log("lost", self, why=type(error).__name__)
                self.step, skip_sync, well = self.committed, False, False
            except HostsUpdatedError as error:
                log("updated", self)
                skip_sync, well = error.skip_sync, True
            self.shutdown(well=well)
            self.init(again=True)
            notifications.news.clear()


def abort() -> NoReturn:
    sys.stdout.flush()
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    os.abort()


def log(what: str, worker: Worker | None = None, **more: object) -> None:
    """To standard output, and to the log of all workers."""
    line: dict[str, object] = {"what": what, "time": time.time(), "pid": os.getpid(), **more}
    line["host"] = os.environ["HOROVOD_HOSTNAME"]
    if worker is not None:
        line |= {
            "rank": worker.place[0],
            "size": worker.place[1],
            "step": worker.step,
            "requests": worker.http.requests,
        }
    with open(os.environ["STEP_LOG"], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def rude(http: Http) -> None:
    """Requests that no Horovod makes."""
    for method, path, body in (
        ("HEAD", "/global/0", b""),
        ("GET", "/a/b/c", b""),
        ("GET", "/global", b""),
        ("PUT", "/worker_addresses/x", b"!" * 100_000),
        ("PUT", f"/global/{'k' * 3000}", b"x"),
        ("POST", "/global/0", b""),
    ):
        with contextlib.suppress(OSError, http_errors):
            log("rude", status=http._once(method, path, body)[0], path=path[:20], method=method)
    with contextlib.suppress(OSError), socket.create_connection(http.address) as sock:
        sock.sendall(b"\x00\xff" * 500 + b"\r\n\r\n")
        sock.recv(100)
    with contextlib.suppress(OSError), socket.create_connection(http.address) as sock:
        sock.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n")
        for _ in range(100):
            sock.sendall(b"x" * 100_000)


http_errors = (http.client.HTTPException, ValueError, IndexError)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--commit-each", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--boot", type=float, default=0.0, help="seconds that its imports take")
    parser.add_argument("--asks-first", action="store_true")
    parser.add_argument("--static", action="store_true", help="without elastic.run")
    parser.add_argument("--dies", action="append", default=[], metavar="STEP:RANK=CODE|KILL|STOP")
    parser.add_argument("--dies-meeting", action="append", default=[], metavar="INIT:RANK:CONTEXT")
    parser.add_argument("--deaf", action="store_true", help="it never acknowledges a notice")
    parser.add_argument("--rubbish", action="store_true", help="it registers a pickle that runs a command")
    parser.add_argument("--rude", action="store_true")
    parser.add_argument("--stubborn", action="store_true", help="it ignores SIGTERM")
    args = parser.parse_args()
    args.asks_first = args.asks_first and "ELASTIC_DRIVER_HOROVOD_PORT" in os.environ
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log("start", None, planned=[int(os.environ[f"HOROVOD_{name}"]) for name in NUMBERS])
    time.sleep(args.boot)
    worker = Worker(args)
    if args.rude:
        rude(worker.http)
    worker.run()


if __name__ == "__main__":
    main()
