"""assign_ranks and order_hosts, against the dumbest way to do the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_job import naive_slots

from elastic_driver.core.assignment import assign_ranks, order_hosts
from elastic_driver.hosts import Host, WorkerId

pytestmark = pytest.mark.property

HOSTNAMES = ("a", "b", "worker-2", "worker-10", "10.0.0.9", "::1")

workers = st.builds(WorkerId, st.sampled_from(HOSTNAMES), st.integers(0, 3), st.integers(0, 1))
members = st.lists(workers, min_size=1, max_size=12, unique=True)
orders = st.permutations(HOSTNAMES)


@settings(max_examples=300, deadline=None)
@given(members, orders, st.data())
def test_the_six_numbers_are_those_of_a_naive_count(
    given_members: list[WorkerId], order: list[str], data: st.DataObject
) -> None:
    root = data.draw(st.one_of(st.none(), st.sampled_from(given_members)))
    placed = assign_ranks(given_members, host_order=order, root=root)
    by_rank = [one.worker for one in placed]
    assert sorted(by_rank) == sorted(given_members)
    assert [one.slot for one in placed] == naive_slots(by_rank)
    assert root is None or by_rank[0] == root
    # Hosts are contiguous, and in the given order but for the root's, which is first.
    hosts = [worker.hostname for worker in by_rank]
    blocks = [name for index, name in enumerate(hosts) if index == 0 or hosts[index - 1] != name]
    named = sorted(set(hosts), key=lambda name: (root is None or name != root.hostname, order.index(name)))
    assert blocks == named
    # Within a host by slot, but for the root.
    for name in named:
        block = [worker for worker in by_rank if worker.hostname == name and worker != root]
        assert block == sorted(block, key=lambda worker: (worker.slot, worker.attempt))


@settings(max_examples=100, deadline=None)
@given(members, orders, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(given_members: list[WorkerId], order: list[str], random: object) -> None:
    shuffled = list(given_members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    root = given_members[0]
    assert assign_ranks(shuffled, host_order=order, root=root) == assign_ranks(
        given_members, host_order=order, root=root
    )


@settings(max_examples=100, deadline=None)
@given(members, orders, st.data())
def test_a_root_moves_no_local_rank(given_members: list[WorkerId], order: list[str], data: st.DataObject) -> None:
    root = data.draw(st.sampled_from(given_members))
    plain = {one.worker: one.slot.local_rank for one in assign_ranks(given_members, host_order=order, root=None)}
    rooted = {one.worker: one.slot.local_rank for one in assign_ranks(given_members, host_order=order, root=root)}
    assert plain == rooted


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(HOSTNAMES), unique=True),
    st.lists(st.sampled_from(HOSTNAMES), unique=True),
)
def test_known_hosts_keep_their_order_and_come_first(known: list[str], names: list[str]) -> None:
    ordered = [host.name for host in order_hosts(known, [Host(name, 1) for name in names])]
    assert sorted(ordered) == sorted(names)
    kept = [name for name in known if name in names]
    assert ordered[: len(kept)] == kept
    # Asking again with the answer as what is known changes nothing, however the list wanders.
    assert [host.name for host in order_hosts(ordered, [Host(name, 1) for name in reversed(names)])] == ordered
