"""Collectives of bytes, to or from all members, for the library's own messages between ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from elastic_driver.worker.engine.collectives import Bytes
from elastic_driver.worker.engine.protocol import GLOBAL_SET, Engine, Kind, Operation, TensorSpec

PREFIX = "elastic_driver."  # of the names of the library's own operations


def array_spec(array: npt.NDArray[np.generic], output: npt.NDArray[np.generic] | None = None) -> TensorSpec:
    """Describe a C-contiguous array of a wire dtype for an operation."""
    address = array.__array_interface__["data"][0] if array.nbytes else 0
    target = 0
    if output is not None and output.nbytes:
        target = output.__array_interface__["data"][0]
    return TensorSpec(address, array.nbytes, array.dtype.name, array.shape, target)


def as_data(text: str) -> Bytes:
    """Encode a text as bytes to send."""
    return np.frombuffer(text.encode(), np.uint8).copy()


def gather(engine: Engine, data: Bytes, name: str, process_set: int = GLOBAL_SET) -> list[Bytes]:
    """Return each member's bytes. Blocks until done; one operation. Raises HorovodInternalError."""
    length = np.array([data.nbytes], np.int64)
    specs = (array_spec(length), array_spec(data))
    operation = Operation(Kind.ALLGATHER, specs, PREFIX + name, process_set=process_set, keep=(length, data), own=True)
    result = engine.submit(operation).result()
    lengths, joined = result.arrays[0].view(np.int64), result.arrays[1]
    return list(_split(joined, lengths))


def _split(joined: Bytes, lengths: npt.NDArray[np.int64]) -> Iterator[Bytes]:
    start = 0
    for length in lengths.tolist():
        yield joined[start : start + length]
        start += length


def broadcast(engine: Engine, data: Bytes, root: int, name: str, process_set: int = GLOBAL_SET) -> None:
    """Overwrite bytes with those of a global rank, of the same size on all. Blocks until done. Raises
    HorovodInternalError.
    """
    if data.nbytes:
        spec = array_spec(data, data)
        operation = Operation(
            Kind.BROADCAST, (spec,), PREFIX + name, root=root, process_set=process_set, keep=data, own=True
        )
        engine.submit(operation).result()
