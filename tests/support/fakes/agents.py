"""What the agents of a job know: the processes of their hosts, and what each of these was told. For drivers that die.

One value stands for all of them. That of a driver that lives is told each command; that of a driver that dies misses
some, and is told by another one what is still due (``core/redo.py``). In the end both are to know the same.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from elastic_driver.core.events import (
    Command,
    DismissWorker,
    EndJob,
    Event,
    GiveUpHost,
    HostHeard,
    HostLost,
    HostsReported,
    KillWorker,
    PublishRound,
    SetNotice,
    StartWorker,
    StopWorker,
    WorkerDying,
    WorkerExited,
    WorkerNotStarted,
    WorkerReady,
    WorkerSpared,
    WorkersReported,
)
from elastic_driver.core.redo import HostLevels, redo, unknown
from elastic_driver.core.state import State, WorkerPhase, record_of
from elastic_driver.hosts import WorkerId
from elastic_driver.words import Ending

# By how much time each gives.
_SOONEST = (Ending.BROKEN, Ending.USUAL, Ending.PLANNED)


@dataclass(frozen=True, slots=True)
class Process:
    """A process that runs, or is being started.

    Attributes:
        stop: how it was told to end; None for not.
        kill: whether it is killed since it hangs, and whether it may still exit; None for one that is not killed.
        asks: whether it has a request for a round open.
    """

    stop: Ending | None = None
    kill: tuple[bool, bool] | None = None
    asks: bool = False


class Agents:
    """See above.

    Attributes:
        living: the processes.
        ended: those of which the end was reported.
        told: by host, the last round and the last notice.
        refused: hosts that were given up.
        over: whether all were told to end.
    """

    def __init__(self) -> None:
        self.living: dict[WorkerId, Process] = {}
        self.ended: frozenset[WorkerId] = frozenset()
        self.told: dict[str, tuple[int, int]] = {}
        self.refused: frozenset[str] = frozenset()
        self.over = False

    def copy(self) -> Agents:
        """Others that know the same."""
        twin = Agents()
        twin.living, twin.ended = self.living.copy(), self.ended
        twin.told, twin.refused, twin.over = self.told.copy(), self.refused, self.over
        return twin

    def of(self, hostname: str) -> dict[WorkerId, Process]:
        """The processes of one host."""
        return {worker: process for worker, process in self.living.items() if worker.hostname == hostname}

    def happened(self, event: Event, state: State, *, away: Container[str] = ()) -> None:
        """Something has happened, of which this state came.

        Args:
            event: what.
            state: the job after that.
            away: hosts whose agents the driver does not hear: what is lost of them may live.
        """
        match event:
            case WorkerExited() | WorkerNotStarted():
                self.living.pop(event.worker, None)
                self.ended |= {event.worker}
            case HostLost():
                for worker in event.workers if event.hostname not in away else ():
                    self.living.pop(worker, None)
            case WorkerReady() if not state.ended:
                record = record_of(state, event.worker)
                if record is not None and record.phase is not WorkerPhase.LEAVING:
                    self._change(event.worker, asks=record.phase is WorkerPhase.READY)
            case WorkerDying():
                self._change(event.worker, asks=False)
            case WorkerSpared() if not state.ended:
                self._change(event.worker, kill=None)
            case HostHeard():
                self.refused -= {event.hostname}
            case WorkersReported() | HostsReported():
                for report in event.reports:
                    self.happened(report, state, away=away)
            case _:
                pass

    def carry_out(self, command: Command, *, away: Container[str] = ()) -> None:
        """Does what the driver says, but on hosts whose agents do not hear it."""
        match command:
            case StartWorker() if command.worker.hostname not in away:
                assert command.worker not in self.living, "started twice"
                assert command.worker not in self.ended, "started again"
                self.living[command.worker] = Process()
            case StopWorker() if command.worker.hostname not in away:
                self._stop(command.worker, command.ending)
            case KillWorker() if command.worker.hostname not in away:
                self._change(command.worker, kill=(command.hangs, command.exits))
            case DismissWorker() if command.worker.hostname not in away:
                self._change(command.worker, asks=False)
            case GiveUpHost() if command.hostname not in away:
                self.refused |= {command.hostname}
            case PublishRound():
                for name in {one.worker.hostname for one in command.placed}:
                    self._tell(name, command.round_id, 0, away)
                for one in command.placed:
                    if one.worker.hostname not in away:
                        self._change(one.worker, asks=False)
            case SetNotice():
                for name in {worker.hostname for worker in self.living}:
                    self._tell(name, command.round_id, command.version, away)
            case EndJob():
                self.over = True
                for worker in [worker for worker in self.living if worker.hostname not in away]:
                    self._stop(worker, Ending.USUAL)
            case _:
                pass

    def levels(self, hostname: str) -> HostLevels:
        """What the agent of a host says when it is back."""
        ended = sorted(worker for worker in self.ended if worker.hostname == hostname)
        round_id, version = self.told.get(hostname, (0, 0))
        return HostLevels(hostname, tuple(sorted(self.of(hostname))), tuple(ended), round_id, version)

    def come_back(self, hostname: str, state: State) -> tuple[WorkerId, ...]:
        """The agent of a host meets a driver with this state. Returns the workers of which it knows nothing."""
        levels = self.levels(hostname)
        gone = unknown(state, levels)
        for command in redo(state, levels):
            self.carry_out(command)
        self._tell(hostname, state.round_id, state.notice_version, ())
        for worker, process in self.of(hostname).items():
            # It asks once more, and is answered: with its place in the round, or that it has none.
            record = record_of(state, worker)
            if process.asks and (record is None or record.phase is not WorkerPhase.READY):
                self._change(worker, asks=False)
        return gone

    def check_like(self, other: Agents, hostname: str, but: Container[WorkerId] = ()) -> None:
        """Raises AssertionError where others know something else of a host, some of its workers left aside."""
        if hostname in other.refused:
            assert other.over or hostname in self.refused
            return
        assert hostname not in self.refused
        due = {worker: process for worker, process in other.of(hostname).items() if worker not in but}
        assert self.of(hostname) == due

    def _change(self, worker: WorkerId, **values: object) -> None:
        if worker in self.living:
            self.living[worker] = replace(self.living[worker], **values)  # type: ignore[arg-type]

    def _stop(self, worker: WorkerId, ending: Ending) -> None:
        """An agent that has the order keeps its earlier deadline. A process that ends waits for no round."""
        if worker in self.living:
            before = self.living[worker].stop or ending
            self._change(worker, stop=min(before, ending, key=_SOONEST.index), asks=False)

    def _tell(self, hostname: str, round_id: int, version: int, away: Container[str]) -> None:
        if hostname not in away:
            last = self.told.get(hostname, (0, 0))
            self.told[hostname] = (max(last[0], round_id), max(last[1], version))
