"""A hook for workers that run Horovod's own library: it asks the agent for the worker's place before each ``init()``.

At a process's first ``init()``, Horovod sends no request: it reads rank and size from its environment, and does not
notice that they have changed since the process was started. At later calls it requests its place, and aborts if it no
longer has one. So this wraps ``HorovodBasics.init``: the wrapper waits until the round is formed, and puts the place
into the environment; a worker without a place exits with code 0. Nothing else in Horovod is changed. Where this does
not run (``python -I``), the agent has only the requests that Horovod sends.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib
import os
import sys
import threading
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from elastic_driver.dialects.horovod import (
    ENV_INTERFACE,
    ENV_PORT,
    INTERFACE_HEADER,
    PLACE_HEADER,
    RANK_AND_SIZE,
    REMOVED,
    place_variables,
)
from elastic_driver.errors import in_words
from elastic_driver.hosts import SlotInfo
from elastic_driver.rendezvous.environment import ENV_ROUND

_BASICS = "horovod.common.basics"
# The module that torch imports when the first optimizer is created.
_OPTIMIZERS_NEED = "torch._dynamo"


def install() -> None:
    """Wrap ``HorovodBasics.init`` as soon as its module is imported."""
    if _BASICS in sys.modules:
        _wrap(sys.modules[_BASICS])
    elif not any(isinstance(finder, _BasicsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BasicsFinder())


class _BasicsFinder(MetaPathFinder):
    """A finder that finds Horovod's module through the other finders, and wraps it after its import.

    It is removed once the module was loaded, not when it was found: a program may only check whether it exists.
    """

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _BASICS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WrappingLoader(spec.loader, self)
        return spec


class _WrappingLoader(Loader):
    def __init__(self, loader: Any, finder: _BasicsFinder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _wrap(module)
        with contextlib.suppress(ValueError):  # another thread was first
            sys.meta_path.remove(self._finder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _wrap(module: ModuleType) -> None:
    basics = getattr(module, "HorovodBasics", None)
    if basics is None or hasattr(basics.init, "__wrapped__"):
        return
    init = basics.init

    @functools.wraps(init)
    def init_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ENV_PORT in os.environ and not _is_initialized(self):
            _hurry_later()
            _take_place()
        return init(self, *args, **kwargs)

    basics.init = init_hook


def _is_initialized(basics: Any) -> bool:
    try:
        return bool(basics.is_initialized())
    except (ValueError, AttributeError):
        return False


def _hurry_later() -> None:
    """Import now, in a running job, what torch would import later: other workers would wait for it after ``init()``.

    torch imports that module when the first optimizer is created, which takes a second or more.
    """
    if os.environ.get(ENV_ROUND, "0") != "0" and "torch" in sys.modules:
        with contextlib.suppress(Exception):  # the script's own import will raise it
            importlib.import_module(_OPTIMIZERS_NEED)


def _take_place() -> None:
    """Wait until this worker has a place in a round. Without one, the process ends with code 0."""
    connection = http.client.HTTPConnection("127.0.0.1", int(os.environ[ENV_PORT]))
    try:
        process = f"{os.getpid()} {threading.get_native_id()}"
        path = f"/{RANK_AND_SIZE}/{os.environ.get('HOROVOD_HOSTNAME', '')}:{os.environ.get('HOROVOD_LOCAL_RANK', '')}"
        connection.request("GET", path, headers={PLACE_HEADER.decode(): process})
        answer = connection.getresponse()
        body = answer.read()
    except OSError as error:
        reason = in_words(error)
        raise RuntimeError(f"cannot get a rank for this worker: its agent does not answer: {reason}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"cannot get a rank for this worker: {body.decode(errors='replace')[:500]}")
    if body == REMOVED:
        raise SystemExit(0)  # it no longer has a place, which is not a failure
    os.environ.update(place_variables(SlotInfo(*map(int, body.split(b",")))))
    interface = answer.headers.get(INTERFACE_HEADER)
    if interface:
        os.environ[ENV_INTERFACE] = interface
