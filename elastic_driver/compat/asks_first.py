"""In a worker that runs Horovod's own library: before each ``init()``, its agent is asked for the worker's place.

Horovod asks nobody at a process's first ``init()``: it takes rank and size from its environment, and has no way to hear
that they have changed since the process was started. At a later one it asks, and aborts when there is no place for it
any more. So ``HorovodBasics.init`` is wrapped: it waits here until the round is formed, and puts the place into the
environment; who has none exits with code 0. Nothing else of Horovod is touched. Where this does not run
(``python -I``), the agent does with the requests that Horovod makes.
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
# What torch's optimizers import when the first is made.
_OPTIMIZERS_NEED = "torch._dynamo"


def install() -> None:
    """Wraps it as soon as it is imported."""
    if _BASICS in sys.modules:
        _wrap(sys.modules[_BASICS])
    elif not any(isinstance(finder, _BasicsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BasicsFinder())


class _BasicsFinder(MetaPathFinder):
    """Finds that one module where it is found without this, and wraps it when it is there.

    It stays until the module has been loaded: who only asks whether there is one imports it later.
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
    def asks_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ENV_PORT in os.environ and not _is_initialized(self):
            _hurry_later()
            _take_place()
        return init(self, *args, **kwargs)

    basics.init = asks_first


def _is_initialized(basics: Any) -> bool:
    try:
        return bool(basics.is_initialized())
    except (ValueError, AttributeError):
        return False


def _hurry_later() -> None:
    """What a script imports after ``init()`` all others wait for, if they train already: so it is imported now.

    That is what torch's optimizers import when the first is made, which takes a second or more.
    """
    if os.environ.get(ENV_ROUND, "0") != "0" and "torch" in sys.modules:
        with contextlib.suppress(Exception):  # it will be raised where it is needed
            importlib.import_module(_OPTIMIZERS_NEED)


def _take_place() -> None:
    """Blocks until this worker has its place in a round. Without one, the process ends with code 0."""
    connection = http.client.HTTPConnection("127.0.0.1", int(os.environ[ENV_PORT]))
    try:
        process = f"{os.getpid()} {threading.get_native_id()}"
        path = f"/{RANK_AND_SIZE}/{os.environ.get('HOROVOD_HOSTNAME', '')}:{os.environ.get('HOROVOD_LOCAL_RANK', '')}"
        connection.request("GET", path, headers={PLACE_HEADER.decode(): process})
        answer = connection.getresponse()
        body = answer.read()
    except OSError as error:
        reason = in_words(error)
        raise RuntimeError(f"cannot ask for this worker's place: its agent does not answer: {reason}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"cannot take this worker's place: {body.decode(errors='replace')[:500]}")
    if body == REMOVED:
        raise SystemExit(0)  # it has no place any more, which is no failure
    os.environ.update(place_variables(SlotInfo(*map(int, body.split(b",")))))
    interface = answer.headers.get(INTERFACE_HEADER)
    if interface:
        os.environ[ENV_INTERFACE] = interface
