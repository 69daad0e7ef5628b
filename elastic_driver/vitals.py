"""What an agent sees of one of its workers at a moment: its process, and what it says of its training.

Owns the shape of that, and which of it is nothing at all. Agents make it (:mod:`elastic_driver.launch.agent`), the
driver reads it; who is taken for hung or slow by it is decided in :mod:`elastic_driver.health`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from elastic_driver.codec import ROW, Cut, Rounded, Within

RUNNABLE = "R"
"""A process that runs, or waits for nothing but a processor, in ``Vitals.state``."""
STOPPED = "T"
"""One that was stopped by a signal."""
DEBUGGED = "t"
"""One that a debugger has stopped."""

# What a process that does nothing does nevertheless: other threads wake up, our own answer the agent.
_IDLE_CPU, _IDLE_CPU_S = 0.01, 0.05
_IDLE_BYTES_PER_S, _IDLE_BYTES = 1024, 16 * 1024
QUIET_BLOCK_S = 60.0
"""What a process does is measured over so long at most: who has done nothing for an hour may not compute the sooner for
it."""

OWN_STEPS = 20
"""Of so many steps the own time is told: few, since who gets slow is to be found soon, and enough, as steps differ."""
OWN_CAP = 1.25
"""Of these, one that took longer than so many times their median counts for so many times."""

# What an agent may say at most. Agents are believed no number that no float holds, nor more rows than they ever send.
_Count = Annotated[int, Within(0, (1 << 53) - 1)]
_Seconds = Annotated[float, Rounded(3), Within(0, (1 << 53) - 1)]
_Text = Annotated[str, Within(0, 256)]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that some ranks of a round have submitted, and others have not.

    Attributes:
        name: what it is, for people: "allreduce 'grad.3'".
        since_s: how long ago the first rank has submitted it, seconds.
        missing: the ranks that have not.
    """

    name: _Text
    since_s: _Seconds
    missing: Annotated[tuple[_Count, ...], Within(0, 64)]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a worker's engine has carried of one kind of collective, since its process began.

    Attributes:
        kind: "allreduce", "broadcast" and so on.
        operations: that have finished.
        payload_bytes: of this rank's own tensors in them.
    """

    kind: _Text
    operations: _Count
    payload_bytes: _Count


@dataclass(frozen=True, slots=True)
class Vitals:
    """One look at a worker. Ages are in seconds before the look; what is not known is None, or empty.

    Attributes:
        at_s: when, by the agent's own clock, seconds: only differences of one worker's mean something.
        pid: of the process that runs Python, as its host numbers it; of the command that was started, where it has
            not said.
        state: the letter that the kernel has for it: "R", "S", "D", "T" (stopped), "t" (stopped by a tracer), "Z".
        traced: whether a tracer (a debugger, strace) is attached.
        cpu_s: CPU time of its threads so far, seconds, without those that this project runs in it; with that of its
            children that have ended, and, while it stands still itself, of those that live.
        io_bytes: read and written so far, as the kernel counted them, without what it has written of its stacks. While
            it stands still, with that of its children, and with what their and its own TCP connections have received.
        rss_bytes: of memory that is in use.
        pulse_s: how long ago a thread of it that needs no interpreter lock was last alive; None where there is none: a
            script that does not use this library.
        round_id: the round that it is in, as it knows itself; 0 for none.
        rank: its rank there; -1 for none.
        steps: of its training, since its process began: calls of an optimizer's step(), or else commits.
        own_s: what a step takes without waiting for others, seconds: the mean of the last OWN_STEPS, of which none
            counts for more than OWN_CAP times their median. None before there are as many in the round, and where it
            is not known at the moment.
        submitted, finished: collectives, since its process began.
        waits_s: for how long it has been waiting now in a collective; 0.0 when it does not.
        waited_s: for how long it has waited in collectives since its process began, without the present wait.
        commits: as State.commits counts them, the last it has said.
        committed_s: how long ago the last commit was; None before the first.
        traffic: by kind.
        waiting: collectives that lack ranks, the oldest first: only rank 0 knows, and it names some of them only.
        can_dump: whether it can be asked for its stacks.
        wakes: how often its main thread has waited for something and gone on (voluntary context switches), since it was
            looked at first, without those that the taking of its stacks has cost. Other threads do not count: our own
            wake up in a worker that hangs.
        awaits: what its main thread waits for now that is neither in its process nor a worker of its host, in words, as
            far as the kernel tells: a file lock, a child, a connection. Only where it stands still, and has not woken
            for some seconds; "" for nothing.
        peer: the address of the other end where that is a connection to another host, without a port; else "".
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
    """Whether a process that has used so much CPU time, and has moved so many bytes, in so long does nothing."""
    # A process counts in ticks, and its threads exactly: what is left of it goes up and down by some of them.
    return -_IDLE_CPU_S < cpu_s < max(_IDLE_CPU_S, _IDLE_CPU * since_s) and moved_bytes < max(
        _IDLE_BYTES, _IDLE_BYTES_PER_S * since_s
    )
