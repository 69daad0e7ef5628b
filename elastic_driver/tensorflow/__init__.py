"""TensorFlow's parameter servers with workers that join and leave.

    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = ElasticClusterCoordinator(strategy)
    coordinator.add_worker("10.0.0.7:2222")
    coordinator.remove_worker("10.0.0.5:2222")

Everything else is as with TensorFlow's own ``ClusterCoordinator``. See docs/parameter-servers.md. Importing this
package alone does not load TensorFlow: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_driver.tensorflow.cluster_spec import add_task as add_task
    from elastic_driver.tensorflow.cluster_spec import remove_task as remove_task
    from elastic_driver.tensorflow.coordinator import ElasticClusterCoordinator as ElasticClusterCoordinator
    from elastic_driver.tensorflow.coordinator import WorkerInfo as WorkerInfo
    from elastic_driver.tensorflow.coordinator import WorkerState as WorkerState
    from elastic_driver.tensorflow.following import Following as Following
    from elastic_driver.tensorflow.listings import pods as pods

_HOMES = {
    "ElasticClusterCoordinator": "coordinator",
    "Following": "following",
    "WorkerInfo": "coordinator",
    "WorkerState": "coordinator",
    "add_task": "cluster_spec",
    "pods": "listings",
    "remove_task": "cluster_spec",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
