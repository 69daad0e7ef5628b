"""An elastic driver for distributed training: jobs keep running while machines join and leave.

``import elastic_driver as hvd`` gives the API for numpy arrays, ``import elastic_driver.torch as hvd`` the one for
PyTorch. Importing this package alone loads neither numpy nor torch nor the native module: names are looked up when
they are first used, so that the command line starts fast.

All public names of worker/api/numpy.py are this package's, too: type checkers read them through the star import below,
and ``__getattr__`` finds them there. Names that are not part of the API inside workers are listed here.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from elastic_driver.version import __version__ as __version__

if TYPE_CHECKING:
    from elastic_driver import elastic as elastic
    from elastic_driver.core.registry import WorkerStateRegistry as WorkerStateRegistry
    from elastic_driver.discovery.objects import FixedHosts as FixedHosts
    from elastic_driver.discovery.objects import HostDiscovery as HostDiscovery
    from elastic_driver.discovery.objects import HostDiscoveryScript as HostDiscoveryScript
    from elastic_driver.driver import ElasticDriver as ElasticDriver
    from elastic_driver.function.launch import run as run
    from elastic_driver.function.torch_launcher import ChildFailedError as ChildFailedError
    from elastic_driver.function.torch_launcher import LaunchConfig as LaunchConfig
    from elastic_driver.function.torch_launcher import elastic_launch as elastic_launch
    from elastic_driver.hosts import Host as Host
    from elastic_driver.worker.api.figures import report as report
    from elastic_driver.worker.api.numpy import *  # noqa: F403
    from elastic_driver.worker.checkpoint import checkpoint_point as checkpoint_point

_API = "elastic_driver.worker.api.numpy"
_ELSEWHERE = {
    "ChildFailedError": "elastic_driver.function.torch_launcher",
    "ElasticDriver": "elastic_driver.driver",
    "FixedHosts": "elastic_driver.discovery.objects",
    "Host": "elastic_driver.hosts",
    "HostDiscovery": "elastic_driver.discovery.objects",
    "HostDiscoveryScript": "elastic_driver.discovery.objects",
    "LaunchConfig": "elastic_driver.function.torch_launcher",
    "checkpoint_point": "elastic_driver.worker.checkpoint",
    "WorkerStateRegistry": "elastic_driver.core.registry",
    "elastic_launch": "elastic_driver.function.torch_launcher",
    "report": "elastic_driver.worker.api.figures",
    "run": "elastic_driver.function.launch",
}


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("elastic_driver.elastic")
    # ``from elastic_driver import torch`` calls this first, and must not load numpy's API.
    is_module = name not in _ELSEWHERE and importlib.util.find_spec(f"{__name__}.{name}") is not None
    if name.startswith("_") or is_module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_ELSEWHERE.get(name, _API)), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    api = [name for name in dir(importlib.import_module(_API)) if not name.startswith("_")]
    return sorted({*globals(), *api, *_ELSEWHERE, "elastic"})
