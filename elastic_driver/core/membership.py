"""The membership core: the only code that changes who is in the job.

``step(state, event, now) -> (state, commands)`` is a pure function. An event updates what is known; then ``settle``
looks at the levels (hosts, living workers, reports) and decides. So a duplicate event is harmless, and changes that
cancel out before anything was done about them have no effect.

:mod:`elastic_driver.core.intake` defines what an event means; the kind of job
(:mod:`elastic_driver.core.kinds`) defines what is decided.
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
    """Return the job's next state and the commands to carry out, after an event at this time.

    Args:
        state: the job so far; not changed.
        event: what happened.
        now: the present, seconds of a clock that never goes back.

    Returns:
        The new state, and the commands in the order to carry them out.
    """
    if state.ended:
        return _after_the_end(state, event)
    transition = Transition(state, now)
    take(transition, event)
    settle(transition)
    return transition.state, transition.commands


def _after_the_end(state: State, event: Event) -> tuple[State, list[Command]]:
    """Drop the workers that have ended, and report their ends; no event has any other effect any more."""
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
    """Decide what is due, from the levels. Every branch leaves a deadline, an end, or a running round."""
    # Each may end the job; then nothing more is to be done.
    for decide in kind_of(t.state).DECIDERS:
        if t.state.ended:
            return
        decide(t)
