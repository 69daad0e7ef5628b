"""For Horovod's own tests, in pytest's process: ``import horovod`` gives this package, and what became of each test.

What there is not, a module or a name of one, skips the tests that call it. The outcomes go to the folder that the
variable names, a file for each process.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import types
import unittest.mock
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from elastic_driver import compat
from elastic_driver.compat import finder

RESULTS = "HOROVOD_SOURCE_RESULTS"


class _Absent:
    """A name that there is not: calling it skips the test."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"there is no {self._name}")


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("horovod.") or fullname in finder._MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """It has nothing."""


compat.install(mode="always")
sys.meta_path.insert(0, _AbsentFinder())
import horovod.runner  # noqa: E402

horovod.runner._HorovodArgs = _Absent("horovod.runner._HorovodArgs")  # type: ignore[attr-defined]
if importlib.util.find_spec("mock") is None:
    _mock = types.ModuleType("mock")
    vars(_mock).update(vars(unittest.mock), version_info=(5, 0, 0))  # which parameterized asks for
    sys.modules["mock"] = _mock

_outcomes: dict[str, list[str]] = {}


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps the worst of a test's parts, with its reason."""
    name = report.nodeid.rpartition("::")[2]
    if report.failed:
        _outcomes[name] = ["failed", report.longreprtext[-2000:]]
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _outcomes.setdefault(name, ["skipped", reason])
    elif report.when == "call":
        _outcomes.setdefault(name, ["passed", ""])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be collected counts as a test that fails."""
    if report.failed:
        _outcomes[report.nodeid] = ["failed", report.longreprtext[-2000:]]


def pytest_sessionfinish() -> None:
    """Tells what became of them."""
    Path(os.environ[RESULTS], f"{os.getpid()}.json").write_text(json.dumps(_outcomes))
