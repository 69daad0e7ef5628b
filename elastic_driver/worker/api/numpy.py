"""The API for numpy arrays, as provided by ``import elastic_driver as hvd``.

Names, arguments and meanings are those of ``horovod.torch``, with arrays instead of tensors. All public names here
belong to the API, and nothing else does: elastic_driver/__init__.py re-exports all of them.
"""

import numpy.typing as _npt

from elastic_driver.worker.api import arrays as _arrays
from elastic_driver.worker.api import collectives as _framework
from elastic_driver.worker.api.names import *  # noqa: F403

_collectives: _framework.Collectives[_npt.ArrayLike, _arrays.Array, list[_arrays.Array]]
_collectives = _framework.Collectives(_arrays.NumpyAdapter())

allgather = _collectives.allgather
allgather_async = _collectives.allgather_async
allreduce = _collectives.allreduce
allreduce_ = _collectives.allreduce_
allreduce_async = _collectives.allreduce_async
allreduce_async_ = _collectives.allreduce_async_
alltoall = _collectives.alltoall
alltoall_async = _collectives.alltoall_async
broadcast = _collectives.broadcast
broadcast_ = _collectives.broadcast_
broadcast_async = _collectives.broadcast_async
broadcast_async_ = _collectives.broadcast_async_
grouped_allgather = _collectives.grouped_allgather
grouped_allgather_async = _collectives.grouped_allgather_async
grouped_allreduce = _collectives.grouped_allreduce
grouped_allreduce_ = _collectives.grouped_allreduce_
grouped_allreduce_async = _collectives.grouped_allreduce_async
grouped_allreduce_async_ = _collectives.grouped_allreduce_async_
grouped_reducescatter = _collectives.grouped_reducescatter
grouped_reducescatter_async = _collectives.grouped_reducescatter_async
reducescatter = _collectives.reducescatter
reducescatter_async = _collectives.reducescatter_async
