"""How fast the rendezvous server is, next to Python's threading HTTP server (and aiohttp, where it is installed).

    python benchmarks/rendezvous.py [--runs 5] [--seconds 1.5]

Each server runs in a process of its own, the load in this one; on different cores where there are two. Measured:
requests a second with 64 keep-alive connections (GET and PUT of 200 bytes), the time from a PUT to the last of 1,000
answers to requests that were parked on its key, and the server's memory before and with those parked. All keep keys
under their round. Ours listens at a socket of this machine, as agents do for their workers, and the kernel names the
user once; the others listen on loopback, and check a token with each request. Figures are medians over the runs; the
servers take turns, so that a busy moment of the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import importlib.util
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.authentication import opening
from elastic_driver.rendezvous.credentials import Identity, JobKey, Role
from elastic_driver.system.local_socket import SocketFolder, connect

TOKEN = "benchmark-token"
EXPECTED = f"Bearer {TOKEN}"
KEY = JobKey(TOKEN.encode())
WORKER = Identity(Role.WORKER, WorkerId("localhost", 0, 0))
CONNECTIONS = 64
CONNECT_S = 10.0
PARKED = 1000
VALUE = b"v" * 200


# --- the servers -----------------------------------------------------------------------------------


def serve_ours(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """The project's server."""
    from elastic_driver.rendezvous.server.key_routes import KeyRoutes
    from elastic_driver.rendezvous.server.server import RendezvousServer

    async def main() -> None:
        keys = KeyRoutes()
        server = RendezvousServer(keys.routes, key_of=KEY.of, admits=lambda identity: True)
        server.connections.make_local_room(PARKED)
        folder = SocketFolder.new()
        await server.start_local(folder.listen("rendezvous.sock"))
        announce(folder.path / "rendezvous.sock")
        keys.begin_round(1)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


def serve_uvloop() -> None:
    """The project's server as the driver runs it."""
    import uvloop

    serve_ours(uvloop.new_event_loop)


def serve_asyncio() -> None:
    """The project's server under the standard library's loop."""
    serve_ours(asyncio.new_event_loop)


def serve_threads() -> None:
    """The standard library's server, a thread for each connection: about what Horovod's rendezvous is."""
    values: dict[tuple[str, ...], bytes] = {}
    changed = threading.Condition()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer in one piece
        disable_nagle_algorithm = True

        def place(self) -> tuple[tuple[str, ...], float]:
            parts = urlsplit(self.path)
            return tuple(parts.path.split("/")[3:]), float(parse_qs(parts.query).get("wait_s", ["0"])[0])

        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def knows_token(self) -> bool:
            return hmac.compare_digest(self.headers.get("Authorization", ""), EXPECTED)

        def do_GET(self) -> None:
            key, wait_s = self.place()
            with changed:
                if wait_s:
                    changed.wait_for(lambda: key in values, wait_s)
                value = values.get(key)
            self.answer(401 if not self.knows_token() else 404 if value is None else 200, value or b"")

        def do_PUT(self) -> None:
            key, _ = self.place()
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not self.knows_token():
                self.answer(401)
                return
            with changed:
                values[key] = body
                changed.notify_all()
            self.answer(204)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 4096
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            if not isinstance(sys.exception(), ConnectionError):
                raise

    with Server(("127.0.0.1", 0), Handler) as server:
        announce(server.server_address[1])
        server.serve_forever()


def serve_aiohttp() -> None:
    """aiohttp under uvloop."""
    import uvloop
    from aiohttp import web  # type: ignore[import-not-found, unused-ignore]

    values: dict[tuple[str, ...], bytes] = {}
    waiting: dict[tuple[str, ...], list[asyncio.Future[bytes]]] = defaultdict(list)

    async def handle(request: web.Request) -> web.Response:
        if not hmac.compare_digest(request.headers.get("Authorization", ""), EXPECTED):
            return web.Response(status=401)
        key = tuple(request.path.split("/")[3:])
        if request.method == "PUT":
            values[key] = await request.read()
            for future in waiting.pop(key, ()):
                future.set_result(values[key])
            return web.Response(status=204)
        value = values.get(key)
        if value is None and "wait_s" in request.query:
            wanted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            waiting[key].append(wanted)
            value = await asyncio.wait_for(wanted, float(request.query["wait_s"]))
        return web.Response(status=404) if value is None else web.Response(body=value)

    async def main() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        announce(runner.addresses[0][1])
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def announce(where: int | Path) -> None:
    """Tells the parent where to connect."""
    print(where, flush=True)


