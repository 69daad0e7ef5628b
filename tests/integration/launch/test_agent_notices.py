"""An agent that is told that its machine goes away: by the cloud's endpoint, by a signal. What it tells its driver."""

from __future__ import annotations

import asyncio
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from elastic_driver.launch.agent.clouds import ENV_AWS, ENV_AZURE, ENV_GCP
from elastic_driver.rendezvous.agent_messages import Close, Leaves, Warning
from tests.support.clusters.fake_clouds import Asked, Says, fake_cloud
from tests.support.processes.agents import act, scene

pytestmark = pytest.mark.integration


class Spot:
    """AWS, that has a notice from some time on."""

    def __init__(self) -> None:
        self.left_s: float | None = None
        self.rebalance = False

    def __call__(self, asked: Asked) -> Says:
        if asked.method == "PUT":
            return Says(body="token")
        if asked.path.endswith("rebalance"):
            return Says(body='{"noticeTime": "2020-10-27T08:22:00Z"}') if self.rebalance else Says(404)
        if self.left_s is None:
            return Says(404)
        at = datetime.now(UTC) + timedelta(seconds=self.left_s)
        return Says(body=f'{{"action": "terminate", "time": "{at:%Y-%m-%dT%H:%M:%SZ}"}}')


def test_a_notice_of_the_cloud_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spot = Spot()
    spot.rebalance = True

    async def main() -> None:
        async with scene(tmp_path, spot_notices="aws") as one:
            agent = await one.ready(one.driver.joiner())
            advice = await one.driver.hears(Warning)
            assert "AWS recommends replacing this spot instance" in advice.text
            assert not one.driver.of(Leaves), "advice is no notice"
            spot.left_s = 800.0
            first = await one.driver.hears(Leaves)
            assert first.why == "AWS is reclaiming this spot instance: it will be terminated"
            assert first.within_s is not None
            assert 0 < first.within_s <= 800
            # What is left is told again, and is less each time; the advice is not.
            third = await one.driver.hears(Leaves, nth=3)
            assert third.within_s is not None
            assert third.within_s <= first.within_s - 1.9
            assert len(one.driver.of(Warning)) == 1
            one.driver.tell(Close())
            code, said = await agent.ends()
            assert code == 0
            assert "AWS is reclaiming this spot instance: it will be terminated in " in said

    with fake_cloud(spot) as fake:
        monkeypatch.setenv(ENV_AWS, fake.url)
        act(main)


def test_what_was_heard_late_is_said_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that stood still when the notice came must not take the machine for longer-lived than it is."""
    spot = Spot()

    async def main() -> None:
        async with scene(tmp_path, spot_notices="aws") as one:
            await one.ready(one.driver.joiner())
            driver = one.driver
            driver.pause(driver.link)
            asked = len(fake.asked)
            spot.left_s = 600.0
            await driver.until(lambda: len(fake.asked) >= asked + 4, "two looks")
            driver.resume(driver.link)
            late = await driver.hears(Leaves)
            again = await driver.hears(Leaves, nth=2)
            assert late.within_s is not None
            assert again.within_s is not None
            assert again.within_s <= late.within_s - 1.0
            assert len(driver.of(Leaves)) < 4, "they do not pile up"

    with fake_cloud(spot) as fake:
        monkeypatch.setenv(ENV_AWS, fake.url)
        act(main)


def test_that_nothing_is_left_is_said_until_it_is_heard(tmp_path: Path) -> None:
    """A driver that stood still for longer than the machine had must not take it for one that has all that left."""

    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready(one.driver.joiner(grace_s=1.5))
            driver = one.driver
            driver.pause(driver.link)
            at = time.monotonic()
            agent.popen.send_signal(signal.SIGTERM)
            await driver.until(lambda: time.monotonic() > at + 4, "that the machine's end has passed")
            driver.resume(driver.link)
            assert (await driver.hears(Leaves)).within_s == 1.5
            await driver.until(lambda: driver.of(Leaves)[-1].within_s == 0.0, "that nothing is left")
            driver.tell(Close())
            assert (await agent.ends())[0] == 0

    act(main)


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_cloud_that_is_not_there_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: str) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready(one.driver.joiner(spot_notices=cloud))
            told = await one.driver.hears(Warning)
            assert told.text.startswith(f"cannot get notices of {cloud} (--spot-notices): http://")
            one.driver.tell(Close())
            assert (await agent.ends())[0] == 0, "its end waits for no endpoint"
            assert len(one.driver.of(Warning)) == 1
            assert not one.driver.of(Leaves)

    with fake_cloud(lambda _: Says(404)) as fake:
        for name, value in {ENV_AWS: fake.url, ENV_GCP: fake.place, ENV_AZURE: fake.url}.items():
            monkeypatch.setenv(name, value)
        act(main)


def test_a_cloud_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready(one.driver.joiner(spot_notices="azure"))
            await one.driver.until(lambda: fake.asked, "that it is asked")
            one.driver.python("print('works', flush=True)")
            await one.driver.writes("works")
            one.driver.tell(Close())
            async with asyncio.timeout(100):  # the first answer of Azure is waited for 130 s
                assert (await agent.ends())[0] == 0

    with fake_cloud(lambda _: None) as fake:
        monkeypatch.setenv(ENV_AZURE, fake.url)
        act(main)


def test_a_signal_means_that_long(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready(one.driver.joiner(grace_s=30.0))
            agent.popen.send_signal(signal.SIGTERM)
            said = await one.driver.hears(Leaves)
            assert (said.why, said.within_s) == ("its agent received SIGTERM", 30.0)
            one.driver.tell(Close())
            assert (await agent.ends())[0] == 0

        async with scene(tmp_path) as one:
            agent = await one.ready(one.driver.joiner())
            agent.popen.send_signal(signal.SIGTERM)
            said = await one.driver.hears(Leaves)
            assert (said.why, said.within_s) == ("its agent received SIGTERM", None)
            one.driver.tell(Close())
            assert (await agent.ends())[0] == 0

    act(main)


def test_a_host_that_has_left_is_not_done(tmp_path: Path) -> None:
    """Kubernetes must be able to tell one that is to come again from one whose job is over."""

    async def main() -> None:
        for exit_code, expected in ((-1, 143), (0, 0), (1, 0)):
            async with scene(tmp_path) as one:
                agent = await one.ready(one.driver.joiner(leave_code=143))
                one.driver.tell(Close(exit_code, "the job is over" if exit_code >= 0 else ""))
                assert (await agent.ends())[0] == expected
        async with scene(tmp_path) as one:
            agent = await one.ready(one.driver.joiner())
            one.driver.tell(Close(143, "interrupted by SIGTERM", preempted=True))
            assert (await agent.ends())[0] == 75

    act(main)
