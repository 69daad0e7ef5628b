"""Network checks between hosts: an agent listens where its workers would, and probes whether it reaches other hosts.

Owns the listener, which lives for one check only, and the probes' connections. Conclusions are up to the driver
(:mod:`elastic_driver.launch.fleet.network_check`). Used on the event loop only.

    prober                                              listener
    which host it looks for, and for what  ──────────►
                                           ◄──────────  proof that it is this host's agent
    proof that it is another agent         ──────────►
    echo: 16 bytes, again and again        ◄─────────►  the same
    take: bytes                            ──────────►
                                           ◄──────────  how many arrived, and in what time; then the connection ends
    give:                                  ◄──────────  bytes, until there are enough or the connection ends

Both ends of a probe have the check's secret from the driver, and prove it by the exchange of
:mod:`~elastic_driver.rendezvous.authentication`; without TLS, which would measure AES instead of the network. The name
in it is ``probe HOST KIND NUMBER SECONDS``: the host, the kind of probe, its amount, and its time. A stranger is cut
off before any work is done for it, and a listener without the secret is not an agent of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from elastic_driver.errors import RendezvousProtocolError, in_words
from elastic_driver.rendezvous.agent_messages import AgentMessage, Listen, Listening, Probe, Probed, Unlisten
from elastic_driver.rendezvous.authentication import (
    MAC_BYTES,
    NO_CERTIFICATE,
    NONCE_BYTES,
    Challenge,
    Proof,
    read_request,
    refusal,
)
from elastic_driver.rendezvous.credentials import KEY_BYTES
from elastic_driver.system.tasks import Tasks

_ECHO, _TAKE, _GIVE = "echo", "take", "give"
_TAKEN = struct.Struct("!Qd")
_PING_BYTES = 16
# Round trips: of a probe that measures the speed of a link, and of all others.
_PINGS, _FEW_PINGS = 8, 3
_CHUNK = bytes(1 << 17)
_PIECE = 1 << 10  # of an unauthenticated request, which is at most about half as long
# No driver asks for more.
_MOST_BYTES, _MOST_PINGS, _MOST_S = 1 << 26, 64, 10.0
_LONGEST_S = 60.0  # of a check
# The shortest measurable time of a burst.
_SHORTEST_S = 1e-4
# How long the first bytes of a burst may take, behind what still fills a slow link's queue.
_FIRST_S = 1.0
# Limits before authentication: time, and connections. All hosts of a large job may connect at once.
_PROVE_S, _MOST_UNPROVEN = 3.0, 1024
# Connections being made at a time.
_SIDE_BY_SIDE = 256
# A connection that ends during the exchange is retried: the listener may have had too many.
_AGAIN_S = 0.1


@dataclass(slots=True)
class _Check:
    """This agent's part in one check.

    Attributes:
        order: the driver's order.
        secret: of the check.
        server: the listener; None before it listens.
        unproven: number of connections not yet authenticated.
        serving: tasks of all connections.
        timer: ends the check.
    """

    order: Listen
    secret: bytes = field(repr=False)
    server: asyncio.Server | None = None
    unproven: int = 0
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


class Probes:
    """Runs this agent's part of network checks, one at a time.

    Args:
        send: sends the driver a message.
        tasks: runs background tasks.
        is_held: returns whether a port is held for workers.
    """

    def __init__(
        self, send: Callable[[AgentMessage], None], tasks: Tasks, *, is_held: Callable[[int], bool] = lambda port: False
    ) -> None:
        self._send = send
        self._is_held = is_held
        self._tasks = tasks
        self._check: _Check | None = None

    def take(self, message: AgentMessage) -> bool:
        """Carry out an order. Returns whether the message was one."""
        match message:
            case Listen():
                self._listen(message)
            case Probe():
                self._tasks.start(self._probe_all(message))
            case Unlisten(check):
                if self._check is not None and self._check.order.check == check:
                    self.close()
            case _:
                return False
        return True

    def close(self) -> None:
        """Stop listening, and end all connections. Harmless when repeated."""
        check, self._check = self._check, None
        if check is None:
            return
        if check.timer is not None:
            check.timer.cancel()
        if check.server is not None:
            check.server.close()
        for task in check.serving:
            task.cancel()

    # --- listening -------------------------------------------------------------------------------------------------

    def _listen(self, order: Listen) -> None:
        self.close()
        try:
            check = self._check = _Check(order, _key_from(order.secret))
            sock = _bound(order.address, order.ports, self._is_held)
        except (OSError, ValueError, OverflowError) as error:  # OverflowError: not a port
            self._send(Listening(order.check, 0, in_words(error)))
            return
        limit_s = min(max(order.limit_s, 0.0), _LONGEST_S)
        check.timer = asyncio.get_running_loop().call_later(limit_s, self._over, check)
        self._tasks.start(self._accept(check, sock))

    async def _accept(self, check: _Check, sock: socket.socket) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(check, reader, writer)

        port = sock.getsockname()[1]
        try:
            server = await asyncio.start_server(serve, sock=sock, backlog=_MOST_UNPROVEN)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            self._send(Listening(check.order.check, 0, in_words(error)))
            return
        if self._check is not check:  # ended meanwhile
            server.close()
            return
        check.server = server
        self._send(Listening(check.order.check, port, ""))

    def _over(self, check: _Check) -> None:
        if self._check is check:
            self.close()

    async def _serve(self, check: _Check, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        check.serving.add(task)
        try:
            if self._check is check and check.unproven < _MOST_UNPROVEN:
                with contextlib.suppress(OSError, EOFError, RendezvousProtocolError):  # includes TimeoutError
                    await _answer(check, reader, writer)
        except asyncio.CancelledError:
            pass  # the check is over; this task is not awaited
        finally:
            check.serving.discard(task)
            writer.transport.abort()

    # --- probing ---------------------------------------------------------------------------------------------------

    async def _probe_all(self, order: Probe) -> None:
        rtt_s: dict[str, float] = {}
        speeds: dict[str, list[float]] = {}
        failures: dict[str, str] = {}
        side_by_side = asyncio.Semaphore(_SIDE_BY_SIDE)
        secret = self._check.secret if self._check is not None and self._check.order.check == order.check else None

        async def probe(host: str) -> None:
            async with side_by_side:
                if secret is None:
                    failures[host] = "the check is over"
                    return
                one = _Prober(secret, host, order)
                try:
                    async with asyncio.timeout(min(max(order.limit_s, 0.0), _MOST_S)):
                        await one.run()
                except TimeoutError:
                    one.failure = one.failure or f"no answer within {order.limit_s:g} s"
                except RendezvousProtocolError:
                    one.failure = "the process that answers there is not that host's agent"
                except (OSError, EOFError, ValueError, OverflowError) as error:
                    one.failure = in_words(error)
                if one.rtt_s is None:
                    failures[host] = one.failure
                else:
                    rtt_s[host] = one.rtt_s
                    if one.there is not None and one.back is not None:
                        speeds[host] = [one.there, one.back]

        hosts = [host for host in order.addresses if host in order.ports]
        await asyncio.gather(*map(probe, hosts))
        self._send(Probed(order.number, rtt_s, speeds, failures))


class _Prober:
    """One probe of one host.

    Attributes:
        rtt_s: the shortest round trip, seconds; None until the host was reached.
        there, back: bytes per second each way; None if not measured.
        failure: why it was not reached.
    """

    def __init__(self, secret: bytes, host: str, order: Probe) -> None:
        self._secret = secret
        self._host = host
        self._order = order
        self.rtt_s: float | None = None
        self.there: float | None = None
        self.back: float | None = None
        self.failure = ""

    async def run(self) -> None:
        """Probe whether the host is reachable, and how fast if that is wanted. Has no time limit of its own."""
        order = self._order
        number = min(max(order.burst_bytes, 0), _MOST_BYTES)
        await self._echo(_PINGS if number else _FEW_PINGS)
        if number:
            self.there = await self._give(number)
            self.back = await self._take(number)

    async def _echo(self, pings: int) -> None:
        async with self._open(_ECHO, pings, 0.0) as (reader, writer):
            for _ in range(pings):
                began = time.perf_counter()
                writer.write(bytes(_PING_BYTES))
                await reader.readexactly(_PING_BYTES)
                took_s = time.perf_counter() - began
                self.rtt_s = took_s if self.rtt_s is None else min(self.rtt_s, took_s)

    async def _give(self, number: int) -> float | None:
        async with self._open(_TAKE, number, self._order.burst_s) as (reader, writer):
            sending = asyncio.ensure_future(_send(writer, number))
            try:
                # The receiver knows when they have arrived; here they may be in a queue.
                count, took_s = _TAKEN.unpack(await reader.readexactly(_TAKEN.size))
            except EOFError:
                return None
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        return count / took_s if took_s > 0 else None

    async def _take(self, number: int) -> float | None:
        async with self._open(_GIVE, number, self._order.burst_s) as (reader, _):
            count, took_s = await _receive(reader, number, self._order.burst_s)
        return count / took_s if took_s > 0 else None

    @contextlib.asynccontextmanager
    async def _open(
        self, kind: str, number: int, seconds: float
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection on which both ends have authenticated. It is cut afterwards."""
        name = f"probe {self._host} {kind} {number} {seconds!r}"
        writer = None
        try:
            while True:
                try:
                    address, port = self._order.addresses[self._host], self._order.ports[self._host]
                    ipaddress.ip_address(address)  # no name is looked up
                    reader, writer = await asyncio.open_connection(address, port)
                    await self._prove(reader, writer, name)
                    break
                except (EOFError, ConnectionResetError):
                    self.failure = "the connection was closed immediately"
                    if writer is not None:
                        writer.transport.abort()
                    await asyncio.sleep(_AGAIN_S)
            yield reader, writer
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        proof = Proof(name, self._secret, NO_CERTIFICATE, os.urandom(NONCE_BYTES))
        writer.write(proof.request)
        answer = b""
        while missing := proof.missing(answer):
            answer += await reader.readexactly(missing)
        writer.write(proof.response(answer))


