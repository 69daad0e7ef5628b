"""The elastic coordinator over real servers: workers come and go while closures run."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from elastic_driver.tensorflow import WorkerInfo, WorkerState, private
from elastic_driver.tensorflow.runtime import LOOK_S, RuntimeCluster
from tests.support.processes.tensorflow_job import Job, aside, current_worker, until
from tests.support.processes.tensorflow_servers import Servers, a_closed_port, a_port_that_says_nothing

pytestmark = [pytest.mark.integration, pytest.mark.tensorflow]

RUNNING, STOPPED = WorkerState.RUNNING, WorkerState.STOPPED


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of numbers. A server has it open as long as an iterator that reads it lives there."""
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{number}\n" for number in range(100_000)))
    return path


def open_files(pid: int, path: Path) -> int:
    return sum(link.resolve() == path for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists())


def test_epochs_with_changes_between_them(servers: Servers, lines: Path) -> None:
    job = Job(servers, 2, spares=1)
    first, second = job.workers
    new = job.spares[0]

    @tf.function
    def step(iterator: Any) -> Any:
        number = tf.strings.to_number(next(iterator), tf.int64)
        job.counter.assign_add(1)
        return number

    old: list[weakref.ref[Any]] = []
    for epoch in range(3):
        dataset = job.coordinator.create_per_worker_dataset(lambda: tf.data.TextLineDataset(str(lines)).repeat())
        iterator = iter(dataset)
        values = [job.coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
        job.coordinator.join()
        assert job.done == 60 * (epoch + 1)
        numbers = sorted(int(value.fetch()) for value in values)
        # Each worker's own from its beginning: together sixty.
        assert numbers[0] == 0
        assert len([n for n in numbers if n == 0]) <= 2
        old.append(weakref.ref(iterator))
        if epoch == 0:
            assert job.coordinator.remove_worker(first.address) == WorkerInfo(0, first.address, STOPPED)
            until(lambda: open_files(first.pid, lines) == 0, "the removed worker's iterator is freed")
        if epoch == 1:
            assert job.coordinator.add_worker(new.address) == WorkerInfo(2, new.address, RUNNING)
    assert old[0]() is None
    assert old[1]() is None
    assert [worker.index for worker in job.coordinator.workers() if worker.state is RUNNING] == [1, 2]
    # Only the last epoch's are there.
    until(lambda: open_files(second.pid, lines) <= 1 and open_files(new.pid, lines) <= 1, "old iterators are freed")
    del dataset, iterator
    until(lambda: open_files(second.pid, lines) == open_files(new.pid, lines) == 0, "the last are freed, too")


def test_an_iterator_goes_on_through_changes(servers: Servers) -> None:
    job = Job(servers, 2, spares=1)

    @tf.function
    def step(iterator: Any) -> Any:
        return current_worker(), next(iterator)

    iterator = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(1_000_000)))
    seen: dict[int, list[int]] = {}

    def run() -> None:
        values = [job.coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
        job.coordinator.join()
        for value in values:
            index, number = value.fetch()
            seen.setdefault(int(index), []).append(int(number))

    run()
    job.coordinator.add_worker(job.spares[0].address)
    while 2 not in seen:
        run()
    job.coordinator.remove_worker(job.workers[0].address)
    at_removal = len(seen[0])
    run()
    # Nobody's began anew when another came or went, and none was lost.
    for numbers in seen.values():
        assert sorted(numbers) == list(range(len(numbers)))
    assert len(seen[0]) == at_removal
    # Who was removed has lost its own: it begins again.
    job.coordinator.add_worker(job.workers[0].address)
    before = seen.pop(0)
    while 0 not in seen:
        run()
    assert before
    assert sorted(seen[0]) == list(range(len(seen[0])))


def test_a_dataset_with_state_is_each_workers_own(servers: Servers) -> None:
    job = Job(servers, 1, spares=1)

    def dataset_fn() -> Any:
        # Its state: the sum so far, and a shuffle buffer.
        numbers = tf.data.Dataset.from_tensor_slices([1] * 50).shuffle(50).repeat()
        return numbers.scan(tf.constant(0), lambda state, one: (state + one, state + one))

    @tf.function
    def step(iterator: Any) -> Any:
        return current_worker(), next(iterator)

    iterator = iter(job.coordinator.create_per_worker_dataset(dataset_fn))
    for _ in range(10):
        job.coordinator.schedule(step, args=(iterator,))
    job.coordinator.join()
    job.coordinator.add_worker(job.spares[0].address)
    seen: dict[int, list[int]] = {0: [], 1: []}
    while not (seen[0] and seen[1]):
        values = [job.coordinator.schedule(step, args=(iterator,)) for _ in range(20)]
        job.coordinator.join()
        for value in values:
            index, number = value.fetch()
            seen[int(index)].append(int(number))
    assert sorted(seen[0]) == list(range(11, 11 + len(seen[0])))
    assert sorted(seen[1]) == list(range(1, 1 + len(seen[1])))


def test_a_worker_is_added_while_closures_are_scheduled(servers: Servers) -> None:
    job = Job(servers, 1, spares=2, parameter_servers=2)
    enough = threading.Event()
    values: list[Any] = []

    def schedule() -> None:
        while not enough.is_set():
            values.extend(job.schedule(20))
            job.coordinator.join()

    training = aside(schedule)
    until(lambda: len(values) > 40, "closures run")
    for index, server in enumerate(job.spares, start=1):
        assert job.coordinator.add_worker(server.address).index == index
    until(lambda: {int(value.fetch()) for value in values[-20:]} == {0, 1, 2}, "all take closures")
    for server in [job.workers[0], job.spares[0]]:
        job.coordinator.remove_worker(server.address)
    enough.set()
    training.result(60)
    assert job.done == len(values)
    # Both parameter servers hold variables.
    assert {variable.device.rpartition("/job:")[2][:27] for variable in (job.counter, job.begun)} == {
        "ps/replica:0/task:0/device:",
        "ps/replica:0/task:1/device:",
    }


def test_a_removed_worker_ends_the_closure_in_hand(servers: Servers) -> None:
    job = Job(servers, 2)
    held = job.hold(times=2)
    leaving = aside(job.coordinator.remove_worker, job.workers[0].address)
    until(lambda: job.coordinator._cluster.addresses() == {job.workers[1].address}, "it is leaving")
    assert not leaving.done()
    assert job.done == 0
    job.let_go()
    assert leaving.result(40) == WorkerInfo(0, job.workers[0].address, STOPPED)
    job.coordinator.join()
    assert {int(value.fetch()) for value in held} == {0, 1}
    assert (job.begun.numpy(), job.done) == (2, 2)
    assert job.run(10) == {1}


def test_a_removed_workers_closure_is_given_to_another_after_its_time(servers: Servers) -> None:
    job = Job(servers, 2)
    held = job.hold(times=2)
    began = time.monotonic()
    info = job.coordinator.remove_worker(job.workers[0].address, timeout_s=0.3)
    assert info.state is STOPPED
    assert 0.3 <= time.monotonic() - began < 20
    assert job.done == 0
    job.let_go()
    job.coordinator.join()
    assert [int(value.fetch()) for value in held] == [1, 1]
    # One was begun a second time, and each was ended once.
    assert (job.begun.numpy(), job.done) == (3, 2)


def test_a_worker_that_has_no_closure_leaves_at_once(servers: Servers) -> None:
    job = Job(servers, 2)
    began = time.monotonic()
    job.coordinator.remove_worker(job.workers[1].address)
    assert time.monotonic() - began < 5
    assert job.run(10) == {0}


def test_one_address_is_one_worker(servers: Servers) -> None:
    job = Job(servers, 1, spares=1)
    address = job.spares[0].address
    joins = [aside(job.coordinator.add_worker, address) for _ in range(4)]
    assert {join.result(40) for join in joins} == {WorkerInfo(1, address, RUNNING)}
    assert job.coordinator.add_worker(address) == WorkerInfo(1, address, RUNNING)
    assert job.coordinator.add_worker(job.workers[0].address).index == 0
    assert len(job.coordinator.workers()) == 2
    job.until_taken_by(1)


def test_a_stopped_worker_comes_back_without_a_word_to_the_cluster(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(servers, 2)
    told: list[Any] = []
    update = private.update_server_def
    monkeypatch.setattr(private, "update_server_def", lambda new: (told.append(new), update(new)))
    iterator = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(1000)))

    @tf.function
    def step(iterator: Any) -> Any:
        return current_worker(), next(iterator)

    address = job.workers[0].address
    for _ in range(3):
        job.coordinator.remove_worker(address)
        assert job.coordinator.add_worker(address) == WorkerInfo(0, address, RUNNING)
    assert not told
    seen: set[int] = set()
    while seen != {0, 1}:
        values = [job.coordinator.schedule(step, args=(iterator,)) for _ in range(8)]
        job.coordinator.join()
        seen |= {int(value.fetch()[0]) for value in values}
    # Another process there is another server, with nothing of what the first had.
    job.coordinator.remove_worker(address)
    job.workers[0].kill()
    job.workers[0].start_again()
    assert job.coordinator.add_worker(address) == WorkerInfo(0, address, RUNNING)
    assert told
    seen.clear()
    while seen != {0, 1}:
        values = [job.coordinator.schedule(step, args=(iterator,)) for _ in range(8)]
        job.coordinator.join()
        seen |= {int(value.fetch()[0]) for value in values}


