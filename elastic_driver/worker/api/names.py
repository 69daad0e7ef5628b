"""The API's names that are the same for every framework: all but the collectives of tensors.

All public names here belong to the API, and nothing else does. A framework's API is these, its collectives
(``Collectives``), and its own additions.
"""

from elastic_driver.errors import DuplicateNameError as DuplicateNameError
from elastic_driver.errors import HorovodInternalError as HorovodInternalError
from elastic_driver.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from elastic_driver.errors import MismatchError as MismatchError
from elastic_driver.errors import NotInitializedError as NotInitializedError
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
from elastic_driver.worker.api.collectives import barrier as barrier
from elastic_driver.worker.api.collectives import join as join
from elastic_driver.worker.api.figures import report as report
from elastic_driver.worker.api.handles import poll as poll
from elastic_driver.worker.api.handles import synchronize as synchronize
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