async def _answer(check: _Check, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection to the listener. Raises OSError, EOFError or RendezvousProtocolError."""
    check.unproven += 1
    try:
        async with asyncio.timeout(_PROVE_S):
            name = await _proven(check, reader, writer)
    finally:
        check.unproven -= 1
    kind, number, seconds = _read_wanted(name)
    async with asyncio.timeout(_MOST_S):
        if kind == _ECHO:
            for _ in range(min(number, _MOST_PINGS)):
                writer.write(await reader.readexactly(_PING_BYTES))
            await _to_the_end(reader)
        elif kind == _TAKE:
            writer.write(_TAKEN.pack(*await _receive(reader, min(number, _MOST_BYTES), seconds)))
            await writer.drain()
            await _to_the_end(reader)
        elif kind == _GIVE:
            await _send(writer, min(number, _MOST_BYTES))
            await _to_the_end(reader)


async def _proven(check: _Check, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Authenticate the other end, and return its name. Raises OSError, EOFError or RendezvousProtocolError."""
    received = b""
    while (request := read_request(received)) is None:
        data = await reader.read(_PIECE)
        if not data:
            raise EOFError
        received += data
    if len(received) > request.size:  # a prober waits for the challenge
        raise RendezvousProtocolError("cannot read request: unexpected data follows it")
    if not request.name.startswith(f"probe {check.order.host} "):
        writer.write(refusal("this is not that host's agent"))
        writer.close()
        await writer.wait_closed()
        raise EOFError
    challenge = Challenge(request, check.secret, NO_CERTIFICATE, os.urandom(NONCE_BYTES))
    writer.write(challenge.message)
    if not challenge.accepts(await reader.readexactly(MAC_BYTES)):
        raise RendezvousProtocolError("cannot answer a probe: the prober failed to authenticate")
    return request.name


async def _to_the_end(reader: asyncio.StreamReader) -> None:
    """Wait until the other end has cut the connection: cutting it here would lose what was sent last."""
    while await reader.read(len(_CHUNK)):
        pass


async def _send(writer: asyncio.StreamWriter, number: int) -> None:
    while number > 0:
        writer.write(_CHUNK[:number])
        number -= len(_CHUNK)
        await writer.drain()


async def _receive(reader: asyncio.StreamReader, number: int, seconds: float) -> tuple[int, float]:
    """Receive bytes, for so many seconds from the first ones on.

    Returns:
        How many bytes arrived after the first ones, and in what time: the whole time if no more arrive.
    """
    loop = asyncio.get_running_loop()
    total = first = 0
    began = last = time.perf_counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_S) as limit:
            while total < number and (data := await reader.read(len(_CHUNK))):
                last = time.perf_counter()
                if not total:
                    first, began = len(data), last
                    limit.reschedule(loop.time() + min(max(seconds, 0.0), _MOST_S))
                total += len(data)
    if total < number:
        return total - first, max(time.perf_counter() - began, _SHORTEST_S)
    return (total - first, max(last - began, _SHORTEST_S)) if total > first else (total, _SHORTEST_S)


