"""Any Python object to all members, or from all members, as bytes over the collectives.

Objects are pickled with cloudpickle. They travel only between members of the job, which run the same user's code and
hold the job's token; nothing that comes over HTTP is ever unpickled.
"""

from __future__ import annotations

from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from elastic_driver.worker.collectives import GLOBAL, Bytes, as_bytes
from elastic_driver.worker.context import Context
from elastic_driver.worker.runtime import current


def check_root(context: Context, root_rank: int) -> None:
    """Raises ValueError when there is no such rank."""
    if not 0 <= root_rank < context.slot.size:
        raise ValueError(f"cannot broadcast from rank {root_rank}: the job has ranks 0 to {context.slot.size - 1}")


def broadcast_array(context: Context, data: Bytes, root_rank: int) -> None:
    """Overwrites bytes with the root's. Blocks until done. Raises HorovodInternalError."""
    if data.nbytes == 0:
        return
    limit_s = context.limits.collective_s
    context.run(lambda collectives: collectives.broadcast(GLOBAL, data, root_rank, timeout_s=limit_s))


def allgather_counts(context: Context, mine: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Some integers from each rank, as many from each, in rank order. Blocks until done."""
    row = np.asarray(mine, np.int64)
    table = np.empty((context.slot.size, len(mine)), np.int64)
    limit_s = context.limits.collective_s
    counts = [row.nbytes] * context.slot.size
    context.run(
        lambda collectives: collectives.allgather(GLOBAL, as_bytes(row), as_bytes(table), counts, timeout_s=limit_s)
    )
    return [tuple(int(value) for value in line) for line in table]


def allgather_bytes(context: Context, data: Bytes, counts: list[int]) -> Bytes:
    """The ranks' bytes, end to end; counts are their lengths, known to all. Blocks until done."""
    output = np.empty(sum(counts), np.uint8)
    if output.nbytes:
        limit_s = context.limits.collective_s
        context.run(lambda collectives: collectives.allgather(GLOBAL, data, output, counts, timeout_s=limit_s))
    return output


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object, on every rank. Blocks until done.

    Args:
        obj: anything that cloudpickle takes; used on the root only.
        root_rank: whose object it is.
        name: for Horovod's signature; calls are matched by their order.

    Raises:
        HorovodInternalError: a peer is gone.
        ValueError: there is no such rank.
    """
    context = current()
    check_root(context, root_rank)
    if context.slot.size == 1:
        return obj
    if context.slot.rank == root_rank:
        payload = np.frombuffer(cloudpickle.dumps(obj), np.uint8).copy()
        broadcast_array(context, as_bytes(np.array([payload.nbytes], np.int64)), root_rank)
        broadcast_array(context, payload, root_rank)
        return obj
    length = np.zeros(1, np.int64)
    broadcast_array(context, as_bytes(length), root_rank)
    payload = np.empty(int(length[0]), np.uint8)
    broadcast_array(context, payload, root_rank)
    return cloudpickle.loads(payload.data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, in rank order. Blocks until done.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    context = current()
    if context.slot.size == 1:
        return [obj]
    payload = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    counts = [count for (count,) in allgather_counts(context, (payload.nbytes,))]
    gathered = allgather_bytes(context, payload, counts)
    ends = np.cumsum(counts)
    return [cloudpickle.loads(gathered[end - count : end].data) for end, count in zip(ends, counts, strict=True)]
