"""``hvd.process_group()``: torch.distributed's process group of the current round.

Owns its making, its end with the round, and its place as torch's default group. Errors of a group in a broken round
count as the round's (Context.accounts_for).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from elastic_driver.errors import HorovodInternalError, RendezvousError
from elastic_driver.system.interfaces import host_addresses
from elastic_driver.torch.device.groups import abort_in_thread, has_ended, say_once
from elastic_driver.torch.device.lane import nccl_refusal
from elastic_driver.torch.distributed.sockets import GroupSockets, gloo_sleeps, lazy_gloo
from elastic_driver.torch.distributed.store import LazyServer, RoundStore
from elastic_driver.torch_private import groups as private
from elastic_driver.worker.engine.collectives import Group
from elastic_driver.worker.engine.own_sockets import check_ends, pack_ends, unpack_ends
from elastic_driver.worker.engine.torch_collectives import batch_scheduling
from elastic_driver.worker.rounds.context import Context
from elastic_driver.worker.rounds.current import current
from elastic_driver.worker.settings import worker_settings

_log = logging.getLogger("elastic_driver.worker")

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch's own variable

_present: RoundGroup | None = None


def backend_of(context: Context) -> str:
    """Return the backend of a round's group, as torch names it. The same on all ranks."""
    return "gloo" if nccl_refusal(context) else "cpu:gloo,cuda:nccl"


def name_interface(address: str) -> None:
    """Make torch's Gloo listen at the interface with this address, unless the user has named one.

    By default it uses the address of the host's name, which may be any. Once in a process, for subgroups too.
    """
    if os.environ.get(_GLOO_INTERFACE):
        return
    for line in host_addresses():
        interface, _, own = line.rpartition(" ")
        if own.partition("/")[0].partition("%")[0] == address.partition("%")[0]:
            os.environ[_GLOO_INTERFACE] = interface
            return


