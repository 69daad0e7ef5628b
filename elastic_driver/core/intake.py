"""What each event means: it changes what is known of hosts, workers and reports.

Owns the accounting by cause (crashed, not started, removed, finished) and the refusal of what belongs to the past.
Decides nothing that needs more than the event itself: :mod:`elastic_driver.core.membership` looks at the levels
afterwards.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_driver.core.assignment import order_hosts
from elastic_driver.core.events import (
    DiscoveryFailed,
    DrainRequested,
    Event,
    Fault,
    HostsDiscovered,
    ReportResumed,
    StopRequested,
    TimerExpired,
    WorkerDying,
    WorkerExited,
    WorkerNotStarted,
    WorkerReady,
    WorkerRunning,
    WorkersReported,
    WorkerStarted,
)
from elastic_driver.core.placement import all_offered, in_target, standby_places, wanted_places
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.setbacks import Failure, fault_of
from elastic_driver.core.state import (
    DISCOVERY_OUTAGE_S,
    DISCOVERY_TOLD_S,
    JobPhase,
    WorkerPhase,
    WorkerRecord,
    finishing,
    record_of,
)
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.words import ExitCode, OnChange, ReadyCause


def take(t: Transition, event: Event) -> None:
    """Takes in one event. What belongs to the past changes nothing."""
    match event:
        case HostsDiscovered():
            _take_hosts(t, event.hosts)
        case DiscoveryFailed():
            _take_discovery_failure(t, event)
        case WorkerStarted() | WorkerReady() | WorkerRunning() | WorkerDying() | WorkerExited():
            _take_reports(t, (event,))
        case WorkersReported():
            _take_reports(t, event.reports)
        case WorkerNotStarted():
            _take_not_started(t, event)
        case DrainRequested():
            _take_drain(t, event)
        case StopRequested():
            t.end(128 + event.signal, f"interrupted by {event.name}")
        case TimerExpired():
            pass


def _take_hosts(t: Transition, hosts: tuple[Host, ...]) -> None:
    since = t.state.discovery_failing_since
    if since is not None and t.now - since >= DISCOVERY_OUTAGE_S:
        t.report(f"host discovery answers again, after {t.now - since:.0f} s")
    ordered = order_hosts(t.state.host_order, hosts)
    listed = [host.name for host in ordered]
    living = [record.worker.hostname for record in t.state.workers]
    # A host with living workers keeps its place in the order although it is no longer listed.
    kept = [name for name in t.state.host_order if name in listed or name in living]
    t.state = replace(
        t.state,
        hosts=ordered,
        host_order=(*kept, *(name for name in listed if name not in kept)),
        blacklist=t.state.blacklist.forgive_absent(listed),
        drained=frozenset(place for place in t.state.drained if place[0] in listed),
        discovered=True,
        discovery_failing_since=None,
    )


def _take_drain(t: Transition, event: DrainRequested) -> None:
    places = frozenset({(event.hostname, event.slot)})
    what = f"host {event.hostname}" if event.slot is None else f"worker {event.hostname}[{event.slot}]"
    if event.undo:
        if event.slot is None:
            places = frozenset(place for place in t.state.drained if place[0] == event.hostname)
        if t.state.drained & places:
            t.report(f"{what} may be used again: {event.why}")
        t.state = replace(t.state, drained=t.state.drained - places)
        return
    if not places <= t.state.drained:
        when = "leaves at the next commit" if t.state.policy.on_change is OnChange.IN_PLACE else "leaves now"
        t.report(f"{what} {when}: {event.why}")
    t.state = replace(t.state, drained=t.state.drained | places)


def _take_discovery_failure(t: Transition, event: DiscoveryFailed) -> None:
    if not t.state.discovered:
        t.end(ExitCode.BAD_USAGE, event.message)
        return
    since = t.state.discovery_failing_since
    if since is None:
        since = t.now
        told = t.state.discovery_told_at
        # A script that fails every now and then is not told of each time.
        if told is None or t.now - told >= DISCOVERY_TOLD_S:
            t.report(f"{event.message}; going on with the hosts known so far", warning=True)
            t.state = replace(t.state, discovery_told_at=t.now)
    t.state = replace(t.state, discovery_failing_since=since, discovery_error=event.message)


def _take_reports(
    t: Transition, reports: tuple[WorkerStarted | WorkerReady | WorkerRunning | WorkerDying | WorkerExited, ...]
) -> None:
    resumed = None
    for report in reports:
        match report:
            case WorkerStarted():
                _take_started(t, report)
            case WorkerReady():
                _take_ready(t, report)
            case WorkerRunning():
                resumed = report if _take_running(t, report) else resumed
            case WorkerDying():
                _take_dying(t, report)
            case WorkerExited():
                _take_exit(t, report)
    if resumed is None or t.state.phase is not JobPhase.RUNNING:
        return
    if all(record.running for record in t.state.workers if record.phase is WorkerPhase.MEMBER):
        took_s = t.now - t.state.reset_began
        t.commands.append(ReportResumed(t.state.round_id, resumed.commits, took_s))


def _take_started(t: Transition, event: WorkerStarted) -> None:
    record = record_of(t.state, event.worker)
    on_change = t.state.policy.on_change
    if record is None or record.phase is not WorkerPhase.BOOTING or on_change is OnChange.IN_PLACE:
        return
    phase = WorkerPhase.READY if on_change is OnChange.RESTART else WorkerPhase.MEMBER
    t.put(replace(record, phase=phase, since=t.now, deadline=None))
    t.state = replace(t.state, ever_ready=True)
    if on_change is OnChange.RESTART:
        t.state = replace(t.state, registry=t.state.registry.record(event.worker, WorkerState.READY))


def _take_ready(t: Transition, event: WorkerReady) -> None:
    if t.state.policy.on_change is not OnChange.IN_PLACE:
        return  # no worker of theirs asks for a round
    record = record_of(t.state, event.worker)
    if record is None or record.phase is WorkerPhase.LEAVING or event.after_round != record.round_id:
        return  # of the past: a process that has ended, or a request that was answered already
    if record.phase is WorkerPhase.READY:
        return  # the same level again: its long poll ran out
    was_member = record.phase is WorkerPhase.MEMBER
    t.put(
        replace(
            record,
            phase=WorkerPhase.READY,
            since=t.now,
            deadline=None,
            # Who has commits, or left by itself, was through with its sync, though its report was lost.
            has_state=record.has_state
            or (was_member and (event.commits > 0 or event.cause is not ReadyCause.INTERNAL_ERROR)),
            commits=max(event.commits, record.commits) if was_member else event.commits,
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
    if not was_member and in_target(record, standby_places(t.state)):
        t.report(f"worker {event.worker} stands by for a member that is lost")
    if was_member:
        t.open_reset()
        if event.cause is ReadyCause.REINIT:
            t.state = replace(t.state, reinits=(*t.state.reinits, event.worker))
        setbacks = t.state.setbacks.came_to(max(event.commits, record.commits), event.steps)
        if event.cause is ReadyCause.INTERNAL_ERROR:
            how = "raised HorovodInternalError" if event.raised else "lost its round"
            failure = Failure.said(event.worker, record.rank, how, event.detail, event.where)
            setbacks = setbacks.complained(failure, raised=event.raised)
            t.state = replace(t.state, unplanned=True)
            t.break_round(failure.told)
        t.state = replace(t.state, setbacks=setbacks)


def _take_running(t: Transition, event: WorkerRunning) -> bool:
    """Returns whether it is news."""
    record = record_of(t.state, event.worker)
    if record is None or record.phase is not WorkerPhase.MEMBER or event.round_id != t.state.round_id:
        return False
    if event.another:
        record = replace(record, commits=event.commits)
        t.put(record)
        t.state = replace(t.state, setbacks=t.state.setbacks.another_training(event.commits))
    if record.running:
        return False
    t.put(replace(record, running=True, has_state=True, commits=event.commits))
    t.state = replace(t.state, setbacks=t.state.setbacks.came_to(event.commits, 0))
    return True


def _take_exit(t: Transition, event: WorkerExited) -> None:
    record = record_of(t.state, event.worker)
    if record is None:
        return
    wanted = in_target(record, wanted_places(t.state))
    t.forget(event.worker)
    if record.phase is WorkerPhase.LEAVING:
        return
    if event.returncode == 0:
        _take_clean_exit(t, record, wanted=wanted)
    else:
        fault = event.fault or fault_of(event.returncode)
        failure = _failure(record, event.how, event.error, event.where)
        take_crash(t, record, failure, fault, event.draw, wanted=wanted, told=True)


def _take_dying(t: Transition, event: WorkerDying) -> None:
    record = record_of(t.state, event.worker)
    if record is None or record.phase is WorkerPhase.LEAVING:
        return
    wanted = in_target(record, wanted_places(t.state))
    # It counts as one that is being stopped: its end will be no news.
    t.put(replace(record, phase=WorkerPhase.LEAVING, since=t.now, deadline=None, stopped=True))
    failure = _failure(record, event.how, event.error, event.where)
    take_crash(t, record, failure, event.fault, event.draw, wanted=wanted)


def _failure(record: WorkerRecord, how: str, error: str = "", where: str = "") -> Failure:
    return Failure.said(record.worker, record.rank if record.round_id else None, how, error, where)


def _take_clean_exit(t: Transition, record: WorkerRecord, *, wanted: bool) -> None:
    if t.state.policy.on_change is OnChange.NO_ROUNDS:
        t.state = replace(t.state, registry=t.state.registry.record(record.worker, WorkerState.SUCCESS))
        return
    if not record.round_id:
        message = f"worker {record.worker} exited with code 0 before it called hvd.init()"
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
    """
    worker, how = record.worker, failure.how
    if t.state.policy.on_change is OnChange.NO_ROUNDS:
        _take_loss(t, worker, failure, fault, draw, wanted=wanted, told=told)
        return
    t.state = replace(t.state, registry=t.state.registry.record(worker, WorkerState.FAILURE))
    known = _blacklist(t, worker.hostname, draw, wanted=wanted)
    if worker not in t.state.members:
        # A joiner, or a worker of the first round: its host gets no new workers, but those who live there go on.
        text = f"worker {worker} {how} before its first round"
        _report_blacklisted(t, worker.hostname, text, told=told, news=wanted and not known)
        if t.state.phase is JobPhase.STARTING:
            t.note_failure(failure, fault, text)
        return
    text = f"host {worker.hostname} lost (worker {worker} {how})"
    if wanted:
        for other in t.state.workers:
            if other.worker.hostname == worker.hostname and other.phase is not WorkerPhase.LEAVING:
                t.stop(other, f"its host is blacklisted: worker {worker} {how}")
    else:
        text = f"worker {worker} {how} after its place was removed"
    t.note_failure(failure, fault, text)
    t.open_reset()
    t.break_round(text)
    t.state = replace(t.state, unplanned=True)


