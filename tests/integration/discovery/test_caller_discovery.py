"""Discovery by an object of another process: what it says, raises and never says, and that it is asked one by one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import elastic_driver
from elastic_driver.discovery.caller import CallerDiscovery, answer_questions
from elastic_driver.errors import DiscoveryError, JobFailedError, SettingsError
from elastic_driver.hosts import Host

pytestmark = pytest.mark.integration


class Finder:
    """Answers as it is told."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer
        self.threads: set[int] = set()
        self.calls = 0

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        self.calls += 1
        self.threads.add(threading.get_ident())
        found: Mapping[str, int] = self.answer()
        return found


@contextlib.contextmanager
def asked(finder: Finder, timeout_s: float = 150.0) -> Iterator[CallerDiscovery]:
    ours, drivers = socket.socketpair()
    thread = threading.Thread(target=answer_questions, args=(finder, ours))
    thread.start()
    with drivers:
        yield CallerDiscovery(drivers, timeout_s)
    thread.join(150)
    assert not thread.is_alive()


def fails(answer: Callable[[], Any]) -> str:
    with asked(Finder(answer)) as discovery, pytest.raises(DiscoveryError) as caught:
        asyncio.run(discovery.find_hosts())
    return str(caught.value)


def test_hosts_in_their_order_and_none() -> None:
    answers = iter([{"localhost": 2, "::1": 1, "127.0.0.1": 3}, {}, {"localhost": 0, "127.0.0.2": 1}])
    with asked(Finder(lambda: next(answers))) as discovery:

        async def three() -> list[tuple[Host, ...]]:
            found = []
            for _ in range(3):
                found.append(await discovery.find_hosts())
                await discovery.wait_change(0.0)
                assert discovery.remark() == ("" if found[-1] else "the discovery object lists no hosts")
            return found

        hosts = asyncio.run(three())
    assert hosts == [
        (Host("localhost", 2), Host("::1", 1), Host("127.0.0.1", 3)),
        (),
        (Host("127.0.0.2", 1),),
    ]


def test_hosts_with_labels() -> None:
    found = {"localhost": 2, "127.0.0.1": Host("127.0.0.1", 3, ("rack=r1", "spot")), "127.0.0.2": Host("127.0.0.2", 0)}
    with asked(Finder(lambda: found)) as discovery:
        assert asyncio.run(discovery.find_hosts()) == (Host("localhost", 2), found["127.0.0.1"])


@pytest.mark.parametrize(
    ("host", "complaint"),
    [
        (Host("a", 1, ("spot", "spot")), "the label 'spot' is there twice"),
        (Host("a", 1, ("rack=1 spot",)), "cannot read 'rack=1 spot' as a label"),
        (Host("a", 0, ("spot",) * 40), ""),
        (Host("b", 1), "raised ValueError: it returned host 'b' under the name 'a'"),
    ],
)
def test_hosts_with_labels_that_are_none(host: Host, complaint: str) -> None:
    if not complaint:
        with asked(Finder(lambda: {"a": host})) as discovery:
            assert asyncio.run(discovery.find_hosts()) == ()
        return
    assert complaint in fails(lambda: {"a": host})


def test_a_name_with_a_space_is_none() -> None:
    assert "cannot read 'a b:1' as a host" in fails(lambda: {"a b": 1})


def test_what_it_raises_is_told_with_its_place() -> None:
    def lose() -> None:
        raise KeyError("the cloud")

    said = fails(lose)
    assert said.startswith(f"the discovery object raised KeyError: 'the cloud' ({__file__}:")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (["localhost"], "raised AttributeError: 'list' object has no attribute 'items'"),
        ({"localhost": "many"}, "raised ValueError: invalid literal"),
        ({"local host": 2}, "did not return valid hosts: cannot read 'local host:2' as a host"),
        ({"localhost": -1}, "slots must be at least 1, not -1"),
        ({"localhost": 1 << 20}, "slots must be at most 4096"),
        ({f"host-{number:0240}": 1 for number in range(5000)}, "it listed more than 1048576 bytes"),
    ],
)
def test_what_is_no_list_of_hosts(answer: Any, complaint: str) -> None:
    assert complaint in fails(lambda: answer)


