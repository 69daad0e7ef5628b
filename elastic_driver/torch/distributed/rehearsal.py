"""The first build of a sharded model, before its process joins the others.

The first build includes one-time work (imports, kernels, reading files) that takes seconds, during which all members of
a round would wait. So it is done once in advance, on a mesh of torch's fake process group, whose collectives do
nothing, and discarded. It is only an optimization: any failure is left to the real build.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from elastic_driver.hosts import SlotInfo
from elastic_driver.torch_private.groups import fake_store, init_default_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("elastic_driver.worker")


def rehearse(make: Callable[[DeviceMesh], Any], planned: SlotInfo, device_type: str) -> None:
    """Call ``make`` with a mesh of the planned size, and discard the result.

    Does nothing if the program has its own process group, which would not be the one of the round.
    """
    if dist.is_initialized():
        return
    try:
        with _fake_group(planned) as group, _same_numbers(device_type):
            from torch.distributed.device_mesh import DeviceMesh  # late: importing it takes long

            make(DeviceMesh.from_group(group, device_type))
    except (Exception, SystemExit) as error:  # also if a script exits because a file is missing
        _log.info("elastic_driver: cannot build the model before the round: %s: %s", type(error).__name__, error)
    if device_type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _fake_group(planned: SlotInfo) -> Iterator[dist.ProcessGroup]:
    """Set a fake group as torch's default group, and remove it with everything made from it."""
    group = init_default_group("fake", fake_store(), planned.rank, planned.size)
    try:
        yield group
    finally:
        del group
        gc.collect()  # a sharded model references itself, and its groups
        dist.destroy_process_group()


@contextlib.contextmanager
def _same_numbers(device_type: str) -> Iterator[None]:
    """Restore the random number generators afterwards."""
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
