"""What it costs that agents dial in, and what their frames cost, over TLS and at a socket of the driver's machine.

    python benchmarks/dial_in.py [--runs 3] [--agents 600]

The driver's server and its admission of agents are the real ones, and so is the agents' dial_in; each side has a
process of its own. Measured: processor time of either side for one connection, from the connect to where it carries
frames, 20 at a time; and for one frame of 300 bytes, 16 KiB and 256 KiB, both sides together, from agent to driver,
with at most 512 KiB on their way. Printed are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from elastic_driver.launch.agent.dial_in import Met, dial_in  # noqa: E402
from elastic_driver.rendezvous.channel import FrameConnection  # noqa: E402
from elastic_driver.rendezvous.credentials import Credential, Identity, Role  # noqa: E402
from elastic_driver.rendezvous.frames import Frame, Message  # noqa: E402
from elastic_driver.rendezvous.server.server import RendezvousServer  # noqa: E402
from elastic_driver.system.local_socket import SocketFolder  # noqa: E402

SIDE_BY_SIDE = 20
WINDOW = 512 << 10
SIZES = {300: 6000, 16 << 10: 3000, 256 << 10: 400}
AGENT = Credential(Identity(Role.AGENT, number="ab"), bytes(32))


class Agents:
    """Takes agents in, and tells each how many of its messages have come."""

    def key_of(self, identity: Identity) -> bytes:
        """The same for all."""
        return AGENT.key

    def take_over(self, identity: Identity) -> FrameConnection:
        """What their connections are handed over to."""
        count = 0

        def take(frame: Frame) -> None:
            nonlocal count
            count += len(frame.messages)
            connection.write(0, count, [])

        connection = FrameConnection(on_frame=take, on_lost=lambda why: None)
        return connection


async def serve() -> None:
    """The driver's process: says where it is, and for each line that it reads its processor time so far."""
    server = RendezvousServer((), key_of=Agents().key_of, admits=lambda identity: True, agents=Agents().take_over)
    port = await server.start("127.0.0.1", 0, workers=2000)
    folder = SocketFolder.new()
    await server.start_local(folder.listen("driver.sock"))
    fingerprint = await server.certificate.make()
    print(f"https://127.0.0.1:{port} unix:{folder.path}/driver.sock {fingerprint}", flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(time.process_time(), flush=True)
    folder.close()
    await server.close()


class Driver:
    """That process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        tls, local, self.fingerprint = self._process.stdout.readline().split()
        self.urls = {"TLS": tls, "local socket": local}

    def cpu_s(self) -> float:
        """Processor time so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


async def used(driver: Driver, act: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Processor seconds of the agents' side and of the driver's."""
    ours, theirs = time.process_time(), driver.cpu_s()
    await act()
    return time.process_time() - ours, driver.cpu_s() - theirs


async def dial(driver: Driver, way: str, on_frame: Callable[[Frame], None] = lambda frame: None) -> Met:
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
        connection.write(sent + 1, 0, packed)
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
            found = [await used(driver, lambda way=way: dial_many(driver, way, agents)) for _ in range(runs)]  # type: ignore[misc]
            ours, theirs = (statistics.median(each) / agents * 1e3 for each in zip(*found, strict=True))
            print(f"{way:13} a connection   agent {ours:6.3f} ms   driver {theirs:6.3f} ms", flush=True)
            for size, number in SIZES.items():
                both = [
                    sum(
                        await used(
                            driver, lambda size=size, number=number, way=way: send_many(driver, way, size, number)
                        )
                    )  # type: ignore[misc]
                    for _ in range(runs)
                ]
                print(
                    f"{way:13} a frame of {size:6} bytes {statistics.median(both) / number * 1e6:8.1f} us", flush=True
                )
    finally:
        driver.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each (default 3)")
    parser.add_argument("--agents", type=int, default=600, help="that dial in (default 600)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    uvloop.run(serve() if arguments.serve else main(arguments.runs, arguments.agents))
