"""The first build of a sharded model in a process that joins others, before it joins them.

What a build does only the first time (imports, kernels, files that are read) takes seconds, and in a round all members
would wait for it. So it is done once beforehand, on a mesh of torch's fake process group, whose collectives do nothing,
and thrown away. It is a help and no more: whatever goes wrong is left to the build that counts.
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
    """Calls ``make`` with a mesh of as many ranks as are planned, and forgets what it gives.

    Not where the program has a process group of its own, which would not be the one that it has in a round.
    """
    if dist.is_initialized():
        return
    try:
        with _fake_group(planned) as group, _same_numbers(device_type):
            from torch.distributed.device_mesh import DeviceMesh  # late, see shards.py

            make(DeviceMesh.from_group(group, device_type))
    except (Exception, SystemExit) as error:  # also of a script that gives up where it finds no file
        _log.info("elastic_driver: cannot build the model before the round: %s: %s", type(error).__name__, error)
    if device_type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _fake_group(planned: SlotInfo) -> Iterator[dist.ProcessGroup]:
    """torch's default group, which does nothing, and is gone afterwards with all that was made of it."""
    group = init_default_group("fake", fake_store(), planned.rank, planned.size)
    try:
        yield group
    finally:
        del group
        gc.collect()  # a sharded model holds itself, and its groups
        dist.destroy_process_group()


@contextlib.contextmanager
def _same_numbers(device_type: str) -> Iterator[None]:
    """Random numbers are drawn afterwards as if none had been."""
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
