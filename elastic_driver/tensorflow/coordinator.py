"""TensorFlow's coordinator, with workers that join and leave."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import tensorflow as tf

from elastic_driver.tensorflow.addresses import checked_address
from elastic_driver.tensorflow.cluster import Cluster
from elastic_driver.tensorflow.driver_link import DriverLink
from elastic_driver.tensorflow.following import Following
from elastic_driver.tensorflow.listings import LinkSource, as_source
from elastic_driver.tensorflow.private import (
    ClusterCoordinator,
    VariableClosure,
    has_resources,
)
from elastic_driver.tensorflow.schedule import Member, Phase
from elastic_driver.tensorflow.values import (
    ElasticDatasetFromDataset,
    ElasticDatasetFromFunction,
    ElasticValues,
    Recipe,
)

# The driver says how long a leaving worker has; this applies only if it does not.
_DRAIN_S = 300.0


class WorkerState(StrEnum):
    """The state of a worker."""

    RUNNING = "running"  # its thread takes closures
    LOST = "lost"  # its server does not answer; it takes closures again when that does
    STOPPED = "stopped"  # its thread has ended


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker.

    Attributes:
        index: its task index; no other worker ever has the same.
        address: of its server, "host:port".
        state: of the worker.
    """

    index: int
    address: str
    state: WorkerState


