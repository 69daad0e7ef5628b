"""Horovod's ElasticDriver as integrations use it: workers are calls, hosts come and go, one fails, none can be had."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from elastic_driver import compat
from elastic_driver.compat.elastic import job as job_module
from elastic_driver.compat.elastic.discovery import DiscoveredHosts, FixedHosts, HostManager, HostUpdateResult
from elastic_driver.compat.elastic.driver import ElasticDriver
from elastic_driver.compat.runner.hosts import INVALID_SLOT_INFO, SlotInfo

pytestmark = pytest.mark.integration

Worker = Callable[[SlotInfo, list[threading.Event]], tuple[int, float]]
TWO_BY_TWO = {"host-1": 2, "host-2": 2}
PATIENCE_S = 150.0


class Rendezvous:
    """Remembers the rounds."""

    def __init__(self) -> None:
        self.rounds: list[list[SlotInfo]] = []
        self.stopped = threading.Event()

    def init(self, host_assignments: list[SlotInfo]) -> None:
        self.rounds.append(host_assignments)

    def stop(self) -> None:
        self.stopped.set()


Make = Callable[..., tuple[ElasticDriver, Rendezvous]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(job_module, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.02)
    drivers = []

    def made(discovery: Any, **given: Any) -> tuple[ElasticDriver, Rendezvous]:
        rendezvous = Rendezvous()
        given = {"min_num_proc": 2, "max_num_proc": 4, "timeout": PATIENCE_S, **given}
        driver = ElasticDriver(rendezvous, discovery, **given)
        drivers.append(driver)
        return driver, rendezvous

    yield made
    for driver in drivers:
        driver.stop()
        driver.get_results()


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def ended(code: int = 0) -> tuple[int, float]:
    return code, time.time()


def test_all_slots_get_workers_and_all_succeed(make: Make) -> None:
    driver, rendezvous = make(FixedHosts(TWO_BY_TWO))
    seen: dict[int, tuple[SlotInfo, SlotInfo]] = {}

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        assert driver.record_ready(slot.hostname, slot.local_rank) == 1
        seen[slot.rank] = slot, driver.get_slot_info(slot.hostname, slot.local_rank)
        return ended()

    driver.wait_for_available_slots(2)
    driver.start(2, work)
    results = driver.get_results()
    assert results.error_message is None
    assert sorted(results.worker_results) == ["host-1[0]", "host-1[1]", "host-2[0]", "host-2[1]"]
    assert {code for code, _ in results.worker_results.values()} == {0}
    assert sorted(seen) == [0, 1, 2, 3]
    assert all(planned == placed for planned, placed in seen.values())
    assert seen[3][0] == SlotInfo("host-2", 3, 1, 1, 4, 2, 2)
    assert [[place.rank for place in places] for places in rendezvous.rounds] == [[0, 1, 2, 3]]
    assert driver.finished()
    assert rendezvous.stopped.is_set()
    assert (driver.world_size(), driver.local_size("host-1"), driver.local_size("host-3")) == (4, 2, 0)
    assert driver.get_coordinator_info() == seen[0][0]


def test_workers_that_never_say_ready(make: Make) -> None:
    driver, rendezvous = make(FixedHosts(TWO_BY_TWO))
    driver.start(4, lambda slot, events: ended())
    assert len(driver.get_results().worker_results) == 4
    assert len(rendezvous.rounds) == 1


def test_a_worker_that_fails_takes_its_host_out_and_the_others_go_on(make: Make) -> None:
    driver, rendezvous = make(FixedHosts(TWO_BY_TWO))
    asked_to_end = threading.Event()
    after: dict[int, SlotInfo] = {}

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        if slot.hostname == "host-1":
            if slot.local_rank == 0:
                return ended(1)
            wait_for(events[0])
            asked_to_end.set()
            return ended(1)
        wait_for(asked_to_end)
        assert driver.record_ready(slot.hostname, slot.local_rank) == 2
        after[slot.rank] = driver.get_slot_info(slot.hostname, slot.local_rank)
        return ended()

    driver.start(2, work)
    results = driver.get_results()
    assert after == {2: SlotInfo("host-2", 0, 0, 0, 2, 2, 1), 3: SlotInfo("host-2", 1, 1, 0, 2, 2, 1)}
    assert {name: code for name, (code, _) in results.worker_results.items()} == {"host-2[0]": 0, "host-2[1]": 0}
    assert [place.hostname for place in rendezvous.rounds[-1]] == ["host-2", "host-2"]
    assert driver.get_slot_info("host-1", 0) == INVALID_SLOT_INFO
    assert not driver.has_rank_assignment("host-1", 1)


def test_workers_that_fail_before_they_are_ready(make: Make) -> None:
    driver, _ = make(FixedHosts(TWO_BY_TWO))
    after: dict[int, SlotInfo] = {}

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.hostname == "host-2":
            raise RuntimeError("no such machine")
        driver.record_ready(slot.hostname, slot.local_rank)
        after[slot.rank] = driver.get_slot_info(slot.hostname, slot.local_rank)
        return ended()

    driver.start(4, work)
    assert len(driver.get_results().worker_results) == 2
    assert {place.size for place in after.values()} == {2}


def test_a_worker_that_fails_before_it_is_ready_takes_its_host_along(make: Make) -> None:
    """Its neighbor gets its event, whether or not it waits for the round."""
    driver, rendezvous = make(FixedHosts(TWO_BY_TWO))
    after: dict[int, SlotInfo] = {}

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.hostname == "host-1" and slot.local_rank == 0:
            return ended(1)
        round_id = driver.record_ready(slot.hostname, slot.local_rank)
        if slot.hostname == "host-1":
            assert not round_id
            wait_for(events[0])
            return ended(1)
        after[slot.rank] = driver.get_slot_info(slot.hostname, slot.local_rank)
        return ended()

    driver.start(2, work)
    results = driver.get_results()
    assert {name: code for name, (code, _) in results.worker_results.items()} == {"host-2[0]": 0, "host-2[1]": 0}
    assert after == {2: SlotInfo("host-2", 0, 0, 0, 2, 2, 1), 3: SlotInfo("host-2", 1, 1, 0, 2, 2, 1)}
    assert [len(places) for places in rendezvous.rounds] == [2]


def test_a_worker_that_is_asked_to_end_takes_nobody_along(make: Make) -> None:
    """Its host has fewer slots, before anybody is ready."""
    discovery = FixedHosts({"host-1": 2})
    driver, _ = make(discovery, min_num_proc=1)
    begun, has_left = threading.Barrier(2), threading.Event()

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if not begun.wait(PATIENCE_S):
            discovery.set({"host-1": 1})
        if slot.local_rank:
            wait_for(events[0])
            has_left.set()
            return ended(1)
        wait_for(has_left)
        return ended(0 if driver.record_ready(slot.hostname, slot.local_rank) else 2)

    driver.start(2, work)
    assert {name: code for name, (code, _) in driver.get_results().worker_results.items()} == {"host-1[0]": 0}


def test_a_worker_that_waits_for_a_round_is_asked_to_end_when_its_host_is_out(make: Make) -> None:
    driver, _ = make(FixedHosts(TWO_BY_TWO))
    waiting = threading.Event()

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        if slot.hostname == "host-1":
            if slot.local_rank == 0:
                wait_for(waiting)
                return ended(1)
            waiting.set()
            assert not driver.record_ready(slot.hostname, slot.local_rank)
            wait_for(events[0])
            return ended(1)
        assert driver.record_ready(slot.hostname, slot.local_rank) == 2
        return ended()

    driver.start(2, work)
    results = driver.get_results()
    assert {name: code for name, (code, _) in results.worker_results.items()} == {"host-2[0]": 0, "host-2[1]": 0}


def test_a_worker_that_succeeds_before_it_is_ready_ends_those_that_are(make: Make) -> None:
    driver, _ = make(FixedHosts(TWO_BY_TWO))

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.rank == 0:
            return ended()
        driver.record_ready(slot.hostname, slot.local_rank)
        wait_for(events[0])
        return ended(1)

    driver.start(2, work)
    results = driver.get_results()
    assert sorted(code for code, _ in results.worker_results.values()) == [0, 1, 1, 1]
    assert results.error_message is None


def test_all_workers_fail(make: Make) -> None:
    driver, _ = make(FixedHosts(TWO_BY_TWO))
    driver.start(2, lambda slot, events: ended(1))
    results = driver.get_results()
    assert [code for code, _ in results.worker_results.values()] == [1] * 4
    assert driver.finished()


def test_a_worker_that_succeeds_ends_those_that_wait(make: Make) -> None:
    driver, _ = make(FixedHosts(TWO_BY_TWO))
    waiting = threading.Barrier(4)

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        waiting.wait(PATIENCE_S)
        if slot.rank == 0:
            return ended()
        driver.record_ready(slot.hostname, slot.local_rank)
        wait_for(events[0])
        return ended(1)

    driver.start(2, work)
    codes = [code for code, _ in driver.get_results().worker_results.values()]
    assert sorted(codes) == [0, 1, 1, 1]


def test_hosts_that_are_added_at_runtime(make: Make) -> None:
    discovery = FixedHosts({"host-1": 2})
    driver, rendezvous = make(discovery)
    after: dict[int, SlotInfo] = {}
    joiners = threading.Barrier(4)

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.hostname == "host-1":
            driver.record_ready(slot.hostname, slot.local_rank)
            assert driver.get_slot_info(slot.hostname, slot.local_rank).size == 2
            discovery.set(TWO_BY_TWO)
            driver.wait_for_available_slots(4, min_hosts=2)
        joiners.wait(PATIENCE_S)
        # Members do not wait for who comes a moment later; he is in the next round.
        driver.record_ready(slot.hostname, slot.local_rank)
        while driver.get_slot_info(slot.hostname, slot.local_rank).size < 4:
            driver.record_ready(slot.hostname, slot.local_rank)
        joiners.wait(PATIENCE_S)
        after[slot.rank] = driver.get_slot_info(slot.hostname, slot.local_rank)
        return ended()

    driver.start(2, work)
    assert len(driver.get_results().worker_results) == 4
    sizes = [len(places) for places in rendezvous.rounds]
    assert (sizes[0], sizes[-1]) == (2, 4)
    assert sizes == sorted(sizes)
    assert {rank: (place.rank, place.size, place.cross_size) for rank, place in after.items()} == {
        rank: (rank, 4, 2) for rank in range(4)
    }


def test_slots_and_hosts_are_waited_for(make: Make) -> None:
    discovery = FixedHosts({})
    driver, _ = make(discovery)
    found: list[DiscoveredHosts] = []
    waiter = threading.Thread(target=lambda: found.append(driver.wait_for_available_slots(2, min_hosts=2)))
    waiter.start()
    discovery.set({"host-1": 4})
    assert driver.wait_for_available_slots(4).host_slots == {"host-1": 4}
    assert not found
    discovery.set({"host-2": 8, "host-1": 4})
    waiter.join(PATIENCE_S)
    assert found[0].host_assignment_order == ["host-1", "host-2"] or found[0].available_hosts == {"host-1", "host-2"}
    assert found[0].count_available_slots() == 12
    driver.resume()


def test_slots_that_never_come(make: Make) -> None:
    driver, rendezvous = make(FixedHosts({"host-1": 1}), timeout=0.2)
    with pytest.raises(TimeoutError, match=r"cannot find 2 slots on 1 hosts within 0\.2 s: found 1 on 1"):
        driver.wait_for_available_slots(2)
    with pytest.raises(TimeoutError):
        driver.start(2, lambda slot, events: ended())
    assert driver.finished()
    results = driver.get_results()
    assert results.worker_results == {}
    assert results.error_message is not None
    assert rendezvous.stopped.is_set()


def test_a_discovery_that_fails_at_first_ends_the_job(make: Make) -> None:
    class Broken:
        def find_available_hosts_and_slots(self) -> Mapping[str, int]:
            raise KeyError("the cloud")

    driver, rendezvous = make(Broken())
    with pytest.raises(RuntimeError, match="the cloud"):
        driver.wait_for_available_slots(2)
    assert driver.finished()
    with pytest.raises(RuntimeError, match="the cloud"):
        driver.start(2, lambda slot, events: ended())
    assert rendezvous.stopped.wait(PATIENCE_S)


def test_the_reset_limit(make: Make) -> None:
    driver, rendezvous = make(FixedHosts({f"host-{number}": 1 for number in range(4)}), min_num_proc=1, reset_limit=1)

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        for round_id in range(1, 4):
            if not driver.record_ready(slot.hostname, slot.local_rank):
                break
            if slot.rank == round_id:
                return ended(1)
        return ended()

    driver.start(4, work)
    results = driver.get_results()
    assert "--reset-limit" in (results.error_message or "")
    assert [len(places) for places in rendezvous.rounds] == [4, 3]


def test_stop_sets_the_events_and_keeps_its_message(make: Make) -> None:
    driver, _ = make(FixedHosts(TWO_BY_TWO))
    begun = threading.Barrier(5)

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        begun.wait(PATIENCE_S)
        wait_for(events[0])
        return ended(143)

    driver.start(4, work)
    begun.wait(PATIENCE_S)
    driver.stop("the cluster is gone")
    results = driver.get_results()
    assert results.error_message == "the cluster is gone"
    assert [code for code, _ in results.worker_results.values()] == [143] * 4
    assert driver.record_ready("host-1", 0) == 0


def test_what_cannot_be_had_says_so(make: Make) -> None:
    driver, _ = make(FixedHosts(TWO_BY_TWO))
    with pytest.raises(NotImplementedError, match=r"record_ready again"):
        driver.register_worker_server("host-1", 0, {}, b"")


def test_under_horovods_names() -> None:
    assert compat.install(mode="always")
    try:
        from horovod.runner.elastic import discovery, driver

        assert driver.ElasticDriver is ElasticDriver
        assert discovery.HostManager is HostManager
        assert issubclass(discovery.HostDiscoveryScript, discovery.HostDiscovery)
    finally:
        compat.uninstall()


# --- hosts by themselves ---------------------------------------------------------------------------------------------


def test_a_host_manager_tells_what_has_changed() -> None:
    fixed = FixedHosts({"a": 2})
    manager = HostManager(fixed)
    changes = []
    snapshots = []
    for hosts in ({"a": 2}, {"a": 2, "b": 2}, {"a": 2, "b": 4}, {"b": 4}, {"b": 2, "c": 1}, {"b": 2, "c": 1}):
        fixed.set(hosts)
        changes.append(manager.update_available_hosts())
        snapshots.append(manager.current_hosts)
    result = HostUpdateResult
    assert changes == [result.added, result.added, result.added, result.removed, result.mixed, result.no_update]
    assert snapshots[1].host_slots == {"a": 2, "b": 2}
    manager.blacklist("b")
    assert manager.is_blacklisted("b")
    assert manager.current_hosts.host_slots == {"c": 1}
    assert snapshots[-1].host_slots == {"b": 2, "c": 1}
    assert (snapshots[-1].get_slots("b"), manager.current_hosts.get_slots("b")) == (2, 0)
    assert HostManager.order_available_hosts({"d", "c", "b"}, ["a", "b", "c"]) == ["b", "c", "d"]
