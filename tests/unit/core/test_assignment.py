"""Order of hosts, and Horovod's six numbers."""

from __future__ import annotations

import pytest
from membership_job import naive_slots, worker_id

from elastic_driver.core.assignment import Placed, assign_ranks, order_hosts
from elastic_driver.hosts import Host, SlotInfo

pytestmark = pytest.mark.unit


def names(known: list[str], listed: list[str]) -> list[str]:
    return [host.name for host in order_hosts(known, [Host(name, 1) for name in listed])]


def placed(*workers: str, order: list[str], root: str | None = None) -> tuple[Placed, ...]:
    members = [worker_id(worker) for worker in workers]
    return assign_ranks(members, host_order=order, root=worker_id(root) if root else None)


def ranks(given: tuple[Placed, ...]) -> list[str]:
    return [str(one.worker) for one in given]


def test_the_example_of_the_protocol() -> None:
    """worker-0:1, worker-1:2, as Horovod numbers them."""
    given = placed("worker-0[0]", "worker-1[0]", "worker-1[1]", order=["worker-0", "worker-1"])
    assert [one.slot for one in given] == [
        SlotInfo(rank=0, size=3, local_rank=0, local_size=1, cross_rank=0, cross_size=2),
        SlotInfo(rank=1, size=3, local_rank=0, local_size=2, cross_rank=1, cross_size=2),
        SlotInfo(rank=2, size=3, local_rank=1, local_size=2, cross_rank=0, cross_size=1),
    ]


def test_cross_ranks_count_only_hosts_that_have_the_local_rank() -> None:
    given = placed("a[0]", "b[0]", "b[1]", "c[0]", "d[0]", "d[1]", order=["a", "b", "c", "d"])
    second = [one for one in given if one.slot.local_rank == 1]
    assert [(str(one.worker), one.slot.cross_rank, one.slot.cross_size) for one in second] == [
        ("b[1]", 0, 2),
        ("d[1]", 1, 2),
    ]


def test_ranks_run_over_hosts_in_their_order_whatever_the_order_of_workers() -> None:
    assert ranks(placed("b[1]", "a[0]", "b[0]", order=["b", "a"])) == ["b[0]", "b[1]", "a[0]"]


def test_local_rank_has_no_holes_where_slots_do() -> None:
    given = placed("a[1]", "a[3]", order=["a"])
    assert [(str(one.worker), one.slot.local_rank, one.slot.local_size) for one in given] == [
        ("a[1]", 0, 2),
        ("a[3]", 1, 2),
    ]


def test_the_root_has_rank_0_and_its_host_comes_first() -> None:
    given = placed("a[0]", "a[1]", "b[0]", "b[1]", "c[0]", order=["a", "b", "c"], root="b[1]")
    assert ranks(given) == ["b[1]", "b[0]", "a[0]", "a[1]", "c[0]"]
    assert [one.slot for one in given] == naive_slots([one.worker for one in given])


def test_the_root_keeps_its_local_rank() -> None:
    given = placed("a[0]", "a[1]", order=["a"], root="a[1]")
    assert [(str(one.worker), one.slot.rank, one.slot.local_rank) for one in given] == [("a[1]", 0, 1), ("a[0]", 1, 0)]


def test_one_worker_and_none() -> None:
    (alone,) = placed("a[7]", order=["a"], root="a[7]")
    assert alone.slot == SlotInfo(0, 1, 0, 1, 0, 1)
    assert placed(order=["a"]) == ()


def test_known_hosts_keep_their_order_and_new_ones_come_behind() -> None:
    assert names(["c", "a"], ["a", "b", "c"]) == ["c", "a", "b"]
    assert names(["c", "a"], ["x", "a"]) == ["a", "x"]
    assert names([], ["b", "a"]) == ["b", "a"], "who comes first is the lister's choice"
    assert names(["a"], []) == []


def test_names_that_differ_in_numbers_are_in_the_order_of_these() -> None:
    assert names([], ["w-1", "w-10", "w-2", "w-9"]) == ["w-1", "w-2", "w-9", "w-10"]
    assert names([], ["r2-w1", "r1-w10", "r1-w9"]) == ["r1-w9", "r1-w10", "r2-w1"]
    assert names([], ["10.0.0.10", "10.0.0.9"]) == ["10.0.0.9", "10.0.0.10"]
    assert names([], ["gpu-2", "cpu-7", "gpu-1", "cpu-3"]) == ["gpu-1", "gpu-2", "cpu-3", "cpu-7"]
    # Equal numbers, unequal texts: still one order.
    assert names([], ["w01", "w1"]) == names([], ["w1", "w01"]) == ["w01", "w1"]
    assert names(["w-10"], ["w-1", "w-10"]) == ["w-10", "w-1"], "a newcomer takes no rank from who was there"


def test_slots_come_from_the_new_list() -> None:
    assert order_hosts(["a"], [Host("a", 4)]) == (Host("a", 4),)
