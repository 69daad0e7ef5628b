"""The driver of the job according to etcd, for an agent that does not hear from its driver.

Owns the client, and calls it without blocking the loop. What follows from the answer is up to the link.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from elastic_driver.etcd.place import EtcdPlace

if TYPE_CHECKING:
    from elastic_driver.etcd.client import EtcdClient
    from elastic_driver.etcd.driver_record import RegisteredDriver

# Leaves an agent time to find the next driver, in a fifth of its lease.
_TIMEOUT_S = 2.0


class DriverLocator:
    """Asks etcd which driver has the job. One question at a time, on the event loop.

    Args:
        place: the job's place in etcd.
        cluster: id of the etcd cluster; "" if not known.
    """

    def __init__(self, place: EtcdPlace, cluster: str = "") -> None:
        self._place = place
        self._cluster = cluster
        self._client: EtcdClient | None = None

    async def ask(self, *, again: bool = False) -> RegisteredDriver | None:
        """Return the driver that has the job, or None.

        Args:
            again: whether the next question follows soon; else no connection stays open.

        Raises:
            OSError: etcd does not answer, or another etcd does.
        """
        return await asyncio.get_running_loop().run_in_executor(None, partial(self._ask, again=again))

    def _ask(self, *, again: bool) -> RegisteredDriver | None:
        # The modules that speak HTTP take a while to load, and most agents never need them.
        from elastic_driver.etcd.client import EtcdClient
        from elastic_driver.etcd.driver_record import driver_key, driver_there

        if self._client is None:
            needs = f"read the key {driver_key(self._place)}"
            self._client = EtcdClient(self._place, timeout_s=_TIMEOUT_S, needs=needs)
        try:
            there = driver_there(self._client, self._place)
        finally:
            if not again:
                self._client.close()
        if self._cluster and self._client.cluster_id != self._cluster:
            # It knows nothing of the job, and would answer that there is no driver.
            raise OSError(f"the etcd at {self._place} is not the driver's")
        return there
