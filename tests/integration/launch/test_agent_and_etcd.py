"""An agent of a job whose journal is in etcd: that says who drives, where the driver's machine may be lost with it.

What is the same with a journal in a folder is in test_agent_without_driver.py.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.etcd.driver_record import RegisteredDriver
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.rendezvous.agent_messages import Exited, Finished, InDoubt, Levels, Warning
from elastic_driver.system.process_name import place_of_sockets
from tests.support.fakes.fake_etcd import FakeEtcd, fake_etcd, nobody
from tests.support.processes.agents import B, FakeDriver, Scene, act, gone, scene

pytestmark = pytest.mark.integration

SLEEP = "import time; print('sleeps', flush=True); time.sleep(600)"


def there(driver: FakeDriver) -> RegisteredDriver:
    facts = driver.welcome_facts
    url = f"https://127.0.0.1:{driver.port}"
    return RegisteredDriver(facts.job_id, "m", "", facts.epoch, facts.driver, (url,))


@asynccontextmanager
async def job(folder: Path, **more: Any) -> AsyncIterator[tuple[Scene, FakeEtcd, FakeDriver]]:
    """A scene whose driver etcd names; and the one that is to have the job after it, elsewhere."""
    with fake_etcd() as etcd:
        facts = {
            "epoch": 1,
            "driver": "first",
            "driver_timeout_s": 600.0,
            "agent_timeout_s": 3.0,
            "place": place_of_sockets(),
            "etcd": etcd.place(),
            "etcd_cluster": etcd.cluster,
        }
        async with scene(folder, **(facts | more)) as one:
            etcd.says(there(one.driver))
            second = one.driver.successor(2, etcd=etcd.place())
            second.port = 0
            try:
                yield one, etcd, second
            finally:
                await second.deafen()
                for link in second.links.values():
                    link.close("the test is over")


async def has_it(second: FakeDriver, etcd: FakeEtcd) -> None:
    """The other driver has the job, and says so."""
    await second.listen()
    etcd.says(there(second))


def test_workers_have_nothing_that_only_drivers_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may: that of the driver's machine is begun before it is known whose agent it is."""
    monkeypatch.setenv("ETCDCTL_USER", "jobs:secret")
    monkeypatch.setenv("ETCDCTL_API", "3")

    async def main() -> None:
        async with job(tmp_path) as (one, _, _):
            await one.ready()
            names = "import os; print(sorted(name for name in os.environ if name.startswith('ETCDCTL')))"
            one.driver.start([sys.executable, "-c", names], env={})
            await one.driver.hears(Finished)
            assert one.driver.output() == b"[0]<stdout>:['ETCDCTL_API']\n"

    act(main)


def test_the_next_driver_is_found_on_another_machine(tmp_path: Path) -> None:
    """The lost one's machine answers nothing, and there is nobody else for longer than the lease."""

    async def main() -> None:
        async with job(tmp_path) as (one, etcd, second):
            await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            with socket.create_server(("127.0.0.1", one.driver.port), backlog=100):
                etcd.says(None)
                asked = len(etcd.answered)
                await one.driver.until(lambda: len(etcd.answered) - asked > 10, "that it asks again and again")
                await has_it(second, etcd)
                await second.hears(Levels)
            second.start(["true"], B)
            assert (await second.hears(Exited, B)).returncode == 0
            assert process.is_running()

    act(main)


@pytest.mark.parametrize("how", ["it drives", "nobody knows", "another etcd knows nothing of it"])
def test_a_driver_that_may_live_is_not_waited_for(tmp_path: Path, how: str) -> None:
    """Its machine refuses, which says nothing of the one that may have come since, elsewhere."""

    async def main() -> None:
        async with job(tmp_path) as (one, etcd, _):
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            match how:
                case "nobody knows":
                    etcd.is_away = True
                case "another etcd knows nothing of it":
                    etcd.cluster = "78"
                    etcd.says(None)
            await one.driver.deafen()
            code, text = await agent.ends()
            assert code == 1
            assert "cannot reach the driver" in text
            await gone([process])

    act(main)


def test_a_driver_in_doubt_is_left_for_the_one_that_has_the_job(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path) as (one, etcd, second):
            await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await has_it(second, etcd)
            one.driver.tell(InDoubt(is_so=True))
            await second.hears(Levels)
            second.start(["true"], B)
            assert (await second.hears(Exited, B)).returncode == 0
            assert process.is_running()
            assert not one.driver.link.connected

    act(main)


def test_a_driver_that_is_stopped_is_left_as_well(tmp_path: Path) -> None:
    """Its kernel acknowledges what comes, and nothing comes of it."""

    async def main() -> None:
        async with job(tmp_path) as (one, etcd, second):
            await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            one.driver.freeze(one.driver.link)
            await has_it(second, etcd)
            await second.hears(Levels)
            assert process.is_running()

    act(main)


def test_a_driver_in_doubt_is_heard_for_as_long_as_another_is_waited_for(tmp_path: Path) -> None:
    """Beyond that the next one takes it for granted that this host's workers have ended."""

    async def main() -> None:
        async with job(tmp_path, driver_timeout_s=5.0) as (one, etcd, _):
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            etcd.is_away = True
            one.driver.tell(InDoubt(is_so=True))
            code, text = await agent.ends()
            assert code == 1
            assert "no other driver has taken over within 5 s" in text
            await gone([process])

    act(main)


def test_a_doubt_that_passes_ends_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path, driver_timeout_s=4.0) as (one, etcd, _):
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            one.driver.tell(InDoubt(is_so=True))
            asked = len(etcd.answered)
            await one.driver.until(lambda: len(etcd.answered) > asked + 1, "that it asks who drives")
            one.driver.tell(InDoubt(is_so=False))
            channel = one.driver.link._channel
            await one.driver.until(lambda: channel.is_seen(channel.last), "that it has heard that")
            etcd.is_away = True
            for number in range(2):  # longer than the doubt might have lasted
                one.driver.start(["sleep", "2.5"], B.__class__("a", 1, number))
                await one.driver.hears(Exited, B.__class__("a", 1, number))
            assert process.is_running()
            assert agent.popen.poll() is None

    act(main)


def test_who_cannot_ask_is_told_so_before_it_matters(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path, etcd=EtcdPlace((nobody(),), "/jobs/a")) as (one, _, _second):
            await one.ready()
            warning = await one.driver.hears(Warning)
            assert "cannot find out from here which driver has the job: " in warning.text

    act(main)
