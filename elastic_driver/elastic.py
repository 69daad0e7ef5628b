"""``hvd.elastic`` of the numpy API: the decorator that keeps a training function going, and the states it keeps."""

from __future__ import annotations

from elastic_driver.worker.run import run
from elastic_driver.worker.state import ObjectState, State

__all__ = ["ObjectState", "State", "run"]
