"""A TensorFlow that lacks what is used of it and not public is refused at the import, by name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.distribute import input_lib
from tensorflow.python.distribute.coordinator import cluster_coordinator as stock
from tensorflow.python.distribute.coordinator import values
from tensorflow.python.eager import cancellation, context, executor

from elastic_driver.tensorflow import private

pytestmark = [pytest.mark.integration, pytest.mark.tensorflow]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (stock, "_is_worker_failure"),
        (stock, "_is_ps_failure"),
        (stock, "_extract_failed_ps_instances"),
        (stock.Closure, "execute_on"),
        (stock.Closure, "mark_cancelled"),
        (stock.Cluster, "done"),
        (stock.ClusterCoordinator, "_create_per_worker_resources"),
        (values.RemoteValueImpl, "_set_aborted"),
        (input_lib, "get_iterator_spec_from_dataset"),
        (cancellation, "_active_context"),
        (cancellation.CancellationManager, "start_cancel"),
        (context, "get_server_def"),
        (context.Context, "update_server_def"),
        (executor.Executor, "clear_error"),
    ],
)
def test_a_name_that_is_gone(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=rf"cannot be used with TensorFlow {tf.__version__}: .*\b{name}\b"):
        private._check()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (stock.Closure, "_output_type_spec"),
        (stock.Closure, "_output_remote_value_ref"),
        (stock.Worker, "_resource_remote_value_refs"),
        (stock.Cluster, "workers"),
        (values.RemoteValueImpl, "_has_fetched_to_local_lock"),
        (private.DatasetFromFunction, "_coordinator"),
        (tf.distribute.ParameterServerStrategy, "_cluster_coordinator"),
    ],
)
def test_an_attribute_of_another_name(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    init = kind.__init__
    code = init.__code__.replace(
        co_names=tuple(f"_other{each}" * (each == name) or each for each in init.__code__.co_names)
    )
    monkeypatch.setattr(kind, "__init__", types.FunctionType(code, init.__globals__, closure=init.__closure__))
    with pytest.raises(ImportError, match=rf"{name} is gone"):
        private._check()


def test_what_there_is_will_do() -> None:
    private._check()
