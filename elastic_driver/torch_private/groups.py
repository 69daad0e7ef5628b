"""Private parts of torch.distributed: process groups, and features built on them."""

from __future__ import annotations

import ctypes
import ipaddress
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from elastic_driver.torch_private.features import Feature, has, mentions, takes

c10d = _distributed_c10d
"""Stores, options and groups. Most are also public names of torch.distributed, which its type hints do not export."""

_OPTIONS = ("AllgatherOptions", "AllreduceOptions", "AllToAllOptions", "BroadcastOptions")


def _gloo_changes() -> Iterator[str]:
    yield from has(c10d, *_OPTIONS, "ProcessGroupGloo")
    gloo: Any = c10d.ProcessGroupGloo
    yield from has(gloo, "_Options", "create_device")
    yield from has(gloo._Options, "_devices", "_threads", "_timeout")


def _nccl_changes() -> Iterator[str]:
    yield from has(c10d, *_OPTIONS, "ProcessGroupNCCL")
    yield from has(c10d.ProcessGroupNCCL, "Options", "abort")
    yield from has(c10d.ProcessGroupNCCL.Options, "_timeout")


def _process_group_changes() -> Iterator[str]:
    yield from has(distributed_c10d, "_set_pg_timeout", "_world")
    yield from has(distributed_c10d._world, "pg_map")
    yield from takes(distributed_c10d._set_pg_timeout, "timeout", "group")
    yield from has(dist.ProcessGroup, "_get_backend")


def _second_group_changes() -> Iterator[str]:
    yield from _process_group_changes()
    yield from has(distributed_c10d._world, "pg_group_ranks")
    named = ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name")
    yield from takes(distributed_c10d._new_process_group_helper, *named, "timeout", "group_desc")


GLOO = Feature("torch's Gloo in place of the native extension", _gloo_changes)
NCCL = Feature("NCCL for operations on CUDA tensors", _nccl_changes, late=True)  # many builds of torch lack it
PROCESS_GROUP = Feature("hvd.process_group()", _process_group_changes)
SECOND_GROUP = Feature("hvd.process_group() beside the program's own default group", _second_group_changes)


def gloo_device(address: str) -> Any:
    """Make a Gloo device that listens at this address. Raises RuntimeError."""
    GLOO.check()
    return c10d.ProcessGroupGloo.create_device(hostname=address)


def gloo_group(store: c10d.Store, index: int, size: int, device: Any, timeout_s: float) -> Any:
    """Make a process group over this device, not registered in torch.distributed. Raises RuntimeError, ValueError."""
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1  # one collective at a time
    return gloo(store, index, size, options)


def has_nccl() -> bool:
    """Return whether this torch has NCCL."""
    return hasattr(c10d, "ProcessGroupNCCL")


def nccl_group(store: c10d.Store, index: int, size: int, timeout_s: float) -> Any:
    """Make a process group of NCCL's, not registered in torch.distributed. Raises RuntimeError."""
    NCCL.check()
    options: Any = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return c10d.ProcessGroupNCCL(store, index, size, options)


def is_communicator_id(key: str) -> bool:
    """Return whether NCCL's process group stores a communicator's id under this key."""
    return key.isdigit() or key.startswith("UniqueNCCLID")


def init_default_group(backend: str, store: c10d.Store, rank: int, size: int, timeout_s: float | None = None) -> Any:
    """Call ``init_process_group`` without its change of ``sys.excepthook``: torch wraps the hook at each call, for
    ever.
    """
    hook = sys.excepthook
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    finally:
        sys.excepthook = hook
    return dist.group.WORLD


def add_group(backend: str, store: c10d.Store, rank: int, size: int, timeout_s: float, name: str) -> Any:
    """Make a group of all ranks beside the default one, which is the program's own. Needs SECOND_GROUP."""
    make: Callable[..., Any] = distributed_c10d._new_process_group_helper
    group, _ = make(size, rank, [], backend, store, name, timeout=timedelta(seconds=timeout_s), group_desc=name)
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def known_groups() -> list[Any]:
    """Return the groups that torch.distributed knows: a program may destroy any. Needs PROCESS_GROUP."""
    return list(distributed_c10d._world.pg_map)


def is_known(group: Any) -> bool:
    """Return whether torch.distributed knows a group. Needs PROCESS_GROUP."""
    return group in distributed_c10d._world.pg_map


def set_timeout(group: Any, timeout_s: float) -> None:
    """Set the time limit of a group's collectives. Needs PROCESS_GROUP."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def backend_of(group: Any, device: str) -> Any:
    """Return the backend of a group's collectives on a device type. Raises RuntimeError if there is none."""
    return group._get_backend(torch.device(device))


