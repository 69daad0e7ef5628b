"""The membership core: the only code that changes who is in the job.

``step(state, event, now) -> (state, commands)`` is a pure function. An event changes what is known; then ``settle``
looks at the levels (hosts, living workers, reports) and decides. So feeding an event twice is harmless, and changes
that cancel out before anything was done about them do nothing.

What an event means is in :mod:`elastic_driver.core.intake`; what is decided depends on the kind of the job
(:mod:`elastic_driver.core.kinds`).
"""

from __future__ import annotations

from elastic_driver.core.deadlines import next_deadline
from elastic_driver.core.events import (
    Command,
    Event,
    HostLost,
    ReportExit,
    WorkerExited,
    WorkerNotStarted,
    WorkersReported,
)
from elastic_driver.core.explain import explain
from elastic_driver.core.intake import take
from elastic_driver.core.invariants import check_invariants
from elastic_driver.core.kinds import kind_of
from elastic_driver.core.past import forget_worker
from elastic_driver.core.state import (
    Leaving,
    Policy,
    State,
    new_state,
    record_of,
)
from elastic_driver.core.transition import Transition

__all__ = ["Policy", "State", "check_invariants", "explain", "new_state", "next_deadline", "step"]


def step(state: State, event: Event, now: float) -> tuple[State, list[Command]]:
    """What the job becomes, and what is to be done, when this happens at this time.

    Args:
        state: the job so far; not changed.
        event: what happened.
        now: the present, seconds of a clock that never goes back.

    Returns:
        The new state, and the commands in the order in which they are to be carried out.
    """
    if state.ended:
        return _after_the_end(state, event)
    transition = Transition(state, now)
    take(transition, event)
    settle(transition)
    return transition.state, transition.commands


def _after_the_end(state: State, event: Event) -> tuple[State, list[Command]]:
    """Nothing follows from anything any more; it is told who has ended."""
    events = event.reports if isinstance(event, WorkersReported) else (event,)
    told: list[Command] = []
    for gone in events:
        if not isinstance(gone, WorkerExited | WorkerNotStarted | HostLost):
            continue
        for worker in gone.workers if isinstance(gone, HostLost) else (gone.worker,):
            record = record_of(state, worker)
            if record is not None and not isinstance(gone, WorkerNotStarted):
                told.append(ReportExit(worker, expected=record.leaving is not Leaving.DYING))
            state = forget_worker(state, worker)
    return state, told


def settle(t: Transition) -> None:
    """Looks at the levels and does what is due. Every branch leaves a deadline, an end, or a running round."""
    # Each may end the job, and then nothing more is to be done.
    for decide in kind_of(t.state).DECIDERS:
        if t.state.ended:
            return
        decide(t)
