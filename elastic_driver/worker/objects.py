"""Any Python object to all members, or from all members, as bytes over the collectives.

Objects are pickled with cloudpickle. They travel only between members of the job, which run the same user's code and
hold the job's keys; nothing that comes over HTTP is ever unpickled.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from elastic_driver.worker.collectives import as_bytes
from elastic_driver.worker.messages import broadcast, gather
from elastic_driver.worker.process_sets import Members, ProcessSet, global_process_set, members_of


def check_root(members: Members, root_rank: int) -> None:
    """Raises ValueError when there is no such rank among them."""
    if root_rank in members.ranks:
        return
    if members.number:
        raise ValueError(f"cannot broadcast from rank {root_rank}: the process set has ranks {list(members.ranks)}")
    raise ValueError(f"cannot broadcast from rank {root_rank}: the job has ranks 0 to {members.size - 1}")


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on every rank. Blocks until done.

    Args:
        obj: anything that cloudpickle takes; used on the root only.
        root_rank: whose object it is (a global rank).
        name: of the operation; calls from several threads at once need different ones.
        process_set: whose members take part.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks do not name one root.
        ValueError: there is no such rank.
    """
    members = members_of(process_set)
    check_root(members, root_rank)
    context = members.context
    context.check()
    if members.size == 1:
        return obj
    label = f"broadcast_object.{name or 'object'}"
    if context.slot.rank == root_rank:
        payload = np.frombuffer(cloudpickle.dumps(obj), np.uint8).copy()
        length = np.array([payload.nbytes], np.int64)
        broadcast(context.engine, as_bytes(length), root_rank, f"{label}.size", members.number)
        broadcast(context.engine, payload, root_rank, f"{label}.data", members.number)
        return obj
    length = np.zeros(1, np.int64)
    broadcast(context.engine, as_bytes(length), root_rank, f"{label}.size", members.number)
    payload = np.empty(int(length[0]), np.uint8)
    broadcast(context.engine, payload, root_rank, f"{label}.data", members.number)
    return cloudpickle.loads(payload.data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in rank order. Blocks until done.

    Args:
        obj: anything that cloudpickle takes.
        name: of the operation; calls from several threads at once need different ones.
        process_set: whose members take part.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    members = members_of(process_set)
    members.context.check()
    if members.size == 1:
        return [obj]
    payload = np.frombuffer(cloudpickle.dumps(obj), np.uint8).copy()
    label = f"allgather_object.{name or 'object'}"
    parts = gather(members.context.engine, payload, label, members.number)
    return [cloudpickle.loads(part.data) for part in parts]
