"""The rendezvous server over real sockets, on both loops: what depends on those, how it begins, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.messages import WatchRequest
from elastic_driver.rendezvous.server.listeners import Listeners
from elastic_driver.rendezvous.server.server import RendezvousServer, ServerLimits
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.local_socket import SocketFolder
from tests.support.fakes.rendezvous_service import (
    KEY,
    READER,
    READY,
    WORKER,
    Calls,
    Handler,
    Peer,
    Service,
    descriptors,
    request,
    serving,
)
from tests.support.network.ports import free_ports

pytestmark = pytest.mark.integration

WATCH = WatchRequest(WORKER, 1, 0)
PATH = "/v1/rounds/1/kv/s/k"
RUBBISH = (
    b"GET",
    b"/v1/status",
    b" HTTP/1.1",
    b"\r\n\r\n",
    b"\0",
    b"\xff",
    b"Content-Length: -3\r\n",
)


@pytest.fixture(params=["uvloop", "asyncio"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with serving(loop=request.param) as running:
        yield running


@pytest.fixture
def peer(service: Service) -> Iterator[Peer]:
    with Peer(service) as connected:
        yield connected


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_server_that_stood_still_reads_what_has_come_before_it_says_that_it_is_too_late(loop: str) -> None:
    clock = JobClock(most_s=0.05)
    with serving(call_later=clock.call_later, loop=loop) as service:
        calls, client, second = Calls(), service.client(), service.client()
        calls.start(lambda: client.exchange(1, "s", 0, 2, b"zero", timeout_s=3.0))
        service.until_parked(1)

        def stand_still() -> None:
            calls.start(lambda: second.put(1, "s", "1", b"one"))  # over a new connection
            time.sleep(3.5)  # what the test is about: longer than the wait

        service.call(stand_still)
        assert calls.join() == [[b"zero", b"one"], None]
        client.close()
        second.close()


def test_who_goes_while_parked_is_forgotten(service: Service) -> None:
    for method, target, body in (
        ("POST", "/v1/next-round", READY.to_json()),
        ("POST", "/v1/watch", WATCH.to_json()),
        ("GET", "/v1/rounds/1/kv/s/k?wait_s=3600", b""),
        ("POST", "/v1/rounds/1/exchange/s?key=0&count=2&wait_s=3600", b""),
    ):
        with Peer(service) as peer:
            peer.send(peer.request(method, target, body))
            service.until_parked(1)
        service.until_parked(0)
    assert service.call(lambda: service.handler.next_rounds[0].cancelled()) is True
    assert service.call(lambda: service.handler.watches[0].cancelled()) is True


def test_requests_behind_a_parked_one_wait_for_it(service: Service, peer: Peer) -> None:
    """In one packet, in later ones, cut anywhere; what the queue does may release what waits elsewhere."""
    with Peer(service) as other:
        other.send(other.request("GET", "/v1/rounds/1/kv/s/second?wait_s=3600"))
        service.until_parked(1)
        first = peer.request("GET", "/v1/rounds/1/kv/s/first?wait_s=3600")
        behind = (
            peer.request("GET", "/v1/rounds/1/kv/s/third?wait_s=3600")
            + peer.request("PUT", "/v1/rounds/1/kv/s/second", b"2")
            + peer.request("GET", "/v1/rounds/1/kv/s/nothing")
        )
        peer.send(first + behind[:100])
        service.until_parked(2)
        peer.send(behind[100:])
        with Peer(service) as helper:
            assert helper.ask("PUT", "/v1/rounds/1/kv/s/first", b"1").status == 204
            assert peer.read().body == b"1"
            service.until_parked(2)
            assert helper.ask("PUT", "/v1/rounds/1/kv/s/third", b"3").status == 204
        assert peer.read().body == b"3"
        assert [peer.read().status for _ in range(2)] == [204, 404]
        assert other.read().body == b"2"


def test_upgrade_is_answered_in_http_1_and_closed(peer: Peer) -> None:
    assert peer.ask("GET", "/v1/status", headers=("Connection: Upgrade", "Upgrade: h2c")).status == 200
    assert peer.is_closed()


def test_expect_100_continue(peer: Peer) -> None:
    peer.send(peer.request("PUT", "/v1/rounds/1/kv/s/k", headers=("Expect: 100-continue", "Content-Length: 5")))
    assert peer.read().status == 100
    peer.send(b"value")
    assert peer.read().status == 204


def test_a_port_in_use_is_one_clear_line(service: Service) -> None:
    async def second() -> None:
        await RendezvousServer(Handler().routes, key_of=KEY.of).start("127.0.0.1", service.port)

    with pytest.raises(SettingsError) as caught:
        service.wait(second())
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1 port {service.port} for the rendezvous: "
        "the port is in use; choose another with --rendezvous-port, or 0 for any"
    )


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70000), ("no.such.host.invalid", 0)])
def test_an_address_that_cannot_be_had(host: str, port: int) -> None:
    async def main() -> None:
        server = RendezvousServer(Handler().routes, key_of=KEY.of)
        with pytest.raises(SettingsError, match="cannot listen on"):
            await server.start(host, port)
        await server.close()

    asyncio.run(main())


def test_a_range_of_ports() -> None:
    async def main() -> None:
        low, middle, high = free_ports(3)
        downwards = range(high, low - 1, -1)
        taken = socket.create_server(("127.0.0.1", high))
        server, second, third = (RendezvousServer(Handler().routes, key_of=KEY.of) for _ in range(3))
        assert await server.start("127.0.0.1", downwards) == middle
        taken_too = socket.create_server(("127.0.0.2", middle))
        assert await server.listeners.open("127.0.0.2", (middle, *downwards)) == high
        assert await second.start("127.0.0.1", downwards) == low
        with pytest.raises(SettingsError, match=rf"ports {low} to {high} are all in use \(--port-range\)"):
            await third.start("127.0.0.1", downwards)
        for each in (server, second, third):
            await each.close()
        taken.close()
        taken_too.close()

    asyncio.run(main())


def test_ipv6() -> None:
    async def main() -> None:
        server = RendezvousServer(Handler().routes, key_of=KEY.of, reader=READER.encode())
        port = await server.start("::1", 0)
        reader, writer = await asyncio.open_connection("::1", port)
        writer.write(request("GET", "/v1/status", b"", READER))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()
        await server.close()

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    asyncio.run(main())


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_end_answers_who_waits_and_leaves_nothing(loop: str) -> None:
    before = descriptors()
    service = Service(loop=loop)
    idle, waiting, asking, half, deaf = (Peer(service) for _ in range(5))
    waiting.send(waiting.request("GET", "/v1/rounds/1/kv/s/k?wait_s=3600"))
    asking.send(asking.request("POST", "/v1/watch", WATCH.to_json()))
    half.send(b"GET /v1/sta")
    # One who asks for more than the sockets hold, and does not read it.
    deaf.send(deaf.request("PUT", "/v1/rounds/1/kv/s/big", bytes(16 << 20)))
    assert deaf.read().status == 204
    deaf.send(deaf.request("GET", "/v1/rounds/1/kv/s/big"))
    service.until_parked(2)
    service.stop()
    for one in (waiting, asking):
        answer = one.read()
        assert (answer.status, answer.error) == (410, "the driver has ended")
        assert one.is_closed()
    assert idle.is_closed()
    assert half.is_closed()
    for one in (idle, waiting, asking, half, deaf):
        one.close()
    assert descriptors() == before


def test_close_before_start_and_twice() -> None:
    async def main() -> None:
        server = RendezvousServer(Handler().routes, key_of=KEY.of)
        await server.close()
        server = RendezvousServer(Handler().routes, key_of=KEY.of)
        port = await server.start("127.0.0.1", 0)
        await server.close()
        await server.close()
        again = RendezvousServer(Handler().routes, key_of=KEY.of)
        assert await again.start("127.0.0.1", port) == port
        await again.close()

    asyncio.run(main())


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("way", ["open", "listen_at", "adopt", "open_local"])
def test_what_begins_to_listen_while_the_server_ends_does_not(
    loop: Callable[[], asyncio.AbstractEventLoop], way: str
) -> None:
    """Somebody asks for a link or a token in the job's last moment."""
    ways: dict[str, Callable[[Listeners, socket.socket], Coroutine[Any, Any, object]]] = {
        "open": lambda listeners, _: listeners.open("127.0.0.1", 0),
        "listen_at": lambda listeners, _: listeners.listen_at("127.0.0.1", 0),
        "adopt": lambda listeners, there: listeners.adopt(there),
        "open_local": lambda listeners, there: listeners.open_local(there),
    }

    async def main() -> None:
        server, folder = RendezvousServer([]), SocketFolder.new()
        there = socket.create_server(("127.0.0.1", 0)) if way == "adopt" else folder.listen("s")
        opening: asyncio.Future[Any] = asyncio.ensure_future(ways[way](server.listeners, there))
        await asyncio.sleep(0)
        await server.close()
        with contextlib.suppress(SettingsError):  # uvloop may have done it at once
            await opening
        left = server.descriptors()
        server.listeners.close()  # uvloop's end waits for what listens
        there.close()
        folder.close()
        assert left == []

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_who_asks_and_never_reads_is_cut() -> None:
    with serving(limits=ServerLimits(unread_bytes=1 << 20)) as service, Peer(service) as peer:
        assert peer.ask("PUT", PATH, bytes(4 << 20)).status == 204
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):  # as OpenSSL has it where the cut was seen before
            for _ in range(1000):
                peer.send(peer.request("GET", PATH))
                if not service.connections:
                    break
        service.until(lambda: not service.connections, "the connection is gone")


