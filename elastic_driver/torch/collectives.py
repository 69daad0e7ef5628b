"""The collectives of tensors that are not differentiable: asynchronous ones, and those in place.

worker/api/collectives.py implements them once for all frameworks. ops.py builds the differentiable ones on top. All
public names here belong to the API, and nothing else does.
"""

import torch as _torch

from elastic_driver.torch import tensors as _tensors
from elastic_driver.worker.api import collectives as _framework

_collectives: _framework.Collectives[_torch.Tensor, _torch.Tensor, tuple[_torch.Tensor, ...]]
_collectives = _framework.Collectives(_tensors.TorchAdapter())

allgather_async = _collectives.allgather_async
allreduce_ = _collectives.allreduce_
allreduce_async = _collectives.allreduce_async
allreduce_async_ = _collectives.allreduce_async_
alltoall_async = _collectives.alltoall_async
broadcast_ = _collectives.broadcast_
broadcast_async = _collectives.broadcast_async
broadcast_async_ = _collectives.broadcast_async_
grouped_allgather_async = _collectives.grouped_allgather_async
grouped_allreduce_ = _collectives.grouped_allreduce_
grouped_allreduce_async = _collectives.grouped_allreduce_async
grouped_allreduce_async_ = _collectives.grouped_allreduce_async_
grouped_reducescatter_async = _collectives.grouped_reducescatter_async
reducescatter_async = _collectives.reducescatter_async
