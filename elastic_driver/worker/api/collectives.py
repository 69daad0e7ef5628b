"""The collectives as training scripts call them: names, arguments and defaults of Horovod 0.28.1, for any framework.

Functions that end in ``_async`` return a handle for ``poll`` and ``synchronize``; until then the tensor must not be
changed. Those that end in ``_`` write into the tensor they are given. None of them is differentiable: a framework puts
its gradients on top. What they do is operations.py's, how a framework's tensors are read its Adapter's.
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
    """The collectives of one framework: of what callers may give, its tensors, and what groups of results come as.

    The methods are the functions of the API.
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
        """Begins an :func:`allreduce`; a handle for ``poll`` and ``synchronize``."""
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
        """Combines the ranks' arrays, which have one shape and dtype. Blocks until done.

        Args:
            tensor: any shape; left as it is.
            average: older spelling of ``op``: True is Average, False is Sum.
            name: pairs the calls of the ranks; calls without one are paired by their order.
            op: Average (the default), Sum, Adasum, Min, Max or Product. Averages of integers are rounded toward zero.
            prescale_factor: multiplies before the reduction.
            postscale_factor: multiplies after it.
            process_set: whose members take part.

        Returns:
            A new array, bitwise the same on all ranks.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks did not submit the same; on all of them.
            DuplicateNameError: an operation of this name is under way.
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
        """Begins an :func:`allreduce_`; a handle for ``poll`` and ``synchronize``."""
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
        """Like :func:`allreduce`, in place: returns the tensor given, overwritten. Not differentiable."""
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
        """Begins a :func:`grouped_allreduce`; a handle for ``poll`` and ``synchronize``."""
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
        """:func:`allreduce` of several arrays in one operation."""
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
        """Begins a :func:`grouped_allreduce_`; a handle for ``poll`` and ``synchronize``."""
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
        """:func:`allreduce_` of several tensors in one operation. Not differentiable."""
        handle = self.grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
        result: Group = synchronize(handle)
        return result

    def allgather_async(
        self, tensor: Given, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begins an :func:`allgather`; a handle for ``poll`` and ``synchronize``."""
        return begin_allgather(self._adapter, [tensor], name, process_set, grouped=False)

    def allgather(self, tensor: Given, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
        """The ranks' arrays joined along their first dimension, in which alone they may differ. Blocks until done.

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
        """Begins a :func:`grouped_allgather`; a handle for ``poll`` and ``synchronize``."""
        return begin_allgather(self._adapter, list(tensors), name, process_set, grouped=True)

    def grouped_allgather(
        self, tensors: Sequence[Given], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Group:
        """:func:`allgather` of several arrays in one operation."""
        result: Group = synchronize(self.grouped_allgather_async(tensors, name, process_set))
        return result

    def broadcast_async(
        self, tensor: Given, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begins a :func:`broadcast`; a handle for ``poll`` and ``synchronize``."""
        return begin_broadcast(self._adapter, tensor, None, root_rank, name, process_set)

    def broadcast(
        self, tensor: Given, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """The root's array (``root_rank`` is a global rank), on every rank, as a new array. Blocks until done.

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
        """Begins a :func:`broadcast_`; a handle for ``poll`` and ``synchronize``."""
        self._adapter.check_writable([tensor], "broadcast")
        return begin_broadcast(self._adapter, tensor, tensor, root_rank, name, process_set)

    def broadcast_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Overwrites the tensor with the root's, and returns it. Blocks until done. Not differentiable."""
        result: T = synchronize(self.broadcast_async_(tensor, root_rank, name, process_set))
        return result

    def alltoall_async(
        self,
        tensor: Given,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Begins an :func:`alltoall`; ``synchronize`` returns what was received and the rows from each rank."""
        return begin_alltoall(self._adapter, tensor, splits, name, process_set)

    def alltoall(
        self,
        tensor: Given,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Sends rows to each rank and receives rows from each. Blocks until done.

        Args:
            tensor: its first rows go to the first member, and so on.
            splits: rows to each member; the same number of rows to each by default.
            name: pairs the calls of the ranks; calls without one are paired by their order.
            process_set: whose members take part.

        Returns:
            The rows received, joined in the order of the members; with splits also the rows from each, (size,) int32.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks' dtypes or other dimensions differ; on all of them.
            UnsupportedOperationError: a scalar.
            ValueError: splits that do not add up to the rows there are.
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
        """Begins a :func:`reducescatter`; a handle for ``poll`` and ``synchronize``."""
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
        """Combines the ranks' arrays and gives each rank some rows of the result. Blocks until done.

        Rows are dealt in the order of the members, evenly; where they cannot be, the first members get one more.

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
        """Begins a :func:`grouped_reducescatter`; a handle for ``poll`` and ``synchronize``."""
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
        """:func:`reducescatter` of several arrays in one operation."""
        handle = self.grouped_reducescatter_async(tensors, name, op, process_set, prescale_factor, postscale_factor)
        result: Group = synchronize(handle)
        return result


def join(device: int = -1) -> int:
    """Takes part in the others' allreduces without changing their values until all ranks have joined.

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
    """Blocks until every member is here. Raises HorovodInternalError when one is gone."""
    members = members_of(process_set)
    operation = Operation(Kind.BARRIER, process_set=members.number)
    synchronize(begin(members, operation, finish=lambda result: None))