def _bound(address: str, ports: list[int], is_held: Callable[[int], bool]) -> socket.socket:
    """Return a socket bound to this address and a free port. Raises OSError, ValueError or OverflowError."""
    ipaddress.ip_address(address)
    family, _, _, _, place = socket.getaddrinfo(
        address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
    )[0]
    for port in _in_turn(ports):
        if is_held(port):  # it could be bound, but then rank 0 could not listen there
            continue
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((place[0], port, *place[2:]))
            sock.listen(_MOST_UNPROVEN)
            return sock
        except BaseException as error:
            sock.close()
            if not ports or not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"no port in {ports[0]}-{ports[-1]} is free")


def _in_turn(ports: list[int]) -> Iterator[int]:
    """Iterate over ports from the end opposite to the one at which workers begin."""
    return iter(range(ports[-1], ports[0] - 1, -1)) if ports else iter((0,))


def _key_from(secret: str) -> bytes:
    """Return the key of a check. Raises ValueError."""
    key = bytes.fromhex(secret)
    if len(key) != KEY_BYTES:
        raise ValueError(f"the secret of a check must have {KEY_BYTES} bytes")
    return key


def _read_wanted(name: str) -> tuple[str, int, float]:
    """Return the kind of a probe, its amount, and its time in seconds. Raises RendezvousProtocolError."""
    try:
        _, _, kind, number, seconds = name.split(" ")
        return kind, int(number), float(seconds)
    except ValueError:
        raise RendezvousProtocolError(f"cannot read {name!r} as the request of a probe") from None
