"""Order of hosts, and Horovod's six numbers."""

from __future__ import annotations

import pytest

from elastic_driver.core.assignment import Placed, assign_ranks, order_hosts
from elastic_driver.hosts import Host, SlotInfo, parse_host
from tests.support.fakes.membership_job import naive_slots, worker_id

pytestmark = pytest.mark.unit


def hosts(texts: list[str]) -> list[Host]:
    return [parse_host(text, default_slots=1) for text in texts]


def names(known: list[str], listed: list[str], *, staying: tuple[str, ...] = ()) -> list[str]:
    return [host.name for host in order_hosts(hosts(known), hosts(listed), staying=staying)]


def placed(*workers: str, order: list[str], root: str | None = None) -> tuple[Placed, ...]:
    members = [worker_id(worker) for worker in workers]
    return assign_ranks(members, host_order=hosts(order), root=worker_id(root) if root else None)


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


def test_the_lists_order_is_taken_as_it_is() -> None:
    assert names([], ["w-1", "w-10", "w-2"]) == ["w-1", "w-10", "w-2"]
    assert names(["w-2"], ["w-10", "w-1", "w-2"]) == ["w-2", "w-10", "w-1"]


def test_who_is_no_longer_listed_keeps_its_place_only_if_it_is_to_stay() -> None:
    assert names(["a", "b", "c"], ["c", "a", "d"]) == ["a", "c", "d"]
    assert names(["a", "b", "c"], ["c", "a", "d"], staying=("b", "x")) == ["a", "b", "c", "d"]


def test_hosts_of_a_rack_are_next_to_each_other_in_the_order_of_their_first() -> None:
    listed = ["a rack=1", "b rack=2", "c", "d rack=1", "e rack=2 spot", "f"]
    assert names([], listed) == ["a", "d", "b", "e", "c", "f"]


def test_a_newcomer_of_a_rack_comes_behind_its_last_host() -> None:
    known = ["a rack=1", "b rack=1", "c rack=2", "d"]
    assert names(known, [*known, "e rack=1", "f rack=3", "g rack=2"]) == ["a", "b", "e", "c", "g", "d", "f"]


def test_the_first_host_of_a_rack_may_go_and_nobody_else_moves() -> None:
    known = ["a rack=1", "c rack=1", "b rack=2", "d"]
    assert names(known, known[1:]) == ["c", "b", "d"]


def test_a_host_that_is_away_and_stays_keeps_its_place_in_its_rack() -> None:
    known = ["a rack=1", "b rack=1", "c rack=1", "d"]
    away = order_hosts(hosts(known), hosts(["a rack=1", "c rack=1", "d", "e rack=1"]), staying=("b",))
    assert [host.name for host in away] == ["a", "b", "c", "e", "d"]
    assert [host.name for host in order_hosts(away, hosts([*known, "e rack=1"]))] == ["a", "b", "c", "e", "d"]


def test_a_host_whose_rack_is_another_now_moves_there() -> None:
    known = ["a rack=1", "b rack=1", "c rack=2"]
    assert names(known, ["a rack=2", "b rack=1", "c rack=2"]) == ["a", "c", "b"]


def test_the_rack_of_the_root_comes_first_with_its_host_before_the_others() -> None:
    order = ["a rack=1", "b rack=1", "c rack=2", "d rack=2", "e"]
    given = placed("a[0]", "b[0]", "c[0]", "d[0]", "d[1]", "e[0]", order=order, root="d[1]")
    assert ranks(given) == ["d[1]", "d[0]", "c[0]", "a[0]", "b[0]", "e[0]"]
    assert [one.slot for one in given] == naive_slots([one.worker for one in given])


def test_slots_and_labels_come_from_the_new_list() -> None:
    assert order_hosts([Host("a", 2, ("spot",))], [Host("a", 4)]) == (Host("a", 4),)