@pytest.mark.parametrize("kind", ["closed", "silent", "stopped"])
def test_an_address_that_does_not_answer(servers: Servers, kind: str) -> None:
    job = Job(servers, 1, spares=2)
    with a_closed_port() as closed, a_port_that_says_nothing() as silent:
        address = {"closed": closed, "silent": silent, "stopped": job.spares[0].address}[kind]
        job.spares[0].stop()
        began = time.monotonic()
        join = aside(job.coordinator.add_worker, address, timeout_s=5)
        meanwhile = 0
        while not join.done():
            job.run(4)
            meanwhile += not join.done()
        with pytest.raises(TimeoutError, match=f"{address} did not answer within 5 s"):
            join.result()
        assert time.monotonic() - began > 4.9
        assert meanwhile, "the others do not wait for it"
        assert job.states() == {0: "running"}
        # Nothing of it stays: others join, and this one when it answers.
        new = job.coordinator.add_worker(job.spares[1].address, timeout_s=20)
        assert new.state is RUNNING
        job.until_taken_by(new.index)
    if kind == "stopped":
        job.spares[0].cont()
        job.until_taken_by(job.coordinator.add_worker(address).index)


def test_who_does_not_answer_may_be_called_off(servers: Servers) -> None:
    job = Job(servers, 1)
    with a_closed_port() as address:
        join = aside(job.coordinator.add_worker, address)
        until(lambda: address in job.coordinator._cluster.addresses(), "it is joining")
        job.coordinator.remove_worker(address)
        with pytest.raises(tf.errors.CancelledError, match=address):
            join.result(20)
    assert job.run(4) == {0}


