"""All use of TensorFlow's private API, which is checked when this module is imported.

Owns the names of ``tensorflow.python`` that the elastic coordinator needs, and two changes to them: each thread has its
own current cancellation manager, where TensorFlow has one per process (:func:`cancelled_by`), and no function is traced
while the cluster is updated (:func:`update_server_def`). Tested with TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_lib, parameter_server_strategy_v2
from tensorflow.python.distribute.coordinator import cluster_coordinator as stock
from tensorflow.python.distribute.coordinator import coordinator_context, values
from tensorflow.python.eager import cancellation, context, executor
from tensorflow.python.eager.polymorphic_function import concrete_function, polymorphic_function

TRIED_WITH = ("2.21",)

ClusterCoordinator = stock.ClusterCoordinator
PerWorkerValues = values.PerWorkerValues
PerWorkerIterator = values.PerWorkerDistributedIterator
DatasetFromFunction = values.PerWorkerDatasetFromDatasetFunction
DatasetFromDataset = values.PerWorkerDatasetFromDataset
RemoteValue = stock.RemoteValue
RemoteVariable = stock.RemoteVariable
ClosureInputError = stock.ClosureInputError
ClosureAbortedError = stock.ClosureAbortedError
CancellationManager = cancellation.CancellationManager

QUEUE_SIZE: int = stock._CLOSURE_QUEUE_MAX_SIZE

# The errors that may be a worker's fault, not its closure's.
JUDGED = (tf.errors.OpError, ClosureInputError, ClosureAbortedError, TypeError)


class _Managers:
    """A stand-in for the cancellation manager of closures: a closure uses that of the thread that runs it instead."""

    @staticmethod
    def get_cancelable_function(function: Callable[..., Any]) -> Callable[..., Any]:
        return function


_MANAGERS = _Managers()


def concrete(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the concrete function for these arguments; a function other than a tf.function is returned unchanged.

    TensorFlow itself would trace it with the per-worker values of worker 0, which may have left.
    """
    if not isinstance(function, polymorphic_function.Function):
        return function
    specs = tf.nest.map_structure(_spec, (tuple(args), kwargs))
    return function.get_concrete_function(*specs[0], **specs[1])


def _spec(value: Any) -> Any:
    if isinstance(value, (PerWorkerValues, stock.RemoteValue)):
        spec = value.element_type if isinstance(value, ByIndex) else value._type_spec
        if spec is None:
            raise ValueError(
                "the result of a function that is not a tf.function cannot be the input of another function"
            )
        return spec
    return value


class ByIndex:
    """The base class of this package's per-worker values."""

    element_type: Any = None


class _Returned(stock.RemoteValueImpl):  # type: ignore[misc]
    """The result of a scheduled function, copied to this process before it becomes available.

    Otherwise its worker could be lost between the end of the function and the copy, and the caller that fetches the
    result would get the error instead of the worker's thread.
    """

    def _set_values(self, tensors: Any) -> None:
        self._values = tensors
        with self._has_fetched_to_local_lock:
            self._fetched_tensors = self._copy_to_local()
            self._has_fetched_to_local = True
        self._values = None  # the tensors on the worker are no longer needed
        super()._set_values(None)


