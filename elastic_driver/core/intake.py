"""Application of each event: how it changes what is known of hosts, workers and reports.

Owns what is the same for all kinds of jobs; each kind (:mod:`elastic_driver.core.kinds`) defines what the start and
the end of a worker mean. Decides nothing that needs more than the event itself:
:mod:`elastic_driver.core.membership` looks at the levels afterwards.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence, Set
from dataclasses import replace

from elastic_driver.core.assignment import order_hosts
from elastic_driver.core.chief import take_answer, take_chief_exit
from elastic_driver.core.draining import describe_shortage
from elastic_driver.core.events import (
    ChiefExited,
    DiscoveryFailed,
    DrainRequested,
    DriverFailed,
    Event,
    Fault,
    HostHeard,
    HostLost,
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
from elastic_driver.core.failures import Crash, failure_of
from elastic_driver.core.in_place import take_ready
from elastic_driver.core.kinds import kind_of
from elastic_driver.core.past import IllegalEventError, record_unless_late, why_impossible
from elastic_driver.core.placement import (
    is_wanted,
)
from elastic_driver.core.setbacks import fault_of
from elastic_driver.core.state import (
    DISCOVERY_OUTAGE_S,
    DISCOVERY_TOLD_S,
    HEALING_S,
    LAST_MOMENT_S,
    PREPARING_S,
    Departing,
    JobPhase,
    Kill,
    Leaving,
    Outage,
    Preparing,
    Silence,
    WorkerPhase,
    WorkerRecord,
    gives_time,
    leaves_by,
    leaving,
    record_of,
)
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import Departure
from elastic_driver.words import ExitCode, in_seconds

# A worker that raised an error longer than this before its end had continued after the error.
_LONGEST_END_S = 60.0


def take(t: Transition, event: Event) -> None:
    """Apply one event. A late event changes nothing.

    Raises:
        IllegalEventError: the event cannot have happened.
    """
    why = why_impossible(t.state, event)
    if why:
        raise IllegalEventError(f"cannot accept {event}: {why}")
    match event:
        case HostsDiscovered():
            _take_hosts(t, event)
            _take_departures(t, event.departures)
        case DiscoveryFailed():
            _take_discovery_failure(t, event)
        case HostsUnusable():
            # Once there were workers, hosts that are gone may return; the elastic timeout bounds the wait.
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
            take_chief_exit(t, event)
        case DrainRequested():
            _take_drain(t, event)
        case StopRequested():
            t.end(128 + event.signal, f"interrupted by {event.name}")
        case DriverFailed():
            t.end(ExitCode.INTERNAL_ERROR, event.message)
        case TimerExpired():
            pass
        case _:
            _take_reports(t, (event,))


def _take_hosts(t: Transition, event: HostsDiscovered) -> None:
    discovery = t.state.discovery
    outage = discovery.outage
    if outage is not None and event.answered:
        if discovery.told_at == outage.since or t.now - outage.since >= DISCOVERY_OUTAGE_S:
            t.report(f"host discovery works again, after {t.now - outage.since:.0f} s")
        outage = None
    up = dict.fromkeys(host.name for host in event.hosts)
    last = {host.name: host.incarnation for host in discovery.order}
    others = frozenset(host.name for host in event.hosts if last.get(host.name, host.incarnation) != host.incarnation)
    # Of the hosts that are still the same machines.
    listed = event.down.union(up) - others
    # A host that returns is a new machine, even if the old one, no longer listed, has announced again that it goes
    # away. So is a host that was to go away, and did.
    has_gone = {
        departing_host.hostname
        for departing_host in t.state.departing
        if not departing_host.listed and not departing_host.by_hand
    }
    has_gone &= discovery.slots.keys() - up.keys()
    kept = listed.intersection(t.state.listed) - has_gone
    staying = event.down.union(record.worker.hostname for record in t.state.workers)
    # Before any worker has been started there are no ranks to keep: hosts that come up one by one take the lister's
    # order.
    known = tuple(host for host in discovery.order if host.name not in others)
    if t.state.phase is JobPhase.WAITING:
        known = (*event.hosts, *known)
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
        departing=tuple(departing_host for departing_host in t.state.departing if departing_host.hostname in kept),
        preparing=_preparing(t, event.preparing, anew=others),
    )
    if not t.state.policy.has_chief:  # with a chief, a limit holds as long as the place is gone
        _lift_drain_limits(t, [record for record in t.state.workers if record.worker.hostname not in listed])


def _preparing(t: Transition, names: Set[str], *, anew: Set[str]) -> tuple[Preparing, ...]:
    """Return the hosts that prepare now. A repeated report gives a host no more time, unless it starts anew."""
    known = {
        preparing_host.hostname: preparing_host
        for preparing_host in t.state.preparing
        if preparing_host.hostname not in anew
    }
    return tuple(known.get(name, Preparing(name, t.now + PREPARING_S)) for name in sorted(names))


def _take_host_report(t: Transition, event: HostReport) -> None:
    known = next((silence for silence in t.state.silent if silence.hostname == event.hostname), None)
    others = tuple(silence for silence in t.state.silent if silence is not known)
    if isinstance(event, HostHeard):
        if known is not None:
            if known.told and not known.given_up:
                others = tuple(
                    replace(other, kept_until=t.now + HEALING_S) if other.told else other for other in others
                )
            t.state = replace(t.state, silent=others)
            if known.told and not known.given_up:
                t.report(f"host {event.hostname} responds again, after {t.now - known.since:.1f} s")
    elif known is None:
        fresh = Silence(event.hostname, t.now - event.silent_s, sure=event.sure)
        t.state = replace(t.state, silent=(*others, fresh))
    elif event.sure and not known.sure:
        t.state = replace(t.state, silent=(*others, replace(known, sure=True)))


def _take_departures(t: Transition, departures: Sequence[Departure]) -> None:
    """Apply the lister's announcements of which listed hosts are about to go away. It may withdraw them."""
    said = {departure.hostname: departure for departure in departures}
    for departing_host in t.state.departing:
        if departing_host.listed and departing_host.hostname not in said:
            _take_drain(
                t,
                DrainRequested(
                    departing_host.hostname, None, f"no longer going away ({departing_host.why})", undo=True
                ),
            )
    for departure in departures:
        if t.state.is_listed(departure.hostname):
            why, within_s = departure.why, departure.within_s
            _take_drain(t, DrainRequested(departure.hostname, None, why, within_s=within_s), listed=True)


