"""The interface by which a framework's arrays take part in collectives: numpy and PyTorch have one Adapter each.

Owns the protocol only. operations.py and collectives.py implement the collectives once over it; a framework adds
gradients on top. A new framework needs one more Adapter, and one more ``Collectives``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from elastic_driver.worker.engine.collectives import Bytes, ReduceOp
from elastic_driver.worker.engine.protocol import Kind, TensorSpec
from elastic_driver.worker.rounds.process_sets import Members

T = TypeVar("T")


class OperationLane(Protocol[T]):
    """Runs operations on a framework's device memory; the engine only agrees on their order."""

    def takes(self, members: Members, tensors: Sequence[T]) -> bool:
        """Return whether the lane runs an operation on these tensors. Raises DeviceLaneError if it should, but
        cannot.
        """

    def begin(
        self,
        members: Members,
        kind: Kind,
        tensors: Sequence[T],
        name: str | None,
        finish: Callable[[list[T], list[int]], Any],
        *,
        op: ReduceOp = ...,
        root: int = ...,
        factors: tuple[float, float] = ...,
        splits: tuple[tuple[int, ...], ...] = ...,
    ) -> int:
        """Start an operation on tensors that ``takes`` has accepted.

        Args:
            members: the participants.
            kind: the kind of operation.
            tensors: of any dtype, all on one device.
            name: of the operation, if given.
            finish: converts the results, and the rows from each member of an alltoall, to what synchronize returns.
            op, root, factors, splits: as in Operation.

        Returns:
            A handle for ``poll`` and ``synchronize``.
        """


class Adapter(Protocol[T]):
    """How one framework's arrays (its tensors) become memory that the engine reads, and results become tensors.

    Values on the host (``Any`` below) are the framework's own type for contiguous CPU memory; only the adapter looks
    into them.
    """

    @property
    def lane(self) -> OperationLane[T] | None:
        """The lane for tensors on devices; None if all go through the CPU."""

    def group(self, results: list[T]) -> Sequence[T]:
        """Return the results of a grouped operation in the caller's form."""

    def tensors(self, given: Sequence[Any], verb: str) -> Sequence[T]:
        """Convert a caller's values to tensors; ``verb`` names the operation in messages. Raises TypeError."""

    def check_writable(self, tensors: Sequence[Any], verb: str) -> None:
        """Raise TypeError if results cannot be written into one of these."""

    def dtype(self, tensor: T) -> str:
        """Return the dtype's name, as in WIRE_DTYPES if it is one of them."""

    def rows(self, tensor: T) -> int:
        """Return the extent of the first dimension; -1 for a scalar."""

    def sent(self, tensor: T, verb: str) -> Any:
        """Return the unchanged values on the host: its own memory, or a copy. Raises TypeError."""

    def reduced(self, tensor: T, dtype: str) -> Any:
        """Return the values on the host, in the dtype of the reduction: its own memory, or a copy."""

    def result_for(self, host: Any, output: T | None) -> Any:
        """Return host memory for a result like this: that of ``output`` if it fits, else new."""

    def spec(self, host: Any, result: Any = None) -> TensorSpec:
        """Describe the memory of ``sent`` or ``reduced``, and of its result, to the engine.

        A dtype that engines do not carry is sent as bytes, in one more dimension.
        """

    def rebuilt(self, data: Bytes, rows: int, host: Any) -> Any:
        """Return the engine's memory as a host value like this one, except for the first dimension."""

    def delivered(self, results: list[Any], tensors: Sequence[T], outputs: Sequence[T] | None) -> list[T]:
        """Convert results, on the host or on a device, for the caller.

        They are written into ``outputs`` if given, else returned in the tensors' dtype, on their device.
        """

    def split_counts(self, splits: Any) -> Any:
        """Return a caller's splits for an alltoall, in a form that numpy converts to an array."""

    def row_counts(self, received: Sequence[int], splits: Any) -> T:
        """Return the rows from each member, in the form of the splits."""