class ElasticClusterCoordinator(ClusterCoordinator):  # type: ignore[misc]
    """A ``tf.distribute.coordinator.ClusterCoordinator`` whose workers may be added and removed while closures run.

    It keeps that class's guarantees: see there for ``schedule``, ``join``, ``done``, ``fetch`` and
    ``create_per_worker_dataset``. Under ``elasticrun --parameter-servers`` it follows the job's servers by itself.
    There is one coordinator per strategy; if one of TensorFlow's own exists already, created by ``strategy.scope()``
    for instance, it becomes this one.

    Args:
        strategy: a ``tf.distribute.ParameterServerStrategy``.
        worker_timeout_s: how long a server may be silent while it runs a closure, before another worker gets that
            closure, seconds; None for no limit.

    Raises:
        ValueError: the strategy is of another kind.
        RuntimeError: the strategy has a coordinator of TensorFlow's that is in use.
    """

    def __new__(cls, strategy: Any, **_: Any) -> ElasticClusterCoordinator:
        if not hasattr(strategy, "_is_parameter_server_strategy_v2"):
            raise ValueError("only a tf.distribute.ParameterServerStrategy can have an ElasticClusterCoordinator")
        there = getattr(strategy, "_cluster_coordinator", None)
        if there is not None and not isinstance(there, ElasticClusterCoordinator):
            if has_resources(there):
                raise RuntimeError(
                    "the strategy has a ClusterCoordinator that is in use: create the ElasticClusterCoordinator "
                    "before it"
                )
            there._cluster.stop()
            # Objects created in the strategy's scope already, such as tables, refer to it.
            there.__class__ = cls
            there._has_initialized = False
        made: ElasticClusterCoordinator = super().__new__(cls, strategy)
        return made

    def __init__(self, strategy: Any, *, worker_timeout_s: float | None = 60.0) -> None:
        if getattr(self, "_has_initialized", False):
            return
        if worker_timeout_s is not None and not worker_timeout_s > 0:
            raise ValueError(f"worker_timeout_s is {worker_timeout_s}: it must be above 0, or None")
        self._strategy = strategy
        strategy.extended._used_with_coordinator = True
        link = DriverLink.from_environment()
        self._cluster = Cluster(worker_timeout_s=worker_timeout_s)
        self._has_initialized = True
        if link is not None:
            Following(self._cluster, LinkSource(link), drain_timeout_s=_DRAIN_S, left=link.left)

    def __del__(self) -> None:
        cluster = getattr(self, "_cluster", None)
        if cluster is not None:
            cluster.stop()

    def add_worker(self, address: str, timeout_s: float = 60.0) -> WorkerInfo:
        """Add a worker. Blocks until it runs closures.

        A new address extends the running cluster; the other workers continue. The address of a stopped worker restarts
        that worker. If the worker is running already, nothing happens; if it is lost, this waits for it.

        Args:
            address: of a TensorFlow server, "host:port", of any job and task index.
            timeout_s: how long the server may take to answer, and the cluster to add it, seconds.

        Returns:
            The worker.

        Raises:
            TimeoutError: it was not added in time. Nothing has changed.
            ValueError: the address is invalid, or its server is in the cluster already: a parameter server, this
                process, or a worker at another address, such as another name of its host.
            tf.errors.CancelledError: it was removed meanwhile.
        """
        address = checked_address(address)
        if self._cluster.is_for_others(address):
            raise ValueError(f"the server at {address} is not a worker: it is a parameter server, or this process")
        return _info(self._cluster.add(address, timeout_s))

    def remove_worker(self, address: str, timeout_s: float | None = None) -> WorkerInfo:
        """Remove a worker. Blocks until it has stopped.

        It finishes its current closure, and starts no other. Its per-worker values, such as iterators, are freed. Its
        server keeps running, and may be added again.

        Args:
            address: of its server.
            timeout_s: how long it may take to finish the closure, seconds; then that is canceled, and another worker
                runs it again from its beginning. None for no limit.

        Returns:
            The worker in its new state; RUNNING if it has been added again meanwhile.

        Raises:
            ValueError: there is no worker at this address.
        """
        return _info(self._cluster.remove(address, timeout_s))

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return all workers, by index. Stopped ones are forgotten at the next update of the cluster."""
        return tuple(_info(member) for member in self._cluster.members() if member.phase is not Phase.JOINING)

    def follow(
        self, discovery: Any, *, port: int | None = None, interval_s: float = 1.0, drain_timeout_s: float = 30.0
    ) -> Following:
        """Add and remove workers as hosts join and leave, until :meth:`Following.close` or the coordinator's end.

        Present workers that are not listed are removed. While there is no answer, all stay.

        Args:
            discovery: an object with ``find_available_hosts_and_slots()`` (its names are hosts, or "host:port" where no
                ``port`` is given), a script that prints hosts, or :func:`~elastic_driver.tensorflow.pods`.
            port: of the first server of each host; those of its other slots have the ports after it. A host with the
                label ``port=N`` has its own.
            interval_s: between an answer of an object or a script and the next request, seconds.
            drain_timeout_s: how long a leaving worker may take to finish its closure, unless the discovery says,
                seconds; then another one runs it again.

        Raises:
            SettingsError: the discovery, or its combination with ``port``, is invalid.
        """
        source = as_source(discovery, port=port, interval_s=interval_s)
        return Following(self._cluster, source, drain_timeout_s=drain_timeout_s)

    def create_per_worker_dataset(self, dataset_fn: Any) -> Any:
        """Create a dataset as ``ClusterCoordinator`` does; workers that join later create their iterators, too."""
        if callable(dataset_fn) and not isinstance(dataset_fn, tf.data.Dataset):
            return ElasticDatasetFromFunction(dataset_fn, self)
        return ElasticDatasetFromDataset(dataset_fn, self)

    def _create(self, recipe: Recipe, kind: type[ElasticValues] = ElasticValues) -> ElasticValues:
        return self._cluster.create(recipe, kind)

    def _create_per_worker_resources(self, fn: Any, args: Any = None, kwargs: Any = None) -> ElasticValues:
        return self._create(Recipe.of(fn, args, kwargs))

    def _create_per_worker_variables(self, fn: Any, args: Any = None, kwargs: Any = None) -> ElasticValues:
        return self._create(Recipe.of(fn, args, kwargs, closure=VariableClosure))


_STATES = {
    Phase.JOINING: WorkerState.STOPPED,
    Phase.RUNNING: WorkerState.RUNNING,
    Phase.STOPPING: WorkerState.RUNNING,
    Phase.LOST: WorkerState.LOST,
    Phase.STOPPED: WorkerState.STOPPED,
}


def _info(member: Member[Any]) -> WorkerInfo:
    return WorkerInfo(member.index, member.address, _STATES[member.phase])