def _take_drain(t: Transition, event: DrainRequested, *, listed: bool = False) -> None:
    """Apply a drain request; ``listed`` if it came from the lister."""
    name, slot = event.hostname, event.slot
    what = f"host {name}" if slot is None else f"worker {name}[{slot}]"
    inside = [r for r in t.state.workers if r.worker.hostname == name and slot in (None, r.worker.slot)]
    if not inside and not t.state.is_listed(name):
        return  # a machine that has left, and announces again that it goes away
    if event.undo:
        places = frozenset(place for place in t.state.drained if place[0] == name and slot in (None, place[1]))
        if places:
            t.report(f"{what} can be used again: {event.why}")
        departing = tuple(
            departing_host
            for departing_host in t.state.departing
            if slot is not None or departing_host.hostname != name
        )
        t.state = replace(t.state, drained=t.state.drained - places, departing=departing)
        _lift_drain_limits(t, inside)
        return
    is_sooner = slot is None and _note_departure(t, event, listed=listed)
    is_news = (name, slot) not in t.state.drained
    t.state = replace(t.state, drained=t.state.drained | {(name, slot)})
    if is_news or is_sooner:
        when = "is leaving at the next commit" if t.state.policy.on_change.has_commits else "is leaving now"
        left = "" if event.within_s is None else f"; its machine goes away in {in_seconds(event.within_s)}"
        t.report(f"{what} {when}: {event.why}{left}")
    used = [r for r in inside if r.parameter_server is not None and r.phase is WorkerPhase.MEMBER]
    if used and t.state.chief is not None and (is_news or is_sooner):
        what_then = "until another slot is free for it" if t.state.policy.restart_chief else "as long as it can"
        t.report(f"{used[0].server_name} stays {what_then}: no other process has its variables", warning=True)
    # A user who drains a host gets the answer directly; the sender of a signal, and a machine that goes away, do not.
    short = describe_shortage(t.state)
    staying = [record for record in inside if record.phase is not WorkerPhase.LEAVING]
    if short and is_sooner:
        # Restarted workers have to checkpoint: any progress after that would be lost with the machine.
        until = ", its workers train until then" if t.state.policy.on_change.has_commits else ""
        t.report(f"host {name} goes away{until}{short}", warning=True)
    elif short and is_news and slot is not None:
        for record in staying:
            undo = f"elasticrun drain --undo {name} undoes it"
            t.report(f"worker {record.worker} is drained{short}; {undo}", warning=True)
    limit, machine = t.now + t.state.policy.drain_timeout_s, leaves_by(t.state, name)
    if machine is not None:
        limit = max(t.now, min(limit, machine))
    # A repeated request gives no worker more time.
    t.put_all(
        replace(r, leave_by=limit)
        for r in staying
        if r.leave_by is None or (machine is not None and limit < r.leave_by)
    )


