"""What it costs that agents dial in, and what their frames cost, over TLS and at a socket of the driver's machine.

    python benchmarks/dial_in.py [--runs 3] [--agents 600]
    python benchmarks/dial_in.py --strangers 50000

The driver's server and its admission of agents are the real ones, and so is the agents' dial_in; each side has a
process of its own. Measured: processor time of either side for one connection, from the connect to where it carries
frames, 20 at a time; and for one frame of 300 bytes, 16 KiB and 256 KiB, both sides together, from agent to driver,
with at most 512 KiB on their way. Printed are medians.

With --strangers: what a stranger costs the driver, in kB of its own memory (not the kernel's), by how far it goes; and
how long an agent takes to dial in over TLS while so many strangers connect, one after another, and at once as far as
the limit of open files lets them. They have a process of their own, and so has the agent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from elastic_driver.launch.agent.dial_in import AuthenticatedConnection, dial_in  # noqa: E402
from elastic_driver.rendezvous.certificate import client_context  # noqa: E402
from elastic_driver.rendezvous.channel import FrameConnection  # noqa: E402
from elastic_driver.rendezvous.credentials import Credential, Identity, Role  # noqa: E402
from elastic_driver.rendezvous.frames import Frame, Message  # noqa: E402
from elastic_driver.rendezvous.server.server import RendezvousServer, ServerLimits  # noqa: E402
from elastic_driver.system.local_socket import SocketFolder, url_of  # noqa: E402

SIDE_BY_SIDE = 20
WINDOW = 512 << 10
SIZES = {300: 6000, 16 << 10: 3000, 256 << 10: 400}
AGENT = Credential(Identity(Role.AGENT, number="ab"), bytes(32))


# How far strangers go whose memory is measured, and how many. All may stay, unlike in a job.
STAGES = ("silent", "half a ClientHello", "in its handshake", "after its handshake")
KEPT = 4000
# Those that come before them need what is imported late, and what memory is left of the start.
FIRST = 500
DIALS = 100
ONE_BY_ONE, AT_ONCE = "one after another", "at once"
# The range of a client's ports is half of that for each of its addresses.
PER_ADDRESS = 25_000
_IP_BIND_ADDRESS_NO_PORT = 24  # of Linux; Python has no name for it


def take_over(identity: Identity) -> FrameConnection:
    """What agents' connections are handed over to: it tells each how many of its messages have come."""
    count = 0

    def take(frame: Frame) -> None:
        nonlocal count
        count += len(frame.messages)
        connection.write(0, count, count, [])

    connection = FrameConnection(on_frame=take, on_lost=lambda why: None)
    return connection


