"""The collectives as training scripts call them: names, arguments and defaults of Horovod 0.28.1, for any framework.

Functions that end in ``_async`` return a handle for ``poll`` and ``synchronize``; until then the tensor must not be
changed. Those that end in ``_`` write into the given tensor. None is differentiable: a framework adds gradients on top.
operations.py implements them; an Adapter reads a framework's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from elastic_driver.worker.api.adapter import Adapter
from elastic_driver.worker.api.handles import begin, synchronize
from elastic_driver.worker.api.operations import (
    begin_allgather,
    begin_allreduce,
    begin_alltoall,
    begin_broadcast,
    begin_reducescatter,
)
from elastic_driver.worker.engine.collectives import Average, ReduceOp, resolve_op
from elastic_driver.worker.engine.protocol import Kind, Operation
from elastic_driver.worker.rounds import devices
from elastic_driver.worker.rounds.process_sets import ProcessSet, global_process_set, members_of

Given = TypeVar("Given")
T = TypeVar("T")
Group = TypeVar("Group")


class Collectives(Generic[Given, T, Group]):
    """The collectives of one framework, by the types of its inputs, its tensors, and its groups of results.

    The methods are the API's functions.
    """

    def __init__(self, adapter: Adapter[T]) -> None:
        self._adapter = adapter

    def allreduce_async(
        self,
        tensor: Given,
        average: bool | None = None,  # noqa: FBT001 - Horovod's signature
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an :func:`allreduce` and return a handle for ``poll`` and ``synchronize``."""
        resolved = resolve_op(average=average, op=op)
        factors = (prescale_factor, postscale_factor)
        return begin_allreduce(self._adapter, [tensor], None, resolved, name, factors, process_set, grouped=False)

    def allreduce(
        self,
        tensor: Given,
        average: bool | None = None,  # noqa: FBT001 - Horovod's signature
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Reduce the ranks' arrays, which have the same shape and dtype. Blocks until done.

        Args:
            tensor: any shape; not modified.
            average: older spelling of ``op``: True is Average, False is Sum.
            name: pairs the calls of the ranks; unnamed calls are paired by their order.
            op: Average (the default), Sum, Adasum, Min, Max or Product. Averages of integers are rounded toward zero.
            prescale_factor: multiplies before the reduction.
            postscale_factor: multiplies after it.
            process_set: the participants.

        Returns:
            A new array, bitwise the same on all ranks.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks did not submit the same; on all of them.
            DuplicateNameError: an operation of this name is in flight.
            TypeError: values of this dtype cannot be reduced.
            ValueError: both average and op were given, or this process is not in the process set.
        """
        handle = self.allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
        result: T = synchronize(handle)
        return result

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,  # noqa: FBT001 - Horovod's signature
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an :func:`allreduce_` and return a handle for ``poll`` and ``synchronize``."""
        self._adapter.check_writable([tensor], "allreduce")
        resolved = resolve_op(average=average, op=op)
        factors = (prescale_factor, postscale_factor)
        return begin_allreduce(self._adapter, [tensor], [tensor], resolved, name, factors, process_set, grouped=False)

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,  # noqa: FBT001 - Horovod's signature
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Reduce in place, like :func:`allreduce`; return the given tensor, overwritten. Not differentiable."""
        handle = self.allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
        result: T = synchronize(handle)
        return result

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Given],
        average: bool | None = None,  # noqa: FBT001 - Horovod's signature
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a :func:`grouped_allreduce` and return a handle for ``poll`` and ``synchronize``."""
        resolved = resolve_op(average=average, op=op)
        factors = (prescale_factor, postscale_factor)
        return begin_allreduce(self._adapter, list(tensors), None, resolved, name, factors, process_set, grouped=True)

    def grouped_allreduce(
        self,
        tensors: Sequence[Given],
        average: bool | None = None,  # noqa: FBT001 - Horovod's signature
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Group:
        """Run :func:`allreduce` on several arrays in one operation."""
        handle = self.grouped_allreduce_async(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
        result: Group = synchronize(handle)
        return result

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,  # noqa: FBT001 - Horovod's signature
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a :func:`grouped_allreduce_` and return a handle for ``poll`` and ``synchronize``."""
        outputs = list(tensors)
        self._adapter.check_writable(outputs, "allreduce")
        resolved = resolve_op(average=average, op=op)
        factors = (prescale_factor, postscale_factor)
        return begin_allreduce(self._adapter, outputs, outputs, resolved, name, factors, process_set, grouped=True)

    def grouped_allreduce_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,  # noqa: FBT001 - Horovod's signature
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Group:
        """Run :func:`allreduce_` on several tensors in one operation. Not differentiable."""
        handle = self.grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
        result: Group = synchronize(handle)
        return result

    def allgather_async(
        self, tensor: Given, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start an :func:`allgather` and return a handle for ``poll`` and ``synchronize``."""
        return begin_allgather(self._adapter, [tensor], name, process_set, grouped=False)

    def allgather(self, tensor: Given, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
        """Join the ranks' arrays along their first dimension, the only one that may differ. Blocks until done.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks' dtypes or other dimensions differ; on all of them.
            UnsupportedOperationError: a scalar.
        """
        result: T = synchronize(self.allgather_async(tensor, name, process_set))
        return result

    def grouped_allgather_async(
        self, tensors: Sequence[Given], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start a :func:`grouped_allgather` and return a handle for ``poll`` and ``synchronize``."""
        return begin_allgather(self._adapter, list(tensors), name, process_set, grouped=True)

    def grouped_allgather(
        self, tensors: Sequence[Given], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Group:
        """Run :func:`allgather` on several arrays in one operation."""
        result: Group = synchronize(self.grouped_allgather_async(tensors, name, process_set))
        return result

    def broadcast_async(
        self, tensor: Given, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start a :func:`broadcast` and return a handle for ``poll`` and ``synchronize``."""
        return begin_broadcast(self._adapter, tensor, None, root_rank, name, process_set)

    def broadcast(
        self, tensor: Given, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Return the root's array, on every rank, as a new array; ``root_rank`` is a global rank. Blocks until done.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks' roots, shapes or dtypes differ; on all of them.
            ValueError: there is no such rank.
        """
        result: T = synchronize(self.broadcast_async(tensor, root_rank, name, process_set))
        return result

    def broadcast_async_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start a :func:`broadcast_` and return a handle for ``poll`` and ``synchronize``."""
        self._adapter.check_writable([tensor], "broadcast")
        return begin_broadcast(self._adapter, tensor, tensor, root_rank, name, process_set)

    def broadcast_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Overwrite the tensor with the root's, and return it. Blocks until done. Not differentiable."""
        result: T = synchronize(self.broadcast_async_(tensor, root_rank, name, process_set))
        return result

    def alltoall_async(
        self,
        tensor: Given,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an :func:`alltoall`; ``synchronize`` returns the rows received and their number from each rank."""
        return begin_alltoall(self._adapter, tensor, splits, name, process_set)

    def alltoall(
        self,
        tensor: Given,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Send rows to each rank and receive rows from each. Blocks until done.

        Args:
            tensor: the first rows go to the first member, and so on.
            splits: rows to each member; the same number of rows to each by default.
            name: pairs the calls of the ranks; unnamed calls are paired by their order.
            process_set: the participants.

        Returns:
            The rows received, joined in the order of the members; with splits also the rows from each, (size,) int32.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks' dtypes or other dimensions differ; on all of them.
            UnsupportedOperationError: a scalar.
            ValueError: the splits do not add up to the number of rows.
        """
        received = synchronize(self.alltoall_async(tensor, splits, name, process_set))
        return received[0] if splits is None else received

    def reducescatter_async(
        self,
        tensor: Given,
        name: str | None = None,
        op: ReduceOp = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a :func:`reducescatter` and return a handle for ``poll`` and ``synchronize``."""
        resolved = resolve_op(average=None, op=op)
        factors = (prescale_factor, postscale_factor)
        return begin_reducescatter(self._adapter, [tensor], resolved, name, factors, process_set, grouped=False)

    def reducescatter(
        self,
        tensor: Given,
        name: str | None = None,
        op: ReduceOp = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Reduce the ranks' arrays and give each rank some rows of the result. Blocks until done.

        Rows are divided in the order of the members, evenly; if that is impossible, the first members get one more.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks did not submit the same; on all of them.
            TypeError: values of this dtype cannot be reduced.
            UnsupportedOperationError: a scalar, or Adasum.
        """
        handle = self.reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor)
        result: T = synchronize(handle)
        return result

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Given],
        name: str | None = None,
        op: ReduceOp = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a :func:`grouped_reducescatter` and return a handle for ``poll`` and ``synchronize``."""
        resolved = resolve_op(average=None, op=op)
        factors = (prescale_factor, postscale_factor)
        return begin_reducescatter(self._adapter, list(tensors), resolved, name, factors, process_set, grouped=True)

    def grouped_reducescatter(
        self,
        tensors: Sequence[Given],
        name: str | None = None,
        op: ReduceOp = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Group:
        """Run :func:`reducescatter` on several arrays in one operation."""
        handle = self.grouped_reducescatter_async(tensors, name, op, process_set, prescale_factor, postscale_factor)
        result: Group = synchronize(handle)
        return result


def join(device: int = -1) -> int:
    """Take part in the others' allreduces, without changing their values, until all ranks have joined.

    Averages still divide by all ranks. Blocks until all ranks have joined. Unnamed operations that other threads of
    this rank submit meanwhile are paired with those that the others submit after their own join.

    Args:
        device: for Horovod's signature.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    members = members_of(global_process_set)
    devices.prepare_join(members.context)
    last: int = synchronize(begin(members, Operation(Kind.JOIN), finish=lambda result: result.last_joined))
    members.context.note_join()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every member has called it. Raises HorovodInternalError if one is gone."""
    members = members_of(process_set)
    operation = Operation(Kind.BARRIER, process_set=members.number)
    synchronize(begin(members, operation, finish=lambda result: None))
