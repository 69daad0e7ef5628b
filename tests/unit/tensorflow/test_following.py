"""Following a listing: who is added and removed, and what does not hold others up."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_driver.discovery.objects import FixedHosts, HostDiscoveryScript
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Departure, Host
from elastic_driver.tensorflow.addresses import checked_address
from elastic_driver.tensorflow.following import Following
from elastic_driver.tensorflow.listings import FinderSource, Leave, Listing, as_source, pods, servers_of

pytestmark = pytest.mark.unit

PATIENCE_S = 150.0


class FakeWorkers:
    """Workers that join and leave at once, but for those that the test holds."""

    def __init__(self, *addresses: str) -> None:
        self.changed = threading.Condition()
        self.there = set(addresses)
        self.held: set[str] = set()
        self.is_closed = False
        self.said: list[tuple[str, str, float | None]] = []

    def addresses(self) -> frozenset[str]:
        return frozenset(self.there)

    def add(self, address: str, timeout_s: float) -> None:
        with self.changed:
            self.said.append(("add", address, timeout_s))
            self.changed.notify_all()
            if address in self.held:
                raise TimeoutError("it does not answer")
            self.there.add(address)

    def remove(self, address: str, timeout_s: float | None, *, forget: bool) -> None:
        assert forget, "its server goes, or has gone"
        with self.changed:
            self.said.append(("remove", address, timeout_s))
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: address not in self.held, PATIENCE_S)
            if address not in self.there:
                raise ValueError("there is none")
            self.there.discard(address)
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), (self.there, self.said)


class FakeSource:
    """Tells what the test puts."""

    def __init__(self) -> None:
        self.listings: queue.Queue[Listing | Exception | None] = queue.Queue()
        self.closed = threading.Event()

    def next(self, stop: threading.Event) -> Listing | None:
        listing = self.listings.get(timeout=PATIENCE_S)
        if isinstance(listing, Exception):
            raise listing
        return listing

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def source() -> Iterator[FakeSource]:
    made = FakeSource()
    yield made
    made.listings.put(None)
    assert made.closed.wait(PATIENCE_S), "its thread has ended"


def follow(workers: FakeWorkers, source: FakeSource, left: Callable[[str], object] = str) -> Following:
    return Following(workers, source, drain_timeout_s=7.0, left=left)


def test_those_that_run_become_those_that_are_listed(source: FakeSource) -> None:
    workers = FakeWorkers("a:1", "b:1")
    with follow(workers, source):
        source.listings.put({"b:1": None, "c:1": None})
        workers.until(lambda: workers.there == {"b:1", "c:1"})
        assert ("remove", "a:1", 7.0) in workers.said
        assert not any(address == "b:1" for _, address, _ in workers.said)


def test_one_that_does_not_answer_or_leave_holds_nobody_up(source: FakeSource) -> None:
    workers = FakeWorkers("a:1")
    workers.held = {"a:1", "x:1"}
    with follow(workers, source):
        source.listings.put({"x:1": None})
        workers.until(lambda: len(workers.said) >= 2)
        source.listings.put({"x:1": None, "c:1": None})
        workers.until(lambda: "c:1" in workers.there)
        with workers.changed:
            workers.held.clear()
            workers.changed.notify_all()
        workers.until(lambda: "a:1" not in workers.there)
        source.listings.put({"x:1": None, "c:1": None})  # news wakes who pauses
        workers.until(lambda: workers.there == {"x:1", "c:1"})


def test_one_that_is_about_to_go_is_left_in_time_and_that_is_said(source: FakeSource) -> None:
    workers, left = FakeWorkers("a:1", "b:1"), queue.Queue[str]()
    with follow(workers, source, left.put):
        source.listings.put({"a:1": Leave(30.0), "b:1": Leave()})
        assert {left.get(timeout=PATIENCE_S), left.get(timeout=PATIENCE_S)} == {"a:1", "b:1"}
        assert sorted(workers.said) == [("remove", "a:1", 29.0), ("remove", "b:1", 7.0)]
        source.listings.put({"a:1": None, "b:1": Leave()})
        workers.until(lambda: workers.there == {"a:1"})


def test_one_that_never_came_has_left_as_well(source: FakeSource) -> None:
    workers, left = FakeWorkers("a:1"), queue.Queue[str]()
    with follow(workers, source, left.put):
        source.listings.put({"a:1": None, "b:1": Leave()})
        assert left.get(timeout=PATIENCE_S) == "b:1"
        source.listings.put({"a:1": Leave(), "b:1": Leave()})
        assert left.get(timeout=PATIENCE_S) == "a:1"
        assert left.empty(), "it is said once"


def test_while_there_is_no_answer_all_stay(source: FakeSource, caplog: pytest.LogCaptureFixture) -> None:
    workers = FakeWorkers("a:1")
    with follow(workers, source):
        source.listings.put(OSError("no network"))
        source.listings.put({"a:1": None, "b:1": None})
        workers.until(lambda: workers.there == {"a:1", "b:1"})
    assert "continuing with the current one: no network" in caplog.text
    assert "is available again" in caplog.text


def test_it_ends_with_what_has_the_workers(source: FakeSource) -> None:
    workers = FakeWorkers()
    follow(workers, source)
    workers.is_closed = True
    source.listings.put({})
    assert source.closed.wait(PATIENCE_S)


class FewThreads:
    """So many keepers at once, and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.most = most
        self.refused = 0
        start = threading.Thread.start

        def start_if_few(thread: threading.Thread) -> None:
            prefix = "elastic-tf-keep"
            if not thread.name.startswith(prefix):
                return start(thread)
            if sum(other.name.startswith(prefix) for other in threading.enumerate()) >= self.most:
                self.refused += 1
                raise RuntimeError("can't start new thread")
            return start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_few)