class Closure(stock.Closure):  # type: ignore[misc]
    """A scheduled function."""

    def __init__(self, function: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> None:
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        stock._disallow_remote_value_as_input(args)
        stock._disallow_remote_value_as_input(kwargs)
        super().__init__(concrete(function, args, kwargs), _MANAGERS, args=args, kwargs=kwargs)

    def build_output_remote_value(self) -> Any:
        """Create the remote value of its result."""
        value = _Returned(None, self._output_type_spec)
        self._output_remote_value_ref = weakref.ref(value)
        return value

    def set_error(self, error: BaseException) -> None:
        """Raise this error in callers that wait for its result."""
        self.maybe_call_with_output_remote_value(lambda value: value._set_error(error))


class ResourceClosure(stock.ResourceClosure):  # type: ignore[misc]
    """A function that creates a value on one worker."""

    def __init__(self, function: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> None:
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        super().__init__(concrete(function, args, kwargs), _MANAGERS, args=args, kwargs=kwargs)

    @property
    def is_wanted(self) -> bool:
        """Whether its value is still referenced."""
        return self._output_remote_value_ref is not None and self._output_remote_value_ref() is not None

    def set_error(self, error: BaseException) -> None:
        """Raise this error in callers that wait for its value."""
        self.maybe_call_with_output_remote_value(lambda value: value._set_error(error))


class VariableClosure(ResourceClosure):
    """A function that creates a variable on one worker."""

    def _init_remote_value(self) -> Any:
        return RemoteVariable(self, self._output_type_spec)


def set_aborted(value: Any, error: BaseException) -> None:
    """Mark a value as lost with its worker's server. It may be created again."""
    value._set_aborted(ClosureAbortedError(error))


def is_function(function: Any) -> bool:
    """Return whether this is a tf.function or a concrete function."""
    return isinstance(function, (polymorphic_function.Function, concrete_function.ConcreteFunction))


def has_resources(coordinator: Any) -> bool:
    """Return whether one of TensorFlow's own coordinators has per-worker values or unfinished closures."""
    cluster = coordinator._cluster
    return any(worker._resource_remote_value_refs for worker in cluster.workers) or not cluster.done()


def is_worker_failure(error: BaseException) -> bool:
    """Return whether TensorFlow considers an error the failure of a worker."""
    return bool(stock._is_worker_failure(error))


def failed_parameter_servers(error: BaseException) -> frozenset[int]:
    """Return the indices of the parameter servers whose failure TensorFlow sees in an error; empty for other errors."""
    return frozenset(stock._extract_failed_ps_instances(str(error))) if stock._is_ps_failure(error) else frozenset()


def iterator_type(strategy: Any, dataset_fn: Any) -> Any:
    """Return the type of an iterator of the dataset that a concrete function returns."""
    return input_lib.get_iterator_spec_from_dataset(strategy, dataset_fn.structured_outputs)


def dataset_type(dataset_fn: Any) -> Any:
    """Return the type of the dataset that a concrete function returns."""
    return dataset_fn.structured_outputs._type_spec


# --- the runtime -----------------------------------------------------------------------------------------------------


def server_def() -> Any:
    """Return a copy of the runtime's cluster (a ``ServerDef``)."""
    now = context.get_server_def()
    copy = type(now)()
    copy.CopyFrom(now)
    return copy


def update_server_def(new: Any) -> None:
    """Update the runtime's cluster. Blocks until all its servers have answered, or one has failed.

    Two updates at a time would crash the process. The tracing of functions waits meanwhile: the runtime sends each
    function to all servers, and would fail at a server that is just leaving.
    """
    with _cluster_or_functions:
        context.context().update_server_def(new)


# Held while the cluster is updated, and while a function is registered or removed, which the garbage collector may do
# in any thread. Also held for a query whether a server is alive: the runtime would look it up in a cluster that is
# being replaced, and crash.
_cluster_or_functions = threading.RLock()


def _alone(method: Any) -> Any:
    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _cluster_or_functions:
            return method(self, *args, **kwargs)

    return alone


class Place:
    """Where a worker's closures run: its device, and an executor that keeps its operations in order.

    Args:
        index: the worker's index.
    """

    def __init__(self, index: int) -> None:
        self.worker_index = index
        self.device_name = f"/job:worker/replica:0/task:{index}"
        self.executor = executor.new_executor(enable_async=False)

    def clear(self) -> None:
        """Clear the executor's errors, which would be logged when it is freed."""
        self.executor.clear_error()


_of_thread = threading.local()


@contextlib.contextmanager
def cancelled_by(manager: Any) -> Iterator[None]:
    """Return a context in which functions that this thread runs end when the manager is canceled."""
    _of_thread.manager = manager
    try:
        yield
    finally:
        _of_thread.manager = None


def _manager_of_process() -> Any:
    return cancellation._active_context


def _manager() -> Any:
    manager = getattr(_of_thread, "manager", None)
    return _manager_of_process() if manager is None else manager


# --- the check -------------------------------------------------------------------------------------------------------


def _faults() -> Iterator[str]:
    """Yield the differences between TensorFlow's private API and its use here."""

    def has(thing: Any, *names: str) -> Iterator[str]:
        for name in names:
            if not hasattr(thing, name):
                yield f"{getattr(thing, '__name__', thing)}.{name} is gone"

    def gives(kind: type, *names: str) -> Iterator[str]:
        # For attributes that only instances have.
        given = inspect.unwrap(kind.__init__).__code__.co_names  # type: ignore[misc]
        for name in names:
            if name not in given:
                yield f"{kind.__name__}.{name} is gone"

    def takes(function: Any, *names: str) -> Iterator[str]:
        there = tuple(inspect.signature(function).parameters)
        if there[: len(names)] != names:
            yield f"{function.__qualname__} takes {', '.join(there)}"

    yield from has(
        stock,
        "_disallow_remote_value_as_input",
        "_extract_failed_ps_instances",
        "_is_ps_failure",
        "_is_worker_failure",
        "_select_worker_slice",
    )
    yield from takes(stock.Closure.__init__, "self", "function", "cancellation_mgr", "args", "kwargs")
    yield from takes(stock.Closure.execute_on, "self", "worker")
    yield from gives(stock.Closure, "_output_remote_value_ref", "_output_type_spec", "get_cancelable_function")
    yield from has(
        stock.ResourceClosure,
        "_init_remote_value",
        "build_output_remote_value",
        "mark_cancelled",
        "maybe_call_with_output_remote_value",
    )
    yield from takes(stock.Closure.maybe_call_with_output_remote_value, "self", "method")
    yield from has(values.RemoteValueImpl, "_set_aborted", "_set_error", "_set_values", "_copy_to_local", "get")
    yield from takes(values.RemoteValueImpl.__init__, "self", "closure", "type_spec")
    yield from gives(
        values.RemoteValueImpl,
        "_closure",
        "_fetched_tensors",
        "_has_fetched_to_local",
        "_has_fetched_to_local_lock",
        "_type_spec",
        "_values",
    )
    yield from takes(stock.ClusterCoordinator.__new__, "cls", "strategy")
    yield from has(stock.ClusterCoordinator, "_create_per_worker_resources", "_create_per_worker_variables")
    for name in ("_create_per_worker_resources", "_create_per_worker_variables"):
        yield from takes(getattr(stock.ClusterCoordinator, name), "self", "fn", "args", "kwargs")
    yield from gives(stock.ClusterCoordinator, "_cluster", "_has_initialized", "_strategy")
    yield from gives(stock.Cluster, "workers")
    yield from has(stock.Cluster, "done", "stop")
    yield from gives(stock.Worker, "_resource_remote_value_refs")
    yield from gives(tf.distribute.ParameterServerStrategy, "_cluster_coordinator", "_is_parameter_server_strategy_v2")
    yield from gives(parameter_server_strategy_v2.ParameterServerStrategyV2Extended, "_used_with_coordinator")
    for kind, first in ((DatasetFromFunction, "dataset_fn"), (DatasetFromDataset, "dataset")):
        yield from takes(kind.__init__, "self", first, "coordinator")
    yield from gives(DatasetFromFunction, "_coordinator", "_dataset_fn")
    if not issubclass(DatasetFromDataset, DatasetFromFunction):
        yield "per-worker datasets are implemented differently"
    yield from has(tf.data.Dataset, "_type_spec")
    yield from has(input_lib, "get_iterator_spec_from_dataset")
    yield from has(concrete_function.ConcreteFunction, "structured_outputs")
    yield from takes(coordinator_context.DispatchContext.__init__, "self", "worker_obj")
    yield from takes(context.Context.update_server_def, "self", "server_def")
    yield from has(context.Context, "_initialize_logical_devices", "call_function", *_ALONE)
    yield from has(context, "context", "get_server_def")
    yield from takes(executor.new_executor, "enable_async")
    yield from has(executor.Executor, "clear_error")
    yield from has(CancellationManager, "is_cancelled", "start_cancel")
    yield from has(cancellation, "_active_context", "context")
    if "cancellation" not in context.Context.call_function.__code__.co_names:
        yield "functions are canceled differently"


def _check() -> None:
    try:
        faults = list(_faults())
    except (TypeError, ValueError, AttributeError) as error:
        faults = [str(error)]
    if faults:
        raise ImportError(
            f"elastic_driver.tensorflow cannot be used with TensorFlow {tf.__version__}: {'; '.join(faults)}. It "
            f"was tested with {', '.join(f'{version}.x' for version in TRIED_WITH)}"
        )


# The methods that register and remove functions in the runtime, and the one that looks up a server in the cluster.
_ALONE = ("add_c_function", "add_function_def", "remove_function", "check_alive")

_check()
cancellation.context = _manager
for _name in _ALONE:
    setattr(context.Context, _name, _alone(getattr(context.Context, _name)))
