"""``horovod.runner.elastic.driver``: Horovod's ElasticDriver, as who builds on Horovod calls it.

Owns the calls and their blocking. The job behind them is :mod:`elastic_driver.compat.elastic.job`'s.
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
    """Who tells the workers their places: Horovod's server, or a user's own."""

    def init(self, host_assignments: list[SlotInfo]) -> Any:
        """A round has formed: its places by rank. Called on the driver's own thread; must not block."""

    def stop(self) -> Any:
        """The job is over."""


@dataclass(frozen=True)
class Results:
    """How a job ended.

    Attributes:
        error_message: why it ended before its workers had; None otherwise.
        worker_results: ``host[slot]`` -> exit code and time, of the workers of the last round; of all workers where
            there never was a round.
    """

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


class ElasticDriver:
    """Runs workers, each by a call of ``create_worker_fn`` in a thread, while hosts come and go.

    Args:
        rendezvous: is told the places of every round.
        discovery: tells the hosts; asked every second, in a thread of its own, from now on.
        min_num_proc: fewest workers of a round.
        max_num_proc: most; None for no bound.
        timeout: how long the job may lack slots, and workers may take until they are READY, seconds; by default
            HOROVOD_ELASTIC_TIMEOUT, or 600.
        reset_limit: unplanned resets allowed; None for no bound.
        cooldown_range: shortest and longest time a failed host stays out, seconds; None for ever.
        verbose: without effect: what happens is told to the logger ``elastic_driver.horovod``.
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

    # --- the job's life --------------------------------------------------------------------------------------------

    def start(self, num_proc: int, create_worker_fn: CreateWorker) -> None:
        """Starts workers on all slots, ``max_num_proc`` at most, once there are ``num_proc``. Blocks until then.

        Args:
            num_proc: slots to begin with.
            create_worker_fn: runs one worker on a slot until it ends, or until one of the events that it is given is
                set. Returns its exit code and the time. Called in a thread for each worker.

        Raises:
            TimeoutError: there were not so many slots in time.
            RuntimeError: the job is over.
        """
        self._job.start(max(num_proc, self._min_num_proc), create_worker_fn)
        with self._job.changed:
            self._job.changed.wait_for(lambda: not self._job.waits)
        if not self._job.has_begun:
            self._raise_end()

    def resume(self) -> None:
        """Blocks until there are slots for the fewest workers: the next round is formed without being asked for.

        Raises:
            TimeoutError, RuntimeError: as :meth:`wait_for_available_slots`.
        """
        self.wait_for_available_slots(self._min_num_proc)

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> DiscoveredHosts:
        """Blocks until so many slots on so many hosts can be used; gives the hosts.

        Raises:
            TimeoutError: there were not so many in time.
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
                        f"there are {found.count_available_slots()} on {len(hosts)}"
                    )
                self._job.changed.wait(left_s)

    def record_ready(self, host: str, slot: int) -> int:
        """A worker is there for a round. Blocks until all have said so, or failed, and the round is formed.

        Args:
            host: the worker's.
            slot: its local rank when it was started.

        Returns:
            The round's number; 0 when the worker has no place in it, or the job is over.
        """
        return self._job.ready((host, slot))

    def stop(self, error_message: str | None = None) -> None:
        """Ends the job: sets the workers' events. Does not wait for their ends; :meth:`get_results` does."""
        if self._job.end is None:
            self._error_message = error_message
        self._job.stop(error_message or "stop() was called")
        with self._job.changed:
            self._job.changed.wait_for(lambda: self._job.end is not None)

    def finished(self) -> bool:
        """Whether the job is over. Workers may not have ended yet."""
        return self._job.end is not None

    def get_results(self) -> Results:
        """Blocks until the job is over and all workers have ended."""
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
        message = "the job has not begun" if end is None else end.message
        if end is not None and end.exit_code == ExitCode.TOO_FEW_SLOTS:
            raise TimeoutError(message)
        raise RuntimeError(f"the job is over: {message}")

    # --- places ----------------------------------------------------------------------------------------------------

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """The present place of a worker; INVALID_SLOT_INFO when it has none."""
        return self._job.slot_of((host, slot)) or INVALID_SLOT_INFO

    def has_rank_assignment(self, host: str, slot: int) -> bool:
        """Whether a worker has a place."""
        return self._job.slot_of((host, slot)) is not None

    def get_coordinator_info(self) -> SlotInfo:
        """The place of rank 0; INVALID_SLOT_INFO before the first round."""
        return next((place for place in self._job.places.values() if place.rank == 0), INVALID_SLOT_INFO)

    @property
    def host_assignments(self) -> dict[str, list[SlotInfo]]:
        """The places of the round, by host."""
        hosts: dict[str, list[SlotInfo]] = {}
        for place in self._job.places.values():
            hosts.setdefault(place.hostname, []).append(place)
        return hosts

    def world_size(self) -> int:
        """Workers of the round."""
        return len(self._job.places)

    def local_size(self, host: str) -> int:
        """Those of them on a host."""
        return len(self.host_assignments.get(host, ()))

    # --- what there is not -----------------------------------------------------------------------------------------

    def register_worker_server(self, host: str, slot: int, addresses: Any, secret_key: Any) -> NoReturn:
        """Horovod's notification services are not spoken to.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "cannot send notices to Horovod's notification services: a worker that wants to leave its round calls "
            "record_ready again, and the round is formed anew with whoever has been added"
        )
