"""The change from restarted workers to workers that reset in place, at the first ``init()`` of one of them.

Owns that change. A script does not reveal its kind before it runs: the command may be a shell that runs it. So its
workers are restarted until one of them asks for a round. From then on the job is as if it had just begun, with the
living workers: what they did before ``init()`` does not count.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_driver.core.registry import WorkerStateRegistry
from elastic_driver.core.setbacks import Setbacks
from elastic_driver.core.state import Reset, WorkerPhase
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import WorkerId
from elastic_driver.words import OnChange


def become_in_place(t: Transition, asker: WorkerId) -> None:
    """Make the workers reset in place from now on: all that live and stay are expected to ask for the first round.

    A worker that has ended with code 0 before has not succeeded: its place is filled again. Round numbers continue,
    since reports may still refer to past rounds.
    """
    state = t.state
    living = [record for record in state.workers if record.phase is not WorkerPhase.LEAVING]
    t.state = replace(
        state,
        policy=replace(state.policy, on_change=OnChange.IN_PLACE),
        rounds_before=max(state.rounds_before, state.round_id),
        round=None,
        launch=None,
        reset=Reset(t.now, t.now + state.policy.start_timeout_s),
        registry=WorkerStateRegistry(tuple(record.worker for record in living)),
        commits=0,
        setbacks=Setbacks(),
        last_call=None,
    )
    t.put_all(
        replace(
            record,
            phase=WorkerPhase.BOOTING,
            since=t.now,
            round_id=0,
            rank=0,
            has_state=False,
            commits=0,
            running=False,
        )
        for record in living
    )
    ending = [record for record in state.workers if record.phase is WorkerPhase.LEAVING]
    t.put_all(replace(record, round_id=0, rank=0) for record in ending)
    t.report(f"worker {asker} called hvd.init(): from now on, workers reset without restarting their processes")