def leak(group: Any) -> None:
    """Keep an object alive until the process ends: a group's destructor joins threads that a forked child lacks."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


# --- Gloo's messages through a store ---

GLOO_KEY = re.compile(r"/cpu/+\d+/(?P<rank>\d+)$")
"""The end of the keys by which Gloo shares where it listens."""
GLOO_THREAD = "pt_gloo_runloop"
"""The name of the threads of torch's Gloo that run collectives."""

_LENGTH = struct.Struct("<Q")
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct(">H")


def gloo_listener(value: bytes) -> tuple[str, int] | None:
    """Return the address where the Gloo device that sent this message listens; None if it cannot be parsed.

    The message is the name of the host and then a ``struct sockaddr_storage``, each preceded by a length.
    """
    if len(value) < _LENGTH.size:
        return None
    at = 2 * _LENGTH.size + _LENGTH.unpack_from(value)[0]
    if at + 24 > len(value):
        return None
    family, port = _FAMILY.unpack_from(value, at)[0], _PORT.unpack_from(value, at + 2)[0]
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(value[at + 4 : at + 8])), port
    if family == socket.AF_INET6:
        address = ipaddress.IPv6Address(value[at + 8 : at + 24])
        return str(address.ipv4_mapped or address), port
    return None


# --- DistributedDataParallel, ZeRO, FSDP2 ---


def _compile_ahead_changes() -> Iterator[str]:
    yield from has(DistributedDataParallel, "_inside_ddp_forward")
    yield from mentions(DistributedDataParallel.__init__, "bucket_bytes_cap")


def _wrappers_changes() -> Iterator[str]:
    yield from mentions(DistributedDataParallel.__init__, "reducer", "process_group", "gradient_as_bucket_view")
    yield from mentions(DistributedDataParallel._ddp_init_helper, "logger")
    yield from has(c10d.Reducer, "_remove_autograd_hooks")


def _zero_changes() -> Iterator[str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    yield from mentions(ZeroRedundancyOptimizer.__init__, "_overlap_with_ddp")


def _strided_changes() -> Iterator[str]:
    from torch.distributed.tensor import placement_types

    yield from has(placement_types, "_StridedShard")
    yield from takes(placement_types._StridedShard, "split_factor")


def _rehearsal_changes() -> Iterator[str]:
    from torch.testing._internal.distributed import fake_pg

    yield from has(fake_pg, "FakeStore")


COMPILE_AHEAD = Feature("hvd.compile_ahead()", _compile_ahead_changes)
WRAPPERS = Feature(
    "hvd.distributed_data_parallel()", _wrappers_changes, "the wrapper of an earlier round may stay in memory"
)
ZERO = Feature("ZeroState", _zero_changes, late=True)
STRIDED = Feature("FSDPState for models under tensor parallelism", _strided_changes, late=True)
REHEARSAL = Feature("FSDPState's first build before a round", _rehearsal_changes, late=True)


def as_in_forward(wrapper: Any) -> AbstractContextManager[None]:
    """Make torch's compiler compile as inside the forward pass of a DistributedDataParallel.

    Args:
        wrapper: the DistributedDataParallel, or an object with its ``bucket_bytes_cap``. Needs COMPILE_AHEAD.
    """
    return DistributedDataParallel._inside_ddp_forward(wrapper)


def free_wrapper(wrapper: DistributedDataParallel) -> None:
    """Free a wrapper's hooks on the parameters, buckets, and reference to the process group."""
    reducer = wrapper.__dict__.get("reducer")
    if reducer is None:
        return
    if WRAPPERS.has_parts():
        reducer._remove_autograd_hooks()
    # Gradients may be views of the buckets, and are no longer needed.
    if getattr(wrapper, "gradient_as_bucket_view", True):
        for param in wrapper.module.parameters():
            param.grad = None
    for name in ("reducer", "logger", "process_group"):
        setattr(wrapper, name, None)


def is_plain_zero(optimizer: Any) -> bool:
    """Return whether it is a ZeroRedundancyOptimizer without overlap_with_ddp.

    Raises:
        UnsupportedTorchError: that cannot be determined.
    """
    # A program that has made one has imported this module, which is slow to import, and warns.
    optim = sys.modules.get("torch.distributed.optim")
    if optim is None or not isinstance(optimizer, optim.ZeroRedundancyOptimizer):
        return False
    ZERO.check()
    return not optimizer._overlap_with_ddp


def is_strided(placement: Any) -> bool:
    """Return whether a DTensor's placement is FSDP2's for a tensor already divided by tensor parallelism."""
    from torch.distributed.tensor import placement_types

    return STRIDED.is_there and type(placement) is placement_types._StridedShard


def fake_store() -> c10d.Store:
    """Make the Store of torch's fake process group, whose collectives do nothing. Raises UnsupportedTorchError."""
    REHEARSAL.check()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