def test_a_slow_reader_gets_a_large_answer_whole() -> None:
    with serving() as large, Peer(large) as peer, Peer(large) as other:
        value = random.Random(1).randbytes(16 << 20)
        assert peer.ask("PUT", PATH, value).status == 204
        peer.send(peer.request("GET", PATH, headers=("Connection: close",)))
        assert other.ask("GET", "/v1/status").status == 200
        assert peer.read().body == value


def test_thousands_of_idle_strangers_do_not_shut_workers_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1500  # half as many again as are let in
    if hard != resource.RLIM_INFINITY and hard < 2 * number + 500:
        number = (hard - 500) // 2
    # Nobody is answered for the reason that others were cut because they idled.
    limits = ServerLimits(request_s=3600, idle_s=3600)
    with serving(limits=limits) as service, Peer(service) as worker, Peer(service) as parked:
        assert worker.ask("GET", "/v1/status").status == 200
        parked.send(parked.request("GET", f"{PATH}?wait_s=3600"))
        service.until_parked(1)
        before = descriptors()
        rubbish: list[socket.socket] = []
        for index in range(number):
            rubbish.append(socket.create_connection(("127.0.0.1", service.port)))
            if index % 3:
                with contextlib.suppress(ConnectionError):
                    rubbish[-1].send(b"GET / HT" if index % 3 == 1 else os.urandom(30))
            if index % 50 == 0:
                assert worker.ask("PUT", "/v1/rounds/1/kv/other/k", b"v").status == 204
                with Peer(service) as newcomer:
                    assert newcomer.ask("GET", "/v1/status").status == 200
        service.until(lambda: len(service.connections) <= 1010, "no more strangers than are allowed")
        worker.ask("PUT", PATH, b"value")
        assert parked.read().body == b"value"
        for one in rubbish:
            one.close()
        service.until(lambda: len(service.connections) == 2, "the strangers are gone")
        assert descriptors() == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft


def test_rubbish_from_many_threads_while_workers_work() -> None:
    stop = threading.Event()
    calls = Calls()
    sent = [0] * 4

    def noise(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            with contextlib.suppress(OSError), Peer(service) as peer:
                peer.send(b"".join(rng.choices(RUBBISH, k=5)))
                sent[number] += 1

    with serving() as service:
        for number in range(4):
            calls.start(lambda number=number: noise(number))  # type: ignore[misc]
        try:
            with Peer(service) as worker:
                for number in itertools.count():
                    if number >= 300 and all(sent):
                        break
                    value = str(number).encode()
                    assert worker.ask("PUT", PATH, value).status == 204
                    assert worker.ask("GET", PATH).body == value
        finally:
            stop.set()
            assert calls.join() == [None] * 4
        assert service.errors == []
