"""Replace torch's ``elastic_launch`` by ours in programs that start torchrun's workers in their own process.

``elasticrun wrap`` puts this folder first on the PYTHONPATH, so that :mod:`site` imports this file in the program if it
is a Python, and in each Python that it starts. When torch's launcher is imported there, ours replaces the one name in
it that runs workers; torch's parsers and their defaults stay. Any Python may run this file, so it uses only the
standard library until then.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_LAUNCHER = "torch.distributed.launcher.api"


class _Loader(Loader):
    """Loads torch's launcher, and replaces that name."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from elastic_driver.function.torch_launcher import elastic_launch

        vars(module)["elastic_launch"] = elastic_launch


class _Finder(MetaPathFinder):
    """Finds torch's launcher, once."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _LAUNCHER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _own_sitecustomize() -> None:
    """Run the ``sitecustomize`` that this file hides."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    sys.path_importer_cache.pop(folder, None)
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder())
_own_sitecustomize()
