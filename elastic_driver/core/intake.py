"""What each event means: it changes what is known of hosts, workers and reports.

Owns the accounting by cause (crashed, not started, removed, finished).
Decides nothing that needs more than the event itself: :mod:`elastic_driver.core.membership` looks at the levels
afterwards.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence, Set
from dataclasses import replace

from elastic_driver.core.assignment import order_hosts
from elastic_driver.core.becoming import become_in_place
from elastic_driver.core.cuts import Accused, Accuser
from elastic_driver.core.draining import what_is_short
from elastic_driver.core.events import (
    ChiefExited,
    DiscoveryFailed,
    DrainRequested,
    DriverFailed,
    Event,
    Fault,
    HostHeard,
    HostReport,
    HostsDiscovered,
    HostSilent,
    HostsReported,
    HostsUnusable,
    KillWorker,
    ReportDying,
    ReportExit,
    ReportResumed,
    StopRequested,
    TimerExpired,
    WorkerDying,
    WorkerExited,
    WorkerExiting,
    WorkerHung,
    WorkerNotStarted,
    WorkerReady,
    WorkerReleased,
    WorkerReport,
    WorkerRunning,
    WorkerServing,
    WorkerSpared,
    WorkersReported,
    WorkerStarted,
)
from elastic_driver.core.explain import why_no_place
from elastic_driver.core.past import IllegalEventError, record_unless_late, why_impossible
from elastic_driver.core.placement import (
    all_offered,
    in_target,
    is_wanted,
    standby_places,
    usable_slots,
    wanted_places,
)
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.setbacks import LONG_ROUND_S, START_S, Failure, described, fault_of
from elastic_driver.core.state import (
    DISCOVERY_OUTAGE_S,
    DISCOVERY_TOLD_S,
    HEALING_S,
    LAST_MOMENT_S,
    PREPARING_S,
    Chief,
    ChiefPhase,
    Departing,
    JobPhase,
    Kill,
    Outage,
    Preparing,
    Silence,
    State,
    WorkerPhase,
    WorkerRecord,
    causes,
    finishing,
    gives_time,
    is_on_one_host,
    leaves_by,
    leaving,
)
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import CHIEF, Departure, WorkerId
from elastic_driver.words import Backend, ExitCode, NoticeKind, OnChange, ReadyCause


def take(t: Transition, event: Event) -> None:
    """Takes in one event. What comes late changes nothing.

    Raises:
        IllegalEventError: the event cannot have happened.
    """
    why = why_impossible(t.state, event)
    if why:
        raise IllegalEventError(f"cannot take {event}: {why}")
    match event:
        case HostsDiscovered():
            _take_hosts(t, event)
            _take_departures(t, event.departures)
        case DiscoveryFailed():
            _take_discovery_failure(t, event)
        case HostsUnusable():
            # Once there were workers, hosts that are gone may come back; the elastic timeout bounds the wait.
            if not t.state.round_id and not t.state.workers:
                t.end(ExitCode.BAD_USAGE, f"no host can be used: {event.reasons}")
        case WorkersReported():
            _take_reports(t, event.reports)
        case HostSilent() | HostHeard():
            _take_host_report(t, event)
        case HostsReported():
            for report in event.reports:
                _take_host_report(t, report)
        case WorkerNotStarted():
            _take_not_started(t, event)
        case ChiefExited():
            _take_chief_exit(t, event)
        case DrainRequested():
            _take_drain(t, event)
        case StopRequested():
            t.end(128 + event.signal, f"interrupted by {event.name}")
        case DriverFailed():
            t.end(ExitCode.INTERNAL_ERROR, f"internal error of the driver: {event.error}")
        case TimerExpired():
            pass
        case _:
            _take_reports(t, (event,))


def _take_hosts(t: Transition, event: HostsDiscovered) -> None:
    discovery = t.state.discovery
    outage = discovery.outage
    if outage is not None and event.answered:
        if discovery.told_at == outage.since or t.now - outage.since >= DISCOVERY_OUTAGE_S:
            t.report(f"host discovery answers again, after {t.now - outage.since:.0f} s")
        outage = None
    up = dict.fromkeys(host.name for host in event.hosts)
    listed = event.down.union(up)
    # Who comes back is a new machine, even if the old one, no longer listed, has said again that it goes. So is who was
    # to go away, and has done so.
    has_gone = {one.hostname for one in t.state.departing if not one.listed and not one.by_hand}
    has_gone &= discovery.slots.keys() - up.keys()
    kept = listed.intersection(t.state.listed) - has_gone
    staying = event.down.union(record.worker.hostname for record in t.state.workers)
    # While nobody has been started there are no ranks to keep: hosts that come up one by one take the lister's order.
    known = () if t.state.phase is JobPhase.WAITING else discovery.order
    order = order_hosts(known, event.hosts, staying=staying)
    t.state = replace(
        t.state,
        discovery=replace(
            discovery,
            hosts=tuple(host for host in order if host.name in up),
            down=event.down,
            order=order,
            outage=outage,
        ),
        blacklist=t.state.blacklist.forgive_absent(listed).go_down(sorted(event.down - t.state.discovery.down), t.now),
        cuts=t.state.cuts.forget_absent(listed),
        drained=frozenset(place for place in t.state.drained if place[0] in kept),
        departing=tuple(one for one in t.state.departing if one.hostname in kept),
        preparing=_preparing(t, event.preparing),
    )
    if not t.state.policy.num_parameter_servers:  # what is set there is for as long as the place is gone
        _lift_drain_limits(t, [record for record in t.state.workers if record.worker.hostname not in listed])


def _preparing(t: Transition, names: Set[str]) -> tuple[Preparing, ...]:
    """These hosts prepare now. To be told so again gives none of them more time."""
    known = {one.hostname: one for one in t.state.preparing}
    return tuple(known.get(name, Preparing(name, t.now + PREPARING_S)) for name in sorted(names))


def _take_host_report(t: Transition, event: HostReport) -> None:
    known = next((one for one in t.state.silent if one.hostname == event.hostname), None)
    others = tuple(one for one in t.state.silent if one is not known)
    if isinstance(event, HostHeard):
        if known is not None:
            if known.told and not known.given_up:
                others = tuple(replace(one, kept_until=t.now + HEALING_S) if one.told else one for one in others)
            t.state = replace(t.state, silent=others)
            if known.told and not known.given_up:
                t.report(f"host {event.hostname} is heard again, after {t.now - known.since:.1f} s")
    elif known is None:
        fresh = Silence(event.hostname, t.now - event.silent_s, sure=event.sure)
        t.state = replace(t.state, silent=(*others, fresh))
    elif event.sure and not known.sure:
        t.state = replace(t.state, silent=(*others, replace(known, sure=True)))


def _take_departures(t: Transition, departures: Sequence[Departure]) -> None:
    """Of the listed hosts, those that the lister says are about to go. It may take that back."""
    said = {departure.hostname: departure for departure in departures}
    for one in t.state.departing:
        if one.listed and one.hostname not in said:
            _take_drain(t, DrainRequested(one.hostname, None, f"no longer so: {one.why}", undo=True))
    for departure in departures:
        if t.state.is_listed(departure.hostname):
            why, within_s = departure.why, departure.within_s
            _take_drain(t, DrainRequested(departure.hostname, None, why, within_s=within_s), listed=True)


def _take_drain(t: Transition, event: DrainRequested, *, listed: bool = False) -> None:
    """Takes it; of the lister where it is ``listed``."""
    name, slot = event.hostname, event.slot
    what = f"host {name}" if slot is None else f"worker {name}[{slot}]"
    inside = [r for r in t.state.workers if r.worker.hostname == name and slot in (None, r.worker.slot)]
    if not inside and not t.state.is_listed(name):
        return  # a machine that has left, and says again that it goes
    if event.undo:
        places = frozenset(place for place in t.state.drained if place[0] == name and slot in (None, place[1]))
        if places:
            t.report(f"{what} may be used again: {event.why}")
        departing = tuple(one for one in t.state.departing if slot is not None or one.hostname != name)
        t.state = replace(t.state, drained=t.state.drained - places, departing=departing)
        _lift_drain_limits(t, inside)
        return
    is_sooner = slot is None and _note_departure(t, event, listed=listed)
    is_news = (name, slot) not in t.state.drained
    t.state = replace(t.state, drained=t.state.drained | {(name, slot)})
    if is_news or is_sooner:
        when = "leaves at the next commit" if t.state.policy.on_change is OnChange.IN_PLACE else "leaves now"
        left = "" if event.within_s is None else f"; its machine goes away in {event.within_s:.3g} s"
        t.report(f"{what} {when}: {event.why}{left}")
    used = [r for r in inside if r.parameter_server is not None and r.phase is WorkerPhase.MEMBER]
    if used and t.state.chief is not None and (is_news or is_sooner):
        what_then = "until there is a place for another" if t.state.policy.restart_chief else "as long as it can"
        t.report(f"{used[0].server_name} stays {what_then}: its variables are nowhere else", warning=True)
    # Who drains a host by hand is answered; a signal's sender, and a machine that goes away, are not.
    short = what_is_short(t.state)
    staying = [record for record in inside if record.phase is not WorkerPhase.LEAVING]
    if short and is_sooner:
        # Restarted workers have to checkpoint: what they do after that would be lost with the machine.
        until = ", its workers train until then" if t.state.policy.on_change is OnChange.IN_PLACE else ""
        t.report(f"host {name} goes away{until}{short}", warning=True)
    elif short and is_news and slot is not None:
        for record in staying:
            undo = f"elasticrun drain --undo {name} gives its place back"
            t.report(f"worker {record.worker} is drained{short}; {undo}", warning=True)
    limit, machine = t.now + t.state.policy.drain_timeout_s, leaves_by(t.state, name)
    if machine is not None:
        limit = max(t.now, min(limit, machine))
    # Asking again gives nobody more time.
    t.put_all(
        replace(r, leave_by=limit)
        for r in staying
        if r.leave_by is None or (machine is not None and limit < r.leave_by)
    )


def _note_departure(t: Transition, event: DrainRequested, *, listed: bool) -> bool:
    """Notes that a host is about to go. Returns whether that is sooner than was known."""
    name, by = event.hostname, None if event.within_s is None else t.now + event.within_s
    known = next((one for one in t.state.departing if one.hostname == name), None)
    others = tuple(one for one in t.state.departing if one is not known)
    if known is None:
        by_hand = (name, None) in t.state.drained
        is_sooner, one = by is not None, Departing(name, event.why, by, listed and not by_hand, by_hand)
        if not is_sooner and not one.listed:
            return False
    else:
        is_sooner = by is not None and (known.by is None or by < known.by - LAST_MOMENT_S)
        # Once somebody else asks for it, the lister alone cannot take it back.
        one = replace(known, listed=known.listed and listed, by_hand=known.by_hand or (by is None and not listed))
        one = replace(one, by=by, why=event.why) if is_sooner else one
    t.state = replace(t.state, departing=(*others, one))
    return is_sooner


def _lift_drain_limits(t: Transition, records: list[WorkerRecord]) -> None:
    limited = [replace(record, leave_by=None) for record in records if record.leave_by is not None]
    if limited:
        t.put_all(limited)


def _take_discovery_failure(t: Transition, event: DiscoveryFailed) -> None:
    discovery = t.state.discovery
    if discovery.hosts is None:
        t.end(ExitCode.BAD_USAGE, event.message)
        return
    told = discovery.told_at
    # A script that fails every now and then is not told of each time.
    if discovery.outage is None and (told is None or t.now - told >= DISCOVERY_TOLD_S):
        t.report(f"{event.message}; going on with the hosts known so far", warning=True)
        discovery = replace(discovery, told_at=t.now)
    since = t.now if discovery.outage is None else discovery.outage.since
    t.state = replace(t.state, discovery=replace(discovery, outage=Outage(since, event.message)))


def _take_reports(t: Transition, reports: tuple[WorkerReport, ...]) -> None:
    resumed = None
    for report in reports:
        record = record_unless_late(t.state, report)
        if record is None:
            continue
        match report:
            case WorkerStarted():
                _take_started(t, record, report)
            case WorkerServing():
                fresh = replace(record, phase=WorkerPhase.MEMBER, since=t.now, running=True, address=report.address)
                t.put(fresh)
                t.state = replace(t.state, ever_ready=True)
            case WorkerReleased():
                worker = record.worker
                t.retire(record, why_no_place(t.state, worker.hostname, worker.slot))
            case WorkerReady():
                _take_ready(t, record, report)
            case WorkerRunning():
                resumed = report if _take_running(t, record, report) else resumed
            case WorkerDying():
                _take_dying(t, record, report)
            case WorkerExited():
                _take_exit(t, record, report)
            case WorkerExiting():
                t.put(replace(record, exit_by=t.now + t.state.policy.start_timeout_s))
            case WorkerHung():
                _take_hung(t, record, report)
            case WorkerSpared():
                # Its script has ended, or all of it: there is nothing to wait for that could be killed again.
                t.put(replace(record, killed=None, exit_by=None))
    if resumed is None or t.state.phase is not JobPhase.RUNNING:
        return
    if all(record.running for record in t.state.workers if record.phase is WorkerPhase.MEMBER):
        took_s = t.now - t.state.reset_began
        t.commands.append(ReportResumed(t.state.round_id, resumed.commits, took_s))


def _take_started(t: Transition, record: WorkerRecord, event: WorkerStarted) -> None:
    restarts = t.state.policy.on_change is OnChange.RESTART
    t.put(replace(record, phase=WorkerPhase.READY if restarts else WorkerPhase.MEMBER, since=t.now))
    t.state = replace(t.state, ever_ready=True)
    if restarts:
        t.state = replace(t.state, registry=t.state.registry.record(event.worker, WorkerState.READY))


def _take_ready(t: Transition, record: WorkerRecord, event: WorkerReady) -> None:
    if t.state.policy.on_change is not OnChange.IN_PLACE:
        become_in_place(t, event.worker)
        record = t.state.workers.find(event.worker) or record
    _blame_who_never_asked(t)
    was_member = record.phase is WorkerPhase.MEMBER
    if was_member and _leaves_as_asked(t.state, event):
        event = replace(event, cause=ReadyCause.HOSTS_UPDATED)
    t.put(
        replace(
            record,
            phase=WorkerPhase.READY,
            since=t.now,
            # Who has commits, or left by itself, was through with its sync, though its report was lost.
            has_state=record.has_state
            or (was_member and (event.commits > 0 or event.cause is not ReadyCause.INTERNAL_ERROR)),
            commits=max(event.commits, record.commits) if was_member else event.commits,
            committed_at=t.now - event.uncommitted_s if was_member and event.uncommitted_s > 0 else None,
            backends=event.backends,
            running=False,
        )
    )
    t.state = replace(
        t.state,
        ever_ready=True,
        commits=max(t.state.commits, event.commits),
        registry=t.state.registry.record(event.worker, WorkerState.READY),
    )
    if not was_member and t.state.round is not None and in_target(record, standby_places(t.state)):
        t.report(f"worker {event.worker} stands by for a member that is lost")
    if was_member:
        reset = t.in_reset()
        if event.unreachable:
            reset = replace(reset, accusers=reset.accusers.put(_accuser(t.state, event)))
        if event.cause is ReadyCause.REINIT:
            reset = replace(reset, reinits=(*reset.reinits, event.worker))
        setbacks = t.state.setbacks.came_to(max(event.commits, record.commits), event.steps)
        if event.cause is ReadyCause.INTERNAL_ERROR:
            how = "raised HorovodInternalError" if event.raised else "lost its round"
            failure = Failure.said(event.worker, record.rank, how, event.detail, event.where)
            setbacks = setbacks.complained(failure, raised=event.raised)
            reset = replace(reset, unplanned=True)
            t.break_round(failure.told)
        t.state = replace(t.state, reset=reset, setbacks=setbacks)


def _leaves_as_asked(state: State, event: WorkerReady) -> bool:
    """Whether a worker that cannot say why it leaves its round does so since it was asked to.

    Its agent says what it has heard so far, and the notice may have reached the other workers before.
    """
    return (
        event.cause is ReadyCause.INTERNAL_ERROR
        and Backend.HOROVOD in event.backends
        and state.notice_kind is NoticeKind.HOSTS_UPDATED
    )


def _blame_who_never_asked(t: Transition) -> None:
    """Before the first round, who has ended with code 0 has failed as soon as another asks for it."""
    if t.state.round is not None or not t.state.registry.successes:
        return
    for worker in t.state.registry.workers_in(WorkerState.SUCCESS):
        failure = Failure(worker, None, "exited with code 0 before it called hvd.init(), as others did")
        wanted = (worker.hostname, worker.slot) in wanted_places(t.state)
        t.state = replace(t.state, registry=t.state.registry.without(worker))
        known = _blacklist(t, worker.hostname, 0.0, wanted=wanted)
        text = f"worker {worker} {failure.how}"
        _report_blacklisted(t, worker.hostname, text, told=False, news=wanted and not known)
        t.note_failure(failure, Fault.OWN, text)


def _accuser(state: State, event: WorkerReady) -> Accuser:
    """Whom a member accuses, of the round that it leaves. What happens inside a host is no matter of networks."""
    by_host: dict[str, list[WorkerId]] = {}
    for rank in sorted(set(event.unreachable)):
        if rank < len(state.members) and state.members[rank].hostname != event.worker.hostname:
            by_host.setdefault(state.members[rank].hostname, []).append(state.members[rank])
    return Accuser(event.worker, tuple(Accused(accused[0], len(accused)) for accused in by_host.values()))


def _take_running(t: Transition, record: WorkerRecord, event: WorkerRunning) -> bool:
    """Returns whether it is news."""
    if event.another:
        record = replace(record, commits=event.commits)
        t.put(record)
        t.state = replace(t.state, setbacks=t.state.setbacks.another_training(event.commits))
    if t.state.policy.on_change is OnChange.RESTART:
        t.state = replace(t.state, setbacks=t.state.setbacks.came_to(event.commits, 0))
    if record.running:
        if event.synced and not record.has_state:
            record = replace(record, has_state=True)
            t.put(record)
        if event.commits > record.commits:
            t.put(replace(record, commits=event.commits))
            t.state = replace(t.state, setbacks=t.state.setbacks.came_to(event.commits, 0))
        return False
    t.put(replace(record, running=True, has_state=record.has_state or event.synced, commits=event.commits))
    t.state = replace(t.state, setbacks=t.state.setbacks.came_to(event.commits, 0))
    return True


def _take_exit(t: Transition, record: WorkerRecord, event: WorkerExited) -> None:
    was_leaving = record.phase is WorkerPhase.LEAVING
    wanted = not was_leaving and is_wanted(t.state, record)
    t.forget(event.worker)
    t.commands.append(ReportExit(event.worker, expected=was_leaving and not record.failed))
    if was_leaving:
        _note_lost_peer(t, record, event)
        return
    if event.returncode == 0:
        _take_clean_exit(t, record, wanted=wanted)
    else:
        end = record.killed or Kill(event.how, fault_of(event.returncode, out_of_memory=event.out_of_memory))
        failure = _failure(record, end.how, event.error, event.where)
        stays = _stays(t, record, end.fault) or _aborts_for_others(t.state, record, event.returncode)
        lost = event.host_lost
        take_crash(t, record, failure, end.fault, event.draw, wanted=wanted, told=True, stays=stays, lost=lost)
        if not stays and wanted:
            _end_at_start(t, record, failure, end.fault)


def _take_chief_exit(t: Transition, event: ChiefExited) -> None:
    chief = t.state.chief
    if chief is None or event.number != chief.number:
        return  # of one that is known to have ended
    if chief.phase is ChiefPhase.STOPPING:
        t.state = replace(t.state, chief=None)
        return
    if event.bad_command and event.number == 1:
        t.end(ExitCode.BAD_USAGE, event.how)
        return
    if event.returncode == 0:
        t.end(ExitCode.SUCCESS, "the chief ended with code 0")
        return
    worker = WorkerId(CHIEF, 0, event.number - 1)
    failure = Failure.said(worker, None, event.how, event.error, event.where, "the chief")
    setbacks = t.state.setbacks.failed(failure, fault_of(event.returncode, out_of_memory=event.out_of_memory))
    if t.now - chief.since >= LONG_ROUND_S:
        setbacks = setbacks.ran_long()
    reset = t.in_reset().with_cause(failure.told, failure)
    failed = replace(chief, phase=ChiefPhase.FAILED, failed=described(failure))
    t.state = replace(t.state, reset=reset, setbacks=setbacks, chief=failed)


def _note_lost_peer(t: Transition, record: WorkerRecord, event: WorkerExited) -> None:
    """Who was given time to end, and was killed: its host is lost, or it has crashed. It is no failure of its."""
    until = gives_time(t.state, record)
    is_lost = event.returncode < 0 and -event.returncode != signal.SIGTERM
    if is_lost and until is not None and t.now < until and t.state.phase is JobPhase.RESETTING:
        t.state = replace(t.state, reset=replace(t.in_reset(), peers_lost=True))


def _take_dying(t: Transition, record: WorkerRecord, event: WorkerDying) -> None:
    wanted = is_wanted(t.state, record)
    end = record.killed or Kill(event.how, fault_of(event.returncode, out_of_memory=event.out_of_memory))
    t.commands.append(ReportDying(event.worker, end.how))
    # It counts as one that is being stopped: its end will be no news.
    t.put(replace(leaving(record, t.now, stopped=True), failed=True))
    failure = _failure(record, end.how, event.error, event.where)
    stays = _stays(t, record, end.fault) or _aborts_for_others(t.state, record, event.returncode)
    take_crash(t, record, failure, end.fault, event.draw, wanted=wanted, stays=stays)
    if not stays and wanted:
        _end_at_start(t, record, failure, end.fault)


def _stays(t: Transition, record: WorkerRecord, fault: Fault) -> bool:
    """Whether the host of a restarted worker that has failed stays in the job.

    It does when the job cannot do without it, and the worker was killed, or had trained for a while, or starts are
    tried again. How often, the setbacks say, and the limit of resets. Where hosts come back after a cooldown, it is one
    of these.
    """
    state, policy, name = t.state, t.state.policy, record.worker.hostname
    if policy.on_change is not OnChange.RESTART or policy.cooldown_range_s is not None:
        return False
    if state.setbacks.is_start(t.now) and fault is Fault.OWN:
        ends = is_on_one_host(state) if policy.ends_at_start else not policy.retries_starts
        if ends:
            return False
    return _is_needed(state, name)


def _aborts_for_others(state: State, record: WorkerRecord, returncode: int | None) -> bool:
    """Whether a worker's process ends only since another was lost while they met: Horovod's own library can do nothing
    else then, and its host is not to blame.
    """
    aborted = returncode is None or returncode in (-signal.SIGABRT, 128 + signal.SIGABRT)
    is_met = record.running or Backend.HOROVOD not in record.backends
    return aborted and not is_met and state.phase is JobPhase.RESETTING and bool(causes(state))


def _is_needed(state: State, hostname: str) -> bool:
    """Whether the job has too few slots without a host."""
    others = replace(state.discovery, hosts=tuple(host for host in state.hosts if host.name != hostname))
    return usable_slots(replace(state, discovery=others)) < state.policy.min_num_proc


def _end_at_start(t: Transition, record: WorkerRecord, failure: Failure, fault: Fault) -> None:
    """Ends the job where a restarted worker has failed by itself and nothing was trained yet: it mostly would again.

    Where there are other hosts, one of them may be lost, and its loss not known yet: there the second failure in a row
    ends the job (:func:`~elastic_driver.core.endings.end_if_given_up`).
    """
    state, policy = t.state, t.state.policy
    if policy.on_change is not OnChange.RESTART or not policy.ends_at_start:
        return
    if fault is not Fault.OWN or not state.setbacks.is_start(t.now):
        return
    if not is_on_one_host(state):
        return
    if not policy.blames_hosts or _is_needed(state, record.worker.hostname):
        when = f"within the first {START_S:g} s of the training"
        t.end(ExitCode.USER_CODE_FAILED, f"{described(failure)}, {when}; {policy.limit_flag} N would try again")


def _take_hung(t: Transition, record: WorkerRecord, event: WorkerHung) -> None:
    kill = Kill(f"hung: {event.reason}", Fault.OUTSIDE if event.silent else Fault.OWN)
    t.kill(record, KillWorker(event.worker, event.reason, hangs=True), kill)


def _failure(record: WorkerRecord, how: str, error: str = "", where: str = "") -> Failure:
    role = "" if record.parameter_server is None else record.server_name
    return Failure.said(record.worker, record.rank if record.round_id else None, how, error, where, role)


def _take_clean_exit(t: Transition, record: WorkerRecord, *, wanted: bool) -> None:
    if t.state.policy.num_parameter_servers:
        # A server serves until it is told to end.
        take_crash(t, record, _failure(record, "exited with code 0"), Fault.OWN, 0.0, wanted=wanted)
        return
    if t.state.policy.on_change is OnChange.NO_ROUNDS:
        t.state = replace(t.state, registry=t.state.registry.record(record.worker, WorkerState.SUCCESS))
        return
    if not record.round_id:
        message = f"worker {record.worker} exited with code 0 before it called hvd.init()"
        if not t.state.ever_ready and not t.state.policy.must_init:
            # It may have nothing to train. Nobody is started in its place.
            t.state = replace(t.state, registry=t.state.registry.record(record.worker, WorkerState.SUCCESS))
            return
        if not t.state.ever_ready:
            t.end(ExitCode.BAD_USAGE, f"{message}; is the command a training script of this library?")
            return
        take_crash(t, record, _failure(record, "exited with code 0"), Fault.OWN, 0.0, wanted=wanted)
        return
    registry = t.state.registry
    if not wanted and registry.expected != (record.worker,):
        # It had been asked to leave, by discovery's list or by whoever took its machine away: not the end of the job.
        t.report(f"worker {record.worker} left: its place is no longer listed")
        t.state = replace(t.state, registry=registry.without(record.worker), setbacks=t.state.setbacks.excuse())
        return
    t.state = replace(t.state, registry=registry.record(record.worker, WorkerState.SUCCESS))


def take_crash(
    t: Transition,
    record: WorkerRecord,
    failure: Failure,
    fault: Fault,
    draw: float,
    *,
    wanted: bool,
    told: bool = False,
    ran: bool = True,
    stays: bool = False,
    lost: bool = False,
) -> None:
    """Counts a failure against the worker's host, unless discovery had already taken the place away.

    Args:
        t: the step.
        record: the worker's.
        failure: what happened to it.
        fault: whose doing that is.
        draw: for the cooldown, 0 to 1.
        wanted: whether its place was still wanted.
        told: whether the driver has warned of it: an exit code other than 0 is warned of where the process ends.
        ran: whether there was a process. A host on which none can be started is put out in any case.
        stays: whether its host stays in the job nevertheless.
        lost: whether its whole host is lost.
    """
    worker, how = record.worker, failure.how
    if t.state.policy.on_change is OnChange.NO_ROUNDS:
        _take_loss(t, record, failure, fault, draw, wanted=wanted, told=told, lost=lost)
        return
    if wanted and (stays or (ran and not t.state.policy.blames_hosts)):
        fault = Fault.OWN  # its host stays: if that is the cause, it will be so again, and there must be an end
    t.state = replace(t.state, registry=t.state.registry.record(worker, WorkerState.FAILURE))
    # Whoever fails before its first round would do so again at once, and no limit counts that.
    is_member = t.state.is_member(worker)
    known = _blacklist(t, worker.hostname, draw, wanted=wanted and not stays, ran=ran and is_member, lost=lost)
    if not is_member:
        # A joiner, or a worker of the first round: its host gets no new workers, but those who live there go on.
        text = f"worker {worker} {how} before its first round"
        _report_blacklisted(t, worker.hostname, text, told=told, news=wanted and not known)
        if t.state.phase is JobPhase.STARTING:
            t.note_failure(failure, fault, text)
        return
    text = f"host {worker.hostname} lost (worker {worker} {how})"
    if stays:
        text = f"worker {worker} {how}"
    elif wanted and t.state.blacklist.is_blacklisted(worker.hostname):
        for other in t.on_host(worker.hostname):
            if other.phase is not WorkerPhase.LEAVING:
                t.stop(other, f"its host is taken out of the job: worker {worker} {how}")
    else:
        late = leaves_by(t.state, worker.hostname) is not None
        text = f"worker {worker} {how}{'' if wanted or late else ' after its place was removed'}"
    t.note_failure(failure, fault, text)
    t.break_round(text)


def _take_loss(
    t: Transition,
    record: WorkerRecord,
    failure: Failure,
    fault: Fault,
    draw: float,
    *,
    wanted: bool,
    told: bool,
    lost: bool,
) -> None:
    """A worker without rounds has failed: the others, on its host too, go on."""
    worker = record.worker
    text = f"{failure.who} {failure.how}"
    # A server that has answered may do so again, on a host that the job cannot do without.
    stays = bool(record.address) and t.state.policy.cooldown_range_s is None and _is_needed(t.state, worker.hostname)
    if wanted and stays:
        fault = Fault.OWN  # if the host is the cause, it will be so again, and there must be an end
    own = fault is Fault.OWN and all_offered(t.state, (worker,))
    reset = t.in_reset().with_cause(text, failure)
    registry = t.state.registry
    # Its failure counts for the end of the job only beside others' success; else another takes its place.
    ending = finishing(t.state)
    t.state = replace(
        t.state,
        reset=reset,
        registry=registry.record(worker, WorkerState.FAILURE) if ending else registry.without(worker),
        setbacks=t.state.setbacks.failed(failure, Fault.OWN if own else Fault.OUTSIDE),
    )
    if record.address and t.now - record.since >= LONG_ROUND_S:
        t.state = replace(t.state, setbacks=t.state.setbacks.ran_long())
    known = _blacklist(t, worker.hostname, draw, wanted=wanted and not stays, lost=lost)
    _report_blacklisted(t, worker.hostname, text, told=told, news=wanted and not known)
    if record.parameter_server is not None and t.state.chief is not None:
        _lose_server(t, t.state.chief, failure, told=told)


def _lose_server(t: Transition, chief: Chief, failure: Failure, *, told: bool) -> None:
    """A parameter server that the chief works with is lost. The chief learns of it by itself."""
    if chief.lost or chief.phase is not ChiefPhase.RUNNING:
        return
    text = f"{failure.who} {failure.how}, and its variables are lost"
    then = "the chief is started again when another parameter server answers"
    ends_by = None
    if not t.state.policy.restart_chief:
        ends_by = t.now + t.state.policy.drain_timeout_s
        then = (
            "no other one is started, and the chief's next use of it fails (with --restart-chief the chief would be "
            "started again, with another parameter server)"
        )
    what = f"the variables of {failure.who} are lost" if told else text
    t.report(f"{what}: {then}", warning=not told)
    t.state = replace(t.state, chief=replace(chief, lost=text, ends_by=ends_by))


def _blacklist(
    t: Transition, hostname: str, draw: float, *, wanted: bool, ran: bool = True, lost: bool = False
) -> bool:
    """Counts a failure against a host whose place was wanted. Returns whether it was blacklisted before."""
    known = t.state.blacklist.is_blacklisted(hostname)
    if wanted and (t.state.policy.blames_hosts or not ran):
        t.state = replace(t.state, blacklist=t.state.blacklist.fail(hostname, now=t.now, draw=draw, lost=lost))
    return known


def _report_blacklisted(t: Transition, hostname: str, text: str, *, told: bool, news: bool) -> None:
    if news and t.state.blacklist.is_blacklisted(hostname):
        for_now = "" if t.state.blacklist.is_out_for_good(hostname) else " until its cooldown is over"
        t.report(f"host {hostname} gets no new workers{for_now}: {text}", warning=not told)


def give_up_start(t: Transition, record: WorkerRecord) -> None:
    """A worker's process is not there in time. Whatever comes of it is no news."""
    what = "did not answer" if t.state.policy.num_parameter_servers else "was not started"
    how = f"{what} within {t.state.policy.start_timeout_s:g} s (--start-timeout)"
    wanted = is_wanted(t.state, record)
    t.retire(record, f"it {how}")
    take_crash(t, record, _failure(record, how), Fault.OUTSIDE, 0.0, wanted=wanted, ran=False)


def _take_not_started(t: Transition, event: WorkerNotStarted) -> None:
    record = record_unless_late(t.state, event)
    if record is None:
        return
    wanted = is_wanted(t.state, record)
    t.forget(event.worker)
    if event.bad_command and not t.state.ever_ready:
        t.end(ExitCode.BAD_USAGE, event.message)
    elif record.phase is not WorkerPhase.LEAVING:
        failure = _failure(record, f"could not be started: {event.message}")
        take_crash(t, record, failure, Fault.OUTSIDE, event.draw, wanted=wanted, ran=False)
