"""Where the driver listens, and which URLs agents get."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.driver import agents
from elastic_driver.driver.agents import DriverAddresses, url_of
from elastic_driver.errors import SettingsError
from elastic_driver.journal.entries import WaysKept
from elastic_driver.rendezvous.certificate import Certificate
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from tests.support.fakes.facts_keeper import FactsKeeper
from tests.support.fakes.fleet_fakes import AtOnce
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

HERE = "unix:/a/driver.sock"
FOUR, SIX = "10.0.0.1", "fd00::1"


class Server:
    """Keeps where it listens. Of the ports that it may choose itself the first is 7000."""

    def __init__(self) -> None:
        self.listens: list[str] = []
        self.ports: list[tuple[int, ...]] = []  # that it was asked for
        self.unusable: set[str] = set()
        self.error: Exception | None = None
        self._opening = 0

    async def open(self, host: str, ports: int | Sequence[int]) -> int:
        chosen = 7000 + len(self.listens) + self._opening
        assert not isinstance(ports, int)
        self.ports.append(tuple(ports))
        self._opening += 1
        await asyncio.sleep(1.0)  # all others go on meanwhile, as far as they can
        self._opening -= 1
        if self.error is not None:
            raise self.error
        if host in self.unusable:
            raise SettingsError(f"cannot listen on {host}")
        self.listens.append(host)
        return ports[0] or chosen

    async def adopt(self, listener: socket.socket) -> int:
        self.listens.append("adopted")
        return 29400


def on(
    test: Callable[[DriverAddresses, Server], Coroutine[Any, Any, None]], kind: type[Server] = Server, **options: Any
) -> None:
    async def main(loop: VirtualLoop) -> None:
        loop.set_default_executor(AtOnce())
        server = kind()
        ways = DriverAddresses("127.0.0.1", addresses=lambda: (FOUR, SIX), certificate=OwnCertificate(), **options)
        await ways.begin(server, Path("/a/driver.sock"))
        await test(ways, server)

    run_virtually(main)


def test_no_port_while_all_agents_are_here_and_nobody_else_asks() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        assert await ways.to("") == (HERE,)
        assert server.listens == []
        assert (ways.here, ways.url, ways.urls) == (HERE, HERE, ())

    on(test)


def test_a_socket_that_has_moved_is_where_agents_are_sent_from_then_on() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        ways.moved(Path("/b/driver.sock"))
        assert await ways.to("") == (ways.here,) == (ways.url,) == ("unix:/b/driver.sock",)

    on(test)


def test_loopback_is_opened_once_for_all_who_ask() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        assert set(await asyncio.gather(*(ways.open_loopback() for _ in range(3)))) == {"http://127.0.0.1:7000"}
        assert server.listens == ["127.0.0.1"]
        assert (ways.here, ways.url, ways.urls) == (HERE, "http://127.0.0.1:7000", ())
        assert await ways.to("") == (HERE,)

    on(test)


def test_a_port_that_is_not_free_now_is_tried_again() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        server.unusable = {"127.0.0.1"}
        for _ in range(2):
            with pytest.raises(SettingsError, match=r"cannot listen on 127\.0\.0\.1"):
                await ways.open_loopback()
        assert ways.url == HERE
        server.unusable = set()
        assert await ways.open_loopback() == "http://127.0.0.1:7000"

    on(test)


def test_whoever_gives_up_to_wait_does_not_keep_the_others_from_it() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        first = asyncio.ensure_future(ways.open_loopback())
        await asyncio.sleep(0)
        second = asyncio.ensure_future(ways.open_loopback())
        await asyncio.sleep(0)
        first.cancel()
        assert await second == "http://127.0.0.1:7000"

    on(test)


@pytest.mark.parametrize("first", ["loopback", "others"])
def test_two_who_need_a_port_at_once_get_the_same(first: str) -> None:
    """A reader and a host that discovery lists: whoever has opened a firewall has opened it for one port."""

    async def test(ways: DriverAddresses, server: Server) -> None:
        openings = [ways.open_loopback, ways.open]
        await asyncio.gather(*(opening() for opening in (openings if first == "loopback" else reversed(openings))))
        ports = {int(url.rpartition(":")[2]) for url in (ways.url, *ways.urls)}
        assert len(ports) == 1
        assert sorted(server.listens) == sorted(["127.0.0.1", FOUR, SIX])

    on(test)


@pytest.mark.parametrize("is_known", [True, False])
def test_that_no_port_can_be_had_is_nobody_s_bug_though_nobody_waits_for_it_any_more(is_known: bool) -> None:
    """Whoever has asked for a link has hung up. Any other error ends the job, as all do that nobody expects."""

    told: list[str] = []

    async def test(ways: DriverAddresses, server: Server) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(repr(context["exception"])))
        server.error = SettingsError("all are in use") if is_known else ZeroDivisionError()
        asking = asyncio.ensure_future(ways.open_loopback())
        await asyncio.sleep(0.5)
        asking.cancel()
        await asyncio.sleep(1.0)
        assert asking.cancelled()
        assert server.ports == [(0,)]

    on(test)
    gc.collect()  # an error that nobody has looked at is told when it is thrown away
    assert told == ([] if is_known else ["ZeroDivisionError()"])


def test_all_addresses_from_the_first_other_host_on_and_the_one_by_route_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_address_towards", {"a": FOUR, "b": SIX, "c": ""}.__getitem__)

    async def test(ways: DriverAddresses, server: Server) -> None:
        urls = await asyncio.gather(*map(ways.to, "abc"))
        four, six = f"https://{FOUR}:7000", f"https://[{SIX}]:7000"
        assert urls == [(four, six), (six, four), (four, six)]
        assert server.listens == [FOUR, SIX]
        assert ways.urls == (four, six)
        assert ways.url == HERE, "nobody has asked for loopback"

    on(test)


@pytest.mark.parametrize("first", ["loopback", "others"])
def test_the_port_that_was_had_first_is_tried_first_at_each_other_address(first: str) -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        openings = [ways.open_loopback, ways.open]
        for opening in openings if first == "loopback" else reversed(openings):
            await opening()
        assert server.ports == [(9000, 8999), (9000, 9000, 8999), (9000, 9000, 8999)]

    on(test, ports=(9000, 8999))


def test_where_hosts_may_join_it_listens_from_the_start() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        assert server.listens == ["127.0.0.1", FOUR, SIX]

    on(test, opens=True, is_wide=True)


def test_a_port_that_was_claimed_is_taken_over_and_the_others_have_the_same() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        assert server.listens == ["adopted", FOUR, SIX]
        assert ways.url == "http://127.0.0.1:29400"
        assert ways.urls == (f"https://{FOUR}:29400", f"https://[{SIX}]:29400")

    with socket.socket() as listener:
        on(test, listener=listener, opens=True, is_wide=True)


def test_an_address_that_can_not_be_had_is_left_out_and_none_at_all_is_tried_again() -> None:
    """A machine may get its network later than the job begins."""

    async def test(ways: DriverAddresses, server: Server) -> None:
        server.unusable = {FOUR, SIX}
        for _ in range(2):
            with pytest.raises(SettingsError, match="cannot listen on fd00::1"):
                await ways.to("a")
        server.unusable = {SIX}
        assert await ways.to("a") == (f"https://{FOUR}:7000",)

    on(test)


def test_a_certificate_that_cannot_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error of the driver's own: a package may be missing, or a descriptor for a moment."""

    def none() -> Certificate:
        raise ImportError("No module named 'cryptography'")

    async def test(ways: DriverAddresses, server: Server) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Certificate, "new", none)
            for _ in range(2):
                with pytest.raises(SettingsError, match=r"cannot create the certificate .*: No module named 'crypto"):
                    await ways.to("a")
            assert server.listens == []
        assert len(await ways.to("a")) == 2

    on(test)