def _take_loss(
    t: Transition, worker: WorkerId, failure: Failure, fault: Fault, draw: float, *, wanted: bool, told: bool
) -> None:
    """A worker without rounds has failed: the others, on its host too, go on."""
    state = t.state
    # Its failure counts for the end of the job only beside others' success; else another takes its place.
    ending = finishing(state)
    registry = state.registry.record(worker, WorkerState.FAILURE) if ending else state.registry.without(worker)
    own = fault is Fault.OWN and all_offered(state, (worker,))
    t.state = replace(
        state,
        registry=registry,
        first_failure=state.first_failure or failure,
        setbacks=state.setbacks.failed(failure, Fault.OWN if own else Fault.OUTSIDE),
    )
    known = _blacklist(t, worker.hostname, draw, wanted=wanted)
    _report_blacklisted(t, worker.hostname, f"worker {worker} {failure.how}", told=told, news=wanted and not known)


def _blacklist(t: Transition, hostname: str, draw: float, *, wanted: bool) -> bool:
    """Counts a failure against a host whose place was wanted. Returns whether it was blacklisted before."""
    known = t.state.blacklist.is_blacklisted(hostname)
    if wanted:
        t.state = replace(t.state, blacklist=t.state.blacklist.fail(hostname, now=t.now, draw=draw))
    return known


