"""An elastic driver for distributed training: the job keeps going while machines come and go.

``import elastic_driver as hvd`` gives the API for numpy arrays, ``import elastic_driver.torch as hvd`` the one for
PyTorch. Importing this package alone loads neither numpy nor torch nor the native module: names are looked up when
they are first used, so that the command line starts fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic_driver.version import __version__ as __version__

if TYPE_CHECKING:
    from elastic_driver import elastic as elastic
    from elastic_driver.errors import DuplicateNameError as DuplicateNameError
    from elastic_driver.errors import HorovodInternalError as HorovodInternalError
    from elastic_driver.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from elastic_driver.errors import MismatchError as MismatchError
    from elastic_driver.errors import NotInitializedError as NotInitializedError
    from elastic_driver.function.launch import run as run
    from elastic_driver.worker.api.builds import ccl_built as ccl_built
    from elastic_driver.worker.api.builds import check_extension as check_extension
    from elastic_driver.worker.api.builds import cuda_built as cuda_built
    from elastic_driver.worker.api.builds import ddl_built as ddl_built
    from elastic_driver.worker.api.builds import gloo_built as gloo_built
    from elastic_driver.worker.api.builds import gloo_enabled as gloo_enabled
    from elastic_driver.worker.api.builds import mpi_built as mpi_built
    from elastic_driver.worker.api.builds import mpi_enabled as mpi_enabled
    from elastic_driver.worker.api.builds import mpi_threads_supported as mpi_threads_supported
    from elastic_driver.worker.api.builds import nccl_built as nccl_built
    from elastic_driver.worker.api.builds import rocm_built as rocm_built
    from elastic_driver.worker.api.builds import start_timeline as start_timeline
    from elastic_driver.worker.api.builds import stop_timeline as stop_timeline
    from elastic_driver.worker.api.numpy import allgather as allgather
    from elastic_driver.worker.api.numpy import allgather_async as allgather_async
    from elastic_driver.worker.api.numpy import allreduce as allreduce
    from elastic_driver.worker.api.numpy import allreduce_ as allreduce_
    from elastic_driver.worker.api.numpy import allreduce_async as allreduce_async
    from elastic_driver.worker.api.numpy import allreduce_async_ as allreduce_async_
    from elastic_driver.worker.api.numpy import alltoall as alltoall
    from elastic_driver.worker.api.numpy import alltoall_async as alltoall_async
    from elastic_driver.worker.api.numpy import barrier as barrier
    from elastic_driver.worker.api.numpy import broadcast as broadcast
    from elastic_driver.worker.api.numpy import broadcast_ as broadcast_
    from elastic_driver.worker.api.numpy import broadcast_async as broadcast_async
    from elastic_driver.worker.api.numpy import broadcast_async_ as broadcast_async_
    from elastic_driver.worker.api.numpy import grouped_allgather as grouped_allgather
    from elastic_driver.worker.api.numpy import grouped_allgather_async as grouped_allgather_async
    from elastic_driver.worker.api.numpy import grouped_allreduce as grouped_allreduce
    from elastic_driver.worker.api.numpy import grouped_allreduce_ as grouped_allreduce_
    from elastic_driver.worker.api.numpy import grouped_allreduce_async as grouped_allreduce_async
    from elastic_driver.worker.api.numpy import grouped_allreduce_async_ as grouped_allreduce_async_
    from elastic_driver.worker.api.numpy import grouped_reducescatter as grouped_reducescatter
    from elastic_driver.worker.api.numpy import grouped_reducescatter_async as grouped_reducescatter_async
    from elastic_driver.worker.api.numpy import join as join
    from elastic_driver.worker.api.numpy import poll as poll
    from elastic_driver.worker.api.numpy import reducescatter as reducescatter
    from elastic_driver.worker.api.numpy import reducescatter_async as reducescatter_async
    from elastic_driver.worker.api.numpy import synchronize as synchronize
    from elastic_driver.worker.api.objects import allgather_object as allgather_object
    from elastic_driver.worker.api.objects import broadcast_object as broadcast_object
    from elastic_driver.worker.engine.collectives import Adasum as Adasum
    from elastic_driver.worker.engine.collectives import Average as Average
    from elastic_driver.worker.engine.collectives import Max as Max
    from elastic_driver.worker.engine.collectives import Min as Min
    from elastic_driver.worker.engine.collectives import Product as Product
    from elastic_driver.worker.engine.collectives import ReduceOp as ReduceOp
    from elastic_driver.worker.engine.collectives import Sum as Sum
    from elastic_driver.worker.rounds.current import cross_rank as cross_rank
    from elastic_driver.worker.rounds.current import cross_size as cross_size
    from elastic_driver.worker.rounds.current import is_homogeneous as is_homogeneous
    from elastic_driver.worker.rounds.current import is_initialized as is_initialized
    from elastic_driver.worker.rounds.current import local_rank as local_rank
    from elastic_driver.worker.rounds.current import local_size as local_size
    from elastic_driver.worker.rounds.current import rank as rank
    from elastic_driver.worker.rounds.current import size as size
    from elastic_driver.worker.rounds.process_sets import ProcessSet as ProcessSet
    from elastic_driver.worker.rounds.process_sets import add_process_set as add_process_set
    from elastic_driver.worker.rounds.process_sets import global_process_set as global_process_set
    from elastic_driver.worker.rounds.process_sets import remove_process_set as remove_process_set
    from elastic_driver.worker.rounds.runtime import init as init
    from elastic_driver.worker.rounds.runtime import shutdown as shutdown

_HOME = {
    "elastic_driver.function.launch": ("run",),
    "elastic_driver.errors": (
        "DuplicateNameError",
        "HorovodInternalError",
        "HostsUpdatedInterrupt",
        "MismatchError",
        "NotInitializedError",
    ),
    "elastic_driver.worker.api.builds": (
        "ccl_built",
        "check_extension",
        "cuda_built",
        "ddl_built",
        "gloo_built",
        "gloo_enabled",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "rocm_built",
        "start_timeline",
        "stop_timeline",
    ),
    "elastic_driver.worker.engine.collectives": (
        "Adasum",
        "Average",
        "Max",
        "Min",
        "Product",
        "ReduceOp",
        "Sum",
    ),
    "elastic_driver.worker.api.numpy": (
        "allgather",
        "allgather_async",
        "allreduce",
        "allreduce_",
        "allreduce_async",
        "allreduce_async_",
        "alltoall",
        "alltoall_async",
        "barrier",
        "broadcast",
        "broadcast_",
        "broadcast_async",
        "broadcast_async_",
        "grouped_allgather",
        "grouped_allgather_async",
        "grouped_allreduce",
        "grouped_allreduce_",
        "grouped_allreduce_async",
        "grouped_allreduce_async_",
        "grouped_reducescatter",
        "grouped_reducescatter_async",
        "join",
        "poll",
        "reducescatter",
        "reducescatter_async",
        "synchronize",
    ),
    "elastic_driver.worker.api.objects": (
        "allgather_object",
        "broadcast_object",
    ),
    "elastic_driver.worker.rounds.process_sets": (
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "remove_process_set",
    ),
    "elastic_driver.worker.rounds.current": (
        "cross_rank",
        "cross_size",
        "is_homogeneous",
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "size",
    ),
    "elastic_driver.worker.rounds.runtime": (
        "init",
        "shutdown",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("elastic_driver.elastic")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, "elastic"})
