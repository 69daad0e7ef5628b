"""All workers of this host that run Horovod's own library: their ports, their notices, their connections.

Owns which workers have a port, and what a notice of the driver does to them: rank 0 is notified, again and again, to
have all leave at a commit; in a broken round, connections between workers are shut down, since a worker that is not a
neighbor of the dead one would wait for it in Gloo. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from elastic_driver.dialects.horovod import (
    AUTO,
    ENV_ADDRESS,
    ENV_INTERFACE,
    ENV_PORT,
    ENV_PROTOCOL,
    ENV_STORE_ADDRESS,
    ENV_STORE_PORT,
    OFF,
    planned,
)
from elastic_driver.errors import RendezvousError, in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.horovod.detection import Detection
from elastic_driver.launch.agent.horovod.notification import notify
from elastic_driver.launch.agent.horovod.port import HorovodPort, PortContext, Rounds, Store
from elastic_driver.rendezvous.messages import Notice
from elastic_driver.system.interfaces import address_in, host_addresses, interface_of
from elastic_driver.system.process_name import is_below, is_stopped
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import NoticeKind

# Horovod's own HostUpdateResult: hosts were added, and others removed. After "removed" alone no worker would broadcast
# the state, and a worker that joins in that round would wait for it forever.
_MIXED = 3
# Interval at which rank 0 is notified again, and how long it has to acknowledge.
_AGAIN_S, _ACKNOWLEDGE_S = 0.5, 5.0
# When connections of a broken round are looked for: some may have been in progress.
_SHUT_AT_S = (0.0, 0.2, 1.0, 2.0, 5.0)
# How long a worker has to connect to the others of a broken round without the dead. Otherwise it would wait for them
# until Gloo's time limit, and then abort: nothing else ends such a wait.
_MEET_S = 2.0
# The longest interval at which workers are looked at.
_LOOK_S = 0.5


class HeartbeatRounds(Rounds, Protocol):
    """The rounds on this host."""

    poll_s: float

    def hear(self, worker: WorkerId, progress: int, *, waiting: bool) -> None:
        """Record a heartbeat of a worker."""


class Processes(Protocol):
    """The workers' processes."""

    async def sever(self, worker: WorkerId, endpoints: Iterable[tuple[str, int]]) -> None:
        """Shut down its connections to and from these addresses and ports."""

    def pid(self, worker: WorkerId) -> int | None:
        """Return the PID of its process; None if it is not running."""

    def start_again(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        """Start its process again, with these variables."""


class HorovodFront:
    """Serves the workers of this host that run Horovod's own library. Used on the event loop only.

    Args:
        rounds: of this host.
        store: the keys of the present round.
        processes: the workers' processes.
        tasks: runs background tasks.
        warn: called with warnings for the user.
    """

    def __init__(
        self, rounds: HeartbeatRounds, store: Store, processes: Processes, *, tasks: Tasks, warn: Callable[[str], None]
    ) -> None:
        self._rounds = rounds
        self._processes = processes
        self._tasks = tasks
        self._around = PortContext(rounds, store, tasks, _interface, processes.start_again, warn)
        self._ports: dict[WorkerId, HorovodPort] = {}
        self._detection = Detection()
        self._telling: asyncio.Task[None] | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._notice: Notice | None = None

    def close(self) -> None:
        """Close all ports."""
        for worker in tuple(self._ports):
            self.gone(worker)
        if self._looking is not None:
            self._looking.cancel()
        self._stop_telling()

    # --- workers ---------------------------------------------------------------------------------------------------

    async def environment(self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with which Horovod's own library in a worker finds this agent.

        Empty if the worker is not to be served that way: its library would find no rendezvous.

        Args:
            worker: the worker. It gets a new port.
            command: the command that it runs.
            env: its environment so far.
        """
        mode = env.get(ENV_PROTOCOL, OFF)
        if mode == OFF or (mode == AUTO and not await self._detection.is_horovods(tuple(command), env, os.getcwd())):
            return {}
        self.gone(worker)  # the port of an earlier process of the worker
        port = HorovodPort(worker, planned(env), self._around)
        try:
            variables = dict(await port.open(os.getuid()))
        except OSError as error:
            self._around.warn(f"cannot serve worker {worker} with Horovod's protocol: {in_words(error)}")
            return {}
        self._ports[worker] = port
        if self._looking is None:
            self._look()
        variables |= {ENV_STORE_ADDRESS: "127.0.0.1", ENV_STORE_PORT: variables[ENV_PORT]}
        if interface := _interface(env.get(ENV_ADDRESS, "")):
            variables[ENV_INTERFACE] = interface
        return variables

    def gone(self, worker: WorkerId) -> None:
        """Close the port of a worker that has ended."""
        port = self._ports.pop(worker, None)
        if port is not None:
            port.close()

    # --- notices of the driver -------------------------------------------------------------------------------------

    def notified(self, notice: Notice) -> None:
        """Act on the present notice."""
        if self._notice == notice:
            return
        self._notice = notice
        self._stop_telling()
        members = [port for port in self._ports.values() if _round_of(port) == notice.round_id]
        match notice.kind:
            case NoticeKind.HOSTS_UPDATED:
                for port in members:
                    port.planned()
                # Rank 0 may turn up here later, too: its answer may be on the way.
                self._telling = self._tasks.start(self._tell(notice))
            case NoticeKind.ABORT | NoticeKind.JOB_OVER:
                for port in members:
                    port.broken()
                    if notice.kind is NoticeKind.ABORT:
                        self._tasks.start(self._shut(port, port.endpoints))
            case NoticeKind.NONE:
                pass

    async def _shut(self, port: HorovodPort, endpoints: set[tuple[str, int]]) -> None:
        """Shut down the connections of a worker in a broken round, until it asks for another."""
        assignment, before = port.assignment, 0.0
        for at_s in _SHUT_AT_S:
            await asyncio.sleep(at_s - before)
            before = at_s
            if port.worker not in self._ports or port.assignment is not assignment:
                return
            if endpoints:
                await self._processes.sever(port.worker, frozenset(endpoints))
            if at_s >= _MEET_S and port.is_meeting:
                pid = self._pid(port)
                if pid is not None:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGABRT)
                return

    async def _tell(self, notice: Notice) -> None:
        """Notify rank 0 that hosts have changed, until the notice changes.

        Workers accept a notification with a greater timestamp than all before, and use the timestamp for nothing else.
        The round's number serves as one, since no clock can: rank 0 may be on another host each time, whose clock may
        be behind, and clocks are set back. A notification that arrives twice, perhaps in the next round, is not
        mistaken for a new one, either.
        """
        timestamp = float(notice.round_id)
        while True:
            for port in tuple(self._ports.values()):
                assignment, registration = port.assignment, port.registration
                if assignment is None or assignment.round_id != notice.round_id:
                    continue
                port.planned()
                if assignment.slot.rank == 0 and registration is not None and port.met:
                    with contextlib.suppress(RendezvousError, OSError, TimeoutError):
                        await notify(registration, timestamp=timestamp, res=_MIXED, own=_own(), limit_s=_ACKNOWLEDGE_S)
            await asyncio.sleep(_AGAIN_S)

    def _stop_telling(self) -> None:
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.cancel()

    # --- heartbeats ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Send the workers' heartbeats: they send none, but it can be seen whether they are stopped."""
        poll_s = self._rounds.poll_s
        delay_s = min(_LOOK_S, poll_s / 2) if poll_s > 0 else _LOOK_S
        self._looking = asyncio.get_running_loop().call_later(delay_s, self._look)
        for worker, port in self._ports.items():
            pid = self._pid(port)
            if port.is_known and pid is not None and not is_stopped(pid):
                self._rounds.hear(worker, 0, waiting=True)

    def _pid(self, port: HorovodPort) -> int | None:
        """Return the PID of the process that runs the library; None if it is not running.

        A process in a PID namespace of its own reports the PID of another process here: then it is the one that was
        started.
        """
        started = self._processes.pid(port.worker)
        return port.pid if started is not None and port.pid and is_below(port.pid, started) else started


def _round_of(port: HorovodPort) -> int:
    return 0 if port.assignment is None else port.assignment.round_id


def _own() -> list[str]:
    """Return the addresses of this machine."""
    return [address_in(line) for line in host_addresses()]


def _interface(address: str) -> str:
    """Return the name of the interface that has an address; "" if there is none."""
    return interface_of(host_addresses(), address) if address else ""