def test_urls_have_brackets_where_they_need_them() -> None:
    assert url_of("::1", 80) == "http://[::1]:80"
    assert url_of("h", 80, scheme="https") == "https://h:80"


def test_where_it_is_reached_is_kept() -> None:
    keeper = FactsKeeper()

    async def test(ways: DriverAddresses, server: Server) -> None:
        assert keeper.facts.ways == WaysKept("/a/driver.sock")
        await ways.open_loopback()
        assert keeper.facts.ways == WaysKept("/a/driver.sock", 7000)
        ways.moved(Path("/b/driver.sock"))
        ways.moved(Path("/b/driver.sock"))
        await ways.open()
        kept = keeper.facts.ways
        assert (kept.socket, kept.loopback_port, kept.ports) == ("/b/driver.sock", 7000, {FOUR: 7000, SIX: 7000})
        assert kept.certificate is not None
        assert kept.fingerprint == ways.certificate.fingerprint
        assert len(keeper.news) == 4, "only what has changed"

    on(test, keeper=keeper, folder=Path("/a"))


def before(**more: Any) -> WaysKept:
    """Of a driver that has died."""
    return WaysKept("/c/driver.sock", **({"loopback_port": 4000, "ports": {FOUR: 4001}} | more))


def test_a_later_driver_is_where_the_last_one_was() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        assert ways.folder == Path("/c")
        await ways.open()
        assert server.listens == ["127.0.0.1", FOUR, SIX]
        assert server.ports == [(4000,), (4001,), (4000, 0)], "others are new"
        assert ways.urls[0] == f"https://{FOUR}:4001"

    on(test, before=before(), folder=Path("/a"), limit_s=600.0)


def test_what_was_closed_stays_so() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        assert server.listens == []

    on(test, before=before(loopback_port=0, ports={}), limit_s=600.0)


def test_a_port_that_another_program_has_is_tried_for_as_long_as_agents_look_for_it() -> None:
    said: list[str] = []

    async def test(ways: DriverAddresses, server: Server) -> None:
        assert server.listens == [], "who comes to the socket does not wait for that"
        await asyncio.sleep(30.0)
        assert (server.listens, len(said)) == ([], 1)
        assert "agents look for this driver there, so it retries for 60 s (--driver-timeout)" in said[0]
        server.unusable = set()
        assert await ways.open_loopback() == "http://127.0.0.1:4000"
        server.unusable = {FOUR, SIX}
        with pytest.raises(SettingsError, match="cannot listen on"):
            await ways.open()

    class Taken(Server):
        def __init__(self) -> None:
            super().__init__()
            self.unusable = {"127.0.0.1"}

    on(test, Taken, before=before(ports={}), limit_s=60.0, say=said.append)


def test_a_port_that_another_program_keeps_is_given_up() -> None:
    async def test(ways: DriverAddresses, server: Server) -> None:
        with pytest.raises(SettingsError, match="cannot listen on"):
            await ways.open_loopback()
        assert asyncio.get_running_loop().time() - began[0] >= 60.0

    class Taken(Server):
        def __init__(self) -> None:
            super().__init__()
            began.append(asyncio.get_running_loop().time())
            self.unusable = {"127.0.0.1"}

    began: list[float] = []
    on(test, Taken, before=before(ports={}), limit_s=60.0)
