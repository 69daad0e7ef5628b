"""The import hook that builds ``horovod`` and its modules from this package's.

A module of the table looks up a name in its targets, in order, at each access. So names added to a target also appear
in Horovod's module, and classes are the same objects under both names (for ``isinstance``, ``except`` and pickle).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from elastic_driver.compat import init_hook
from elastic_driver.dialects.horovod import ENV_PROTOCOL, OFF
from elastic_driver.dialects.horovod_shim import ALWAYS, AUTO, ENV_SHIM, NEVER, SHIM_FOLDER, check_mode

# The release of Horovod with these names and signatures.
HOROVOD_VERSION = "0.28.1"

_OWN = "elastic_driver.compat"
_TORCH = "elastic_driver.torch"
_WORKER = "elastic_driver.worker"

# The helpers of horovod.runner, each with a module in this package.
_RUNNER = {
    "horovod.runner.common.util": (
        *("codec", "env", "host_hash", "hosts", "secret", "settings", "timeout", "tiny_shell_exec"),
    ),
    "horovod.runner.util": ("threads",),
}

# module -> (whether it has submodules, the sources of its names)
_MODULES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "horovod": (True, (f"{_OWN}.top",)),
    "horovod.runner": (True, (f"{_OWN}.top",)),
    "horovod.runner.common": (True, ()),
    **dict.fromkeys(_RUNNER, (True, ())),
    **{
        f"{package}.{name}": (False, (f"{_OWN}.runner.{name}",)) for package, names in _RUNNER.items() for name in names
    },
    "horovod.runner.elastic": (True, ()),
    "horovod.runner.elastic.discovery": (False, (f"{_OWN}.elastic.discovery",)),
    "horovod.runner.elastic.driver": (False, (f"{_OWN}.elastic.driver", f"{_OWN}.elastic.discovery")),
    "horovod.runner.elastic.worker": (False, (f"{_OWN}.elastic.worker", f"{_OWN}.common_elastic")),
    "horovod.common": (True, ()),
    "horovod.common.basics": (False, (f"{_OWN}.common_basics", f"{_WORKER}.rounds.process_sets")),
    "horovod.common.elastic": (False, (f"{_OWN}.common_elastic",)),
    "horovod.common.exceptions": (False, (f"{_OWN}.common_exceptions",)),
    "horovod.common.process_sets": (
        False,
        (f"{_WORKER}.rounds.process_sets", f"{_OWN}.common_basics", f"{_OWN}.common_util"),
    ),
    "horovod.common.util": (False, (f"{_OWN}.common_util", f"{_WORKER}.api.builds")),
    "horovod.data": (True, (f"{_OWN}.data_loader",)),
    "horovod.data.data_loader_base": (False, (f"{_OWN}.data_loader",)),
    "horovod.torch": (True, (_TORCH, f"{_OWN}.top")),
    "horovod.torch.compression": (False, (f"{_TORCH}.optimizer.compression",)),
    "horovod.torch.elastic": (True, (f"{_TORCH}.elastic", f"{_OWN}.common_elastic", _TORCH)),
    "horovod.torch.elastic.sampler": (False, (f"{_TORCH}.sampler",)),
    "horovod.torch.elastic.state": (False, (f"{_TORCH}.state", f"{_TORCH}.elastic", _TORCH)),
    "horovod.torch.functions": (False, (f"{_TORCH}.functions", _TORCH)),
    "horovod.torch.mpi_ops": (False, (_TORCH, f"{_OWN}.common_util")),
    "horovod.torch.optimizer": (False, (f"{_TORCH}.optimizer.optimizer", _TORCH, f"{_OWN}.common_util")),
    "horovod.torch.sync_batch_norm": (False, (f"{_TORCH}.sync_batch_norm", _TORCH)),
}
_MISSING = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "mxnet": "MXNet",
    "spark": "Spark",
    "ray": "Ray",
    "_keras": "Keras",
}


class _Forwarding(ModuleType):
    """A module that forwards its names to others.

    It is pickled by name, as cloudpickle does for known modules: functions that use the global ``hvd`` are sent to
    other processes.
    """

    _targets: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _import, (self.__name__,)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._public()
        full = f"{self.__name__}.{name}"
        if full in _MODULES:
            return importlib.import_module(full)
        # Python looks up such names in every module (inspect, doctest, unittest.mock); forwarding them would mislead.
        if not (name.startswith("__") and name.endswith("__") and name != "__version__"):
            for target in self._targets:
                with contextlib.suppress(AttributeError):
                    return getattr(importlib.import_module(target), name)
        raise AttributeError(
            f"module {self.__name__!r} has no attribute {name!r} (it is elastic_driver's stand-in for Horovod "
            f"{HOROVOD_VERSION})"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._public()})

    def _public(self) -> list[str]:
        names: set[str] = set()
        for target in self._targets:
            module = importlib.import_module(target)
            names.update(getattr(module, "__all__", None) or (n for n in dir(module) if not n.startswith("_")))
        return sorted(names)


def _import(name: str) -> ModuleType:
    """Import the module of that name, from an installed Horovod if there is one."""
    install()
    return importlib.import_module(name)


class _ForwardingLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Forwarding(spec.name)
        module._targets = _MODULES[spec.name][1]
        return module

    def exec_module(self, module: ModuleType) -> None:
        # A target that cannot be imported (no torch here) has to fail the import, not the first use of a name.
        targets = [importlib.import_module(target) for target in _MODULES[module.__name__][1]]
        # Programs look for a version or a library next to this file; modules without targets have the shim's file.
        module.__file__ = targets[0].__file__ if targets else os.path.join(SHIM_FOLDER, "horovod", "__init__.py")


class _HorovodFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "horovod" and not fullname.startswith("horovod."):
            return None
        entry = _MODULES.get(fullname)
        if entry is not None:
            return ModuleSpec(fullname, _ForwardingLoader(), origin=f"{_OWN}: {fullname}", is_package=entry[0])
        missing = _MISSING.get(fullname.split(".")[1])
        text = f"No module named {fullname!r}: elastic_driver's stand-in for Horovod has "
        if missing is not None:
            raise ModuleNotFoundError(f"{text}no {missing}; only horovod.torch is supported", name=fullname)
        raise ModuleNotFoundError(f"{text}no such module", name=fullname)


_finder = _HorovodFinder()


def find_real(without: str = SHIM_FOLDER) -> ModuleSpec | None:
    """Return the spec of an installed Horovod, if any; a mere folder of that name does not count.

    Args:
        without: a folder to exclude from the search.
    """
    folders = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != os.path.abspath(without)]
    specs = [PathFinder.find_spec("horovod", folders)]
    for finder in sys.meta_path:  # editable installations have finders of their own
        if finder not in (PathFinder, _finder) and hasattr(finder, "find_spec"):
            specs.append(finder.find_spec("horovod", None))
    ours = os.path.join(os.path.abspath(without), "horovod")
    for spec in specs:
        if spec is None or spec.loader is None or spec.origin is None:
            continue
        if os.path.dirname(os.path.abspath(spec.origin)) != ours:
            return spec
    return None


def install(*, mode: str = AUTO) -> bool:
    """Make ``import horovod`` find this package in this process.

    Args:
        mode: "auto" does nothing if Horovod is installed, "always" hides it.

    Returns:
        Whether ``horovod`` is now this package's.

    Raises:
        SettingsError: no such mode.
        ImportError: "always", and the installed Horovod is imported already.
    """
    mode = check_mode(mode, "the mode")
    if mode not in (AUTO, ALWAYS):
        return False
    imported = sys.modules.get("horovod")
    foreign = imported is not None and not isinstance(imported, _Forwarding)
    if mode == AUTO and (foreign or find_real() is not None):
        return False
    if foreign:
        raise ImportError(f"cannot hide the installed Horovod: {imported!r} is already imported", name="horovod")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return True


def uninstall() -> None:
    """Undo :func:`install`; existing references to imported modules stay usable."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Forwarding)]:
        del sys.modules[name]


def load_in_place(name: str, folder: str) -> None:
    """Put the installed Horovod, or the forwarding package, into ``sys.modules``.

    Args:
        name: ``horovod``, which is being imported.
        folder: the one on ``sys.path`` in which it was found.

    Raises:
        ModuleNotFoundError: Horovod is not installed, and this job's workers get no stand-in
            (``--horovod-shim never``).
    """
    mode = check_mode(os.environ.get(ENV_SHIM) or AUTO, f"the variable {ENV_SHIM}")
    real = None if mode == ALWAYS else find_real(folder)
    if real is not None and real.loader is not None:
        module = importlib.util.module_from_spec(real)
        sys.modules[name] = module
        real.loader.exec_module(module)
        if os.environ.get(ENV_PROTOCOL, OFF) != OFF:  # also in a process from which workers are forked
            init_hook.install()
        return
    del sys.modules[name]
    if mode == NEVER:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    importlib.import_module(name)
