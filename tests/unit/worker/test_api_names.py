"""The names of the API: those of Horovod 0.28.1 that there are here, for each framework, and no others."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import elastic_driver
import elastic_driver.worker.api.numpy as numpy_api

torch_api = pytest.importorskip("elastic_driver.torch")

pytestmark = pytest.mark.unit

OF_ALL = {
    *("Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"),
    *("DuplicateNameError", "HorovodInternalError", "HostsUpdatedInterrupt", "MismatchError", "NotInitializedError"),
    *("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"),
    *("init", "is_initialized", "report", "shutdown", "is_homogeneous"),
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
    *("ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"),
    *("check_extension", "gloo_enabled", "mpi_enabled", "mpi_threads_supported", "start_timeline", "stop_timeline"),
    *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
    *("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"),
    *("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"),
    *("broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "alltoall", "alltoall_async"),
    *("reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"),
    *("allgather_object", "broadcast_object", "barrier", "join", "poll", "synchronize"),
}
OF_TORCH = {
    *("Compression", "DistributedOptimizer", "SyncBatchNorm", "broadcast_optimizer_state", "broadcast_parameters"),
    *("elastic", "sparse_allreduce_async"),
    *("DDPState", "FSDPState", "HTTPStore", "ZeroState", "compile_ahead", "distributed_data_parallel", "process_group"),
}
OF_THE_PACKAGE = {
    *("ElasticDriver", "FixedHosts", "HostDiscovery", "HostDiscoveryScript", "WorkerStateRegistry", "elastic", "run"),
}


def test_the_numpy_api_has_these_names_and_no_others() -> None:
    assert {name for name in dir(numpy_api) if not name.startswith("_")} == OF_ALL
    assert set(dir(elastic_driver)) >= OF_ALL | OF_THE_PACKAGE
    assert all(getattr(elastic_driver, name) is not None for name in dir(elastic_driver) if not name.startswith("_"))
    for name in OF_ALL:
        assert getattr(elastic_driver, name) is getattr(numpy_api, name)


def test_the_torch_api_has_these_names_and_no_others() -> None:
    assert set(torch_api.__all__) == OF_ALL | OF_TORCH
    taken: dict[str, Any] = {}
    exec("from elastic_driver.torch import *", taken)
    assert set(taken) - {"__builtins__"} == OF_ALL | OF_TORCH
    for name in OF_ALL:
        if "reduce" not in name and "gather" not in name and "broadcast" not in name and "alltoall" not in name:
            assert getattr(torch_api, name) is getattr(numpy_api, name)


@pytest.mark.parametrize("api", [numpy_api, torch_api])
def test_signatures_are_horovods(api: Any) -> None:
    reduction = ["tensor", "average", "name", "op", "prescale_factor", "postscale_factor", "process_set"]
    scattering = ["tensor", "name", "op", "process_set", "prescale_factor", "postscale_factor"]
    expected = {
        "allreduce_async": reduction,
        "allreduce_": reduction,
        "grouped_allreduce_async_": ["tensors", *reduction[1:]],
        "grouped_allgather_async": ["tensors", "name", "process_set"],
        "broadcast_async_": ["tensor", "root_rank", "name", "process_set"],
        "alltoall_async": ["tensor", "splits", "name", "process_set"],
        "reducescatter_async": scattering,
        "grouped_reducescatter_async": ["tensors", *scattering[1:]],
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(api, name)).parameters) == parameters, name
    for name in OF_ALL:
        assert callable(getattr(api, name)) is False or inspect.getdoc(getattr(api, name)), name


def test_type_checkers_are_told_what_is_found_elsewhere() -> None:
    tree = ast.parse(Path(elastic_driver.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told == {**elastic_driver._ELSEWHERE, "elastic": "elastic_driver", "*": elastic_driver._API}


def test_type_checkers_see_no_list_of_torchs_names_that_they_cannot_read() -> None:
    tree = ast.parse(Path(torch_api.__file__).read_text())
    lists = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    assert not any("__all__" in ast.unparse(node) for node in lists)
    guards = [ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)]
    assert guards == ["not _typing.TYPE_CHECKING"]


def test_what_the_driver_has_loads_no_numpy() -> None:
    code = (
        "import sys, elastic_driver\n"
        "from elastic_driver import ElasticDriver, WorkerStateRegistry\n"
        "from elastic_driver import settings\n"  # a module of the package, by which nothing of the API is loaded
        "assert ElasticDriver.__name__ == 'ElasticDriver'\n"
        "print([name for name in ('numpy', 'torch', 'elastic_driver.worker.api') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == "[]"


def test_there_is_no_other_name() -> None:
    for name in ("allreduce_sync", "Collectives", "_collectives", "torch_api"):
        with pytest.raises(AttributeError, match=f"module 'elastic_driver' has no attribute '{name}'"):
            getattr(elastic_driver, name)


def test_no_module_hides_a_public_name() -> None:
    """Importing a submodule sets it as an attribute of the package, over what had that name before."""
    modules = {module.name for module in pkgutil.iter_modules(elastic_driver.__path__)}
    public = {name for name in dir(elastic_driver) if not name.startswith("_")}
    assert {name for name in public & modules if not isinstance(getattr(elastic_driver, name), ModuleType)} == set()
