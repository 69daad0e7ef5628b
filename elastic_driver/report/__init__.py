"""Reports to users: the terminal, the event log, metrics, history and the page, and the happenings that feed them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """This package, which can also be called as the API's ``report(loss=...)``: the two have the same name."""

    def __call__(self, **figures: Any) -> None:
        """Report figures, see :func:`elastic_driver.worker.api.figures.report`."""
        importlib.import_module("elastic_driver.worker.api.figures").report(**figures)


sys.modules[__name__].__class__ = _Package
