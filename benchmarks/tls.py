"""What our TLS costs next to the event loop's own, and how long a stranger's KeyUpdates stop the loop under each.

    python benchmarks/tls.py [--runs 5] [--updates 100000]

One server on uvloop, with the driver's context, serves both in turns; the client is a process of its own, which uses
Python's ssl over a blocking socket. Measured: frames of 256 KiB a second (MB/s), each way; echoes of 300 bytes, one
at a time; what a handshake costs the server's processor; and the longest turn of the loop while one stranger sends
KeyUpdates and reads nothing. The peers of the first two count as trusted. Printed are medians, and ratios of the
two, which is what to look at: the machine is rarely quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast

import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from elastic_driver.rendezvous.certificate import Certificate, client_context, server_context  # noqa: E402
from elastic_driver.rendezvous.tls import TlsLayer, TlsTransport, Turns  # noqa: E402
from tests.support.network.tls_client import TlsClient  # noqa: E402

FRAME, SMALL = 256 << 10, 300
FRAMES, ECHOES, HANDSHAKES = 600, 8000, 300
# What the client asks for first.
TAKE, GIVE, ECHO = b"take", b"give", b"echo"


class Server(asyncio.Protocol):
    """Takes frames, gives frames, or echoes."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._mode = b""
        self._left = FRAMES * FRAME

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if not self._mode:
            self._mode, data = data[:4], data[4:]
            if isinstance(self._transport, TlsTransport) and self._mode in (TAKE, GIVE, ECHO):
                self._transport.trust()
            if self._mode == GIVE:
                self._give(FRAMES)
        if self._mode == ECHO and data:
            self._transport.write(data)
        elif self._mode == TAKE:
            self._left -= len(data)
            if not self._left:
                self._transport.write(b"done")

    def _give(self, left: int) -> None:
        while left and self._transport.get_write_buffer_size() < 2 * FRAME:
            self._transport.write(bytes(FRAME))
            left -= 1
        if left:
            asyncio.get_running_loop().call_soon(self._give, left)


async def listen(kind: str, context: ssl.SSLContext) -> asyncio.Server:
    """A server over TLS of one kind."""
    loop, turns = asyncio.get_running_loop(), Turns()

    def layer() -> TlsLayer:
        return TlsLayer(context, Server, turns, handshake_s=10.0, server_side=True, on_shaken=lambda error: None)

    if kind == "ours":
        return await loop.create_server(layer, "127.0.0.1", 0, backlog=1000)
    return await loop.create_server(Server, "127.0.0.1", 0, ssl=context, backlog=1000)


async def client(port: int, what: str, *more: str) -> dict[str, float]:
    """Runs the client; its seconds, the server's seconds of a processor, and the longest turn of the loop."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--client", what, str(port), *more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()  # it is ready
    used, longest, last = time.process_time(), 0.0, time.perf_counter()
    process.stdin.write(b"\n")
    answer = asyncio.ensure_future(process.stdout.readline())
    while not answer.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    used = time.process_time() - used
    process.stdin.close()
    await process.wait()
    return {"took": float(answer.result()), "used": used, "longest": longest}


def be_client(what: str, port: int, updates: int) -> None:
    """In the client's process: prepares, waits for a line, does it, and says how long it took."""

    def go(do: Callable[[], None]) -> None:
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        do()
        print(time.perf_counter() - began, flush=True)
        sys.stdin.read()

    def connected() -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client_context().wrap_socket(plain)

    def read(sock: ssl.SSLSocket, size: int) -> None:
        buffer = bytearray(FRAME)
        while size:
            size -= sock.recv_into(buffer, min(size, FRAME))

    def take() -> None:
        sock.sendall(TAKE)
        for _ in range(FRAMES):
            sock.sendall(frame)
        read(sock, 4)

    def give() -> None:
        sock.sendall(GIVE)
        read(sock, FRAMES * FRAME)

    def echo() -> None:
        sock.sendall(ECHO)
        for _ in range(ECHOES):
            sock.sendall(frame[:SMALL])
            read(sock, SMALL)

    def shake() -> None:
        for _ in range(HANDSHAKES):
            connected().close()

    frame = bytes(FRAME)
    if what == "flood":
        flood(port, updates, go)
        return
    if what != "shake":
        sock = connected()
    go({"take": take, "give": give, "echo": echo, "shake": shake}[what])


def flood(port: int, updates: int, go: Callable[[Callable[[], None]], None]) -> None:
    """Sends KeyUpdates, and reads none of the answers."""
    with tempfile.TemporaryDirectory() as folder, socket.create_connection(("127.0.0.1", port)) as sock:
        peer = TlsClient(Path(folder) / "keys")
        sock.sendall(peer.take())
        while not peer.is_shaken:
            sock.sendall(peer.take(sock.recv(65536)))
        data = peer.key_updates(updates)
        sock.settimeout(3.0)  # under ours not all of it is read

        def send() -> None:
            with contextlib.suppress(OSError):
                sock.sendall(data)

        go(send)


async def main(runs: int, updates: int) -> None:
    context = server_context(Certificate.new())
    kinds = {kind: await listen(kind, context) for kind in ("ours", "loop's")}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(runs):
        for kind, server in kinds.items():
            port = server.sockets[0].getsockname()[1]
            megabytes = FRAMES * FRAME / 1e6
            for what in ("take", "give"):
                one = await client(port, what, "0")
                found[f"{what} 256 KiB, MB/s"][kind].append(megabytes / one["took"])
                found[f"{what} 256 KiB, ms of a processor each"][kind].append(one["used"] / FRAMES * 1e3)
            one = await client(port, "echo", "0")
            found["echo of 300 B, a second"][kind].append(ECHOES / one["took"])
            found["echo of 300 B, us of a processor"][kind].append(one["used"] / ECHOES * 1e6)
            one = await client(port, "shake", "0")
            found["handshake, us of a processor"][kind].append(one["used"] / HANDSHAKES * 1e6)
            one = await client(port, "flood", str(updates))
            found[f"longest turn under {updates} KeyUpdates, ms"][kind].append(one["longest"] * 1e3)
    for name, values in found.items():
        ours, theirs = (statistics.median(values[kind]) for kind in ("ours", "loop's"))
        print(f"{name:<46} ours {ours:9.2f}   the loop's {theirs:9.2f}   ratio {ours / theirs:.3f}")
    for server in kinds.values():
        server.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        be_client(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--runs", type=int, default=5, help="of each (default 5)")
        parser.add_argument("--updates", type=int, default=100_000, help="KeyUpdates of the flood (default 100,000)")
        options = parser.parse_args()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main(options.runs, options.updates))
