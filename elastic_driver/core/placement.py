"""Placement: the usable slots, the wanted places, the standbys, and the workers in them.

Owns no decision; everything here is derived from the state. Two multiples may restrict the choice: the number of ranks
on each host is a multiple of ``ranks_per_host_multiple``, and the size of the world one of ``num_proc_multiple``. So
places and workers are chosen in groups of ``ranks_per_host_multiple`` on one host (:func:`_whole_groups`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from elastic_driver.core.state import (
    ChiefPhase,
    JobPhase,
    Policy,
    State,
    WorkerPhase,
    WorkerRecord,
    in_phase,
    leaves_by,
    most_advanced,
    parameter_servers,
    protected_hosts,
    silent_hosts,
    still_preparing,
)
from elastic_driver.hosts import Host, WorkerId

# Places (hostname, slot) in rank order. A mapping, because it is mostly used to look up whether a place is included.
Places = Mapping[tuple[str, int], None]


def usable_slots(state: State) -> int:
    """Return the number of usable slots on all listed hosts, at most max-np, reduced to what the multiples allow."""
    policy = state.policy
    slots = sum(_floor(free_slots(state, host), policy.ranks_per_host_multiple) for host in state.hosts)
    if policy.has_chief:
        slots = max(0, slots - _slots_of_servers(state))
    limit = policy.max_num_proc
    return _floor(slots if limit is None else min(slots, limit), policy.multiple)


def _slots_of_servers(state: State) -> int:
    """Return how many of the usable slots parameter servers have, or are to have."""
    # While the chief uses a server whose place is gone, that server takes no other place.
    elsewhere = (r for r in parameter_servers(state).values() if not all_offered(state, (r.worker,)))
    return state.policy.num_parameter_servers - (sum(1 for _ in elsewhere) if state.chief is not None else 0)


def server_places(state: State) -> Mapping[tuple[str, int], int]:
    """Return the places of the parameter servers, with the index of each server.

    A server keeps its place. One that is lost while the chief uses it is not replaced: its variables are gone, and the
    chief continues with no other. The others go to places without a worker: on protected hosts first, then in the order
    of the hosts. If there are none, workers make room, the last ones first.
    """
    number = state.policy.num_parameter_servers
    if not number:
        return {}
    there = parameter_servers(state)
    places = {(record.worker.hostname, record.worker.slot): index for index, record in there.items()}
    lacking = [index for index in range(number) if index not in there]
    if not lacking or (state.chief is not None and state.chief.phase is ChiefPhase.RUNNING):
        return places
    offered = [place for place in _offered_places(state, frozenset()) if place not in places]
    closed = {host.name for host in state.hosts if not free_slots(state, host)}
    gone = {silence.hostname for silence in state.silent if silence.given_up}
    protected = protected_hosts(state)
    living: set[tuple[str, int]] = set()
    leaving: set[tuple[str, int]] = set()
    for record in state.workers:
        held = leaving if record.phase is WorkerPhase.LEAVING else living
        held.add((record.worker.hostname, record.worker.slot))

    def rank(index: int) -> tuple[bool, bool, bool, bool, int]:
        name, _ = place = offered[index]
        last_first = -index if place in living else index
        return name in gone, place in living, place in leaving, name not in protected, last_first

    order = sorted((index for index in range(len(offered)) if offered[index][0] not in closed), key=rank)
    return places | {offered[at]: index for at, index in zip(order, lacking, strict=False)}


def free_slots(state: State, host: Host) -> int:
    """Return how many slots of a listed host may be used: none while it is blacklisted, or left out."""
    if state.blacklist.is_blacklisted(host.name) or host.name in state.cuts.out:
        return 0
    return (
        host.slots if not state.drained else sum(not is_drained(state, host.name, slot) for slot in range(host.slots))
    )


def _floor(number: int, multiple: int) -> int:
    return number - number % multiple


def is_drained(state: State, hostname: str, slot: int) -> bool:
    """Return whether this place is to be left free."""
    return bool(state.drained) and not state.drained.isdisjoint(((hostname, None), (hostname, slot)))


def all_offered(state: State, workers: Sequence[WorkerId]) -> bool:
    """Return whether discovery lists all these workers' places, and none of them is drained."""
    slots = state.discovery.slots
    return all(
        worker.slot < slots.get(worker.hostname, 0) and not is_drained(state, worker.hostname, worker.slot)
        for worker in workers
    )


