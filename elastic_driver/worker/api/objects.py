"""Broadcast and allgather of any Python object, as bytes over the collectives.

Objects are pickled with cloudpickle. Unpickling runs code as this user, so only bytes with the seal of the ranks' key,
for this round, this call and this sender, are unpickled (seal.py); and never bytes received over HTTP.
"""

from __future__ import annotations

import struct
from typing import Any

import cloudpickle
import numpy as np

from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.engine.byte_collectives import broadcast, gather
from elastic_driver.worker.engine.collectives import as_bytes
from elastic_driver.worker.engine.seal import SEAL_BYTES, Place
from elastic_driver.worker.rounds.process_sets import Members, ProcessSet, global_process_set, members_of

_RANK = struct.Struct("<q")
_HEAD_BYTES = _RANK.size + SEAL_BYTES


def check_root(members: Members, root_rank: int) -> None:
    """Raise ValueError if this rank is not a member."""
    if root_rank in members.ranks:
        return
    if members.number:
        raise ValueError(f"cannot broadcast from rank {root_rank}: the process set has ranks {list(members.ranks)}")
    raise ValueError(f"cannot broadcast from rank {root_rank}: the job has ranks 0 to {members.size - 1}")


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object, on every rank. Blocks until done.

    Args:
        obj: anything that cloudpickle can pickle; used on the root only.
        root_rank: the root (a global rank).
        name: of the operation; concurrent calls from several threads need different ones.
        process_set: the participants.

    Raises:
        HorovodInternalError: a peer is gone, or the bytes received are not sealed with the job's key.
        MismatchError: the ranks name different roots.
        ValueError: there is no such rank.
    """
    members = members_of(process_set)
    check_root(members, root_rank)
    members.context.check()
    return obj if members.size == 1 else broadcast_among(members, obj, root_rank, name)


def broadcast_among(members: Members, obj: Any, root_rank: int, name: str | None) -> Any:
    """Broadcast an object among several members."""
    context = members.context
    label = f"broadcast_object.{name or 'object'}"
    seal = context.seal
    place = Place(members.number, root_rank, context.calls_of(members.number, label))
    length, mark = np.zeros(1, np.int64), np.zeros(SEAL_BYTES, np.uint8)
    is_root = context.slot.rank == root_rank
    payload = np.frombuffer(cloudpickle.dumps(obj), np.uint8).copy() if is_root else np.empty(0, np.uint8)
    length[0] = payload.nbytes
    broadcast(context.engine, as_bytes(length), root_rank, f"{label}.size", members.number)
    if not is_root:
        payload = np.empty(int(length[0]), np.uint8)
    broadcast(context.engine, payload, root_rank, f"{label}.data", members.number)
    # Last, so that all ranks compute it at the same time.
    computed = seal.mark(payload.data, label, place)
    if is_root:
        mark[:] = np.frombuffer(computed, np.uint8)
    broadcast(context.engine, mark, root_rank, f"{label}.seal", members.number)
    context.note_call(members.number, label)
    if is_root:
        return obj
    seal.check(mark.data, computed, label, place)
    return cloudpickle.loads(payload.data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, in rank order. Blocks until done.

    Args:
        obj: anything that cloudpickle can pickle.
        name: of the operation; concurrent calls from several threads need different ones.
        process_set: the participants.

    Raises:
        HorovodInternalError: a peer is gone, or the bytes received are not sealed with the job's key.
    """
    members = members_of(process_set)
    members.context.check()
    return [obj] if members.size == 1 else allgather_among(members, obj, name)


def allgather_among(members: Members, obj: Any, name: str | None) -> list[Any]:
    """Gather the objects of several members."""
    context = members.context
    label = f"allgather_object.{name or 'object'}"
    calls = context.calls_of(members.number, label)
    pickled = cloudpickle.dumps(obj)
    mark = context.seal.mark(pickled, label, Place(members.number, context.slot.rank, calls))
    sent = np.frombuffer(_RANK.pack(context.slot.rank) + mark + pickled, np.uint8).copy()
    parts = gather(context.engine, sent, label, members.number)
    senders = [_RANK.unpack_from(part.data)[0] if part.nbytes >= _HEAD_BYTES else -1 for part in parts]
    if senders != list(members.ranks):
        raise HorovodInternalError(f"cannot use the objects received as {label}: they claim to be from ranks {senders}")
    for rank, part in zip(senders, parts, strict=True):
        place = Place(members.number, rank, calls)
        computed = context.seal.mark(part[_HEAD_BYTES:].data, label, place)
        context.seal.check(part[_RANK.size : _HEAD_BYTES].data, computed, label, place)
    context.note_call(members.number, label)
    return [cloudpickle.loads(part[_HEAD_BYTES:].data) for part in parts]
