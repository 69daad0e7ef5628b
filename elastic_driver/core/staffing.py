"""Staffing: starting workers in their places, and stopping those whose place is gone, or whose time is up.

Owns the names of new workers, and the places given at their start. The module of each kind of job
(:mod:`elastic_driver.core.kinds`) decides when places are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from elastic_driver.core.assignment import assign_ranks, hosts_of
from elastic_driver.core.events import Fault, KillWorker, StartWorker
from elastic_driver.core.explain import unused_slots, why_no_place
from elastic_driver.core.failures import Crash, failure_of
from elastic_driver.core.placement import (
    Places,
    first_root,
    in_target,
    is_drained,
    is_wanted,
    server_places,
    standby_places,
    target_places,
    usable_slots,
    wanted_places,
)
from elastic_driver.core.state import (
    JobPhase,
    Kill,
    Server,
    State,
    WorkerPhase,
    WorkerRecord,
    deadline_of,
    finishing,
    in_phase,
    leaves_by,
    record_of,
)
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import SlotInfo, WorkerId


def kill_late_workers(t: Transition) -> None:
    """Kill workers that announced their exit and did not end, and those that train on in a drained place."""
    policy = t.state.policy
    limited = [record for record in t.state.workers if record.exit_by is not None or record.leave_by is not None]
    for record in limited:
        if record.exit_by is not None and t.now >= record.exit_by:
            how = f"did not end within {policy.start_timeout_s:g} s of its exit (--start-timeout)"
            command = KillWorker(record.worker, how, hangs=True, exits=True)
            record = t.kill(replace(record, exit_by=None), command, Kill(how, Fault.OWN, hangs=True, exits=True))
        if record.leave_by is not None and t.now >= record.leave_by:
            record = replace(record, leave_by=None)
            # A READY worker waits for the others, and for slots.
            trains = record.phase in (WorkerPhase.BOOTING, WorkerPhase.MEMBER)
            machine = leaves_by(t.state, record.worker.hostname)
            goes = machine is not None and t.now >= machine
            if goes and usable_slots(t.state) < policy.min_num_proc:
                t.put(record)  # without it the job cannot continue, and its machine may live longer than announced
            elif trains and is_drained(t.state, record.worker.hostname, record.worker.slot):
                how, fault = f"did not leave within {policy.drain_timeout_s:g} s (--drain-timeout)", Fault.OWN
                reason = how
                if goes:
                    how, fault = "had not left when its host was about to go", Fault.OUTSIDE
                    reason = f"{how}: its work since the last commit is lost"
                t.kill(record, KillWorker(record.worker, reason), Kill(how, fault))
            else:
                t.put(record)


def stop_late_starts(t: Transition, take_failure: Callable[[Transition, WorkerRecord, Crash], None], what: str) -> None:
    """Fail workers whose processes do not start in time: their hosts' failures, as if they could not be started.

    Args:
        t: the step.
        take_failure: applies the failure. Whatever happens to the process later is no news.
        what: what it did not do, in words.
    """
    for record in in_phase(t.state, WorkerPhase.BOOTING):
        deadline = deadline_of(t.state, record)
        # It may have been stopped together with the first of its host.
        if deadline is None or t.now < deadline or record_of(t.state, record.worker) != record:
            continue
        how = f"{what} within {t.state.policy.start_timeout_s:g} s (--start-timeout)"
        crash = Crash(failure_of(record, how), Fault.OUTSIDE, is_wanted(t.state, record), ran=False)
        t.retire(record, f"it {how}")
        take_failure(t, record, crash)


def stop_misplaced(t: Transition) -> None:
    """Stop blank workers whose place is gone; those with state leave when the round is closed.

    While a round runs, READY workers outside it have no state that its members lack: they were silent when it was
    formed, or made room.
    """
    places = wanted_places(t.state)
    for record in t.state.workers:
        stays = record.round_id and not (record.phase is WorkerPhase.READY and t.state.phase is JobPhase.RUNNING)
        if stays or record.phase is WorkerPhase.LEAVING or in_target(record, places):
            continue
        t.state = replace(t.state, registry=t.state.registry.without(record.worker))
        reason = why_no_place(t.state, record.worker.hostname, record.worker.slot)
        if record.phase is WorkerPhase.READY:
            t.dismiss(record, reason)
        else:
            t.stop(record, reason)


def fill_places(t: Transition) -> None:
    """Start a worker in every wanted place that has none (a leaving one still holds its place)."""
    if t.state.phase in (JobPhase.WAITING, JobPhase.ENDED) or finishing(t.state):
        return
    held = {(record.worker.hostname, record.worker.slot) for record in t.state.workers}
    standbys = places_to_stand_by(t.state)
    targets = target_places(t.state)
    servers = server_places(t.state)
    # On a host that was given up a new worker would be as lost as the last one, until it is heard again or unlisted.
    lost = {silence.hostname for silence in t.state.silent if silence.given_up}
    free = [place for place in (*servers, *targets, *standbys) if place not in held and place[0] not in lost]
    if not free:
        return
    fresh = name_workers(t, free, servers)
    if t.state.policy.has_chief:
        t.commands += server_starts(t.state, fresh)
        return
    t.commands += planned_starts(t.state, fresh, standbys)


def planned_starts(state: State, fresh: Container[WorkerId], standbys: Places) -> list[StartWorker]:
    """Return the starts of booting workers, each with the place that it would have if the round were formed now.

    Args:
        state: the job, including these workers.
        fresh: the workers to start.
        standbys: the places of workers that are to wait without a rank.
    """
    staying = [record for record in state.workers if record.phase is not WorkerPhase.LEAVING]
    ranked = dict.fromkeys(record.worker for record in staying if not in_target(record, standbys))
    # Rank 0 is known before the first round.
    starts = state.policy.on_change.asks_for_rounds and not state.round_id
    root = first_root(state, ranked) if starts else None
    placed = assign_ranks(tuple(ranked), host_order=state.discovery.order, root=root)
    hosts = hosts_of(placed)
    commands = [StartWorker(member.worker, member.slot, hosts=hosts) for member in placed if member.worker in fresh]
    if len(ranked) < len(staying):
        # A standby is planned as if all had a rank: so it has nobody else's local rank.
        for member in assign_ranks([r.worker for r in staying], host_order=state.discovery.order, root=None):
            if member.worker in fresh and member.worker not in ranked:
                commands.append(StartWorker(member.worker, member.slot, standby=True, hosts=hosts))
    return commands


def places_to_stand_by(state: State) -> Places:
    """Return the places of standbys that may be started: none boots on the cores that a reset needs."""
    return standby_places(state) if state.phase is JobPhase.RUNNING else {}


def server_starts(state: State, fresh: Container[WorkerId]) -> list[StartWorker]:
    """Return the starts of servers. They do not know of each other: the chief notifies them.

    Args:
        state: the job, including these servers.
        fresh: the servers to start.
    """
    number = state.policy.num_parameter_servers
    workers = [r.worker for r in state.workers if r.parameter_server is None and r.phase is not WorkerPhase.LEAVING]
    slots = {
        member.worker: member.slot for member in assign_ranks(workers, host_order=state.discovery.order, root=None)
    }
    starts = []
    for record in state.workers:
        if record.worker not in fresh:
            continue
        index = record.parameter_server
        slot = slots[record.worker] if index is None else SlotInfo(index, number, 0, 1, index, number)
        starts.append(StartWorker(record.worker, slot, parameter_server=index))
    return starts


def name_workers(
    t: Transition, places: Iterable[tuple[str, int]], servers: Mapping[tuple[str, int], int] = MappingProxyType({})
) -> dict[WorkerId, None]:
    """Create a worker for each of these places, in order. They are booting from now on; the caller starts them.

    Args:
        t: the step.
        places: their places.
        servers: the places that are for parameter servers, with the index of each.
    """
    free = list(places)
    held = {(record.worker.hostname, record.worker.slot) for record in t.state.workers}
    is_listed = t.state.is_listed
    attempts, given = t.state.attempts.give(free, needed=lambda place: is_listed(place[0]) or place in held)
    fresh = dict.fromkeys(WorkerId(*place, attempt) for place, attempt in zip(free, given, strict=True))
    has_chief = t.state.policy.has_chief
    records = (
        WorkerRecord(
            worker,
            WorkerPhase.BOOTING,
            t.now,
            server=Server(servers.get((worker.hostname, worker.slot))) if has_chief else None,
        )
        for worker in fresh
    )
    t.state = replace(t.state, workers=t.state.workers.put(*records), attempts=attempts)
    return fresh


def report_unused_slots(t: Transition) -> None:
    """Report which slots a multiple leaves over, whenever that changes."""
    if t.state.policy.multiple == 1 or t.state.phase not in (JobPhase.STARTING, JobPhase.RUNNING):
        return
    text = unused_slots(t.state)
    if text != t.state.unused:
        t.state = replace(t.state, unused=text)
        if text:
            t.report(text)
