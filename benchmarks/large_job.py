"""A large job as its driver knows it, all of whose workers train: brought there by the core's own steps, no process.

Its members have vitals, as agents tell them, so that looking at it costs what it costs the driver of a real one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from elastic_driver.core.events import HostsDiscovered, StartWorker, WorkerReady, WorkerRunning
from elastic_driver.core.membership import Policy
from elastic_driver.driver.stepper import Stepper
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.vitals import Traffic, Vitals
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.status_parts import Parts, status_of

SLOTS_PER_HOST = 8


def a_large_job(size: int, clock: Callable[[], float] = time.monotonic) -> tuple[Stepper, list[WorkerId]]:
    """The driver's core, and the members by rank."""
    started: list[WorkerId] = []

    def carry_out(commands: Any, now: float) -> None:
        started.extend(command.worker for command in commands if isinstance(command, StartWorker))

    def fail(error: Exception) -> None:
        raise error

    stepper = Stepper(Policy(num_proc=size, min_num_proc=1), clock=clock, carry_out=carry_out, on_error=fail)
    stepper.post(HostsDiscovered(tuple(Host(f"host-{n:05}", SLOTS_PER_HOST) for n in range(size // SLOTS_PER_HOST))))
    for one in started:
        stepper.report(WorkerReady(one, 0, 0, ReadyCause.START, "", (Backend.NATIVE,)))
    stepper.catch_up()
    for one in started:
        stepper.report(WorkerRunning(one, 1, 0))
    stepper.catch_up()
    return stepper, list(stepper.state.members)


class LargeStatus:
    """What the driver tells of a large job.

    Attributes:
        status: the driver's own.
    """

    def __init__(self, size: int) -> None:
        stepper, self._members = a_large_job(size)
        parts = Parts()
        parts.pids = {worker: 1000 + worker.slot for worker in self._members}
        self._table = parts.table
        self.status = status_of(stepper, time.monotonic, parts)
        self._seconds = 0
        for _ in range(3):
            self.pass_a_second()

    def pass_a_second(self) -> None:
        """All agents tell of all workers."""
        self._seconds += 1
        steps = 10 * self._seconds
        traffic = (Traffic("allreduce", 20 * steps, steps << 20), Traffic("broadcast", 3, 1 << 20))
        for rank, worker in enumerate(self._members):
            vitals = Vitals(
                self._seconds,
                pid=1000 + worker.slot,
                state="R",
                cpu_s=0.8 * self._seconds,
                rss_bytes=1 << 30,
                pulse_s=0.1,
                round_id=1,
                rank=rank,
                steps=steps,
                submitted=20 * steps,
                finished=20 * steps,
                waited_s=0.2 * self._seconds,
                commits=steps,
                committed_s=0.05,
                traffic=traffic,
                can_dump=True,
            )
            self._table.take(worker, vitals, time.monotonic())
