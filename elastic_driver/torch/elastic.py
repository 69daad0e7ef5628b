"""``hvd.elastic`` of the PyTorch API."""

from __future__ import annotations

from elastic_driver.torch.distributed.data_parallel import DDPState
from elastic_driver.torch.distributed.fsdp_state import FSDPState
from elastic_driver.torch.distributed.zero_state import ZeroState
from elastic_driver.torch.sampler import ElasticSampler
from elastic_driver.torch.state import TorchState
from elastic_driver.worker.run import run
from elastic_driver.worker.state import ObjectState, State

__all__ = ["DDPState", "ElasticSampler", "FSDPState", "ObjectState", "State", "TorchState", "ZeroState", "run"]
