"""TensorFlow's parameter servers with workers that come and go.

    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = ElasticClusterCoordinator(strategy)
    coordinator.add_worker("10.0.0.7:2222")
    coordinator.remove_worker("10.0.0.5:2222")

Everything else is as with TensorFlow's own ``ClusterCoordinator``. See docs/parameter-servers.md.
"""

from elastic_driver.tensorflow.cluster_spec import add_task, remove_task
from elastic_driver.tensorflow.coordinator import ElasticClusterCoordinator, WorkerInfo, WorkerState

__all__ = ["ElasticClusterCoordinator", "WorkerInfo", "WorkerState", "add_task", "remove_task"]