def _note_departure(t: Transition, event: DrainRequested, *, listed: bool) -> bool:
    """Record that a host is about to go away. Return whether that is sooner than was known."""
    name, by = event.hostname, None if event.within_s is None else t.now + event.within_s
    known = next((departing_host for departing_host in t.state.departing if departing_host.hostname == name), None)
    others = tuple(departing_host for departing_host in t.state.departing if departing_host is not known)
    if known is None:
        by_hand = (name, None) in t.state.drained
        is_sooner, one = by is not None, Departing(name, event.why, by, listed and not by_hand, by_hand)
        if not is_sooner and not one.listed:
            return False
    else:
        is_sooner = by is not None and (known.by is None or by < known.by - LAST_MOMENT_S)
        # Once somebody else asks for it, the lister alone cannot withdraw it.
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
    if discovery.hosts is None and not event.may_pass:
        t.end(ExitCode.BAD_USAGE, event.message)
        return
    going_on = "trying again" if discovery.hosts is None else "continuing with the known hosts"
    told = discovery.told_at
    # A script that fails now and then is not reported each time.
    if discovery.outage is None and (told is None or t.now - told >= DISCOVERY_TOLD_S):
        t.report(f"{event.message}; {going_on}", warning=True)
        discovery = replace(discovery, told_at=t.now)
    since = t.now if discovery.outage is None else discovery.outage.since
    t.state = replace(t.state, discovery=replace(discovery, outage=Outage(since, event.message)))


def _take_reports(t: Transition, reports: tuple[WorkerReport | HostLost, ...]) -> None:
    resumed = None
    for report in reports:
        if isinstance(report, HostLost):
            _take_host_loss(t, report)
            continue
        record = record_unless_late(t.state, report)
        if record is None:
            continue
        match report:
            case WorkerStarted():
                kind_of(t.state).take_start(t, record)
            case WorkerServing():
                take_answer(t, record, report.address)
            case WorkerReleased():
                worker = record.worker
                t.retire(record, why_no_place(t.state, worker.hostname, worker.slot))
            case WorkerReady():
                take_ready(t, record, report)
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
                # Its script, or all of it, has ended: nothing is left to wait for or to kill.
                t.put(replace(record, killed=None, exit_by=None))
    if resumed is None or t.state.phase is not JobPhase.RUNNING:
        return
    if all(record.running for record in t.state.workers if record.phase is WorkerPhase.MEMBER):
        took_s = t.now - t.state.reset_began
        t.commands.append(ReportResumed(t.state.round_id, resumed.commits, took_s))


def _take_running(t: Transition, record: WorkerRecord, event: WorkerRunning) -> bool:
    """Apply a report that a worker trains. Return whether it is news."""
    if event.another:
        record = replace(record, commits=event.commits)
        t.put(record)
        t.state = replace(t.state, setbacks=t.state.setbacks.another_training(event.commits))
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
    wanted = _take_end(t, record)
    if wanted is None:
        if event.raised_s is not None and event.raised_s < _LONGEST_END_S:
            t.note_earlier(_crash_of(t, record, event, wanted=False).failure)
        if event.returncode < 0 and -event.returncode != signal.SIGTERM:  # it has crashed, or somebody has killed it
            _note_lost_peer(t, record)
    elif event.returncode == 0:
        kind_of(t.state).take_clean_exit(t, record, wanted=wanted)
    else:
        # An exit code other than 0 has been reported already.
        kind_of(t.state).take_failure(t, record, replace(_crash_of(t, record, event, wanted=wanted), told=True))


