"""What a framework gives so that its arrays take part in collectives: numpy and PyTorch each give one Adapter.

Owns the protocol only. The collectives themselves are written once over it, in operations.py and collectives.py;
gradients are the framework's own affair, on top of these. A new framework is one more Adapter, and one more
``Collectives``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from elastic_driver.worker.engine.collectives import Bytes, ReduceOp
from elastic_driver.worker.engine.protocol import Kind, TensorSpec
from elastic_driver.worker.rounds.process_sets import Members

T = TypeVar("T")


class OperationLane(Protocol[T]):
    """What carries operations on a framework's device memory out, where the engine only agrees on their turn."""

    def takes(self, members: Members, tensors: Sequence[T]) -> bool:
        """Whether an operation on these tensors goes this way. Raises DeviceLaneError: it should, and cannot."""

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
        """Begins an operation on tensors that ``takes`` has chosen.

        Args:
            members: who takes part.
            kind: what is to be done.
            tensors: of any dtype, all on one device.
            name: of the operation, if it was given one.
            finish: makes of the results, and of the rows from each member of an alltoall, what synchronize returns.
            op, root, factors, splits: see Operation.

        Returns:
            A number for ``poll`` and ``synchronize``.
        """


class Adapter(Protocol[T]):
    """How one framework's arrays, its tensors, become memory that the engine reads, and results become tensors.

    What is on the host (``Any`` below) is whatever the framework has for contiguous memory of the CPU; only the adapter
    looks into it.
    """

    @property
    def lane(self) -> OperationLane[T] | None:
        """For tensors on devices; None when all go through the CPU."""

    def group(self, results: list[T]) -> Sequence[T]:
        """The results of a grouped operation, as its caller gets them."""

    def tensors(self, given: Sequence[Any], verb: str) -> Sequence[T]:
        """What a caller gave as tensors; ``verb`` is the operation, for messages. Raises TypeError."""

    def check_writable(self, tensors: Sequence[Any], verb: str) -> None:
        """Raises TypeError for what results cannot be written into."""

    def dtype(self, tensor: T) -> str:
        """Its name, as in WIRE_DTYPES where it is one of them."""

    def rows(self, tensor: T) -> int:
        """The extent of its first dimension; -1 of a scalar."""

    def sent(self, tensor: T, verb: str) -> Any:
        """Its values on the host, as they are: its own memory, or a copy. Raises TypeError."""

    def reduced(self, tensor: T, dtype: str) -> Any:
        """Its values on the host, in the dtype that they are reduced in: its own memory, or a copy."""

    def result_for(self, host: Any, output: T | None) -> Any:
        """Host memory for a result like this: that of ``output`` where it fits, else new."""

    def spec(self, host: Any, result: Any = None) -> TensorSpec:
        """Names the memory of ``sent`` or ``reduced``, and of its result, to the engine.

        A dtype that engines do not carry goes as bytes, in one more dimension.
        """

    def rebuilt(self, data: Bytes, rows: int, host: Any) -> Any:
        """Memory that the engine has made, on the host, like this but for the first dimension."""

    def delivered(self, results: list[Any], tensors: Sequence[T], outputs: Sequence[T] | None) -> list[T]:
        """Results, on the host or on a device, as their caller gets them.

        Written into ``outputs`` where there are any, else of the dtype of the tensors, on their device.
        """

    def split_counts(self, splits: Any) -> Any:
        """The splits that a caller gave to an alltoall, as what numpy makes an array of."""

    def row_counts(self, received: Sequence[int], splits: Any) -> T:
        """The rows from each member, as the splits were given."""
