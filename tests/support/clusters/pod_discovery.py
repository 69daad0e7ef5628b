"""Asks a KubernetesDiscovery as the driver does, and keeps what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from elastic_driver.discovery.kubernetes.access import Access
from elastic_driver.discovery.kubernetes.pods import Reading
from elastic_driver.discovery.kubernetes.source import KubernetesDiscovery
from elastic_driver.errors import DiscoveryError
from elastic_driver.hosts import Departure, Host
from elastic_driver.settings.pods import RACK_FROM, SLOTS_FROM
from tests.support.clusters.kubernetes_fake import FakeKubernetes

LABELS = {"app": "train"}
LIMIT_S = 150.0


def reading(**given: Any) -> Reading:
    """As the settings' defaults have it, with a slot for pods that say nothing."""
    values: dict[str, Any] = {"names": "pod", "slots_from": SLOTS_FROM, "default_slots": 1, "rack_from": RACK_FROM}
    return Reading(**(values | given))


class Follower:
    """The loop that asks.

    Attributes:
        answers: all, in order: hosts, or why there are none, and the departures that went with them.
        at: when each came, by ``time.perf_counter``.
    """

    def __init__(self, discovery: KubernetesDiscovery) -> None:
        self.discovery = discovery
        self.answers: list[tuple[tuple[Host, ...] | str, tuple[Departure, ...]]] = []
        self.at: list[float] = []
        self._came = asyncio.Condition()

    async def run(self) -> None:
        while True:
            try:
                said: tuple[Host, ...] | str = await self.discovery.find_hosts()
            except DiscoveryError as error:
                said = str(error)
            async with self._came:
                if not self.answers or self.answers[-1][0] != said or self._news():
                    self.answers.append((said, self.discovery.departures()))
                    self.at.append(time.perf_counter())
                self._came.notify_all()
            await self.discovery.wait_change(0.2)

    def _news(self) -> bool:
        before = [(each.hostname, each.why) for each in self.answers[-1][1]]
        return [(each.hostname, each.why) for each in self.discovery.departures()] != before

    @property
    def names(self) -> list[str] | str:
        """Of the hosts that it named last, or why it could not."""
        said = self.answers[-1][0]
        return said if isinstance(said, str) else [host.name for host in said]

    @property
    def version(self) -> str:
        """From which the watch of pods would go on."""
        pods = self.discovery._pods
        return "" if pods is None else pods._version

    @property
    def going(self) -> dict[str, Departure]:
        """The last departures."""
        return {each.hostname: each for each in self.answers[-1][1]}

    async def until(self, holds: Callable[[], Any]) -> Any:
        """Blocks until this holds for what was said last; it is looked at after each answer."""
        async with asyncio.timeout(LIMIT_S), self._came:
            await self._came.wait_for(lambda: bool(self.answers) and holds())


@asynccontextmanager
async def following(
    api: FakeKubernetes,
    folder: Path,
    *,
    selector: str = "app=train",
    namespace: str | None = None,
    token: str | None = None,
    timeout_s: float = 10.0,
    environ: dict[str, str] | None = None,
    **given: Any,
) -> AsyncIterator[Follower]:
    """A discovery that is asked all the while."""
    config = api.kubeconfig(folder / "kubeconfig", token=token)
    access = Access(environ or {"KUBECONFIG": str(config)}, folder)
    discovery = KubernetesDiscovery(selector, namespace, reading(**given), timeout_s, access=access)
    follower = Follower(discovery)
    asking = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        asking.cancel()
        await asyncio.wait((asking,))
        await discovery.close()
        if not asking.cancelled():
            asking.result()
