"""One sentence that says why the job is or is not running: for the log, the status page, timeout messages and tests."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_driver.core.deadlines import checkpoints_by, gone_by, joiners_wait_until, pause_until
from elastic_driver.core.placement import (
    all_offered,
    free_slots,
    in_target,
    is_drained,
    launch_places,
    left_over,
    next_members,
    reachable,
    server_places,
    standby_places,
    standing_by,
    target_places,
    usable_slots,
    wanted_places,
    why_left_over,
)
from elastic_driver.core.state import (
    ChiefPhase,
    JobPhase,
    State,
    WorkerPhase,
    concerning,
    finishing,
    gives_time,
    in_phase,
    parameter_servers,
    serving_workers,
)
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.words import NoticeKind, counted

_AT_MOST = 6  # names in a sentence


def names(workers: Sequence[WorkerId]) -> str:
    """Format workers as a list for a sentence: "worker a[0]", "workers a[0], a[1]", "workers a[0], … and 3 more"."""
    if not workers:
        return ""
    text = _listed([str(worker) for worker in workers])
    return f"worker{'s' if len(workers) > 1 else ''} {text}"


def explain(state: State, now: float, *, gives_up: bool = False, stall: str = "") -> str:
    """Explain the current condition of the job in one sentence.

    Args:
        state: the job.
        now: the present, seconds of the core's clock.
        gives_up: whether the wait for slots is over: then the time that is left for it is not mentioned.
        stall: "stalled for ...", if the running round makes no progress.
    """
    policy, reset = state.policy, state.reset
    slots_left = "" if gives_up else _left(state.slots_deadline, now)
    restarts = policy.on_change.restarts
    match state.phase:
        case JobPhase.WAITING:
            if state.discovery.hosts is None:
                return f"waiting for the first hosts{_discovery(state, now)}{slots_left}"
            if state.last_call is not None:
                slots = counted(usable_slots(state), "slot")
                return f"{slots} available, waiting briefly for more hosts{_left(state.last_call, now)}"
            left = _discovery(state, now) + slots_left
            if number := policy.num_parameter_servers:
                wanted = f"{policy.start_flag} {policy.num_proc} and --parameter-servers {number}"
                return f"waiting for {counted(policy.num_proc + number, 'slot')} ({wanted}), {_slots(state, now)}{left}"
            return f"waiting for {counted(policy.num_proc, 'slot')} ({policy.start_flag}), {_slots(state, now)}{left}"
        case JobPhase.RUNNING | JobPhase.RESETTING if policy.has_chief:
            return _explain_chief(state, now, slots_left)
        case JobPhase.RUNNING | JobPhase.RESETTING if not policy.on_change.has_rounds:
            return _explain_roundless(state, now, slots_left)
        case JobPhase.STARTING if restarts:
            return f"round {state.round_id} is starting{_unheard(state, now)}{_booting(state)}{slots_left}"
        case JobPhase.RESETTING if restarts:
            return _explain_restart(state, now, slots_left)
        case JobPhase.STARTING if not state.registry.complete:
            missing = state.registry.missing
            left = _left_for(state, missing, None if reset is None else reset.deadline, now)
            return f"waiting for {names(missing)} to call hvd.init(){left}"
        case JobPhase.RESETTING if not state.registry.complete:
            missing = state.registry.missing
            left = _left_for(state, missing, None if reset is None else reset.deadline, now)
            return f"round {state.round_id} is over; waiting for {names(missing)} to leave it{left}"
        case JobPhase.STARTING | JobPhase.RESETTING:
            ready = next_members(state)
            if len(ready) >= policy.min_num_proc and (until := pause_until(state)) is not None and until > now:
                why = f"{counted(state.setbacks.count, 'round')} in a row failed without progress"
                if until == state.cuts.until:
                    why = "workers cannot reach each other, and the job needs all of them"
                return f"{why}; the next round begins after a pause{_booting(state)}{_left(until, now)}"
            if len(ready) >= policy.min_num_proc:
                left = _left(joiners_wait_until(state), now)
                return f"{counted(len(ready), 'worker')} ready, waiting briefly for more{_booting(state)}{left}"
            some, flags = _ready(state, len(ready))
            lacks = f"waiting for {counted(policy.min_num_proc, 'worker')} ({policy.least_flag}), ready: {some}"
            # The multiple has been named in that case.
            why = (
                f"{_slots(state, now, unused=not flags)}{_unheard(state, now)}{_booting(state)}{_discovery(state, now)}"
            )
            return f"{lacks}, {why}{slots_left}"
        case JobPhase.RUNNING:
            workers = counted(len(in_phase(state, WorkerPhase.MEMBER)), "worker")
            runs = f"round {state.round_id} runs with {workers}"
            members = f"round {state.round_id} with {workers} has been {stall}" if stall else runs
            if finishing(state):
                return f"{members}; some have finished, waiting for the rest"
            if state.notice_kind is NoticeKind.HOSTS_UPDATED:
                return f"{members}; hosts changed, waiting for the next commit"
            out = _unheard(state, now) + _kept_out(state, now, before="; ")
            if state.last_call is not None:
                more = counted(len(launch_places(state)) - len(state.members), "slot")
                members += f"; {more} more available, waiting briefly for others{_left(state.last_call, now)}"
            members += _preparing(state, now) if restarts else ""
            return f"{members}{_standby(state)}{_booting(state)}{out}{_discovery(state, now)}"
        case JobPhase.ENDED:
            return "the job has ended"


def _explain_restart(state: State, now: float, slots_left: str) -> str:
    """Explain why the processes of the next round have not been started."""
    over, until = f"round {state.round_id} is over", gone_by(state)
    if until is not None:
        members = dict.fromkeys(state.members)
        records = [r for r in in_phase(state, WorkerPhase.LEAVING) if r.worker in members]
        ending = [record.worker for record in records]
        given = [at for record in records if (at := gives_time(state, record)) is not None and at > now]
        if given:
            due, limit = checkpoints_by(state), f"{state.policy.drain_timeout_s:g} s, --drain-timeout"
            if due is not None and due < max(given):
                limit = "before their host goes away"
            left = _left_for(state, ending, max(given) if due is None else min(due, max(given)), now)
            return f"{over}; waiting for {names(ending)} to checkpoint and exit ({limit}){left}"
        return f"{over}; waiting for {names(ending)} to exit{_left_for(state, ending, until, now)}"
    places = len(launch_places(state))
    if state.last_call is not None:
        return f"{over}; {counted(places, 'slot')} available, waiting briefly for more{_left(state.last_call, now)}"
    if places >= state.policy.min_num_proc:
        return f"{_pausing(state, 'round')}; the next round begins after a pause{_left(pause_until(state), now)}"
    return f"{over}; {_waiting_for_slots(state, now)}{slots_left}"


def _explain_roundless(state: State, now: float, slots_left: str) -> str:
    ends = finishing(state)
    if not ends and len(target_places(state)) < state.policy.min_num_proc:
        return f"{_waiting_for_slots(state, now)}{slots_left}"
    text = f"{counted(len(in_phase(state, WorkerPhase.MEMBER)), 'worker')} running"
    if ends:
        return f"{text}; some have finished, waiting for the rest"
    until = state.setbacks.present.until
    if until is not None:
        text += f"; {_pausing(state, 'worker')}; the next one starts after a pause{_left(until, now)}"
    short = (
        ""
        if state.slots_deadline is None
        else f"; {state.policy.min_num_proc} needed ({state.policy.least_flag}){slots_left}"
    )
    out = _unheard(state, now) + _kept_out(state, now, before="; ")
    return f"{text}{_booting(state)}{short}{out}{_discovery(state, now)}"


def _explain_chief(state: State, now: float, slots_left: str) -> str:
    policy, chief = state.policy, state.chief
    servers = [record for record in parameter_servers(state).values() if record.phase is WorkerPhase.MEMBER]
    workers = serving_workers(state)
    there = f"{counted(len(workers), 'worker')} and {counted(len(servers), 'parameter server')}"
    text = f"the chief runs with {there}"
    if chief is None:
        text = f"the chief is {'being restarted' if state.chiefs else 'not started yet'}; answering: {there}"
    elif chief.phase is ChiefPhase.STOPPING:
        text = f"the chief is being stopped for a restart; answering: {there}"
    elif chief.lost:
        text = f"{chief.lost}; waiting for the chief to exit{_left(chief.ends_by, now)}"
    until = state.setbacks.present.until
    if until is not None:
        text += f"; {_pausing(state, 'start')}; the next one starts after a pause{_left(until, now)}"
    if state.slots_deadline is not None:
        least = f"{counted(policy.min_num_proc, 'worker')} needed ({policy.least_flag})"
        text += f"; {least}, {_slots(state, now)}{slots_left}"
    off = [record.worker for record in workers if record.leave_by is not None]
    text += f"; {names(off)} leaving" if off else ""
    stay = [r.server_name for r in servers if not all_offered(state, (r.worker,))] if chief is not None else []
    text += (
        f"; {_listed(stay)} {'stay' if len(stay) > 1 else 'stays'} on a host that gets no new workers" if stay else ""
    )
    out = _unheard(state, now) + ("" if state.slots_deadline is not None else _kept_out(state, now, before="; "))
    return f"{text}{_booting(state)}{out}{_discovery(state, now)}"


def _pausing(state: State, what: str) -> str:
    return f"{counted(state.setbacks.count, what)} in a row failed without progress"


def _waiting_for_slots(state: State, now: float) -> str:
    least = (
        f"waiting for {counted(state.policy.min_num_proc, 'slot')} ({state.policy.least_flag}), {_slots(state, now)}"
    )
    return f"{least}{_booting(state)}{_discovery(state, now)}"


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _AT_MOST} more" if len(words) > _AT_MOST else ""
    return f"{', '.join(words[:_AT_MOST])}{more}"


def _slots(state: State, now: float, *, unused: bool = True) -> str:
    """List the usable slots, and for all other listed ones the reason why they are not usable."""
    free = [Host(host.name, slots) for host in state.hosts if (slots := free_slots(state, host))]
    text = f"slots: {sum(host.slots for host in free)}"
    text += f" ({_listed([str(host) for host in free])})" if free else ""
    none = "" if state.hosts else ", no listed host is up" if state.listed else ", no host is listed"
    return f"{text}{none}{_kept_out(state, now, before=', ', unused=unused)}"


def _kept_out(state: State, now: float, *, before: str, unused: bool = True) -> str:
    """List the hosts and slots that get no workers, the reason, and what would release them."""
    text = ""
    out = [entry for entry in state.blacklist.entries if entry.active]
    if out:
        times = ["permanently" if entry.until is None else f"{max(0.0, entry.until - now):.0f} s left" for entry in out]
        hosts = [f"{entry.hostname} ({time})" for entry, time in zip(out, times, strict=True)]
        text += f"{before}blacklisted: {_listed(hosts)}"
    left_out = [
        f"{cut_host.hostname} ({max(0.0, cut_host.until - now):.0f} s left)"
        for cut_host in state.cuts.hosts
        if cut_host.active
    ]
    if left_out:
        text += f"{before}left out: {_listed(left_out)}"
    drained: dict[str, list[int | None]] = {}
    for hostname, slot in state.drained:
        drained.setdefault(hostname, []).append(slot)
    places: list[str] = []
    for host in state.hosts if drained else ():
        slots = drained.get(host.name, [])
        if None in slots:
            places.append(host.name)
        else:
            places += [f"{host.name}[{slot}]" for slot in range(host.slots) if slot in slots]
    places += [name for name in sorted(state.discovery.down) if None in drained.get(name, [])]
    going_in = {
        departing_host.hostname: max(0.0, departing_host.by - now)
        for departing_host in state.departing
        if departing_host.by is not None
    }
    going = [f"{name} ({f'{left_s:.0f} s left' if left_s else 'at any moment'})" for name, left_s in going_in.items()]
    if going:
        text += f"{before}going away: {_listed(going)}"
    places = [place for place in places if place not in going_in]
    if places:
        text += f"{before}drained: {_listed(places)} (undo: elasticrun drain --undo HOST)"
    left_over_slots = unused_slots(state) if unused else ""
    return text + (left_over_slots and before + left_over_slots)


def room_for_standbys(state: State, now: float) -> str:
    """Report that there are fewer places for standbys than were asked for, and why."""
    policy = state.policy
    ranked = policy.max_num_proc or len(state.members)
    return (
        f"there is room for only {len(standby_places(state))} of {counted(policy.num_standby, 'standby')} "
        f"(--standby) besides {counted(ranked, 'worker')} ({policy.most_flag}), {_slots(state, now)}"
    )


def unused_slots(state: State) -> str:
    """Describe the slots that a multiple leaves over; "" for none."""
    policy = state.policy
    flags = (f"--ranks-per-host-multiple {policy.ranks_per_host_multiple}", f"--np-multiple {policy.num_proc_multiple}")
    parts = []
    for flag, by_host in zip(flags, left_over(state), strict=True):
        number = sum(by_host.values())
        of = f" of host {next(iter(by_host))}" if len(by_host) == 1 else ""
        which = f" ({_listed([f'{name}: {count}' for name, count in by_host.items()])})" if len(by_host) > 1 else ""
        if number:
            parts.append(f"{counted(number, 'slot')}{of} {'is' if number == 1 else 'are'} not used: {flag}{which}")
    return "; ".join(parts)


def _ready(state: State, members: int) -> tuple[str, list[str]]:
    """Return the number of ready workers; if a multiple allows fewer in a round, that number and the flags too."""
    places = target_places(state) if state.policy.multiple == 1 else wanted_places(state)
    number = sum(in_target(record, places) for record in reachable(state))
    if state.policy.multiple == 1 or members >= number:
        return str(number), []
    policy = state.policy
    flags = []
    if policy.num_proc_multiple > 1:
        flags.append(f"--np-multiple {policy.num_proc_multiple}")
    if policy.ranks_per_host_multiple > 1:
        flags.append(f"--ranks-per-host-multiple {policy.ranks_per_host_multiple}")
    return f"{number}, of which {members} can form a round ({', '.join(flags)})", flags


def why_no_place(state: State, hostname: str, slot: int) -> str:
    """Explain why a worker that was there no longer has a place in the job."""
    host = next((host for host in state.hosts if host.name == hostname), None)
    if hostname in state.discovery.down:
        return f"host {hostname} is no longer up"
    if host is None:
        return f"host {hostname} is no longer listed"
    if slot >= host.slots:
        return f"host {hostname} has only {counted(host.slots, 'slot')} now"
    if (hostname, None) in state.drained:
        return f"host {hostname} is drained"
    if is_drained(state, hostname, slot):
        return f"slot {slot} of host {hostname} is drained"
    if state.blacklist.is_blacklisted(hostname):
        return f"host {hostname} is blacklisted"
    if hostname in state.cuts.out:
        return f"host {hostname} is left out"
    if flag := why_left_over(state, hostname):
        return f"slot {slot} of host {hostname} is not used: {flag}"
    if (hostname, slot) in server_places(state):
        return f"slot {slot} of host {hostname} is reserved for a parameter server"
    most = counted(state.policy.max_num_proc or len(state.members), "worker")
    return f"the job already has its maximum of {most} ({state.policy.most_flag})"


def _booting(state: State) -> str:
    """List the workers that are booting, and those that still hold a place for which another waits."""
    boots = in_phase(state, WorkerPhase.BOOTING)
    booting = [record.worker for record in boots if record.parameter_server is None]
    text = "".join(f"; {record.who} starting" for record in boots if record.parameter_server is not None)
    text += f"; {names(booting)} starting" if booting else ""
    leaving = in_phase(state, WorkerPhase.LEAVING)
    places = target_places(state) if leaving else {}
    ending = [record.worker for record in leaving if in_target(record, places)]
    return text + (f"; {names(ending)} still exiting" if ending else "")


def _unheard(state: State, now: float) -> str:
    """List the silent hosts that are not given up."""
    silent = [f"{one.hostname} ({now - one.since:.0f} s)" for one in concerning(state) if one.sure and not one.given_up]
    return f"; not responding: {_listed(silent)}" if silent else ""


def _left_for(state: State, workers: Sequence[WorkerId], deadline: float | None, now: float) -> str:
    """List the silent hosts, and how long the job waits for these workers: workers of silent hosts have no limit."""
    silent = {one.hostname for one in concerning(state) if one.sure and not one.given_up}
    left = "" if all(worker.hostname in silent for worker in workers) else _left(deadline, now)
    return f"{_unheard(state, now)}{left}"


def _discovery(state: State, now: float) -> str:
    """Report that discovery fails; the job continues with the known hosts."""
    outage = state.discovery.outage
    if outage is None:
        return ""
    return f"; host discovery has failed for {max(0.0, now - outage.since):.0f} s: {outage.error}"


def _preparing(state: State, now: float) -> str:
    """List the hosts for which the round will end once they have imported the workers' modules."""
    limit = state.policy.max_num_proc
    unready = [preparing_host for preparing_host in state.preparing if not preparing_host.late]
    if not unready or (limit is not None and len(state.members) >= limit):
        return ""
    left = _left(max(one.until for one in unready), now)
    return f"; importing on {_listed([one.hostname for one in unready])} before the workers there join{left}"


def _standby(state: State) -> str:
    standbys = standing_by(state)
    return f"; {names([record.worker for record in standbys])} standing by" if standbys else ""


def _left(deadline: float | None, now: float) -> str:
    return "" if deadline is None else f"; {max(0.0, deadline - now):.0f} s left"