async def serve(strangers: int) -> None:
    """The driver's process: says where it is, and for each line that it reads what it has used, and who is there.

    Args:
        strangers: how many may stay; 0 for as many as a driver lets stay.
    """
    server = RendezvousServer(
        (),
        key_of=lambda identity: AGENT.key,
        admits=lambda identity: True,
        agents=take_over,
        limits=ServerLimits(strangers=strangers, request_s=600.0, idle_s=600.0) if strangers else None,
    )
    port = await server.start("127.0.0.1", 0, workers=2000)
    folder = SocketFolder.new()
    await server.start_local(folder.listen("driver.sock"))
    fingerprint = await server.certificate.make()
    print(f"https://127.0.0.1:{port} {url_of(folder.path / 'driver.sock')} {fingerprint}", flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        print(time.process_time(), pages * os.sysconf("SC_PAGESIZE") / 1e3, len(server.connections), flush=True)
    folder.close()
    await server.close()


class Driver:
    """That process. See :func:`serve`."""

    def __init__(self, strangers: int = 0) -> None:
        command = [sys.executable, __file__, "--serve", str(strangers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        tls, local, self.fingerprint = self._process.stdout.readline().split()
        self.urls = {"TLS": tls, "local socket": local}

    @property
    def port(self) -> int:
        """For TLS."""
        return int(self.urls["TLS"].rpartition(":")[2])

    def figures(self) -> list[float]:
        """Processor time so far, memory in kB, and how many are connected."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return [*map(float, self._process.stdout.readline().split())]

    def cpu_s(self) -> float:
        """Processor time so far."""
        return self.figures()[0]

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


async def used(driver: Driver, act: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Processor seconds of the agents' side and of the driver's."""
    ours, theirs = time.process_time(), driver.cpu_s()
    await act()
    return time.process_time() - ours, driver.cpu_s() - theirs


async def dial(
    driver: Driver, way: str, on_frame: Callable[[Frame], None] = lambda frame: None
) -> AuthenticatedConnection:
    """One connection."""
    fingerprint = driver.fingerprint if way == "TLS" else ""
    return await dial_in(driver.urls[way], AGENT, fingerprint=fingerprint, on_frame=on_frame, on_lost=lambda why: None)


async def dial_many(driver: Driver, way: str, agents: int) -> None:
    """So many, of which few are under way at a time; each is cut when it carries frames."""
    places = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one() -> None:
        async with places:
            (await dial(driver, way)).connection.abort("enough")

    await asyncio.gather(*(one() for _ in range(agents)))


async def send_many(driver: Driver, way: str, size: int, number: int) -> None:
    """So many frames over one connection."""
    seen, news = 0, asyncio.Event()

    def heard(frame: Frame) -> None:
        nonlocal seen
        seen = frame.seen
        news.set()

    connection = (await dial(driver, way, heard)).connection
    packed = [Message("output", {}, bytes(size)).pack()]
    for sent in range(number):
        while (sent - seen) * size > WINDOW:
            news.clear()
            await news.wait()
        connection.write(sent + 1, 0, 0, packed)
    while seen < number:
        news.clear()
        await news.wait()
    connection.abort("enough")


async def main(runs: int, agents: int) -> None:
    """Measures, and prints."""
    driver = Driver()
    try:
        for way in driver.urls:
            await dial_many(driver, way, SIDE_BY_SIDE)  # what is imported late
            found = [await used(driver, partial(dial_many, driver, way, agents)) for _ in range(runs)]
            ours, theirs = (statistics.median(each) / agents * 1e3 for each in zip(*found, strict=True))
            print(f"{way:13} a connection   agent {ours:6.3f} ms   driver {theirs:6.3f} ms", flush=True)
            for size, number in SIZES.items():
                both = [sum(await used(driver, partial(send_many, driver, way, size, number))) for _ in range(runs)]
                print(
                    f"{way:13} a frame of {size:6} bytes {statistics.median(both) / number * 1e6:8.1f} us", flush=True
                )
    finally:
        driver.close()


# --- strangers -------------------------------------------------------------------------------------------------------


def client_hello() -> bytes:
    """The first message of a handshake."""
    outgoing = ssl.MemoryBIO()
    client = client_context().wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def stranger(port: int, number: int) -> socket.socket:
    """A connection, from an address of this machine that has ports left. Raises OSError."""
    connection = socket.socket()
    try:
        connection.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        connection.bind((f"127.0.1.{1 + number // PER_ADDRESS}", 0))
        connection.connect(("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return connection


def at_stage(port: int, stage: str, number: int, hello: bytes) -> socket.socket:
    """A stranger that has come so far, and goes no further."""
    connection = stranger(port, number)
    if stage == "half a ClientHello":
        connection.sendall(hello[: len(hello) // 2])
    elif stage == "in its handshake":
        connection.sendall(hello)
        connection.recv(1)
    elif stage == "after its handshake":
        return client_context().wrap_socket(connection)
    return connection


async def memory_of_each(stage: str) -> float:
    """What one takes of a new driver, kB."""
    driver = Driver(strangers=2 * KEPT)
    hello = client_hello()
    try:
        connected = [at_stage(driver.port, stage, number, hello) for number in range(FIRST)]
        (await dial(driver, "TLS")).connection.abort("enough")  # all before it were read
        before = driver.figures()[1:]
        connected += [at_stage(driver.port, stage, FIRST + number, hello) for number in range(KEPT)]
        (await dial(driver, "TLS")).connection.abort("enough")
        after = driver.figures()[1:]
        for connection in connected:
            connection.close()
        return (after[0] - before[0]) / (after[1] - before[1])
    finally:
        driver.close()


def flood(port: int, number: int, says: int, *, at_once: bool) -> None:
    """The strangers' process: says how many have connected and in what time, and stays until its input ends.

    Args:
        port: of the driver.
        number: how many.
        says: of a ClientHello, so many bytes.
        at_once: whether they stay.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hello = client_hello()[:says]
    kept, began = [], time.perf_counter()
    for each in range(min(number, hard - 100) if at_once else number):
        connection = stranger(port, each)
        with contextlib.suppress(ConnectionError):  # it was cut already
            connection.sendall(hello)
        if at_once:
            kept.append(connection)
        else:
            connection.close()
    print(each + 1, time.perf_counter() - began, flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def flooding(driver: Driver, number: int, says: int, how: str) -> Iterator[subprocess.Popen[str]]:
    """Such a process, while it runs."""
    words = [str(driver.port), str(number), str(says), how]
    process = subprocess.Popen(
        [sys.executable, __file__, "--flood", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.communicate()


async def dial_times(driver: Driver, goes_on: Callable[[], bool]) -> list[float]:
    """How long an agent dials in, one time after the other, ms. As agents do, it tries again where it is cut off."""
    times = []
    while goes_on():
        began = time.perf_counter()
        met = None
        while met is None:
            with contextlib.suppress(OSError):  # of which its time limit is one
                met = await dial(driver, "TLS")
        times.append((time.perf_counter() - began) * 1e3)
        met.connection.abort("enough")
        await asyncio.sleep(0.01)
    return times


def times(number: int) -> Callable[[], bool]:
    """True so often, then False."""
    return iter([True] * number + [False]).__next__


def told(found: list[float]) -> str:
    """In words."""
    return f"{len(found):5} dials, median {statistics.median(found):8.1f} ms, longest {max(found):8.1f} ms"


async def beside(driver: Driver, number: int, says: int, how: str) -> None:
    """Measures dialling in while that many strangers connect, and prints."""
    before = driver.cpu_s()
    with flooding(driver, number, says, how) as process:
        assert process.stdout is not None
        done = asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
        found = await dial_times(driver, lambda: not done.done())
        after, _, left = driver.figures()
        count, took_s = map(float, (await done).split())
        print(f"    {how + ':':25}{told(found)}", flush=True)
        print(
            f"    {'':25}({count:.0f} strangers in {took_s:.1f} s, {after - before:.1f} s of the driver's processor; "
            f"{left:.0f} are connected at the end)",
            flush=True,
        )
        if how == AT_ONCE:
            print(f"    {'while they stay:':25}{told(await dial_times(driver, times(DIALS)))}", flush=True)


async def among_strangers(number: int) -> None:
    """Measures, and prints."""
    for stage in STAGES:
        print(f"a stranger, {stage:25} {await memory_of_each(stage):5.1f} kB", flush=True)
    for says, what in ((0, "silent strangers"), (1 << 20, "strangers that send a ClientHello")):
        print(what, flush=True)
        for how in (ONE_BY_ONE, AT_ONCE):
            driver = Driver()
            try:
                await dial_times(driver, times(20))  # what is imported late
                print(f"    {'none:':25}{told(await dial_times(driver, times(DIALS)))}", flush=True)
                await beside(driver, number, says, how)
            finally:
                driver.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each (default 3)")
    parser.add_argument("--agents", type=int, default=600, help="that dial in (default 600)")
    parser.add_argument("--strangers", type=int, default=0, help="measures those instead; so many (50000 are enough)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--flood", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        port, number, says, how = arguments.flood
        flood(int(port), int(number), int(says), at_once=how == AT_ONCE)
    elif arguments.serve is not None:
        uvloop.run(serve(arguments.serve))
    elif arguments.strangers:
        uvloop.run(among_strangers(arguments.strangers))
    else:
        uvloop.run(main(arguments.runs, arguments.agents))
