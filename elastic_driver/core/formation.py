"""Formation of a round: its members, the state that it uses, whether it syncs, and its cause.

Owns no decision on whether a round is due; :mod:`elastic_driver.core.in_place` requests one when the registry is
closed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from elastic_driver.core.assignment import assign_ranks
from elastic_driver.core.events import PublishRound
from elastic_driver.core.explain import names, why_no_place
from elastic_driver.core.past import forget_round
from elastic_driver.core.placement import all_offered, first_root, in_target, is_drained, wanted_places, why_left_over
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.state import Round, WorkerPhase, WorkerRecord, causes, most_advanced
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import WorkerId
from elastic_driver.words import Backend, ExitCode, NoticeKind, counted

# The order in which the driver prefers collective backends.
_BACKENDS = (Backend.NATIVE, Backend.TORCH, Backend.HOROVOD)


def form_round(t: Transition, members: tuple[WorkerRecord, ...], ready: tuple[WorkerRecord, ...]) -> None:
    state, reset = t.state, t.in_reset()
    stateful = tuple(record for record in members if record.has_state)
    root = most_advanced(state, stateful) if stateful else None
    backend = _common_backend(members)
    if backend is None:
        have = "; ".join(f"{member.worker} has {', '.join(member.backends) or 'none'}" for member in members[:6])
        t.end(
            ExitCode.BAD_USAGE,
            f"cannot run {len(members)} workers: they have no collective backend in common ({have}); install the "
            "native extension or PyTorch in every worker's environment",
        )
        return
    workers = tuple(record.worker for record in members)
    if not state.round_id:
        warn_of_absent_hosts(t)
    placed = assign_ranks(
        workers,
        host_order=state.discovery.order,
        root=first_root(state, workers) if root is None else root.worker,
    )
    # Members that were interrupted at one commit hold equal states, unless one of them is new.
    in_step = len(stateful) == len(members) and len({record.commits for record in members}) == 1
    # A member that hands over comes first.
    handing_over = None if all_offered(state, (members[0].worker,)) else members[0].worker
    formed = Round(
        state.next_round_id,
        tuple(member.worker for member in placed),
        handing_over,
        reset.began,
        sync=reset.unplanned or not in_step,
        commits=root.commits if root else 0,
        backend=backend,
    )
    by_worker = {record.worker: record for record in members}
    t.commands.append(
        PublishRound(
            round_id=formed.round_id,
            placed=placed,
            sync=formed.sync,
            commits=formed.commits,
            backend=backend,
            cause=cause_of(t, formed.members),
            old_size=len(state.members),
            reinit=bool(reset.reinits) and not reset.unplanned,
            lost_s=_lost_s(t, root, backend),
        )
    )
    if reset.unplanned:
        state = replace(state, tally=state.tally.one_more(t.now, state.policy.reset_window_s))
    tells_commits = backend is not Backend.HOROVOD
    if state.policy.durable and not tells_commits:
        # A job cannot resume from what is not on disk.
        state = replace(state, policy=replace(state.policy, durable=False))
        t.report("--durable-dir has no effect here: the workers run Horovod's own library", warning=True)
    t.state = forget_round(state, formed)
    t.put_all(
        replace(
            by_worker[member.worker],
            phase=WorkerPhase.MEMBER,
            since=t.now,
            round_id=formed.round_id,
            # Before the first commit, the initial state of a process is the state. Workers that report no commits have
            # it in the first round; later ones get it when they have been in a round for a while.
            has_state=by_worker[member.worker].has_state or not (formed.commits if tells_commits else stateful),
            rank=member.slot.rank,
            committed_at=None,
        )
        for member in placed
    )
    if not tells_commits:  # as for restarted workers: a long round counts as progress
        t.state = replace(t.state, setbacks=t.state.setbacks.begin(t.now))
    t.notify(NoticeKind.NONE, "")
    places = wanted_places(t.state)
    for record in ready:
        # Standbys, and workers that made room for a handover, stay READY for a later round.
        if record.worker not in by_worker and not in_target(record, places):
            t.dismiss(record, why_no_place(t.state, record.worker.hostname, record.worker.slot))


def warn_of_absent_hosts(t: Transition) -> None:
    """Warn of hosts to be protected that are absent from the first round: they may come, or their names are typos."""
    known = {host.name for host in t.state.discovery.order}
    absent = [name for name in t.state.policy.protect if name not in known]
    if absent:
        hosts = f"host{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
        t.report(f"{hosts}, given by --protect, {'are' if len(absent) > 1 else 'is'} not in the job yet", warning=True)


def cause_of(t: Transition, new: tuple[WorkerId, ...]) -> str:
    """Describe the cause of the round that is being formed."""
    state = t.state
    if not state.round_id:
        return "; ".join(("start", *causes(state)))
    # A worker that lost the round names the effect of a cut; the host that is left out for it names the reason.
    is_cut = any(worker.hostname in state.cuts.out for worker in state.members)
    parts = [] if is_cut and not t.in_reset().crashes else causes(state)
    failed = {worker.hostname for worker in state.registry.workers_in(WorkerState.FAILURE)}
    before = Counter(worker.hostname for worker in state.members)
    after = Counter(worker.hostname for worker in new)
    for name in dict.fromkeys((*before, *after)):
        old, now = before[name], after[name]
        if not old:
            parts.append(f"host {name} added")
        elif name not in failed and old != now:
            gone = [worker for worker in state.members if worker.hostname == name and worker not in new]
            if now and gone and all(is_drained(state, name, worker.slot) for worker in gone):
                parts.append(f"{names(gone)} drained")
            elif now:
                parts.append(f"host {name}: {old} -> {counted(now, 'slot')}")
            else:
                word = "drained" if any(place[0] == name for place in state.drained) else "removed"
                word = "left out" if name in state.cuts.out else word
                flag = why_left_over(state, name)
                parts.append(f"host {name} {f'left over ({flag})' if flag else word}")
    reinits = t.in_reset().reinits
    if reinits:
        who = "all workers" if len(reinits) == len(state.members) else names(reinits)
        parts.append(f"{who} called shutdown() and init() again")
    return ", ".join(parts) or "hosts changed and changed back"


def _lost_s(t: Transition, root: WorkerRecord | None, backend: Backend) -> float | None:
    """Return how long the last round had trained since the commit that is restored; None if unknown."""
    reset = t.in_reset()
    if not t.state.round_id or not reset.unplanned:
        return 0.0
    if root is None or backend is Backend.HOROVOD:
        return None  # a commit on disk has no time, and such workers do not report commits
    if root.committed_at is None:
        return 0.0
    # No more than the round can have lasted, whatever a worker reports.
    since = max(root.committed_at, t.state.reset_began if t.state.round is None else t.state.round.reset_began)
    return max(0.0, reset.began - since)


def _common_backend(members: tuple[WorkerRecord, ...]) -> Backend | None:
    common = [backend for backend in _BACKENDS if all(backend in record.backends for record in members)]
    # One worker alone needs none: its collectives are copies.
    return common[0] if common else (Backend.NATIVE if len(members) == 1 else None)