def test_without_any_worker_closures_wait_for_one(servers: Servers) -> None:
    job = Job(servers, 2, spares=1)
    for server in job.workers:
        job.coordinator.remove_worker(server.address)
    values = job.schedule(20)
    join = aside(job.coordinator.join)
    assert not job.coordinator.done()
    assert not join.done()
    new = job.coordinator.add_worker(job.spares[0].address)
    join.result(40)
    assert {int(value.fetch()) for value in values} == {new.index}
    assert job.done == 20


def test_indices_are_never_used_twice(servers: Servers) -> None:
    job = Job(servers, 2, spares=3)
    indices = []
    for server in job.spares:
        indices.append(job.coordinator.add_worker(server.address).index)
        job.coordinator.remove_worker(server.address)
    assert indices == [2, 3, 4]
    new = job.coordinator.add_worker(job.spares[0].address)
    assert new.index in (2, 5)
    assert [worker.index for worker in job.coordinator.workers() if worker.state is RUNNING] == [0, 1, new.index]
    assert job.run(50) <= {0, 1, new.index}


@pytest.mark.parametrize("address", ["", "nowhere", "host:", "host:port", "host:0", "host:70000", ":2222", "a b:1"])
def test_what_is_no_address_is_refused(servers: Servers, address: str) -> None:
    job = Job(servers, 1)
    with pytest.raises(ValueError, match=r"address|port"):
        job.coordinator.add_worker(address)
    with pytest.raises(ValueError, match="no worker at"):
        job.coordinator.remove_worker(address)
    with pytest.raises(ValueError, match="parameter server"):
        job.coordinator.add_worker(job.parameter_servers[0].address)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1"):
        job.coordinator.remove_worker("127.0.0.1:1")
    assert job.run(4) == {0}


