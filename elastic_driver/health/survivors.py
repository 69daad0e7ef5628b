"""Whether the training's state would be lost with a hanging worker. Pure; kills nothing."""

from __future__ import annotations

from collections.abc import Collection

from elastic_driver.core.state import State, WorkerPhase, record_of
from elastic_driver.hosts import WorkerId


def why_spared(state: State, worker: WorkerId, ended: Collection[WorkerId], *, is_on_disk: bool) -> str:
    """Return why a hanging worker may not be killed, in words; "" if the job would not lose the training's state.

    Args:
        state: the job.
        worker: the worker.
        ended: others that are killed at this moment.
        is_on_disk: whether there is a commit on disk from which the job can resume.
    """
    policy = state.policy
    if not policy.on_change.has_commits or (policy.durable and is_on_disk):
        return ""
    one = record_of(state, worker)
    if one is None or not one.has_state:
        return ""
    lost = {each.hostname for each in (worker, *ended)} if policy.blames_hosts else set()
    for record in state.workers:
        goes = record.phase is WorkerPhase.LEAVING or record.killed is not None or record.worker.hostname in lost
        if record.has_state and not goes and record.worker != worker and record.worker not in ended:
            return ""
    return "no remaining worker would have the training's state, and no commit is on disk (--durable-dir)"
