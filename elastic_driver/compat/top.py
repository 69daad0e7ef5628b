"""``horovod`` and ``horovod.runner``: launching functions, and the version."""

from __future__ import annotations

from elastic_driver.compat.finder import HOROVOD_VERSION as __version__
from elastic_driver.function.launch import run

__all__ = ["__version__", "run"]