def is_wanted(state: State, record: WorkerRecord) -> bool:
    """Return whether the place of a living worker that is not leaving is to have a worker."""
    policy, worker = state.policy, record.worker
    if policy.has_chief:
        return has_place(state, record)
    limit = policy.max_num_proc
    if policy.multiple > 1 or (limit is not None and state.discovery.total_slots > limit):
        return in_target(record, wanted_places(state))
    # All places are wanted, including those of living workers on a blacklisted host: to compute them for each of
    # thousands of ending workers would take minutes.
    return worker.hostname not in state.cuts.out and all_offered(state, (worker,))


def keeps_its_places(state: State) -> bool:
    """Return whether all places of the round's members are offered as they were when it was formed."""
    if state.round is None:
        return True
    leaves = state.round.handing_over
    stay = [worker for worker in state.round.members if worker != leaves]
    if leaves is not None and state.policy.ranks_per_host_multiple > 1:
        # Several workers of one host hand over.
        stay = [worker for worker in stay if worker.hostname != leaves.hostname]
    return all_offered(state, stay)


def target_places(state: State) -> Places:
    """Return the places (hostname, slot) that are to have a rank, in rank order.

    A blacklisted host keeps the places with a living worker (siblings of a joiner that failed to boot), and gets no
    others; a host that is left out has none. If max-np leaves too little room, places of members precede READY ones,
    those precede booting ones, occupied precede free, and free precede those whose last worker is still leaving (it may
    never end). So a READY standby takes the place of a lost member without an extra decision. The same order applies if
    a multiple leaves some over.
    """
    return _choose_places(state)[0]


def standby_places(state: State) -> Places:
    """Return the further places that are to have a booted worker all the same, in rank order.

    Present standbys stay; otherwise hosts without ranks come first, since a host is lost as a whole. No standby is
    started before a round runs, since that would slow its formation. A living worker in a place that only a multiple
    leaves without a rank stands by too: it is needed as soon as others come.
    """
    return _choose_places(state)[1] if state.policy.num_standby or state.policy.multiple > 1 else {}


def wanted_places(state: State) -> Places:
    """Return the places that are to have a worker, with a rank or standing by."""
    targets, standbys = _choose_places(state)
    servers = server_places(state)
    return {**dict.fromkeys(servers), **targets, **standbys} if standbys or servers else targets


def _choose_places(state: State, *, but: Set[tuple[str, int]] = frozenset()) -> tuple[Places, Places]:
    policy = state.policy
    servers = server_places(state)
    places = _offered_places(state, but | servers.keys() if servers else but)
    limit = policy.max_num_proc
    fits = limit is None or len(places) <= limit
    if fits and _is_whole(policy, [hostname for hostname, _ in places]):
        return dict.fromkeys(places), {}
    alive: dict[tuple[str, int], int] = {}
    leaving: set[tuple[str, int]] = set()
    for record in state.workers:
        place = (record.worker.hostname, record.worker.slot)
        if record.phase is WorkerPhase.LEAVING:
            leaving.add(place)
        else:
            # A standby since an earlier round has that round's number. Servers have no rounds.
            is_member = bool(record.address) or (record.round_id and record.round_id == state.round_id)
            alive[place] = 0 if is_member else 1 if record.phase is WorkerPhase.READY else 2
    urgency = [alive.get(place, 4 if place in leaving else 3) for place in places]
    by_urgency = sorted(range(len(places)), key=lambda index: (urgency[index], index))
    chosen = by_urgency[:limit]
    if policy.multiple > 1:
        hosts = [hostname for hostname, _ in places]
        chosen = _whole_groups(policy, hosts, urgency, limit)
    targets = dict.fromkeys(places[index] for index in sorted(chosen))
    standbys: list[int] = []
    if policy.num_standby and not fits and policy.on_change.asks_for_rounds:
        busy = {hostname for hostname, _ in targets}
        rest = [index for index in by_urgency if places[index] not in targets]
        rest.sort(key=lambda index: (urgency[index], places[index][0] in busy, index))
        standbys = rest[: policy.num_standby]
    if policy.multiple > 1 and policy.on_change.asks_for_rounds:
        # Living workers that are left over may stay while max-np has room for them.
        room = len(places) if limit is None else limit - len(targets)
        left = [index for index in by_urgency if places[index] in alive and places[index] not in targets]
        standbys += [index for index in left if index not in standbys][:room]
    return targets, dict.fromkeys(places[index] for index in sorted(standbys))


