"""The core of the elastic coordinator: who takes which closure, who is a worker, and what an error does."""

from __future__ import annotations

import pytest

from elastic_driver.tensorflow.schedule import Phase, Schedule

pytestmark = pytest.mark.unit


@pytest.fixture
def schedule() -> Schedule[str]:
    return Schedule({0: "a:1", 1: "b:1"})


def join(schedule: Schedule[str], address: str, server: str = "s") -> int:
    """A worker that has answered, and that the cluster was told of."""
    member = schedule.add(address)
    schedule.told(schedule.wanted())
    schedule.connected(member.index, server)
    return member.index


def test_closures_are_taken_in_order(schedule: Schedule[str]) -> None:
    for ticket in "xyz":
        schedule.put(ticket)
    assert [schedule.take(0), schedule.take(1)] == ["x", "y"]
    schedule.finished(1)
    assert schedule.take(1) == "z"
    assert not schedule.is_done
    schedule.finished(0)
    schedule.finished(1)
    assert schedule.is_done


def test_a_newcomer_makes_what_it_needs_before_it_takes_a_closure(schedule: Schedule[str]) -> None:
    schedule.put("x")
    index = join(schedule, "c:1")
    assert index == 2
    assert schedule.build(index, "iterator")
    assert schedule.take(index) == "iterator"
    assert not schedule.is_done
    schedule.built(index)
    assert schedule.take(index) == "x"


def test_one_that_joins_takes_nothing_before_the_cluster_knows_it(schedule: Schedule[str]) -> None:
    schedule.put("x")
    member = schedule.add("c:1")
    assert member.phase is Phase.JOINING
    assert not schedule.has_work(member.index)
    assert not schedule.build(member.index, "iterator"), "it makes all of it when it is connected"
    with pytest.raises(ValueError, match="does not belong to the cluster"):
        schedule.connected(member.index, "s")
    schedule.abandoned(member.index)
    assert schedule.find("c:1") is None
    assert join(schedule, "c:1") == 3, "nobody else gets an index that was given"


def test_one_that_is_removed_ends_its_closure_first(schedule: Schedule[str]) -> None:
    for ticket in "xy":
        schedule.put(ticket)
    schedule.take(0)
    assert schedule.remove("a:1").phase is Phase.STOPPING
    assert not schedule.has_work(0)
    schedule.finished(0)
    assert schedule.member(0).phase is Phase.STOPPED
    assert schedule.take(1) == "y"
    with pytest.raises(KeyError):
        schedule.remove("nowhere:1")


def test_one_that_is_idle_stops_at_once(schedule: Schedule[str]) -> None:
    assert schedule.remove("a:1").phase is Phase.STOPPED


def test_one_that_is_wanted_again_before_it_has_stopped_goes_on(schedule: Schedule[str]) -> None:
    for ticket in "xy":
        schedule.put(ticket)
    schedule.take(0)
    schedule.remove("a:1")
    assert schedule.add("a:1").phase is Phase.RUNNING
    schedule.finished(0)
    assert schedule.take(0) == "y"


def test_one_that_is_wanted_again_makes_what_it_had_to(schedule: Schedule[str]) -> None:
    schedule.put("x")
    schedule.take(0)
    schedule.build(0, "iterator")
    schedule.remove("a:1")
    schedule.add("a:1")
    schedule.finished(0)
    assert schedule.take(0) == "iterator"


def test_a_stopped_one_is_kept_until_the_cluster_changes(schedule: Schedule[str]) -> None:
    schedule.remove("a:1")
    member = schedule.add("a:1")
    assert (member.index, member.phase, member.belongs) == (0, Phase.JOINING, True)
    schedule.connected(0, "s")
    schedule.remove("a:1")
    join(schedule, "c:1")
    assert schedule.find("a:1") is None
    assert join(schedule, "a:1") == 3
    assert [member.index for member in schedule.members] == [1, 2, 3]


def test_a_lost_one_gives_its_closure_back_and_keeps_its_index(schedule: Schedule[str]) -> None:
    for ticket in "xy":
        schedule.put(ticket)
    schedule.take(0)
    schedule.build(0, "iterator")
    with pytest.raises(ValueError, match="has work in progress"):
        schedule.lost(0)
    assert schedule.put_back(0) is None
    schedule.lost(0)
    assert schedule.member(0).phase is Phase.LOST
    assert schedule.take(1) == "x", "what was begun is done before what waits"
    assert schedule.wanted(silent=(0,)) == {1: "b:1"}
    schedule.told({1})
    assert [member.index for member in schedule.members] == [0, 1], "it may come back"
    schedule.told(schedule.wanted())
    schedule.connected(0, "another process")
    assert schedule.take(0) == "y", "the iterator is made anew by who knows of it"


def test_a_lost_one_that_nobody_wants_has_stopped(schedule: Schedule[str]) -> None:
    schedule.lost(0)
    assert schedule.remove("a:1").phase is Phase.STOPPED
    schedule.put("x")
    schedule.take(1)
    schedule.remove("b:1")
    schedule.put_back(1)
    schedule.lost(1)
    assert schedule.member(1).phase is Phase.STOPPED
    assert schedule.waiting == 1


def test_an_error_ends_what_runs_and_cancels_what_waits(schedule: Schedule[str]) -> None:
    for ticket in "xyz":
        schedule.put(ticket)
    schedule.take(0)
    schedule.take(1)
    error = RuntimeError("of x")
    schedule.failed(0, error)
    assert schedule.begin_raising() == (1,)
    assert schedule.take(0) is None, "nobody takes anything now"
    with pytest.raises(ValueError, match="closures are running"):
        schedule.end_raising()
    assert schedule.put_back(1) == "y", "it is canceled, and not put back"
    assert schedule.end_raising() == (error, ("z",))
    assert schedule.is_done
    assert schedule.error is None
    schedule.put("w")
    assert schedule.take(0) == "w"


def test_an_error_whose_raising_is_interrupted_is_raised_later(schedule: Schedule[str]) -> None:
    for ticket in "xyz":
        schedule.put(ticket)
    schedule.take(0)
    schedule.take(1)
    schedule.failed(0, error := RuntimeError("of x"))
    schedule.begin_raising()
    schedule.postpone_raising()
    assert schedule.take(0) == "z", "nobody is kept from work"
    schedule.put_back(0)
    schedule.put_back(1)
    assert schedule.begin_raising() == ()
    assert schedule.end_raising()[0] is error


def test_the_first_error_counts(schedule: Schedule[str]) -> None:
    for ticket in "xy":
        schedule.put(ticket)
    first = ValueError("first")
    schedule.take(0)
    schedule.take(1)
    schedule.failed(1, first)
    schedule.failed(0, RuntimeError("second"))
    schedule.begin_raising()
    assert schedule.end_raising() == (first, ())


def test_there_is_a_most() -> None:
    schedule = Schedule[str]({0: "a:1"}, capacity=2)
    schedule.put("x")
    assert not schedule.is_full
    schedule.put("y")
    assert schedule.is_full
    schedule.take(0)
    assert not schedule.is_full
