"""``horovod.runner.elastic.driver``: Horovod's ElasticDriver, for programs built on Horovod.

Owns the blocking calls. The job behind them is in :mod:`elastic_driver.compat.elastic.job`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from elastic_driver.compat.elastic.discovery import DiscoveredHosts
from elastic_driver.compat.elastic.job import DISCOVER_HOSTS_FREQUENCY_SECS, ThreadJob
from elastic_driver.compat.elastic.threads import CreateWorker
from elastic_driver.compat.runner.hosts import INVALID_SLOT_INFO, SlotInfo
from elastic_driver.core.membership import Policy
from elastic_driver.discovery.caller import Finder
from elastic_driver.words import ExitCode

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS", "ELASTIC_TIMEOUT_SECS", "ElasticDriver", "Results"]

ELASTIC_TIMEOUT_SECS = 600
_POLITE_ENDS = (ExitCode.SUCCESS, ExitCode.USER_CODE_FAILED)


class Rendezvous(Protocol):
    """A server that sends the workers their places: Horovod's, or a user's own."""

    def init(self, host_assignments: list[SlotInfo]) -> Any:
        """Publish a new round, whose places are in rank order. Called on the driver's own thread; must not block."""

    def stop(self) -> Any:
        """Stop: the job is over."""


@dataclass(frozen=True)
class Results:
    """How a job ended.

    Attributes:
        error_message: why the job ended before its workers had; None otherwise.
        worker_results: ``host[slot]`` -> exit code and time, for the workers of the last round, or for all workers if
            there never was a round.
    """

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


