"""Who is to be where: the usable slots, the places that are wanted, the standbys, and who is in them.

Owns no decision; everything here is derived from the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_driver.core.state import State, WorkerPhase, WorkerRecord, in_phase, most_advanced, silent_hosts
from elastic_driver.hosts import WorkerId
from elastic_driver.words import OnChange

# Places (hostname, slot) in rank order. A mapping, because what is asked of it most is whether a place is among them.
Places = Mapping[tuple[str, int], None]


def usable_slots(state: State) -> int:
    """Slots of all listed hosts that are not blacklisted, at most max-np."""
    out = state.cuts.out
    slots = sum(
        not is_drained(state, host.name, slot)
        for host in state.hosts
        if not state.blacklist.is_blacklisted(host.name) and host.name not in out
        for slot in range(host.slots)
    )
    limit = state.policy.max_num_proc
    return slots if limit is None else min(slots, limit)


def is_drained(state: State, hostname: str, slot: int) -> bool:
    """Whether this place is to be left free."""
    return bool(state.drained) and not state.drained.isdisjoint(((hostname, None), (hostname, slot)))


def all_offered(state: State, workers: Sequence[WorkerId]) -> bool:
    """Whether discovery lists all these workers' places, and nobody has drained one of them."""
    slots = {host.name: host.slots for host in state.hosts}
    return all(
        worker.slot < slots.get(worker.hostname, 0) and not is_drained(state, worker.hostname, worker.slot)
        for worker in workers
    )


def keeps_its_places(state: State) -> bool:
    """Whether all places of the round's members are offered as they were when it was formed."""
    return state.round is None or all_offered(
        state, [worker for worker in state.round.members if worker != state.round.handing_over]
    )


def target_places(state: State) -> Places:
    """The places (hostname, slot) that are to have a rank, in rank order.

    A blacklisted host keeps the places where a worker still lives (siblings of a joiner that failed to boot), and
    gets no others; a host that is left out has none. When max-np leaves too little room, places of members go before
    READY ones, those before booting ones, occupied before free, and free before those whose last worker is still
    leaving (it may never be gone). So a standby that is READY takes the place of a lost member without a decision of
    its own.
    """
    return _choose_places(state)[0]


def standby_places(state: State) -> Places:
    """The places beyond those that are to have a booted worker all the same, in rank order.

    Who stands by already goes on; otherwise hosts without ranks come first, since a host is lost as a whole. Nobody is
    started there before a round runs, whose forming it would slow down.
    """
    return _choose_places(state)[1] if state.policy.num_standby else {}


def wanted_places(state: State) -> Places:
    """The places that are to have a worker, with a rank or standing by."""
    targets, standbys = _choose_places(state)
    return {**targets, **standbys} if standbys else targets


def _choose_places(state: State) -> tuple[Places, Places]:
    closed = (
        {host.name for host in state.hosts if state.blacklist.is_blacklisted(host.name)}
        if state.blacklist.entries
        else set()
    )
    kept = {
        (record.worker.hostname, record.worker.slot)
        for record in (state.workers if closed else ())
        if record.worker.hostname in closed and record.phase is not WorkerPhase.LEAVING
    }
    out = state.cuts.out
    places = [(host.name, slot) for host in state.hosts if host.name not in out for slot in range(host.slots)]
    if closed or state.drained:
        places = [
            place for place in places if (place[0] not in closed or place in kept) and not is_drained(state, *place)
        ]
    limit = state.policy.max_num_proc
    if limit is None or len(places) <= limit:
        return dict.fromkeys(places), {}
    alive: dict[tuple[str, int], int] = {}
    leaving: set[tuple[str, int]] = set()
    for record in state.workers:
        place = (record.worker.hostname, record.worker.slot)
        if record.phase is WorkerPhase.LEAVING:
            leaving.add(place)
        else:
            alive[place] = 0 if record.round_id else 1 if record.phase is WorkerPhase.READY else 2
    urgency = [alive.get(place, 4 if place in leaving else 3) for place in places]
    by_urgency = sorted(range(len(places)), key=lambda index: (urgency[index], index))
    targets = dict.fromkeys(places[index] for index in sorted(by_urgency[:limit]))
    if not state.policy.num_standby:
        return targets, {}
    busy = {hostname for hostname, _ in targets}
    rest = sorted(by_urgency[limit:], key=lambda index: (urgency[index], places[index][0] in busy, index))
    return targets, dict.fromkeys(places[index] for index in sorted(rest[: state.policy.num_standby]))


def launch_places(state: State) -> Places:
    """The places that a round of newly started workers would have now. A leaving worker still holds its place."""
    leaving = {(r.worker.hostname, r.worker.slot) for r in in_phase(state, WorkerPhase.LEAVING)}
    return dict.fromkeys(place for place in target_places(state) if place not in leaving)


def standing_by(state: State) -> tuple[WorkerRecord, ...]:
    """Workers that are READY, have no rank, and are to get one when a member is lost; in order of start."""
    standbys = standby_places(state)
    return tuple(record for record in in_phase(state, WorkerPhase.READY) if in_target(record, standbys))


def in_target(record: WorkerRecord, targets: Places) -> bool:
    """Whether the worker's place is one of these."""
    return (record.worker.hostname, record.worker.slot) in targets


def reachable(state: State) -> tuple[WorkerRecord, ...]:
    """The READY workers that can be told of a round, in order of start: none on hosts that are silent."""
    ready = in_phase(state, WorkerPhase.READY)
    if not state.silent:
        return ready
    silent = silent_hosts(state)
    return tuple(record for record in ready if record.worker.hostname not in silent)


def next_members(state: State) -> tuple[WorkerRecord, ...]:
    """Who would be in a round that was formed now: the READY workers with a place, on hosts that are heard.

    If all who hold the state are on hosts that left, one of them stays a round to hand it to the newcomers. If all are
    on silent hosts, there is nobody who could go on from it.
    """
    targets = target_places(state)
    ready = reachable(state)
    members = tuple(record for record in ready if in_target(record, targets))
    stateful = tuple(record for record in ready if record.has_state)
    if state.silent and not stateful and any(record.has_state for record in in_phase(state, WorkerPhase.READY)):
        return ()
    if not members or not stateful or any(record.has_state for record in members):
        return members
    limit = state.policy.max_num_proc
    # With max-np 1 there is no other way to hand over than to be two for this one round.
    kept = members if limit is None else members[: max(1, limit - 1)]
    return (most_advanced(stateful), *kept)


def next_places(state: State) -> Places:
    """The places of a round that was formed now."""
    if state.policy.on_change is OnChange.RESTART:
        return launch_places(state)
    return dict.fromkeys((record.worker.hostname, record.worker.slot) for record in next_members(state))
