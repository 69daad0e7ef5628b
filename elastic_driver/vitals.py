"""Vitals: an agent's observation of one of its workers, of its process and of the progress that it reports.

Owns the record, and which activity counts as none. Agents make the observations (:mod:`elastic_driver.launch.agent`),
the driver reads them; :mod:`elastic_driver.health` decides from them which workers hang or are slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from elastic_driver.codec import ROW, Cut, Rounded, Within

RUNNABLE = "R"
"""In ``Vitals.state``: the process runs, or waits only for a processor."""
STOPPED = "T"
"""In ``Vitals.state``: a signal has stopped the process."""
DEBUGGED = "t"
"""In ``Vitals.state``: a debugger has stopped the process."""

# The activity of an idle process: other threads wake up, our own answer the agent.
_IDLE_CPU, _IDLE_CPU_S = 0.01, 0.05
_IDLE_BYTES_PER_S, _IDLE_BYTES = 1024, 16 * 1024
QUIET_BLOCK_S = 60.0
"""The longest period over which activity is measured, seconds: a process that was idle for an hour is allowed no more
activity for that."""

OWN_STEPS = 20
"""Steps over which a worker's own time is averaged: few, to detect a slowdown soon; enough, since steps differ."""
OWN_CAP = 1.25
"""In that mean no step counts for more than so many times the median."""

# Limits on agents' messages: no number beyond a float's integers, and no more rows than agents ever send.
_Count = Annotated[int, Within(0, (1 << 53) - 1)]
_Seconds = Annotated[float, Rounded(3), Within(0, (1 << 53) - 1)]
_Text = Annotated[str, Within(0, 256)]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that some ranks of a round have submitted, and others have not.

    Attributes:
        name: for people: "allreduce 'grad.3'".
        since_s: how long ago the first rank submitted it, seconds.
        missing: the ranks that have not.
    """

    name: _Text
    since_s: _Seconds
    missing: Annotated[tuple[_Count, ...], Within(0, 64)]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A worker's traffic in one kind of collective since its process began.

    Attributes:
        kind: "allreduce", "broadcast" and so on.
        operations: the number of finished ones.
        payload_bytes: of this rank's own tensors in them.
    """

    kind: _Text
    operations: _Count
    payload_bytes: _Count


@dataclass(frozen=True, slots=True)
class Vitals:
    """One look at a worker. Ages are in seconds before the look; unknown values are None, or empty.

    Attributes:
        at_s: time of the look by the agent's own clock, seconds: only differences between one worker's have a meaning.
        pid: of the process that runs Python, in its host's numbering; of the started command if it has not reported.
        state: the kernel's letter for it: "R", "S", "D", "T" (stopped), "t" (stopped by a tracer), "Z".
        traced: whether a tracer (a debugger, strace) is attached.
        cpu_s: CPU time of its threads so far, seconds, without those that this project runs in it; includes its ended
            children, and, while it stands still itself, its live ones.
        io_bytes: read and written so far by the kernel's count, without the dumps of its stacks. While it stands still,
            includes its children's, and the bytes received on their and its own TCP connections.
        rss_bytes: of memory in use.
        pulse_s: how long ago a thread of it that needs no interpreter lock was last alive; None if there is none: a
            script that does not use this library.
        round_id: the round that it is in by its own account; 0 for none.
        rank: its rank there; -1 for none.
        steps: of its training, since its process began: calls of an optimizer's step(), or else commits.
        own_s: the time of a step without waiting for others, seconds: the mean of the last OWN_STEPS, of which none
            counts for more than OWN_CAP times their median. None before the round has had so many, and when unknown.
        submitted, finished: numbers of collectives, since its process began.
        waits_s: how long it has now been waiting in a collective; 0.0 if it is not.
        waited_s: how long it has waited in collectives since its process began, without the present wait.
        commits: the last count of State.commits that it has reported.
        committed_s: how long ago the last commit was; None before the first.
        traffic: by kind.
        waiting: collectives that lack ranks, the oldest first: only rank 0 knows them, and it names only some.
        can_dump: whether it can dump its stacks on request.
        wakes: voluntary context switches of its main thread (it waited and continued) since the first look, without
            those that dumps of its stacks have cost. Other threads do not count: ours wake up even in a hung worker.
        awaits: the thing outside its process, and not a worker of its host, for which its main thread waits now, in
            words, as far as the kernel shows: a file lock, a child, a connection. Only if it stands still and has not
            woken for some seconds; "" for nothing.
        peer: the address of the other end, without a port, if that is a connection to another host; else "".
    """

    at_s: _Seconds
    pid: _Count
    state: Annotated[str, Within(0, 1)] = ""
    traced: bool = False
    cpu_s: _Seconds = 0.0
    io_bytes: _Count = 0
    rss_bytes: _Count = 0
    pulse_s: _Seconds | None = None
    round_id: _Count = 0
    rank: Annotated[int, Within(-1, 1 << 31)] = -1
    steps: _Count = 0
    submitted: _Count = 0
    finished: _Count = 0
    waits_s: _Seconds = 0.0
    waited_s: _Seconds = 0.0
    commits: _Count = 0
    committed_s: _Seconds | None = None
    traffic: Annotated[tuple[Annotated[Traffic, ROW], ...], Within(0, 16)] = ()
    waiting: Annotated[tuple[Annotated[Waiting, ROW], ...], Within(0, 16)] = ()
    can_dump: bool = False
    own_s: Annotated[float, Rounded(6), Within(0, 1 << 53)] | None = None
    wakes: _Count = 0
    awaits: Annotated[str, Cut(256)] = ""
    peer: Annotated[str, Cut(256)] = ""


def is_quiet(since_s: float, cpu_s: float, moved_bytes: int) -> bool:
    """Whether a process is idle that used this CPU time, and moved these bytes, during ``since_s``."""
    # A process's time is counted in ticks, a thread's exactly: their difference varies by some ticks.
    return -_IDLE_CPU_S < cpu_s < max(_IDLE_CPU_S, _IDLE_CPU * since_s) and moved_bytes < max(
        _IDLE_BYTES, _IDLE_BYTES_PER_S * since_s
    )