def test_all_are_added_with_few_threads(
    source: FakeSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers, threads = FakeWorkers("a:1"), FewThreads(monkeypatch, 2)
    workers.held = {"a:1"}  # one thread has to do for all others
    with follow(workers, source):
        wanted = {f"b:{number}" for number in range(1, 3001)}
        source.listings.put(dict.fromkeys(wanted))
        workers.until(lambda: wanted <= workers.there)
        assert threads.refused
        with workers.changed:
            workers.held.clear()
            workers.changed.notify_all()
        workers.until(lambda: workers.there == wanted)
    assert len([record for record in caplog.records if "cannot start threads" in record.message]) == 1


def test_it_goes_on_when_no_thread_at_all_could_be_started(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, threads = FakeWorkers(), FewThreads(monkeypatch, 0)
    with follow(workers, source):
        source.listings.put({"a:1": None})
        source.listings.put(None)
        source.listings.put(None)
        deadline = time.monotonic() + PATIENCE_S
        while threads.refused < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        threads.most = 1
        source.listings.put(None)
        workers.until(lambda: workers.there == {"a:1"})


def test_a_host_has_a_server_on_each_slot() -> None:
    hosts = (Host("a", 2), Host("::1", 1), Host("b", 1, ("port=3000",)))
    assert servers_of(hosts, (Departure("b", "it is cordoned", 9.0),), 2222) == {
        "a:2222": None,
        "a:2223": None,
        "[::1]:2222": None,
        "b:3000": Leave(9.0),
    }


@pytest.mark.parametrize("label", ["port=0x", "port=65536", "port=-1"])
def test_a_port_that_cannot_be(label: str) -> None:
    with pytest.raises(SettingsError, match="host 'a'"):
        servers_of((Host("a", 1, (label,)),), (), 2222)


def test_an_object_may_name_addresses_or_hosts() -> None:
    never = threading.Event()
    assert FinderSource(FixedHosts({"a:1": 1, "b:2": 0}), port=None, interval_s=1).next(never) == {"a:1": None}
    assert FinderSource(FixedHosts({"a": 1}), port=5, interval_s=1).next(never) == {"a:5": None}
    with pytest.raises(ValueError, match="host:port"):
        FinderSource(FixedHosts({"a": 1}), port=None, interval_s=1).next(never)


def test_a_script_and_a_source_of_the_driver(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a\necho b:2 port=9\n")
    script.chmod(0o755)
    never = threading.Event()
    told = as_source(str(script), port=7, interval_s=1.0).next(never)
    assert told == {"a:7": None, "b:9": None, "b:10": None}

    class Theirs:
        async def find_hosts(self) -> tuple[Host, ...]:
            return (Host("p", 1),)

        async def wait_change(self, limit_s: float) -> None:
            await asyncio.sleep(0)

        def departures(self) -> tuple[Departure, ...]:
            return (Departure("p", "its pod is deleted", 5.0),)

        def remark(self) -> str:
            return ""

    source = as_source(Theirs(), port=7, interval_s=1.0)
    assert source.next(never) == source.next(never) == {"p:7": Leave(5.0)}
    source.close()


@pytest.mark.parametrize(
    ("discovery", "port", "said"),
    [
        ("script", None, "port= is required"),
        ("./nosuch.sh --all", 7, "cannot find the script 'nosuch.sh'"),
        (HostDiscoveryScript("script"), None, "port= is required"),
        (FixedHosts({}), 0, "cannot use port=0"),
        (7, 7, "cannot discover hosts with a int"),
    ],
)
def test_what_cannot_be_followed(discovery: object, port: int | None, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        as_source(discovery, port=port, interval_s=1.0)


def test_pods_are_checked() -> None:
    pytest.importorskip("kubernetes_asyncio")
    with pytest.raises(SettingsError, match="--selector"):
        pods("")
    assert hasattr(pods("app=train"), "find_hosts")


@pytest.mark.parametrize(
    "address", [None, "", "a", "a:", ":1", "a:0", "a:65536", "a:x", "::1:5", "a b:1", "http://a:1", "a:+1"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        checked_address(address)


@pytest.mark.parametrize("address", ["a:1", "10.0.0.1:2222", "[::1]:65535", "a.b-c:1"])
def test_what_is_one(address: str) -> None:
    assert checked_address(address) == address
