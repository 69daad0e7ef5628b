"""An elastic driver for distributed training: the job keeps going while machines come and go.

``import elastic_driver as hvd`` gives the API for numpy arrays, ``import elastic_driver.torch as hvd`` the one for
PyTorch. Importing this package alone loads neither numpy nor torch nor the native module: names are looked up when
they are first used, so that the command line starts fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from elastic_driver import elastic as elastic
    from elastic_driver.errors import HorovodInternalError as HorovodInternalError
    from elastic_driver.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from elastic_driver.errors import NotInitializedError as NotInitializedError
    from elastic_driver.worker.collectives import Average as Average
    from elastic_driver.worker.collectives import Max as Max
    from elastic_driver.worker.collectives import Min as Min
    from elastic_driver.worker.collectives import Product as Product
    from elastic_driver.worker.collectives import ReduceOp as ReduceOp
    from elastic_driver.worker.collectives import Sum as Sum
    from elastic_driver.worker.numpy_api import allgather as allgather
    from elastic_driver.worker.numpy_api import allreduce as allreduce
    from elastic_driver.worker.numpy_api import barrier as barrier
    from elastic_driver.worker.numpy_api import broadcast as broadcast
    from elastic_driver.worker.objects import allgather_object as allgather_object
    from elastic_driver.worker.objects import broadcast_object as broadcast_object
    from elastic_driver.worker.runtime import cross_rank as cross_rank
    from elastic_driver.worker.runtime import cross_size as cross_size
    from elastic_driver.worker.runtime import init as init
    from elastic_driver.worker.runtime import is_initialized as is_initialized
    from elastic_driver.worker.runtime import local_rank as local_rank
    from elastic_driver.worker.runtime import local_size as local_size
    from elastic_driver.worker.runtime import rank as rank
    from elastic_driver.worker.runtime import shutdown as shutdown
    from elastic_driver.worker.runtime import size as size

_HOME = {
    "elastic_driver.errors": ("HorovodInternalError", "HostsUpdatedInterrupt", "NotInitializedError"),
    "elastic_driver.worker.collectives": ("Average", "Max", "Min", "Product", "ReduceOp", "Sum"),
    "elastic_driver.worker.numpy_api": ("allgather", "allreduce", "barrier", "broadcast"),
    "elastic_driver.worker.objects": ("allgather_object", "broadcast_object"),
    "elastic_driver.worker.runtime": (
        "cross_rank",
        "cross_size",
        "init",
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "shutdown",
        "size",
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
