"""What is used of TensorFlow that is not public: all of it stands here, and is checked when this is imported.

Owns the words of ``tensorflow.python`` that the elastic coordinator needs, and two changes to them: which cancellation
manager a function runs under is known for each thread, where TensorFlow knows one for the process
(:func:`cancelled_by`), and no function is traced while the cluster changes (:func:`update_server_def`). Tried with
TensorFlow 2.21.
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

# What may be an error of a worker, and not of what it runs.
JUDGED = (tf.errors.OpError, ClosureInputError, ClosureAbortedError, TypeError)


class _Managers:
    """What closures ask for a cancellation manager when they are made: theirs is that of the thread that runs them."""

    @staticmethod
    def get_cancelable_function(function: Callable[..., Any]) -> Callable[..., Any]:
        return function


_MANAGERS = _Managers()


def concrete(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function as it is for these arguments; what is no tf.function stays as it is.

    TensorFlow takes what is per worker as worker 0 has it, who may be gone.
    """
    if not isinstance(function, polymorphic_function.Function):
        return function
    specs = tf.nest.map_structure(_spec, (tuple(args), kwargs))
    return function.get_concrete_function(*specs[0], **specs[1])


def _spec(value: Any) -> Any:
    if isinstance(value, (PerWorkerValues, stock.RemoteValue)):
        spec = value.element_type if isinstance(value, ByIndex) else value._type_spec
        if spec is None:
            raise ValueError("what a function has returned that is no tf.function cannot be the input of another")
        return spec
    return value


class ByIndex:
    """Is of values that are by index."""

    element_type: Any = None


class _Returned(stock.RemoteValueImpl):  # type: ignore[misc]
    """What a scheduled function has returned: nobody sees it before it is in this process.

    Otherwise its worker could be lost between the end of the function and the copy, and who fetches it would get the
    error instead of the worker's thread.
    """

    def _set_values(self, tensors: Any) -> None:
        self._values = tensors
        with self._has_fetched_to_local_lock:
            self._fetched_tensors = self._copy_to_local()
            self._has_fetched_to_local = True
        self._values = None  # what is on the worker is needed no more
        super()._set_values(None)