class RoundGroup:
    """The process group of one round (a Companion).

    Args:
        context: the round.
        number: how many groups this round had before: a program may have destroyed one.
    """

    def __init__(self, context: Context, number: int) -> None:
        self.context, self.number = context, number
        self.sockets = GroupSockets()
        self._lock = threading.Lock()  # guards _broken
        self._broken = ""
        self._store: RoundStore | None = None  # torch holds only its C++ half, which is useless without this one
        self._group: Any = None
        self._is_default = False
        self._aborts: list[threading.Thread] = []

    @property
    def group(self) -> Any:
        """torch's process group."""
        return self._group

    @property
    def is_there(self) -> bool:
        """Whether torch still knows it: a program may destroy it, or the default group."""
        return self._group is not None and private.is_known(self._group)

    def make(self) -> None:
        """Make the group, with all members. Blocks until they have it.

        Raises:
            HorovodInternalError: a peer is gone, or the round is over.
        """
        context = self.context
        slot = context.slot
        scope = f"torch.group.{self.number}"
        name_interface(context.address)
        ports = worker_settings().port_range
        if ports is not None and slot.size > 1:
            say_once(
                "torch's Gloo cannot honor --port-range: its process groups listen on ports that the system chooses"
            )
        meeting = context.meeting if slot.size > 1 else None
        build_s = context.limits.build_s
        self._store = RoundStore(
            scope, slot.rank, slot.size, meeting, lambda: LazyServer(context.address, ports), self.sockets
        )
        try:
            with batch_scheduling():
                self._group = self._registered(backend_of(context), self._store, build_s)
            if self._broken:
                raise HorovodInternalError(f"cannot continue: {self._broken}")
            if meeting is not None:
                ends = self.sockets.remember()
                if not self._store.is_readable:
                    say_once(
                        f"cannot find the connections of this Gloo (torch {torch.__version__}): calls that wait "
                        "in the process group end only at their time limit"
                    )
                elif not lazy_gloo():  # Gloo accepts any peer (torch_collectives.py)
                    packed = meeting(f"{scope}.ends", key=slot.rank, count=slot.size, value=pack_ends(ends))
                    members = Group("global", tuple(range(slot.size)), slot.rank)
                    check_ends(members, [unpack_ends(each) for each in packed])
            private.set_timeout(self._group, context.limits.collective_s)
        except HorovodInternalError:
            raise
        except (RuntimeError, ValueError, OSError, RendezvousError) as error:
            cause = self._store.error or error
            reason = self._broken or (str(cause).splitlines() or [type(cause).__name__])[0]
            raise HorovodInternalError(f"cannot make the process group: {reason}") from cause

    def _registered(self, backend: str, store: RoundStore, timeout_s: float) -> Any:
        slot = self.context.slot
        if not dist.is_initialized():
            group = private.init_default_group(backend, store, slot.rank, slot.size, timeout_s)
            self._is_default = True
            return group
        name = f"elastic_driver.{self.context.assignment.round_id}.{self.number}"
        return private.add_group(backend, store, slot.rank, slot.size, timeout_s, name)

    def _on_devices(self) -> list[Any]:
        """Return the backends, of this group and of subgroups, that have an abort."""
        groups = private.known_groups() if self._is_default else [self._group]
        found = []
        for group in groups:
            with contextlib.suppress(Exception):  # it has none for this device
                backend = private.backend_of(group, "cuda")
                if not isinstance(backend, dist.ProcessGroupGloo) and backend not in found:
                    found.append(backend)
        return found

    def abort(self, reason: str) -> None:
        """End blocked calls, because the round is broken."""
        with self._lock:
            if self._broken:
                return
            self._broken = reason
        self.sockets.keep_shut()
        if self._group is not None:
            self._aborts += [abort_in_thread(backend) for backend in self._on_devices()]

    def quiesce(self, limit_s: float) -> None:
        """Wait until Gloo's threads sleep. The device lane waits for devices."""
        deadline = time.monotonic() + limit_s
        while not gloo_sleeps() and time.monotonic() < deadline:
            pass

    def is_cut(self) -> bool:
        """Return whether a connection to a member is lost."""
        return self.is_there and self.sockets.is_cut()

    def close(self) -> None:
        """Abort the group and remove it from torch.

        Raises:
            RuntimeError: NCCL does not end. This process cannot continue.
        """
        self.abort("the round is over")
        stuck = [abort for abort in self._aborts if not has_ended(abort)]
        if stuck:
            raise RuntimeError(
                "cannot continue in this process: NCCL's communicators of the last round do not end; this "
                "process leaves the job"
            )
        if self.is_there:
            dist.destroy_process_group(None if self._is_default else self._group)

    def free(self) -> None:
        """Free the group and its store."""
        self.sockets.close()
        self._group = None  # Gloo's destructor joins threads
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def abandon(self) -> None:
        """Keep the group alive in a forked child: its destructor would join threads that exist only in the parent."""
        private.leak(self._group)
        self._group = None


def process_group() -> dist.ProcessGroup:
    """Return torch.distributed's process group of all members of the round, for DDP, FSDP2, DTensor and collectives.

    It uses NCCL for CUDA tensors if each rank has its own GPU, Gloo otherwise. It is made at the first call in a round,
    which all members make, and blocks until they have; then it stays the same until the round ends. The next round has
    another one, so objects that hold it must be rebuilt, too (:func:`distributed_data_parallel`, ``DDPState``,
    ``FSDPState``). It is torch's default group unless the program has made one.

    If the round breaks, so does the group: calls that wait in it raise an exception, and ``elastic.run`` resumes from
    the last commit, as after a HorovodInternalError.

    Raises:
        HorovodInternalError: a peer is gone, or the round is broken.
        NotInitializedError: ``init()`` was not called.
        UnsupportedTorchError: this version of torch does not support it.
    """
    return round_group().group  # type: ignore[no-any-return]


def round_group() -> RoundGroup:
    """Return the current round's group, made if necessary (process_group())."""
    global _present
    context = current()
    context.check()
    former = _present if _present is not None and _present.context is context else None
    if former is not None and former.is_there:
        return former
    (private.SECOND_GROUP if dist.is_initialized() else private.PROCESS_GROUP).check()
    if former is not None:
        former.sockets.forget()
    _present = None
    made = RoundGroup(context, former.number + 1 if former is not None else 0)
    context.attach(made)
    _present = made
    try:
        made.make()
    except BaseException as error:
        context.abort(f"cannot make the process group: {error}")
        raise
    return made
