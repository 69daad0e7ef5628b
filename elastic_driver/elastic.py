"""``hvd.elastic`` of the numpy API: the decorator for elastic training functions, and the states that it keeps."""

from __future__ import annotations

from elastic_driver.worker.run import run
from elastic_driver.worker.state import ObjectState, State

__all__ = ["ObjectState", "State", "run"]