def _report_blacklisted(t: Transition, hostname: str, text: str, *, told: bool, news: bool) -> None:
    if news:
        for_now = "" if t.state.blacklist.is_out_for_good(hostname) else " until its cooldown is over"
        t.report(f"host {hostname} gets no new workers{for_now}: {text}", warning=not told)


def give_up_start(t: Transition, record: WorkerRecord) -> None:
    """A worker's process is not there in time. Whatever comes of it is no news."""
    how = f"was not started within {t.state.policy.start_timeout_s:g} s (--start-timeout)"
    wanted = in_target(record, wanted_places(t.state))
    t.retire(record, f"it {how}")
    take_crash(t, record, _failure(record, how), Fault.OUTSIDE, 0.0, wanted=wanted)


def _take_not_started(t: Transition, event: WorkerNotStarted) -> None:
    record = record_of(t.state, event.worker)
    if record is None:
        return
    wanted = in_target(record, wanted_places(t.state))
    t.forget(event.worker)
    if event.bad_command and not t.state.ever_ready:
        t.end(ExitCode.BAD_USAGE, event.message)
    elif record.phase is not WorkerPhase.LEAVING:
        failure = _failure(record, f"could not be started: {event.message}")
        take_crash(t, record, failure, Fault.OUTSIDE, event.draw, wanted=wanted)