def _offered_places(state: State, but: Set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return all places that may have a worker, except ``but``: of a blacklisted host only those with a living one."""
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
    if closed or state.drained or but:
        places = [
            place
            for place in places
            if (place[0] not in closed or place in kept) and not is_drained(state, *place) and place not in but
        ]
    return places


def left_over(state: State) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the slots by host that the multiples leave unused: that of each host, and that of the world."""
    policy = state.policy
    if policy.multiple == 1:
        return {}, {}
    places = _offered_places(state, frozenset())
    if _is_whole(policy, [hostname for hostname, _ in places]):
        return {}, {}
    offered = Counter(hostname for hostname, _ in places)
    of_hosts = {
        hostname: over for hostname, number in offered.items() if (over := number % policy.ranks_per_host_multiple)
    }
    whole = offered - Counter(of_hosts)
    if policy.max_num_proc is not None and whole.total() >= policy.max_num_proc:
        return of_hosts, {}
    return of_hosts, whole - Counter(hostname for hostname, _ in target_places(state))


def why_left_over(state: State, hostname: str) -> str:
    """Return the flag that leaves slots of this host unused; "" for none."""
    of_hosts, of_world = left_over(state)
    if hostname in of_hosts:
        return f"--ranks-per-host-multiple {state.policy.ranks_per_host_multiple}"
    return f"--np-multiple {state.policy.num_proc_multiple}" if hostname in of_world else ""


def _is_whole(policy: Policy, hosts: Sequence[str]) -> bool:
    """Return whether places or workers on these hosts, one each, satisfy the multiples as they are."""
    if policy.multiple == 1:
        return True
    if len(hosts) % policy.multiple:
        return False
    size = policy.ranks_per_host_multiple
    return size == 1 or not any(number % size for number in Counter(hosts).values())


def _whole_groups(policy: Policy, hosts: Sequence[str], urgency: Sequence[Any], limit: int | None) -> list[int]:
    """Choose among places or workers, at most ``limit``: whole groups of a host, and a multiple in all.

    Args:
        policy: has the multiples.
        hosts: the host of each of them.
        urgency: the urgency of each of them; the lowest go first, and among equals those that come first.
        limit: the most that may be chosen; None for no bound.
    """
    size = policy.ranks_per_host_multiple
    of_host: dict[str, list[int]] = {}
    for index in sorted(range(len(hosts)), key=lambda index: (urgency[index], index)):
        of_host.setdefault(hosts[index], []).append(index)
    groups = [
        indices[start : start + size]
        for indices in of_host.values()
        for start in range(0, _floor(len(indices), size), size)
    ]
    groups.sort(key=lambda group: ([urgency[index] for index in group], group))
    most = len(groups) * size if limit is None else min(len(groups) * size, limit)
    return [index for group in groups[: _floor(most, policy.multiple) // size] for index in group]


def launch_places(state: State) -> Places:
    """Return the places of a round of newly started workers at this moment. A leaving worker still holds its place.

    A host that still prepares has none, as all others would wait for its imports, unless too few places are left.
    """
    but = {(r.worker.hostname, r.worker.slot) for r in in_phase(state, WorkerPhase.LEAVING)}
    unready = still_preparing(state)
    if unready and state.phase in (JobPhase.RUNNING, JobPhase.RESETTING):
        busy = {record.worker.hostname for record in state.workers}
        others = {
            (host.name, slot)
            for host in state.hosts
            if host.name in unready and host.name not in busy
            for slot in range(host.slots)
        }
        places = _choose_places(state, but=but | others)[0]
        if len(places) >= state.policy.min_num_proc:
            return places
    return _choose_places(state, but=but)[0]


def trains_until_replaced(state: State, off: Sequence[WorkerRecord], fit: Sequence[WorkerRecord]) -> bool:
    """Return whether members whose places are gone train on, as there are too few for a round without them.

    Only if their machines go away: they train until then, or until others have come.

    Args:
        state: the job.
        off: the members without a place.
        fit: the workers that could form a round now, members or not.
    """
    if not off or len(fit) >= state.policy.min_num_proc:
        return False
    return all(leaves_by(state, record.worker.hostname) is not None for record in off)


def standing_by(state: State) -> tuple[WorkerRecord, ...]:
    """Return the READY workers without a rank that are to replace lost members; in order of start."""
    standbys = standby_places(state)
    return tuple(record for record in in_phase(state, WorkerPhase.READY) if in_target(record, standbys))


def has_place(state: State, record: WorkerRecord) -> bool:
    """Return whether a worker of a job with a chief, or a parameter server, still has its place."""
    if record.parameter_server is not None:
        return all_offered(state, (record.worker,))
    return in_target(record, target_places(state))


def in_target(record: WorkerRecord, targets: Places) -> bool:
    """Return whether the worker's place is one of these."""
    return (record.worker.hostname, record.worker.slot) in targets


def reachable(state: State) -> tuple[WorkerRecord, ...]:
    """Return the READY workers that can be notified of a round, in order of start: none on silent hosts."""
    ready = in_phase(state, WorkerPhase.READY)
    if not state.silent:
        return ready
    silent = silent_hosts(state)
    return tuple(record for record in ready if record.worker.hostname not in silent)


def next_members(state: State) -> tuple[WorkerRecord, ...]:
    """Return the members of a round formed now: the READY workers with a place, on hosts that are heard.

    If all workers with the state are on hosts that left, one of them stays for a round to hand it over to new workers.
    With multiples, as many workers of its host stay as form a group; if they are not ready, no round is possible now.
    If all are on silent hosts, no worker can continue from the state.
    """
    ready = reachable(state)
    members = that_fit(state, ready)
    stateful = tuple(record for record in ready if record.has_state)
    if state.silent and not stateful and any(record.has_state for record in in_phase(state, WorkerPhase.READY)):
        return ()
    if not members or not stateful or any(record.has_state for record in members):
        return members
    root = most_advanced(state, stateful)
    limit = state.policy.max_num_proc
    if state.policy.multiple > 1:
        return _handover(state, root, ready, members)
    # With max-np 1 the only way to hand over is to be two for this one round.
    kept = members if limit is None else members[: max(1, limit - 1)]
    return (root, *kept)


def that_fit(state: State, records: Sequence[WorkerRecord]) -> tuple[WorkerRecord, ...]:
    """Return the workers that could form a round: they have a place, and a multiple leaves none of them over."""
    targets = target_places(state)
    placed = tuple(record for record in records if in_target(record, targets))
    if _is_whole(state.policy, [record.worker.hostname for record in placed]):
        return placed
    position = {place: index for index, place in enumerate(targets)}
    return _as_many_as_fit(state.policy, sorted(placed, key=lambda r: position[r.worker.hostname, r.worker.slot]), None)


def _as_many_as_fit(policy: Policy, records: Sequence[WorkerRecord], limit: int | None) -> tuple[WorkerRecord, ...]:
    # Members of a running round, and workers with the state, or the most of it, are left over last.
    urgency = [
        (record.phase is not WorkerPhase.MEMBER, not record.has_state, -record.commits, -record.round_id)
        for record in records
    ]
    chosen = _whole_groups(policy, [record.worker.hostname for record in records], urgency, limit)
    return tuple(records[index] for index in sorted(chosen))


def _handover(
    state: State, root: WorkerRecord, ready: Sequence[WorkerRecord], members: tuple[WorkerRecord, ...]
) -> tuple[WorkerRecord, ...]:
    """Return the members of the one round in which some of the root's host hand over to new workers, as a multiple."""
    policy, size = state.policy, state.policy.ranks_per_host_multiple
    others = [r for r in ready if r.worker.hostname == root.worker.hostname and r is not root and r not in members]
    others.sort(key=lambda record: (not record.has_state, -record.commits))
    if len(others) < size - 1:
        return ()
    room = len(members) + size
    if policy.max_num_proc is not None:
        room = min(room, policy.max_num_proc)
    # In a job of one group the only way to hand over is to be two groups for this one round.
    room = max(_floor(room, policy.multiple), policy.multiple + (size if policy.multiple == size else 0))
    newcomers = _as_many_as_fit(replace(policy, num_proc_multiple=1), members, room - size)
    return (root, *others[: size - 1], *newcomers)


def first_root(state: State, workers: Iterable[WorkerId]) -> WorkerId | None:
    """Return the worker for rank 0 if none has any state: one on a protected host. None leaves the order as it is."""
    protected = protected_hosts(state)
    position = {host.name: index for index, host in enumerate(state.discovery.order)} if protected else {}
    return min(
        (worker for worker in workers if worker.hostname in protected),
        key=lambda worker: (position[worker.hostname], worker.slot),
        default=None,
    )


def next_places(state: State) -> Places:
    """Return the places of a round formed now."""
    if state.policy.on_change.restarts:
        return launch_places(state)
    return dict.fromkeys((record.worker.hostname, record.worker.slot) for record in next_members(state))
