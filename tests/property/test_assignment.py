"""assign_ranks and order_hosts, against the dumbest way to do the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.core.assignment import assign_ranks, order_hosts
from elastic_driver.hosts import Host, WorkerId
from tests.support.extent import examples
from tests.support.fakes.membership_job import naive_slots

pytestmark = pytest.mark.property

HOSTNAMES = ("a", "b", "worker-2", "worker-10", "10.0.0.9", "::1")

workers = st.builds(WorkerId, st.sampled_from(HOSTNAMES), st.integers(0, 3), st.integers(0, 1))
members = st.lists(workers, min_size=1, max_size=12, unique=True)
labels = st.sampled_from(((), ("rack=1",), ("rack=2", "spot"), ("protected", "rack=3")))
# In any order of the hosts, and then as racks have it.
orders = st.permutations(HOSTNAMES).flatmap(
    lambda names: st.tuples(*(st.builds(Host, st.just(name), st.just(4), labels) for name in names))
)
ordered = orders.map(lambda hosts: order_hosts((), hosts))


@settings(max_examples=examples(300), deadline=None)
@given(members, ordered, st.data())
def test_the_six_numbers_are_those_of_a_naive_count(
    given_members: list[WorkerId], order: tuple[Host, ...], data: st.DataObject
) -> None:
    root = data.draw(st.one_of(st.none(), st.sampled_from(given_members)))
    placed = assign_ranks(given_members, host_order=order, root=root)
    by_rank = [one.worker for one in placed]
    assert sorted(by_rank) == sorted(given_members)
    assert [one.slot for one in placed] == naive_slots(by_rank)
    assert root is None or by_rank[0] == root
    # Hosts are contiguous, and in the given order but for the root's rack, and in that for the root's host.
    hosts = [worker.hostname for worker in by_rank]
    blocks = [name for index, name in enumerate(hosts) if index == 0 or hosts[index - 1] != name]
    racks = {host.name: host.rack or host for host in order}
    position = [host.name for host in order]
    first = root.hostname if root is not None else ""
    named = (
        sorted(set(hosts), key=lambda name: (racks[name] != racks.get(first), name != first, position.index(name)))
        if first
        else sorted(set(hosts), key=position.index)
    )
    assert blocks == named
    in_racks = [racks[name] for name in blocks]
    assert all(
        in_racks[i] != rack or in_racks[i + 1] == rack
        for i, rack in enumerate(in_racks[:-2])
        if rack in in_racks[i + 2 :]
    )
    # Within a host by slot, but for the root.
    for name in named:
        block = [worker for worker in by_rank if worker.hostname == name and worker != root]
        assert block == sorted(block, key=lambda worker: (worker.slot, worker.attempt))


@settings(max_examples=examples(100), deadline=None)
@given(members, ordered, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(
    given_members: list[WorkerId], order: tuple[Host, ...], random: object
) -> None:
    shuffled = list(given_members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    root = given_members[0]
    assert assign_ranks(shuffled, host_order=order, root=root) == assign_ranks(
        given_members, host_order=order, root=root
    )


@settings(max_examples=examples(100), deadline=None)
@given(members, ordered, st.data())
def test_a_root_moves_no_local_rank(
    given_members: list[WorkerId], order: tuple[Host, ...], data: st.DataObject
) -> None:
    root = data.draw(st.sampled_from(given_members))
    plain = {one.worker: one.slot.local_rank for one in assign_ranks(given_members, host_order=order, root=None)}
    rooted = {one.worker: one.slot.local_rank for one in assign_ranks(given_members, host_order=order, root=root)}
    assert plain == rooted


@settings(max_examples=examples(300), deadline=None)
@given(orders, st.data())
def test_known_hosts_keep_their_order_and_come_first_in_their_rack(
    listed: tuple[Host, ...], data: st.DataObject
) -> None:
    known = order_hosts((), data.draw(orders)[: data.draw(st.integers(0, len(HOSTNAMES)))])
    # Labels stay what they are: a host that changes its rack moves.
    labels = {host.name: host.labels for host in known}
    now = [Host(host.name, host.slots, labels.get(host.name, host.labels)) for host in listed]
    now = now[: data.draw(st.integers(0, len(now)))]
    given_order = order_hosts(known, now)
    assert sorted(host.name for host in given_order) == sorted(host.name for host in now)
    kept = [host for host in known if host in now]
    assert [host for host in given_order if host in kept] == kept
    for host in given_order:
        # A newcomer stands behind all of its rack that were there, and behind all if it is of no known rack.
        ahead = given_order[: given_order.index(host)]
        mates = [old for old in kept if old.rack and old.rack == host.rack] or kept
        assert host in kept or set(mates) <= set(ahead)
    # Asking again with the answer as what is known changes nothing, however the list wanders.
    assert order_hosts(given_order, list(reversed(now))) == given_order