class Closure(stock.Closure):  # type: ignore[misc]
    """A scheduled function."""

    def __init__(self, function: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> None:
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        stock._disallow_remote_value_as_input(args)
        stock._disallow_remote_value_as_input(kwargs)
        super().__init__(concrete(function, args, kwargs), _MANAGERS, args=args, kwargs=kwargs)

    def build_output_remote_value(self) -> Any:
        """What stands for what it will have returned."""
        value = _Returned(None, self._output_type_spec)
        self._output_remote_value_ref = weakref.ref(value)
        return value

    def set_error(self, error: BaseException) -> None:
        """Who waits for what it returns gets this error."""
        self.maybe_call_with_output_remote_value(lambda value: value._set_error(error))


class ResourceClosure(stock.ResourceClosure):  # type: ignore[misc]
    """A function that makes something on one worker."""

    def __init__(self, function: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> None:
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        super().__init__(concrete(function, args, kwargs), _MANAGERS, args=args, kwargs=kwargs)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still holds what it makes."""
        return self._output_remote_value_ref is not None and self._output_remote_value_ref() is not None

    def set_error(self, error: BaseException) -> None:
        """Who waits for what it makes gets this error."""
        self.maybe_call_with_output_remote_value(lambda value: value._set_error(error))


class VariableClosure(ResourceClosure):
    """A function that makes a variable on one worker."""

    def _init_remote_value(self) -> Any:
        return RemoteVariable(self, self._output_type_spec)


def set_aborted(value: Any, error: BaseException) -> None:
    """What was made on a worker is gone with its server. It may be made again."""
    value._set_aborted(ClosureAbortedError(error))


def is_function(function: Any) -> bool:
    """Whether it can be scheduled."""
    return isinstance(function, (polymorphic_function.Function, concrete_function.ConcreteFunction))


def has_resources(coordinator: Any) -> bool:
    """Whether something was made on the workers of a coordinator of TensorFlow's, or is scheduled there."""
    cluster = coordinator._cluster
    return any(worker._resource_remote_value_refs for worker in cluster.workers) or not cluster.done()


def is_worker_failure(error: BaseException) -> bool:
    """Whether TensorFlow takes it for the loss of a worker."""
    return bool(stock._is_worker_failure(error))


def failed_parameter_servers(error: BaseException) -> frozenset[int]:
    """The parameter servers that TensorFlow takes for lost, if it is that; nobody for other errors."""
    return frozenset(stock._extract_failed_ps_instances(str(error))) if stock._is_ps_failure(error) else frozenset()


def iterator_type(strategy: Any, dataset_fn: Any) -> Any:
    """The type of an iterator of the dataset that a concrete function returns."""
    return input_lib.get_iterator_spec_from_dataset(strategy, dataset_fn.structured_outputs)


def dataset_type(dataset_fn: Any) -> Any:
    """The type of the dataset that a concrete function returns."""
    return dataset_fn.structured_outputs._type_spec


# --- the runtime -----------------------------------------------------------------------------------------------------


def server_def() -> Any:
    """A copy of the cluster as the runtime has it (a ``ServerDef``)."""
    now = context.get_server_def()
    copy = type(now)()
    copy.CopyFrom(now)
    return copy


def update_server_def(new: Any) -> None:
    """Tells the runtime of another cluster. Blocks until all in it have answered, or one has refused.

    Two at once would crash the process. Functions that are traced meanwhile wait: the runtime tells all servers of
    each, and would fail at one that leaves just then.
    """
    with _cluster_or_functions:
        context.context().update_server_def(new)


# Taken while the cluster changes, and while a function is made known or forgotten. That may be the garbage collector's
# doing, in any thread. Also while somebody asks if a server is alive: the runtime would look for it in a cluster that
# is being replaced, and crash.
_cluster_or_functions = threading.RLock()


def _alone(method: Any) -> Any:
    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _cluster_or_functions:
            return method(self, *args, **kwargs)

    return alone


class Place:
    """Where a worker's closures run: its device, and what keeps the order of its operations.

    Args:
        index: of the worker.
    """

    def __init__(self, index: int) -> None:
        self.worker_index = index
        self.device_name = f"/job:worker/replica:0/task:{index}"
        self.executor = executor.new_executor(enable_async=False)

    def clear(self) -> None:
        """Forgets its errors, which would be told of when it is freed."""
        self.executor.clear_error()


_of_thread = threading.local()


@contextlib.contextmanager
def cancelled_by(manager: Any) -> Iterator[None]:
    """While this runs, the functions of this thread end when the manager is cancelled."""
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
    """What is not as it is used here."""

    def has(thing: Any, *names: str) -> Iterator[str]:
        for name in names:
            if not hasattr(thing, name):
                yield f"{getattr(thing, '__name__', thing)}.{name} is gone"

    def gives(kind: type, *names: str) -> Iterator[str]:
        # What an object has that the class has not.
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
        yield "datasets are per worker in another way"
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
        yield "functions are cancelled in another way"


def _check() -> None:
    try:
        faults = list(_faults())
    except (TypeError, ValueError, AttributeError) as error:
        faults = [str(error)]
    if faults:
        raise ImportError(
            f"elastic_driver.tensorflow cannot be used with TensorFlow {tf.__version__}: {'; '.join(faults)}. It was "
            f"tried with {', '.join(f'{version}.x' for version in TRIED_WITH)}"
        )


# What makes functions known to the runtime, and has it forget them; and what looks for a server in the cluster.
_ALONE = ("add_c_function", "add_function_def", "remove_function", "check_alive")

_check()
cancellation.context = _manager
for _name in _ALONE:
    setattr(context.Context, _name, _alone(getattr(context.Context, _name)))
