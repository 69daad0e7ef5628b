"""What users are told: the terminal, the event log, and what both are told of."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """This package, which is also the API's ``report(loss=...)``: where both are loaded, they have the same name."""

    def __call__(self, **figures: Any) -> None:
        """See :func:`elastic_driver.worker.api.figures.report`."""
        importlib.import_module("elastic_driver.worker.api.figures").report(**figures)


sys.modules[__name__].__class__ = _Package