def _take_host_loss(t: Transition, event: HostLost) -> None:
    records = [record for worker in event.workers if (record := record_of(t.state, worker)) is not None]
    losses: list[tuple[WorkerRecord, bool]] = []
    for record in records:
        wanted = _take_end(t, record)
        if wanted is None:
            _note_lost_peer(t, record)
        else:
            losses.append((record, wanted))
    # Where one failure stands for all, choose the one whose loss matters most.
    losses.sort(key=lambda loss: (not t.state.is_member(loss[0].worker), not loss[1], loss[0].killed is not None))
    for index, (record, wanted) in enumerate(losses):
        end = record.killed or Kill("lost with its host", Fault.OUTSIDE)
        failure = failure_of(record, end.how, event.why)
        crash = Crash(failure, end.fault, wanted, event.draw, told=True, host_lost=True, after_another=index > 0)
        kind_of(t.state).take_failure(t, record, crash)


def _take_end(t: Transition, record: WorkerRecord) -> bool | None:
    """Drop the record of an ended process. Return whether its place was wanted; None if it was leaving."""
    was_leaving = record.phase is WorkerPhase.LEAVING
    wanted = None if was_leaving else is_wanted(t.state, record)
    t.forget(record.worker)
    t.commands.append(ReportExit(record.worker, expected=was_leaving and record.leaving is not Leaving.DYING))
    return wanted


def _note_lost_peer(t: Transition, record: WorkerRecord) -> None:
    """Record the loss of a worker in its time for a checkpoint: no failure, but its peers may wait for it."""
    until = gives_time(t.state, record)
    if until is not None and t.now < until and t.state.phase is JobPhase.RESETTING:
        t.state = replace(t.state, reset=replace(t.in_reset(), peers_lost=True))


def _take_dying(t: Transition, record: WorkerRecord, event: WorkerDying) -> None:
    crash = _crash_of(t, record, event, wanted=is_wanted(t.state, record))
    t.commands.append(ReportDying(event.worker, crash.failure.how))
    # It counts as being stopped: its end will be no news.
    t.put(leaving(record, t.now, Leaving.DYING))
    kind_of(t.state).take_failure(t, record, crash)


def _crash_of(t: Transition, record: WorkerRecord, event: WorkerDying | WorkerExited, *, wanted: bool) -> Crash:
    """Describe a worker's end as a failure. For a killed worker, the reason for the kill is the failure."""
    end = record.killed or Kill(event.how, fault_of(event.returncode, out_of_memory=event.out_of_memory))
    failure = failure_of(record, end.how, event.error, event.where)
    raised_s = event.raised_s or 0.0
    return Crash(
        replace(failure, at=t.now - (raised_s if raised_s < _LONGEST_END_S else 0.0)),
        end.fault,
        wanted,
        event.draw,
        aborted=event.returncode is None or event.returncode in (-signal.SIGABRT, 128 + signal.SIGABRT),
    )


def _take_hung(t: Transition, record: WorkerRecord, event: WorkerHung) -> None:
    kill = Kill(f"hung: {event.reason}", Fault.OUTSIDE if event.silent else Fault.OWN, hangs=True)
    t.kill(record, KillWorker(event.worker, event.reason, hangs=True), kill)


def _take_not_started(t: Transition, event: WorkerNotStarted) -> None:
    record = record_unless_late(t.state, event)
    if record is None:
        return
    wanted = is_wanted(t.state, record)
    t.forget(event.worker)
    if event.bad_command and not t.state.ever_ready:
        t.end(ExitCode.BAD_USAGE, event.message)
    elif record.phase is not WorkerPhase.LEAVING:
        failure = failure_of(record, f"could not be started: {event.message}")
        crash = Crash(failure, Fault.OUTSIDE, wanted, event.draw, ran=False)
        kind_of(t.state).take_failure(t, record, crash)
