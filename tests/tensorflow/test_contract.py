"""What a ClusterCoordinator promises: the same tests for TensorFlow's own, the elastic one, and that with gaps.

The behaviors are those that TensorFlow's cluster_coordinator_test.py checks, as far as they can be seen from outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from elastic_driver.tensorflow import ElasticClusterCoordinator, private
from tests.support.processes.tensorflow_job import Job, aside, current_worker, until
from tests.support.processes.tensorflow_servers import Servers

pytestmark = [pytest.mark.integration, pytest.mark.tensorflow]

Make = Callable[[], Job]


@pytest.fixture(params=["TensorFlow's", "elastic", "elastic with gaps"])
def make(request: pytest.FixtureRequest, servers: Servers) -> Make:
    """Makes a job with two workers and two parameter servers."""

    def made() -> Job:
        if request.param == "TensorFlow's":
            return Job(servers, 2, parameter_servers=2, kind=tf.distribute.coordinator.ClusterCoordinator)
        if request.param == "elastic":
            return Job(servers, 2, parameter_servers=2)
        # Workers 1 and 2: none has the index 0.
        job = Job(servers, 2, parameter_servers=2, spares=1)
        job.coordinator.remove_worker(job.workers[0].address)
        job.coordinator.add_worker(job.spares[0].address)
        return job

    return made


@tf.function
def fails() -> Any:
    x = tf.random.uniform((2, 2))
    tf.debugging.assert_non_positive(tf.reduce_sum(x))
    return x


def test_values(make: Make, servers: Servers) -> None:
    job = make()
    one = tf.constant(1)

    @tf.function
    def nested() -> Any:
        return one + 1, (one + 2, one + 3), [one + 4], {"v": one}

    value = job.coordinator.schedule(nested)
    assert isinstance(value, tf.distribute.experimental.coordinator.RemoteValue)
    expected = (2, (3, 4), [5], {"v": 1})
    assert value.fetch() == expected
    assert job.coordinator.fetch(value) == expected
    assert job.coordinator.fetch([value, 7, {"other": value}]) == [expected, 7, {"other": expected}]
    assert isinstance(value.get()[0], tf.Tensor)

    @tf.function
    def add(x: Any, *, y: Any) -> Any:
        return x + y

    assert job.coordinator.schedule(add, args=(one,), kwargs={"y": tf.constant(5)}).fetch() == 6
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32), y=tf.TensorSpec([], tf.int32))
    assert job.coordinator.schedule(concrete, args=(one,), kwargs={"y": one}).fetch() == 2
    with pytest.raises(ValueError, match="RemoteValue"):
        job.coordinator.schedule(add, args=(value,), kwargs={"y": one})
    with pytest.raises(TypeError, match=r"tf\.function"):
        job.coordinator.schedule(lambda: 1)
    with pytest.raises(TypeError):
        job.coordinator.schedule("nothing")


def test_scheduling_and_joining(make: Make, servers: Servers) -> None:
    job = make()
    job.coordinator.join()
    assert job.coordinator.done()
    held = job.hold(times=2)
    assert not job.coordinator.done()
    join = aside(job.coordinator.join)
    assert not join.done()
    job.let_go()
    join.result(40)
    assert job.coordinator.done()
    assert len({int(value.fetch()) for value in held}) == 2
    for _ in range(3):
        job.coordinator.join()
    assert job.done == 2
    assert len(job.run(40)) >= 1
    assert job.done == 42
    # One strategy has one coordinator.
    assert type(job.coordinator)(job.strategy) is job.coordinator


@pytest.mark.parametrize("ask", ["join", "schedule", "done"])
def test_errors_are_raised_once(make: Make, servers: Servers, ask: str) -> None:
    job = make()
    asked = {"join": job.coordinator.join, "schedule": job.schedule, "done": job.coordinator.done}[ask]
    job.run(4)
    # One is under way forever, one fails, and more are queued behind.
    held = job.hold()
    failing = job.coordinator.schedule(fails)

    def raised() -> bool:
        try:
            asked()
        except tf.errors.InvalidArgumentError:
            return True
        return False

    until(raised, "it is raised")
    with pytest.raises(tf.errors.CancelledError):
        held[0].fetch()
    with pytest.raises(tf.errors.OpError):
        failing.fetch()
    # The error is over, nothing runs any more, and what is scheduled from now on does.
    assert job.coordinator.done()
    job.let_go()
    before = job.done
    job.run(10)
    assert job.done == before + 10
    job.coordinator.schedule(fails)
    with pytest.raises(tf.errors.InvalidArgumentError):
        job.coordinator.join()
    job.coordinator.join()


def test_many_errors(make: Make, servers: Servers) -> None:
    job = make()

    def schedule_for_ever() -> None:
        while True:
            job.coordinator.schedule(fails)

    with pytest.raises(tf.errors.InvalidArgumentError):
        schedule_for_ever()
    job.coordinator.join()
    assert job.run(5)


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
def test_datasets(make: Make, servers: Servers) -> None:
    job = make()
    coordinator, strategy = job.coordinator, job.strategy

    @tf.function
    def first(iterator: Any) -> Any:
        return next(iterator)

    @tf.function
    def local(iterator: Any) -> Any:
        return strategy.experimental_local_results(next(iterator))

    traced = 0

    def plus_ten(x: Any) -> Any:
        nonlocal traced
        traced += 1
        return x + 10

    def value(dataset: Any, function: Any = first) -> Any:
        return coordinator.schedule(function, args=(iter(coordinator.create_per_worker_dataset(dataset)),)).fetch()

    assert value(lambda: tf.data.Dataset.range(1, 2)) == 1
    assert value(tf.function(lambda: tf.data.Dataset.range(3, 5))) == 3
    assert value(lambda: tf.data.Dataset.range(0, 10).map(plus_ten)) == 10
    assert traced == 1
    assert value(tf.data.Dataset.range(0, 10).map(plus_ten)) == 10
    assert list(value(tf.data.Dataset.range(1, 11).batch(4))) == [1, 2, 3, 4]

    def whole(_: Any = None) -> Any:
        return tf.data.Dataset.range(1, 11).batch(4)

    for dataset in (
        lambda: strategy.distribute_datasets_from_function(whole),
        lambda: strategy.experimental_distribute_dataset(whole()),
        strategy.distribute_datasets_from_function(whole),
        strategy.experimental_distribute_dataset(whole()),
    ):
        assert [list(part) for part in value(dataset, local)] == [[1, 2, 3, 4]]

    @tf.function
    def both(one: Any, other: Any) -> Any:
        return next(one) + next(other)

    one = coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(0, 50))
    other = coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(5, 50))
    for _ in range(3):
        iterators = (iter(one), iter(other))
        assert coordinator.schedule(both, args=iterators).fetch() == 5
        for _ in range(10):
            coordinator.schedule(both, args=iterators)
        coordinator.join()

    # What a worker's dataset function may ask, and what not.
    seen = set()
    indices = coordinator.create_per_worker_dataset(
        lambda: tf.data.Dataset.from_tensors(tf.cast(current_worker(), tf.int64)).repeat()
    )
    iterator = iter(indices)
    while len(seen) < 2:
        for one_value in [coordinator.schedule(first, args=(iterator,)) for _ in range(8)]:
            seen.add(int(one_value.fetch()))
    with pytest.raises(ValueError, match=r"Variable|variable"):
        coordinator.create_per_worker_dataset(lambda: tf.Variable(0.0).read_value())
    with pytest.raises(RuntimeError):
        tf.function(lambda: iter(one))()


def test_the_end_of_a_dataset_is_an_error(make: Make, servers: Servers) -> None:
    job = make()

    @tf.function
    def first(iterator: Any) -> Any:
        return next(iterator)

    iterator = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(2)))
    for _ in range(5):
        try:
            job.coordinator.schedule(first, args=(iterator,))
        except tf.errors.OutOfRangeError:
            break
    else:
        with pytest.raises(tf.errors.OutOfRangeError):
            job.coordinator.join()
    assert job.run(4)


def test_a_dataset_of_this_process_is_refused_when_it_is_used(make: Make, servers: Servers) -> None:
    job = make()
    dataset = tf.data.Dataset.range(1, 10)

    @tf.function
    def first(iterator: Any) -> Any:
        return next(iterator)

    iterator = iter(job.coordinator.create_per_worker_dataset(tf.function(lambda: dataset.shuffle(9))))
    job.coordinator.schedule(first, args=(iterator,))
    with pytest.raises(private.ClosureInputError, match="Failed copying input tensor"):
        job.coordinator.join()
    assert job.run(4)


def test_iterators_are_used_after_an_error(make: Make, servers: Servers) -> None:
    job = make()

    @tf.function
    def first(iterator: Any) -> Any:
        return next(iterator)

    iterator = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(100)))
    job.coordinator.schedule(first, args=(iterator,))
    job.coordinator.schedule(fails)
    with pytest.raises(tf.errors.InvalidArgumentError):
        job.coordinator.join()
    job.coordinator.schedule(first, args=(iterator,))
    job.coordinator.join()


def test_inputs_with_errors(make: Make, servers: Servers) -> None:
    job = make()

    @tf.function
    def fine() -> Any:
        return tf.constant(1.0)

    @tf.function
    def plus_one(x: Any) -> Any:
        return x + 1

    good = job.coordinator._create_per_worker_resources(fine)
    bad = job.coordinator._create_per_worker_resources(fails)
    job.coordinator.join()  # what nobody uses is no error
    value = job.coordinator.schedule(plus_one, args=(good,))
    job.coordinator.join()
    assert value.fetch() == 2
    value = job.coordinator.schedule(plus_one, args=(bad,))
    with pytest.raises(private.ClosureInputError):
        job.coordinator.join()
    with pytest.raises(private.ClosureInputError):
        value.fetch()


def test_variables_of_the_strategy(make: Make, servers: Servers) -> None:
    job = make()
    strategy = job.strategy
    with strategy.scope():
        v = tf.Variable(1.0)
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    @tf.function
    def step(x: Any) -> Any:
        def replica(x: Any) -> Any:
            total.assign_add(x)
            return x + v, x - v

        return strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)

    expected = (4.0 * strategy.num_replicas_in_sync, 2.0 * strategy.num_replicas_in_sync)
    assert job.coordinator.schedule(step, args=(tf.constant(3.0),)).fetch() == expected
    with strategy.scope():
        assert job.coordinator.schedule(step, args=(tf.constant(3.0),)).fetch() == expected
    assert total.numpy() == 6


def test_a_variable_of_each_worker(make: Make, servers: Servers) -> None:
    job = make()
    with job.strategy.scope():
        v = tf.Variable([0.0], per_worker_variable=True)

    @tf.function
    def step() -> Any:
        v.assign_add(tf.constant([1.0]))
        return v

    for number in range(5):
        job.coordinator.schedule(step)
        job.coordinator.join()
        assert sum(v.read_all()).numpy() == number + 1
    for _ in range(20):
        job.coordinator.schedule(step)
    job.coordinator.join()
    assert sum(v.read_all()).numpy() == 25


def test_a_start_that_is_delayed(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_COORDINATOR_SCHEDULE_START_DELAY", "1")
    monkeypatch.setenv("TF_COORDINATOR_SCHEDULE_START_DELAY_MAX", "2")
    job = Job(servers, 2)
    assert job.run(4) == {0}
    job.until_taken_by(1)


def test_a_queue_that_is_full(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "QUEUE_SIZE", 2)
    job = Job(servers, 2)
    held = job.hold(times=2)
    more = aside(job.schedule, 5)
    until(lambda: job.coordinator._cluster._schedule.is_full, "it is full")
    assert not more.done()
    job.let_go()
    more.result(40)
    job.coordinator.join()
    assert job.done == 5 + len(held)
    # Nobody waits for room that an error makes.
    job.hold(times=2)
    job.coordinator.schedule(fails)
    more = aside(job.schedule, 5)
    until(lambda: job.coordinator._cluster._schedule.is_full, "it is full")
    job.coordinator.remove_worker(job.workers[0].address, timeout_s=0.0)
    job.coordinator.add_worker(job.workers[0].address)
    job.let_go()
    try:
        more.result(40)
        job.coordinator.join()
    except tf.errors.InvalidArgumentError:
        pass
    else:
        pytest.fail("the error was told by nobody")


def test_tensorflows_coordinator_of_the_strategy_becomes_elastic(servers: Servers) -> None:
    job = Job(servers, 1, kind=tf.distribute.coordinator.ClusterCoordinator)
    stock = job.coordinator
    assert not isinstance(stock, ElasticClusterCoordinator)
    coordinator = ElasticClusterCoordinator(job.strategy)
    assert coordinator is stock
    job.coordinator = coordinator
    assert job.run(5) == {0}
    with pytest.raises(ValueError, match="ParameterServerStrategy"):
        ElasticClusterCoordinator(tf.distribute.get_strategy())
    assert os.environ["GRPC_FAIL_FAST"] == "true"


def test_a_limit_that_is_none(servers: Servers) -> None:
    with pytest.raises(ValueError, match="worker_timeout_s is 0"):
        Job(servers, 1, worker_timeout_s=0)