def test_who_is_added_again_before_it_has_stopped_makes_what_it_had_to(servers: Servers) -> None:
    job = Job(servers, 1)
    address = job.workers[0].address
    job.hold()
    before = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(7, 9)))
    leaving = aside(job.coordinator.remove_worker, address)
    until(lambda: not job.coordinator._cluster.addresses(), "it is leaving")
    meanwhile = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(10, 12)))
    job.coordinator.add_worker(address)
    assert leaving.result(20).state is RUNNING
    job.let_go()
    value = job.coordinator.schedule(tf.function(lambda a, b: next(a) + next(b)), args=(before, meanwhile))
    aside(job.coordinator.join).result(20)
    assert int(value.fetch()) == 17


def test_a_server_by_another_name_is_refused(servers: Servers) -> None:
    job = Job(servers, 2)
    job.run(4)
    other = {one: one.address.replace("127.0.0.1", "localhost") for one in (*job.workers, *job.parameter_servers)}
    for server, name in other.items():
        with pytest.raises(ValueError, match=f"{name} is already in the cluster, as {server.address}"):
            job.coordinator.add_worker(name, timeout_s=10)
    me = next(iter(private.server_def().cluster.job[0].tasks.values()))
    with pytest.raises(ValueError, match="is no worker"):
        job.coordinator.add_worker(me, timeout_s=10)
    assert job.run(20) == {0, 1}
    assert job.done == 24
    # Once it has stopped its server may be called as one likes.
    job.coordinator.remove_worker(job.workers[0].address)
    new = job.coordinator.add_worker(other[job.workers[0]], timeout_s=10)
    job.until_taken_by(new.index)


def test_a_new_server_by_two_names_at_once_is_one_worker(servers: Servers) -> None:
    job = Job(servers, 1, spares=1)
    names = (job.spares[0].address, job.spares[0].address.replace("127.0.0.1", "localhost"))
    joins = [aside(job.coordinator.add_worker, name, timeout_s=20) for name in names]
    errors = [error for join in joins if (error := join.exception(30)) is not None]
    assert len(errors) == 1
    assert isinstance(errors[0], ValueError)
    assert "already in the cluster" in str(errors[0])
    job.until_taken_by(next(worker.index for worker in job.coordinator.workers() if worker.index))
    assert sorted(job.states().values()) == ["running", "running"]


def test_the_server_of_a_lost_worker_comes_back_as_that_one(servers: Servers) -> None:
    job = Job(servers, 2)
    job.run(4)
    victim = job.workers[0]
    victim.kill()
    until(lambda: job.run(4) and job.states()[0] == "lost", "it is lost")
    join = aside(job.coordinator.add_worker, victim.address.replace("127.0.0.1", "localhost"), timeout_s=20)
    victim.start_again()
    error = join.exception(30)
    assert isinstance(error, ValueError), error
    assert f"already in the cluster, as {victim.address}" in str(error)
    assert job.states() == {0: "running", 1: "running"}
    job.until_taken_by(0)