class ElasticDriver:
    """Runs a worker per slot, by calls of ``create_worker_fn`` in threads, while hosts join and leave.

    Args:
        rendezvous: gets the places of every round.
        discovery: lists the hosts; queried every second, in a thread of its own, from now on.
        min_num_proc: the minimum number of workers in a round.
        max_num_proc: the maximum; None for no limit.
        timeout: how long the job may lack slots, and workers may take until they are READY, seconds; by default
            HOROVOD_ELASTIC_TIMEOUT, or 600.
        reset_limit: the limit of unplanned resets; None for no limit.
        cooldown_range: the shortest and longest time on the blacklist, seconds; None for no limit.
        verbose: without effect: the driver logs to ``elastic_driver.horovod``.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        discovery: Finder,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: float | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        verbose: int = 0,
    ) -> None:
        self._min_num_proc = min_num_proc
        self._timeout_s = timeout or float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or ELASTIC_TIMEOUT_SECS)
        self._error_message: str | None = None
        policy = Policy(
            num_proc=min_num_proc,
            min_num_proc=min_num_proc,
            max_num_proc=max_num_proc,
            elastic_timeout_s=self._timeout_s,
            start_timeout_s=self._timeout_s,
            reset_limit=reset_limit,
            cooldown_range_s=cooldown_range,
        )
        self._job = ThreadJob(discovery, policy, on_round=rendezvous.init, on_over=rendezvous.stop)

    # --- life cycle ------------------------------------------------------------------------------------------------

    def start(self, num_proc: int, create_worker_fn: CreateWorker) -> None:
        """Start workers on all slots, at most ``max_num_proc``, once there are ``num_proc``. Blocks until then.

        Args:
            num_proc: the number of slots to wait for.
            create_worker_fn: runs a worker on a slot until it ends, or until one of the given events is set. Returns
                its exit code and the time. Called in a new thread for each worker.

        Raises:
            TimeoutError: there were too few slots in time.
            RuntimeError: the job is over.
        """
        self._job.start(max(num_proc, self._min_num_proc), create_worker_fn)
        with self._job.changed:
            self._job.changed.wait_for(lambda: not self._job.waits)
        if not self._job.has_begun:
            self._raise_end()

    def resume(self) -> None:
        """Block until there are slots for ``min_num_proc`` workers. The next round forms by itself.

        Raises:
            TimeoutError, RuntimeError: as :meth:`wait_for_available_slots`.
        """
        self.wait_for_available_slots(self._min_num_proc)

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> DiscoveredHosts:
        """Block until there are so many usable slots on so many hosts. Returns the usable hosts.

        Raises:
            TimeoutError: there were too few in time.
            RuntimeError: the job is over.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._job.changed:
            while True:
                if self._job.end is not None:
                    self._raise_end()
                hosts = self._job.usable_hosts
                found = DiscoveredHosts({host.name: host.slots for host in hosts}, [host.name for host in hosts])
                if found.count_available_slots() >= min_num_proc and len(hosts) >= min_hosts:
                    return found
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(
                        f"cannot find {min_num_proc} slots on {min_hosts} hosts within {self._timeout_s:g} s: "
                        f"found {found.count_available_slots()} on {len(hosts)}"
                    )
                self._job.changed.wait(left_s)

    def record_ready(self, host: str, slot: int) -> int:
        """Report that a worker is ready for a round. Blocks until all workers are ready or have failed, and it forms.

        Args:
            host: the worker's host.
            slot: its local rank when it was started.

        Returns:
            The round's number; 0 if the worker has no place in it, or the job is over.
        """
        return self._job.ready((host, slot))

    def stop(self, error_message: str | None = None) -> None:
        """End the job, by setting the workers' events. Does not wait for their ends; :meth:`get_results` does."""
        if self._job.end is None:
            self._error_message = error_message
        self._job.stop(error_message or "stop() was called")
        with self._job.changed:
            self._job.changed.wait_for(lambda: self._job.end is not None)

    def finished(self) -> bool:
        """Return whether the job is over. Workers may still be running."""
        return self._job.end is not None

    def get_results(self) -> Results:
        """Return the job's results. Blocks until the job is over and all workers have ended."""
        self._job.join()
        end, state = self._job.end, self._job.state
        assert end is not None
        members = None if state is None or not state.round_id else state.members
        message = self._error_message or (None if end.exit_code in _POLITE_ENDS else end.message)
        return Results(
            message,
            {
                f"{slot[0]}[{slot[1]}]": result
                for worker, (slot, result) in self._job.results.items()
                if members is None or worker in members
            },
        )

    def _raise_end(self) -> NoReturn:
        end = self._job.end
        message = "the job has not started" if end is None else end.message
        if end is not None and end.exit_code == ExitCode.TOO_FEW_SLOTS:
            raise TimeoutError(message)
        raise RuntimeError(f"the job is over: {message}")

    # --- places ----------------------------------------------------------------------------------------------------

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """Return a worker's current place; INVALID_SLOT_INFO without one."""
        return self._job.slot_of((host, slot)) or INVALID_SLOT_INFO

    def has_rank_assignment(self, host: str, slot: int) -> bool:
        """Return whether a worker has a place."""
        return self._job.slot_of((host, slot)) is not None

    def get_coordinator_info(self) -> SlotInfo:
        """Return the place of rank 0; INVALID_SLOT_INFO before the first round."""
        return next((place for place in self._job.places.values() if place.rank == 0), INVALID_SLOT_INFO)

    @property
    def host_assignments(self) -> dict[str, list[SlotInfo]]:
        """Host name -> places of the current round."""
        hosts: dict[str, list[SlotInfo]] = {}
        for place in self._job.places.values():
            hosts.setdefault(place.hostname, []).append(place)
        return hosts

    def world_size(self) -> int:
        """Return the number of workers in the round."""
        return len(self._job.places)

    def local_size(self, host: str) -> int:
        """Return the number of the round's workers on a host."""
        return len(self.host_assignments.get(host, ()))

    # --- not supported ---------------------------------------------------------------------------------------------

    def register_worker_server(self, host: str, slot: int, addresses: Any, secret_key: Any) -> NoReturn:
        """Fail: Horovod's notification services are not supported.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "cannot send notifications to Horovod's notification services: a worker leaves its round by calling "
            "record_ready again, and the next round includes the workers added since"
        )