def test_one_that_hangs_is_waited_for_and_asked_by_nobody_else_meanwhile() -> None:
    goes_on = threading.Event()

    def hang() -> Mapping[str, int]:
        assert goes_on.wait(150)
        return {"localhost": finder.calls}

    finder = Finder(hang)
    with asked(finder, timeout_s=0.2) as discovery:

        async def ask() -> tuple[Host, ...]:
            for _ in range(2):
                with pytest.raises(DiscoveryError, match=r"did not return within 0.2 s \(discovery_timeout\)"):
                    await discovery.find_hosts()
            assert finder.calls == 1
            discovery._timeout_s = 150.0
            waits = asyncio.ensure_future(discovery.find_hosts())
            await asyncio.sleep(0)
            goes_on.set()
            assert await waits == (Host("localhost", 1),)
            return await discovery.find_hosts()

        assert asyncio.run(ask()) == (Host("localhost", 2),)
    assert len(finder.threads) == 1


def test_the_remark_of_one_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("elastic_driver.discovery.caller._SLOW_S", 0.0)
    with asked(Finder(lambda: goes_on.wait(150) and {})) as discovery:

        async def look() -> str:
            asks = asyncio.ensure_future(discovery.find_hosts())
            while discovery._answer is None:
                await asyncio.sleep(0)
            said = discovery.remark()
            goes_on.set()
            await asks
            return said

        told = r"the discovery object has not returned for \d+ s \(limit: 150 s, discovery_timeout\)"
        assert re.fullmatch(told, asyncio.run(look()))


def test_a_caller_that_is_gone() -> None:
    ours, drivers = socket.socketpair()
    ours.close()
    with drivers, pytest.raises(DiscoveryError, match="cannot call the discovery object"):
        asyncio.run(CallerDiscovery(drivers, 30.0).find_hosts())


# --- the classes that come with it -----------------------------------------------------------------------------------


def test_a_script_as_an_object_also_where_a_loop_runs(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost\nelsewhere:3\n")
    script = elastic_driver.HostDiscoveryScript(f"cat {tmp_path}/hosts", 2)
    assert isinstance(script, elastic_driver.HostDiscovery)

    async def find() -> Mapping[str, int]:
        return script.find_available_hosts_and_slots()

    assert list(asyncio.run(find()).items()) == [("localhost", 2), ("elsewhere", 3)]
    with pytest.raises(DiscoveryError, match="exit code 3"):
        elastic_driver.HostDiscoveryScript("exit 3").find_available_hosts_and_slots()


def test_fixed_hosts_until_they_are_set_anew() -> None:
    fixed = elastic_driver.FixedHosts({"a": 1})
    assert fixed.find_available_hosts_and_slots() == {"a": 1}
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}


# --- whole jobs ------------------------------------------------------------------------------------------------------


def rank_and_size() -> tuple[int, int]:
    import elastic_driver as hvd

    hvd.init()
    hvd.barrier()
    return hvd.rank(), hvd.size()


def test_a_job_whose_hosts_come_from_an_object_with_a_lock() -> None:
    class Cluster(elastic_driver.HostDiscovery):
        """Cannot be pickled, and fails once."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.calls = 0

        def find_available_hosts_and_slots(self) -> dict[str, int]:
            assert self.lock.acquire(blocking=False)  # nobody else is here
            with contextlib.ExitStack() as stack:
                stack.callback(self.lock.release)
                self.calls += 1
                if self.calls == 2:
                    raise OSError("no answer")
                return {"localhost": 1} if self.calls == 1 else {"localhost": 1, "127.0.0.1": 1}

    cluster = Cluster()
    assert elastic_driver.run(rank_and_size, np=2, discovery=cluster, discovery_interval=0.05) == [(0, 2), (1, 2)]
    assert cluster.calls >= 3


def test_a_job_whose_object_hangs_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    goes_on = threading.Event()
    with pytest.raises(JobFailedError):
        elastic_driver.run(
            len, np=1, discovery=Finder(lambda: goes_on.wait(150) and {}), discovery_timeout=0.3, elastic_timeout=1.5
        )
    goes_on.set()
    assert "the discovery object did not return within 0.3 s" in capfd.readouterr().err


def test_what_cannot_be_asked() -> None:
    with pytest.raises(SettingsError, match="has no method find_available_hosts_and_slots"):
        elastic_driver.run(len, discovery={"localhost": 2})  # type: ignore[arg-type]
    fixed = elastic_driver.FixedHosts({"localhost": 1})
    with pytest.raises(SettingsError, match="either a discovery object or fixed hosts"):
        elastic_driver.run(len, discovery=fixed, hosts="localhost:1")
    with pytest.raises(SettingsError, match="either --host-discovery-script or a discovery object"):
        elastic_driver.run(len, discovery=fixed, host_discovery_script="true")
