"""The adapter of numpy's arrays: how the engine reads their memory, and how results become arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic_driver.worker.engine.collectives import Bytes
from elastic_driver.worker.engine.protocol import WIRE_DTYPES, TensorSpec

Array: TypeAlias = npt.NDArray[Any]

# numpy computes a dtype's name on each access; a lookup by the dtype is much faster.
_names: dict[np.dtype[Any], str] = {}


def _name_of(dtype: np.dtype[Any]) -> str:
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = dtype.name
    return name


class NumpyAdapter:
    """The Adapter of numpy."""

    lane: None = None

    def group(self, results: list[Array]) -> list[Array]:
        """Return the results as a list."""
        return results

    def tensors(self, given: Sequence[npt.ArrayLike], verb: str) -> list[Array]:
        """Convert the caller's values to arrays."""
        return [np.asarray(value) for value in given]

    def check_writable(self, tensors: Sequence[Any], verb: str) -> None:
        """Raise TypeError if an array cannot be written into."""
        for tensor in tensors:
            if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
                raise TypeError(f"cannot {verb} in place: expected a writable numpy array")

    def dtype(self, tensor: Array) -> str:
        """Return the dtype's name."""
        return _name_of(tensor.dtype)

    def rows(self, tensor: Array) -> int:
        """Return the extent of the first dimension; -1 for a scalar."""
        return tensor.shape[0] if tensor.ndim else -1

    def sent(self, tensor: Array, verb: str) -> Array:
        """Return the values in native byte order, contiguous."""
        if tensor.dtype.hasobject:
            raise TypeError(f"cannot {verb} an array of objects: use broadcast_object or allgather_object")
        return np.asarray(tensor, dtype=tensor.dtype.newbyteorder("="), order="C")

    def reduced(self, tensor: Array, dtype: str) -> Array:
        """Return the values in this dtype, contiguous."""
        return np.asarray(tensor, dtype, order="C")

    def result_for(self, host: Array, output: Array | None) -> Array:
        """Return the output if it fits, else a new array."""
        if output is not None and output.dtype == host.dtype and output.flags.c_contiguous:
            return output
        return np.empty(host.shape, host.dtype)

    def spec(self, host: Array, result: Array | None = None) -> TensorSpec:
        """Describe the array's memory, and its result's, to the engine."""
        nbytes, shape, name = host.nbytes, host.shape, _name_of(host.dtype)
        if name not in WIRE_DTYPES:
            shape, name = (*shape, host.itemsize), "uint8"
        if not nbytes:
            return TensorSpec(0, 0, name, shape)
        target = 0 if result is None else result.__array_interface__["data"][0]
        return TensorSpec(host.__array_interface__["data"][0], nbytes, name, shape, target)

    def rebuilt(self, data: Bytes, rows: int, host: Array) -> Array:
        """Turn the engine's bytes into an array."""
        array: Array = data.view(host.dtype).reshape(rows, *host.shape[1:])
        return array

    def delivered(self, results: list[Array], tensors: Sequence[Array], outputs: Sequence[Array] | None) -> list[Array]:
        """Convert results to the caller's dtype, or copy them into the outputs."""
        if outputs is None:
            return [result.astype(tensor.dtype, copy=False) for result, tensor in zip(results, tensors, strict=True)]
        for result, output in zip(results, outputs, strict=True):
            if result is not output:
                output[...] = result.astype(output.dtype, copy=False)
        return list(outputs)

    def split_counts(self, splits: Any) -> Any:
        """Return the splits as they are."""
        return splits

    def row_counts(self, received: Sequence[int], splits: Any) -> Array:
        """Return the rows from each member, always as int32."""
        return np.array(received, np.int32)
