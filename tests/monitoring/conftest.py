"""Tests with Prometheus and its promtool, where these are installed."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

_MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if _MISSING:
        skip = pytest.mark.skip(reason=f"no {' and '.join(_MISSING)} here: scripts/install-monitoring installs them")
        for item in items:
            if item.get_closest_marker("monitoring"):
                item.add_marker(skip)
