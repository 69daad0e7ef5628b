"""The API for PyTorch: ``import elastic_driver.torch as hvd``. Names and arguments are those of ``horovod.torch``.

Each name is imported here once, or comes with a module that is imported as a whole: worker/api/names.py, shared by all
frameworks, and collectives.py. ``__all__`` lists the imported names, without the package's own modules.
"""

import typing as _typing
from types import ModuleType as _ModuleType

from elastic_driver.torch import elastic as elastic
from elastic_driver.torch.collectives import *  # noqa: F403
from elastic_driver.torch.distributed.data_parallel import DDPState as DDPState
from elastic_driver.torch.distributed.data_parallel import compile_ahead as compile_ahead
from elastic_driver.torch.distributed.data_parallel import distributed_data_parallel as distributed_data_parallel
from elastic_driver.torch.distributed.fsdp_state import FSDPState as FSDPState
from elastic_driver.torch.distributed.group import process_group as process_group
from elastic_driver.torch.distributed.zero_state import ZeroState as ZeroState
from elastic_driver.torch.functions import broadcast_optimizer_state as broadcast_optimizer_state
from elastic_driver.torch.functions import broadcast_parameters as broadcast_parameters
from elastic_driver.torch.ops import allgather as allgather
from elastic_driver.torch.ops import allreduce as allreduce
from elastic_driver.torch.ops import alltoall as alltoall
from elastic_driver.torch.ops import broadcast as broadcast
from elastic_driver.torch.ops import grouped_allgather as grouped_allgather
from elastic_driver.torch.ops import grouped_allreduce as grouped_allreduce
from elastic_driver.torch.ops import grouped_reducescatter as grouped_reducescatter
from elastic_driver.torch.ops import reducescatter as reducescatter
from elastic_driver.torch.optimizer.compression import Compression as Compression
from elastic_driver.torch.optimizer.optimizer import DistributedOptimizer as DistributedOptimizer
from elastic_driver.torch.sparse import sparse_allreduce_async as sparse_allreduce_async
from elastic_driver.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from elastic_driver.torchelastic.store import HTTPStore as HTTPStore
from elastic_driver.worker.api.names import *  # noqa: F403

if not _typing.TYPE_CHECKING:  # type checkers cannot evaluate it, and would assume that it is empty
    __all__ = [
        name
        for name, value in sorted(globals().items())
        if not name.startswith("_") and (name == "elastic" or not isinstance(value, _ModuleType))
    ]
