"""The API for PyTorch: ``import elastic_driver.torch as hvd``. Names and arguments are those of ``horovod.torch``."""

from __future__ import annotations

from elastic_driver.errors import HorovodInternalError, HostsUpdatedInterrupt, NotInitializedError
from elastic_driver.torch import elastic
from elastic_driver.torch.compression import Compression
from elastic_driver.torch.functions import broadcast_optimizer_state, broadcast_parameters
from elastic_driver.torch.ops import allgather, allreduce, allreduce_, broadcast, broadcast_
from elastic_driver.torch.optimizer import DistributedOptimizer
from elastic_driver.worker.collectives import Average, Max, Min, Product, ReduceOp, Sum
from elastic_driver.worker.numpy_api import barrier
from elastic_driver.worker.objects import allgather_object, broadcast_object
from elastic_driver.worker.runtime import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "NotInitializedError",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