SERVERS: dict[str, tuple[str, Callable[[], None]]] = {
    "ours": ("elastic_driver (uvloop)", serve_uvloop),
    "ours-asyncio": ("elastic_driver (asyncio)", serve_asyncio),
    "aiohttp": ("aiohttp (uvloop)", serve_aiohttp),
    "threads": ("ThreadingHTTPServer", serve_threads),
}


# --- the load --------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What a server did under load."""

    rate: float  # requests a second
    cpu: float  # of a core, that the server used
    own_cpu: float  # of a core, that the load itself used


def request(method: str, path: str, body: bytes = b"", authorization: str = EXPECTED) -> bytes:
    """A whole request as bytes."""
    length = f"Content-Length: {len(body)}\r\n" if method == "PUT" else ""
    return (
        f"{method} /v1/rounds/1/kv/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {authorization}\r\n{length}\r\n"
    ).encode() + body


class Measured:
    """One server process and the connections to it."""

    def __init__(self, name: str, cores: list[int]) -> None:
        command = [sys.executable, __file__, "--serve", name, "--core", str(cores[0])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"cannot start the server {name}: it ended with {self._process.wait()}")
        self._socket = Path(line.strip()) if line.startswith("/") else None
        self._port = 0 if self._socket else int(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def memory(self) -> float:
        """Resident, in MB (10**6 bytes)."""
        with open(f"/proc/{self._process.pid}/status") as status:
            return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmRSS"))

    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        with open(f"/proc/{self._process.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def connect(self) -> socket.socket:
        """A connection."""
        if self._socket is not None:
            connection = connect(self._socket, CONNECT_S)
            connection.sendall(opening(str(WORKER)))
            return connection
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def ask(self, connection: socket.socket, data: bytes, status: int) -> int:
        """One request; the length of the answer in bytes. The answer comes whole before the pause that ends it."""
        connection.sendall(data)
        answer = connection.recv(65536)
        assert f" {status} ".encode() in answer.partition(b"\r\n")[0], answer
        return len(answer)

    def load(self, method: str, path: str, body: bytes, status: int, seconds: float) -> Load:
        """Requests from 64 connections, each as soon as the answer to the last is there."""
        poll = select.epoll()
        receive, send, missing = {}, {}, {}
        connections = [self.connect() for _ in range(CONNECTIONS)]
        asked = request(method, path, body)
        length = self.ask(connections[0], asked, status)
        for connection in connections:
            number = connection.fileno()
            receive[number], send[number], missing[number] = connection.recv, connection.send, length
            poll.register(number, select.EPOLLIN)
            connection.send(asked)
        done, now = 0, time.perf_counter()
        began, cpu, own, end = now, self.cpu_s(), time.process_time(), now + seconds
        while now < end:
            for number, _ in poll.poll():
                got = len(receive[number](4096))
                if got == missing[number]:
                    send[number](asked)
                    missing[number] = length
                    done += 1
                else:  # an answer in pieces
                    assert 0 < got < missing[number], "the answers are not all of one length"
                    missing[number] -= got
            now = time.perf_counter()
        used_s, own_s, took_s = self.cpu_s() - cpu, time.process_time() - own, now - began
        for connection in connections:
            connection.close()
        poll.close()
        return Load(done / took_s, used_s / took_s, own_s / took_s)

    def release(self, key: str) -> tuple[float, float]:
        """Seconds from a PUT to the last of 1,000 parked answers; MB with them parked."""
        poll = select.epoll()
        connections = {}
        for _ in range(PARKED):
            connection = self.connect()
            connection.sendall(request("GET", f"{key}?wait_s=60"))
            connections[connection.fileno()] = connection
            poll.register(connection.fileno(), select.EPOLLIN)
        other = self.connect()
        self._until_idle()
        memory = self.memory()
        began = time.perf_counter()
        other.sendall(request("PUT", key, VALUE))
        waiting = set(connections)
        while waiting:
            for number, _ in poll.poll():
                if number in waiting:
                    assert b" 200 " in connections[number].recv(4096)[:20]
                    waiting.discard(number)
        took_s = time.perf_counter() - began
        for connection in (*connections.values(), other):
            connection.close()
        poll.close()
        return took_s, memory

    def _until_idle(self) -> None:
        """Blocks until the server has parked all: it uses no CPU any more."""
        idle = 0
        while idle < 10:
            before = self.cpu_s()
            time.sleep(0.02)  # the interval in which its use of the CPU is looked at
            idle = idle + 1 if self.cpu_s() == before else 0


# --- the table -------------------------------------------------------------------------------------


def measure(names: list[str], runs: int, seconds: float, cores: list[int]) -> None:
    """Runs everything and prints a table."""
    figures: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    for run in range(runs):
        for name in names:
            server, found = Measured(name, cores), figures[name]
            try:
                found["idle MB"].append(server.memory())
                for method, status in (("PUT", 204), ("GET", 200)):
                    load = server.load(method, "scope/key", VALUE if method == "PUT" else b"", status, seconds)
                    found[f"{method}/s"].append(load.rate)
                    found[f"{method} per cpu s"].append(load.rate / load.cpu)
                    found["cpu"].append(load.cpu)
                    found["load's cpu"].append(load.own_cpu)
                took_s, memory = server.release(f"release/{run}")
                found["release ms"].append(took_s * 1000)
                found["parked MB"].append(memory)
            finally:
                server.close()
    columns = [
        *("GET/s", "GET per cpu s", "PUT/s", "PUT per cpu s", "cpu", "load's cpu"),
        *("release ms", "idle MB", "parked MB"),
    ]
    print(f"{CONNECTIONS} connections, {len(VALUE)}-byte values, {PARKED} parked; median of {runs} (range)\n")
    medians = {name: {column: statistics.median(figures[name][column]) for column in columns} for name in names}
    print(f"{'':16}" + "".join(f"{SERVERS[name][0]:>28}" for name in names))
    for column in columns:
        digits = 0 if "/s" in column or "per" in column else 2 if "cpu" in column else 1
        cells = [
            f"{medians[name][column]:,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"
            for name in names
            for values in [figures[name][column]]
        ]
        print(f"{column:16}" + "".join(f"{cell:>28}" for cell in cells))
    first = medians[names[0]]
    print("\ncpu: share of a core. Where both are below 1, other processes had the rest.")
    print(f"{SERVERS[names[0]][0]} against the others:")
    for name in names[1:]:
        other = medians[name]
        print(
            f"  {SERVERS[name][0]:26} {first['GET/s'] / other['GET/s']:.1f} x GET/s,"
            f" {first['PUT/s'] / other['PUT/s']:.1f} x PUT/s,"
            f" {first['GET per cpu s'] / other['GET per cpu s']:.1f} x GET per cpu s,"
            f" release in {first['release ms'] / other['release ms']:.2f} of the time"
        )
    for what, good in (
        ("GET at least 30,000/s", first["GET/s"] >= 30_000),
        ("release under 50 ms", first["release ms"] < 50),
        ("under 60 MB with 1,000 parked", first["parked MB"] < 60),
    ):
        print(f"  {what}: {'reached' if good else 'MISSED'}")


def main() -> None:
    """Parses the command line; measures, or (for its own children) serves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="times that each server is measured (default 5)")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="of load for GET and for PUT, each run (default 1.5)"
    )
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 1 << 16, hard))
    if arguments.serve:
        os.sched_setaffinity(0, {arguments.core})
        SERVERS[arguments.serve][1]()
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[1]})
    else:
        print("one core only: the load takes from the servers what it needs itself")
    names = [name for name in SERVERS if name != "aiohttp" or importlib.util.find_spec("aiohttp") is not None]
    measure(names, arguments.runs, arguments.seconds, cores)


if __name__ == "__main__":
    main()
