"""Assertions that hold for every state."""

from __future__ import annotations

from collections import Counter

from elastic_driver.core.assignment import rack_of
from elastic_driver.core.deadlines import next_deadline
from elastic_driver.core.state import ChiefPhase, JobPhase, State, WorkerPhase, in_phase


def check_invariants(state: State) -> None:
    """Raise AssertionError if the state is invalid. For tests, and for the driver's debug mode."""
    policy = state.policy
    assert min(policy.num_proc_multiple, policy.ranks_per_host_multiple) >= 1, "a multiple is below 1"
    places = [
        (record.worker.hostname, record.worker.slot)
        for record in state.workers
        if record.phase is not WorkerPhase.LEAVING
    ]
    assert len(places) == len(set(places)), "two living workers have the same slot"
    assert len(state.members) == len(set(state.members)), "a worker is a member twice"
    kind, roundless = policy.on_change, not policy.on_change.has_rounds
    asks, restarts = kind.asks_for_rounds, kind.restarts
    assert state.launch is None or restarts, "a launch in a job that does not restart its workers"
    assert asks or not state.rounds_before, "rounds before in a job whose workers do not ask for rounds"
    assert state.round is None or roundless or state.round_id > state.rounds_before, (
        "the round has the number of an earlier one"
    )
    waits = (JobPhase.WAITING, JobPhase.RUNNING, JobPhase.RESETTING, JobPhase.ENDED)
    assert state.last_call is None or (restarts and state.phase in waits), "a last call in a phase without one"
    _check_chief(state)
    if roundless:
        assert not state.round_id, "a round in a job without rounds"
    elif state.round is not None:
        assert state.round.round_id > 0
        assert set(state.registry.expected) <= set(state.members), (
            "a report is expected from a worker that is not a member"
        )
        assert state.round.reset_began >= state.began
        limit = policy.max_num_proc
        # A job of one worker has two in the one round in which it moves to another host.
        assert limit is None or len(state.members) <= max(2 * policy.multiple, limit), "more members than max-np"
        assert len(state.members) >= policy.min_num_proc, "fewer members than min-np"
        assert len(state.members) % policy.multiple == 0, "the number of members is not a multiple of the given number"
        on_hosts = Counter(worker.hostname for worker in state.members)
        size = policy.ranks_per_host_multiple
        assert not any(number % size for number in on_hosts.values()), (
            "the ranks of a host are not a multiple of the given number"
        )
    _check_hosts(state)
    for record in in_phase(state, WorkerPhase.MEMBER):
        assert roundless or state.is_member(record.worker), "a worker in phase MEMBER is not a member of the round"
        assert record.round_id == state.round_id
    names = [silence.hostname for silence in state.silent]
    assert len(names) == len(set(names)), "a host is silent twice"
    assert all(silence.sure or not (silence.given_up or silence.told) for silence in state.silent), (
        "a host is given up or reported although its silence is not certain"
    )
    out = state.cuts.out
    assert asks or not out, "a host is left out in a job whose workers do not ask for rounds"
    stays = [record.worker.hostname for record in state.workers if record.phase is not WorkerPhase.LEAVING]
    assert state.ended or out.isdisjoint(stays), "a worker stays on a host that is left out"
    judged = state.setbacks.present.until is not None
    assert roundless or not judged or state.registry.complete, "a round is judged before it is over"
    if roundless:
        idle = not state.ended and not state.workers
        assert not idle or next_deadline(state) is not None, "no worker runs, and there is no deadline"
    elif state.phase is JobPhase.RUNNING:
        assert in_phase(state, WorkerPhase.MEMBER), "a round runs without a living member"
    elif state.phase is not JobPhase.ENDED:
        assert next_deadline(state) is not None, f"{state.phase} without a deadline"
    for record in state.workers:
        assert record.phase is WorkerPhase.MEMBER or not record.running, "a worker trains that is not a member"
        is_leaving = record.phase is WorkerPhase.LEAVING
        assert is_leaving == (record.leaving is not None), (
            "a worker is leaving without a reason, or has one and is not leaving"
        )
        boots = record.phase is WorkerPhase.BOOTING
        assert not asks or not boots or not record.round_id, "a booting worker has had a round"
        assert record.round_id <= state.round_id, "a worker has the number of a future round"


def _check_chief(state: State) -> None:
    number, chief = state.policy.num_parameter_servers, state.chief
    if not number:
        assert chief is None and not state.chiefs, "a chief in a job without parameter servers"  # noqa: PT018
        assert all(record.server is None for record in state.workers), "a server in a job without a chief"
        return
    assert not state.policy.on_change.has_rounds, "servers in a job with rounds"
    there = [record.parameter_server for record in state.workers if record.phase is not WorkerPhase.LEAVING]
    numbers = [index for index in there if index is not None]
    assert len(numbers) == len(set(numbers)), "two parameter servers have the same number"
    assert all(0 <= index < number for index in numbers), "the number of a parameter server is out of range"
    for record in state.workers:
        assert record.server is not None, "a worker is not a server"
        assert bool(record.address) == (record.phase is WorkerPhase.MEMBER), (
            "only a server that has answered has an address"
        )
    assert chief is None or chief.number == state.chiefs, "the chief has the number of an earlier one"
    assert state.ended or chief is None or chief.phase is not ChiefPhase.FAILED, (
        "a failure of the chief has not been handled"
    )
    lost = chief is not None and chief.lost
    whole = len(numbers) == number or state.ended or chief is None or chief.phase is not ChiefPhase.RUNNING
    assert whole or lost, "the chief lacks a parameter server, and its loss is not recorded"


def _check_hosts(state: State) -> None:
    order, listed = state.discovery.order, frozenset(state.hosts)
    going = [departing_host.hostname for departing_host in state.departing]
    assert len(set(going)) == len(going), "a host goes away twice"
    assert all((name, None) in state.drained for name in going), "a host that goes away is not drained"
    assert len({host.name for host in order}) == len(order), "a host is in the order twice"
    assert [host for host in order if host in listed] == list(state.hosts), "the hosts are not in the order"
    racks = [rack_of(host) for host in order]
    blocks = [rack for index, rack in enumerate(racks) if not index or racks[index - 1] != rack]
    assert len(set(blocks)) == len(blocks), "the hosts of a rack are not adjacent"
    known = {host.name for host in order}
    assert all(record.worker.hostname in known for record in state.workers), (
        "a worker is on a host that is not in the order"
    )