def test_a_time_limit_may_be_infinite(servers: Servers) -> None:
    job = Job(servers, 1, spares=1)
    address = job.spares[0].address
    joins = [aside(job.coordinator.add_worker, address, timeout_s=float("inf")) for _ in range(3)]
    assert {join.result(20).index for join in joins} == {1}
    assert job.coordinator.remove_worker(address, timeout_s=float("inf")).state is STOPPED


def a_function_that_fails(job: Job) -> Any:
    @tf.function
    def fail() -> None:
        tf.debugging.assert_negative(job.counter)

    return fail


def test_a_join_that_is_interrupted_while_closures_are_cancelled(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.CancellationManager, "start_cancel", lambda self: None)  # it takes its time
    job = Job(servers, 2)
    cluster = job.coordinator._cluster
    fail = a_function_that_fails(job)
    job.hold()

    job.coordinator.schedule(fail)

    def interrupt() -> None:
        until(lambda: cluster._schedule.is_raising, "closures are canceled")
        late.append(aside(job.coordinator.schedule, job.count))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    late: list[Any] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = aside(interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.coordinator.join()
    interrupting.result(20)
    job.let_go()
    with pytest.raises(tf.errors.InvalidArgumentError):  # it is told to the next who asks
        late[0].result(20)
    aside(job.coordinator.join).result(20)
    assert job.run(10) <= {0, 1}


def test_what_is_scheduled_while_an_error_is_raised_elsewhere_runs(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.CancellationManager, "start_cancel", lambda self: None)  # it takes its time
    job = Job(servers, 2)
    cluster = job.coordinator._cluster
    fail = a_function_that_fails(job)
    job.hold()

    job.coordinator.schedule(fail)
    until(lambda: cluster._schedule.error, "it has failed")
    done = aside(job.coordinator.done)
    until(lambda: cluster._schedule.is_raising, "closures are canceled")
    late = aside(job.coordinator.schedule, job.count)
    until(lambda: cluster._put.locked(), "it is about to be put")
    job.let_go()
    with pytest.raises(tf.errors.InvalidArgumentError):
        done.result(20)
    assert int(late.result(20).fetch()) in (0, 1)


def test_a_workers_thread_that_fails_is_told_and_replaced(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(servers, 1)
    job.run(1)

    def fail(self: Any, worker: Any) -> None:
        raise SystemExit("out of order")

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with monkeypatch.context() as patch:
        patch.setattr(private.Closure, "execute_on", fail)
        value = job.schedule()[0]
        with pytest.raises(SystemExit, match="out of order"):
            aside(job.coordinator.join).result(20)
    with pytest.raises(SystemExit, match="out of order"):
        value.fetch()
    assert job.run(3) == {0}


def test_a_worker_for_which_no_thread_can_be_started_has_not_joined(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(servers, 1, spares=1)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "elastic-tf-worker-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            job.coordinator.add_worker(job.spares[0].address, timeout_s=20)
        assert job.run(4) == {0}
    new = job.coordinator.add_worker(job.spares[0].address, timeout_s=20)
    job.until_taken_by(new.index)


def test_the_thread_of_a_worker_that_joins_again_takes_no_turn(servers: Servers) -> None:
    job = Job(servers, 2)
    job.run(4)
    cluster = job.coordinator._cluster
    with cluster._lock:  # removed, and added again before its thread has seen that
        cluster._schedule.remove(job.workers[0].address)
        cluster._schedule.add(job.workers[0].address)
        cluster._shared.work.notify_all()
    until(lambda: cluster._shared.workers[0].thread is None, "its thread has ended")
    assert job.run(4) == {1}


def test_closures_wake_nobody_who_has_nothing_to_do(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks after the cluster asks its servers and lists connections each time: that would cost each closure more
    than all else does.
    """
    looks: list[float] = []
    look = RuntimeCluster._look

    def noted(self: Any) -> None:
        looks.append(time.monotonic())
        look(self)

    monkeypatch.setattr(RuntimeCluster, "_look", noted)
    job = Job(servers, 2)
    began = time.monotonic()
    for _ in range(3):
        job.run(100)
    assert len(looks) <= 1 + (time.monotonic() - began) / LOOK_S
