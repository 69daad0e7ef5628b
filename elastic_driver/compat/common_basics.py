"""``horovod.common.basics``: rank, size and the like, as methods of an object."""

from __future__ import annotations

from typing import Any

from elastic_driver.worker.api import builds
from elastic_driver.worker.engine.collectives import Adasum, Average, Max, Min, Product, Sum
from elastic_driver.worker.rounds import current, runtime

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """For code that creates its own instance, as Horovod's modules for each framework do.

    Args:
        pkg_path: the library's path in Horovod; unused here.
        *args: likewise.
    """

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        self.Average, self.Sum, self.Adasum = Average, Sum, Adasum
        self.Min, self.Max, self.Product = Min, Max, Product

    init = staticmethod(runtime.init)
    shutdown = staticmethod(runtime.shutdown)
    is_initialized = staticmethod(current.is_initialized)
    rank = staticmethod(current.rank)
    size = staticmethod(current.size)
    local_rank = staticmethod(current.local_rank)
    local_size = staticmethod(current.local_size)
    cross_rank = staticmethod(current.cross_rank)
    cross_size = staticmethod(current.cross_size)
    is_homogeneous = staticmethod(current.is_homogeneous)
    start_timeline = staticmethod(builds.start_timeline)
    stop_timeline = staticmethod(builds.stop_timeline)
    mpi_threads_supported = staticmethod(builds.mpi_threads_supported)
    mpi_enabled = staticmethod(builds.mpi_enabled)
    mpi_built = staticmethod(builds.mpi_built)
    gloo_enabled = staticmethod(builds.gloo_enabled)
    gloo_built = staticmethod(builds.gloo_built)
    nccl_built = staticmethod(builds.nccl_built)
    ddl_built = staticmethod(builds.ddl_built)
    ccl_built = staticmethod(builds.ccl_built)
    cuda_built = staticmethod(builds.cuda_built)
    rocm_built = staticmethod(builds.rocm_built)
