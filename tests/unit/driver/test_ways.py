"""Where the driver listens for agents, and which URLs they get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from ssl import SSLContext
from typing import Any

import pytest

from elastic_driver.driver import agents
from elastic_driver.driver.agents import Ways, url_of
from elastic_driver.errors import SettingsError
from tests.support.fakes.fleet_fakes import AtOnce
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit


class Server:
    """Keeps where it listens."""

    def __init__(self) -> None:
        self.listens: list[str] = []
        self.unusable: set[str] = set()

    async def listen_too(self, host: str, *, ports: Iterable[int] = (0,), ssl: SSLContext | None = None) -> int:
        await asyncio.sleep(0)
        if host in self.unusable:
            raise SettingsError(f"cannot listen on {host}")
        self.listens.append(host)
        return 7000 + len(self.listens)


def on(test: Callable[[Ways, Server], Coroutine[Any, Any, None]], *, is_wide: bool = False) -> None:
    async def main(loop: VirtualLoop) -> None:
        loop.set_default_executor(AtOnce())
        server = Server()
        ways = Ways("127.0.0.1", addresses=lambda: ("10.0.0.1", "fd00::1"), ssl=None, is_wide=is_wide)
        await ways.begin(server, 7000)
        await test(ways, server)

    run_virtually(main)


def test_only_loopback_while_all_agents_are_here() -> None:
    async def test(ways: Ways, server: Server) -> None:
        assert await ways.to("") == ("http://127.0.0.1:7000",)
        assert server.listens == []
        assert ways.urls == ()

    on(test)


def test_all_addresses_from_the_first_other_host_on_and_the_one_by_route_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_address_towards", {"a": "10.0.0.1", "b": "fd00::1", "c": ""}.__getitem__)

    async def test(ways: Ways, server: Server) -> None:
        urls = await asyncio.gather(*map(ways.to, "abc"))
        four, six = "http://10.0.0.1:7001", "http://[fd00::1]:7002"
        assert urls == [(four, six), (six, four), (four, six)]
        assert server.listens == ["10.0.0.1", "fd00::1"]
        assert ways.urls == (four, six)

    on(test)


def test_where_hosts_may_join_it_listens_from_the_start() -> None:
    async def test(ways: Ways, server: Server) -> None:
        assert server.listens == ["10.0.0.1", "fd00::1"]

    on(test, is_wide=True)


def test_an_address_that_can_not_be_had_is_left_out_and_none_at_all_is_tried_again() -> None:
    """A machine may get its network later than the job begins."""

    async def test(ways: Ways, server: Server) -> None:
        server.unusable = {"10.0.0.1", "fd00::1"}
        for _ in range(2):
            with pytest.raises(SettingsError, match="cannot listen on fd00::1"):
                await ways.to("a")
        server.unusable = {"fd00::1"}
        assert await ways.to("a") == ("http://10.0.0.1:7001",)

    on(test)


def test_urls_have_brackets_where_they_need_them() -> None:
    assert url_of("::1", 80) == "http://[::1]:80"
    assert url_of("h", 80, scheme="https") == "https://h:80"
