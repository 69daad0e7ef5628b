"""What the worker processes of test_ops.py run: many checks of collectives against numpy, in one job each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import other_default_device
import pytest
import torch

import elastic_driver as nhvd
import elastic_driver.torch as hvd

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (4, 3), (3, 0, 2), (2, 3, 5))


class Kinds(NamedTuple):
    """Of which kinds the tensors are.

    Attributes:
        reduced: dtypes of those that are reduced.
        moved: dtypes of those that are gathered, scattered and sent.
        shapes: of both.
        tails: the shapes of rows.
    """

    reduced: tuple[torch.dtype, ...]
    moved: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    tails: tuple[tuple[int, ...], ...]


ALL = Kinds(DTYPES, (*DTYPES, torch.bool, torch.int16, torch.complex64), SHAPES, ((), (3,), (2, 2), (0,)))
# For where dtypes matter and shapes don't, since those are below what is tested; where shapes do, and dtypes don't; and
# where neither does.
FLAT = ALL._replace(shapes=((), (0,), (4, 3)), tails=((), (3,)))
SHAPED = ALL._replace(reduced=(torch.float32,), moved=(torch.float32,))
FEW = FLAT._replace(reduced=(torch.bfloat16, torch.float32, torch.int64), moved=(torch.float32, torch.bool))
OPS = {
    hvd.Sum: lambda arrays: np.sum(arrays, axis=0),
    hvd.Average: lambda arrays: np.sum(arrays, axis=0) / len(arrays),
    hvd.Min: lambda arrays: np.min(arrays, axis=0),
    hvd.Max: lambda arrays: np.max(arrays, axis=0),
    hvd.Product: lambda arrays: np.prod(arrays, axis=0),
}


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank puts in: small whole numbers, so that all dtypes can hold all results."""
    size = int(np.prod(shape, dtype=int))
    return ((torch.arange(size) * 3 + rank) % 3 + 1).reshape(shape).to(dtype)


def plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().double().numpy()


def same(result: torch.Tensor, expected: np.ndarray[Any, Any], dtype: torch.dtype, what: object) -> None:
    assert result.dtype == dtype, what
    assert tuple(result.shape) == expected.shape, (what, result.shape, expected.shape)
    if dtype.is_floating_point:
        assert np.allclose(plain(result), expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3), (what, result)
    else:
        assert np.array_equal(plain(result), np.trunc(expected)), (what, result, expected)


def allreduces(process_set: Any, ranks: list[int], kinds: Kinds) -> None:
    mine = ranks.index(hvd.rank())
    for dtype in kinds.reduced:
        inputs = [[value(rank, shape, dtype) for shape in kinds.shapes] for rank in ranks]
        for op, combine in OPS.items():
            expected = [combine(np.stack([plain(one[i]) for one in inputs])) for i in range(len(kinds.shapes))]
            own = inputs[mine]
            before = [tensor.clone() for tensor in own]
            handles = [hvd.allreduce_async(tensor, op=op, process_set=process_set) for tensor in own]
            for handle, want in zip(handles, expected, strict=True):
                same(hvd.synchronize(handle), want, dtype, (dtype, op, "async"))
            for result, want in zip(hvd.grouped_allreduce(own, op=op, process_set=process_set), expected, strict=True):
                same(result, want, dtype, (dtype, op, "grouped"))
            assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
            copies = [tensor.clone() for tensor in own]
            handle = hvd.grouped_allreduce_async_(copies, op=op, process_set=process_set)
            assert all(a is b for a, b in zip(hvd.synchronize(handle), copies, strict=True))
            for result, want in zip(copies, expected, strict=True):
                same(result, want, dtype, (dtype, op, "grouped in place"))
        strided = torch.zeros(4, 6, dtype=dtype)[:, ::2]
        strided.copy_(value(ranks[mine], (4, 3), dtype))
        want = np.sum([plain(value(rank, (4, 3), dtype)) for rank in ranks], axis=0)
        same(hvd.allreduce(strided, op=hvd.Sum, process_set=process_set), want, dtype, "strided")
        assert hvd.allreduce_(strided, op=hvd.Sum, process_set=process_set) is strided
        same(strided, want, dtype, "strided in place")
        scaled = hvd.allreduce(
            value(ranks[mine], (4, 3), dtype),
            op=hvd.Sum,
            prescale_factor=2.0,
            postscale_factor=0.5,
            process_set=process_set,
        )
        same(scaled, np.trunc(want) if not dtype.is_floating_point else want, dtype, "scaled")
    first, last = hvd.rank() == ranks[0], hvd.rank() == ranks[-1]
    flags = torch.tensor([first, True, False, last])
    single = len(ranks) == 1
    assert hvd.allreduce(flags, op=hvd.Sum, process_set=process_set).tolist() == [True, True, False, True]
    assert hvd.allreduce(flags, op=hvd.Product, process_set=process_set).tolist() == [single, True, False, single]
    with pytest.raises(TypeError, match="cannot reduce values of dtype bool"):
        hvd.allreduce(flags, process_set=process_set)


def moves(process_set: Any, ranks: list[int], kinds: Kinds) -> None:
    """Gathering, scattering, sending."""
    mine, size = ranks.index(hvd.rank()), len(ranks)
    for dtype in kinds.moved:
        for tail in kinds.tails:
            own = value(mine, (mine + 1, *tail), dtype)
            want = torch.cat([value(place, (place + 1, *tail), dtype) for place in range(size)])
            assert torch.equal(hvd.allgather(own, process_set=process_set), want), (dtype, tail)
            pair = hvd.grouped_allgather([own, own[:mine]], process_set=process_set)
            short = torch.cat([value(place, (place + 1, *tail), dtype)[:place] for place in range(size)])
            assert torch.equal(pair[0], want)
            assert torch.equal(pair[1], short)
            # place p sends p + q rows of 10 p + q to place q
            splits = [mine + to for to in range(size)]
            parts = [torch.full((mine + to, *tail), (10 * mine + to) % 100) for to in range(size)]
            out, received = hvd.alltoall(torch.cat(parts).to(dtype), splits, process_set=process_set)
            back = [torch.full((place + mine, *tail), (10 * place + mine) % 100) for place in range(size)]
            assert torch.equal(out, torch.cat(back).to(dtype)), (dtype, tail)
            assert received.tolist() == [place + mine for place in range(size)]
            assert received.dtype == torch.int32
            splits_tensor = torch.tensor(splits)
            out, received = hvd.alltoall(torch.cat(parts).to(dtype), splits_tensor, process_set=process_set)
            assert received.dtype == torch.int64
            even = hvd.alltoall(torch.full((2 * size, *tail), mine).to(dtype), process_set=process_set)
            assert torch.equal(even, torch.cat([torch.full((2, *tail), place) for place in range(size)]).to(dtype))
        for root in ranks:
            for shape in kinds.shapes:
                own, want = value(hvd.rank(), shape, dtype), value(root, shape, dtype)
                assert torch.equal(hvd.broadcast(own, root, process_set=process_set), want), (dtype, shape)
                assert hvd.broadcast_(own, root, process_set=process_set) is own
                assert torch.equal(own, want)
            column = torch.zeros(4, 3, dtype=dtype)[:, 1].copy_(value(hvd.rank(), (4,), dtype))
            hvd.synchronize(hvd.broadcast_async_(column, root, process_set=process_set))
            assert torch.equal(column, value(root, (4,), dtype))
    for dtype in kinds.reduced:
        for rows in (0, 1, size, 2 * size + 1):
            for op in (hvd.Sum, hvd.Average, hvd.Max):
                want = OPS[op](np.stack([plain(value(rank, (rows, 2), dtype)) for rank in ranks]))
                parts = np.array_split(want, size)
                own = value(hvd.rank(), (rows, 2), dtype)
                same(hvd.reducescatter(own, op=op, process_set=process_set), parts[mine], dtype, (dtype, rows, op))
                both = hvd.grouped_reducescatter([own, own * 1], op=op, process_set=process_set)
                same(both[1], parts[mine], dtype, (dtype, rows, op, "grouped"))


def scalars() -> None:
    for collective in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(RuntimeError, match=r"cannot .* a scalar") as caught:
            collective(torch.tensor(1.0))
        assert not isinstance(caught.value, hvd.HorovodInternalError)
    with pytest.raises(ValueError, match="cannot be divided among 3 ranks evenly"):
        hvd.alltoall(torch.ones(4))
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(4), [1, 1, 1])
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(4), [4])
    with pytest.raises(ValueError, match="cannot broadcast from rank 3"):
        hvd.broadcast(torch.ones(4), 3)
    with pytest.raises(TypeError, match="sparse"):
        hvd.allreduce_(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="both average and op"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(TypeError, match="op must be one of"):
        hvd.allreduce(torch.ones(1), op=1)  # type: ignore[arg-type]
    for collective in (hvd.allreduce, hvd.allreduce_, lambda x: hvd.broadcast(x, 0), lambda x: hvd.broadcast_(x, 0)):
        with pytest.raises(TypeError, match="expected tensors"):
            collective([1.0, 2.0])  # type: ignore[arg-type]


def flagged() -> None:
    """Tensors whose conjugation or negation is a flag on memory that says otherwise."""
    rank, size = hvd.rank(), hvd.size()
    value = torch.full((3,), complex(rank, 1)).conj()
    assert hvd.allgather(value)[::3].tolist() == [complex(each, -1) for each in range(size)]
    assert hvd.broadcast(value, 2).tolist() == [2 - 1j] * 3
    assert hvd.alltoall(value)[:1].tolist() == [-1j]
    assert hvd.broadcast_(value, 2) is value
    assert value.tolist() == [2 - 1j] * 3
    negative = torch.full((3,), complex(0, rank + 1)).conj().imag
    assert negative.is_neg()
    total = size * (size + 1) / 2
    assert hvd.allreduce(negative, op=hvd.Sum).tolist() == [-total] * 3
    assert hvd.allreduce_(negative, op=hvd.Sum).tolist() == [-total] * 3


def adasum_of(arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The rule of the paper, recursively over halves (of powers of two), as in its definition."""
    arrays = list(arrays)
    step = 1
    while step < len(arrays):
        for i in range(0, len(arrays) - step, 2 * step):
            a, b = arrays[i], arrays[i + step]
            dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
            arrays[i] = a * (1 - dot / (2 * aa) if aa else 1) + b * (1 - dot / (2 * bb) if bb else 1)
        step *= 2
    return arrays[0]


def adasum() -> None:
    size, rank = hvd.size(), hvd.rank()
    inputs = [np.random.default_rng(each).standard_normal((5, 4)) for each in range(size)]
    inputs[1][:] = 0
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        own = torch.from_numpy(inputs[rank]).to(dtype)
        result = hvd.grouped_allreduce([own, own * 2], op=hvd.Adasum)
        assert np.allclose(plain(result[0]), adasum_of(inputs), atol=tolerance), dtype
        assert np.allclose(plain(result[1]), adasum_of([2 * each for each in inputs]), atol=2 * tolerance), dtype
        assert torch.equal(hvd.broadcast(result[0], 0), result[0])
    with pytest.raises(TypeError, match="Adasum"):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        with pytest.raises(RuntimeError, match="cannot reducescatter with Adasum"):
            hvd.reducescatter(torch.ones(3, dtype=dtype), op=hvd.Adasum)
    with pytest.raises(RuntimeError, match="cannot reducescatter with Adasum"):
        nhvd.reducescatter(np.ones(3, np.int64), op=hvd.Adasum)


def autograd(process_set: Any, ranks: list[int]) -> None:
    mine, size = ranks.index(hvd.rank()), len(ranks)
    weight = float(hvd.rank() + 1)
    weights = [float(rank + 1) for rank in ranks]
    total = sum(weights)

    def grad(run: Callable[[torch.Tensor], torch.Tensor], rows: int) -> list[float]:
        leaf = torch.ones(rows, requires_grad=True)
        (run(leaf) * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    near = pytest.approx
    given = {"process_set": process_set}
    assert grad(lambda x: hvd.allreduce(x, op=hvd.Sum, **given), 2) == near([total] * 2)
    assert grad(lambda x: hvd.allreduce(x, **given), 2) == near([total / size] * 2)
    assert grad(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0, **given), 1) == near([3 * total])
    assert grad(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16, **given), 2) == near([total / size] * 2)
    both = grad(lambda x: torch.cat(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, **given)), 2)
    assert both == near([3 * total] * 2)
    assert grad(lambda x: hvd.allgather(x, **given), mine + 1) == near([total / size] * (mine + 1))
    assert grad(lambda x: hvd.grouped_allgather([x[:1], x], **given)[1], mine + 2) == near([total / size] * (mine + 2))
    expected = [total / size] * 3 if hvd.rank() == ranks[-1] else [0.0] * 3
    assert grad(lambda x: hvd.broadcast(x, ranks[-1], **given), 3) == near(expected)
    splits = [mine + 1 + to for to in range(size)]
    sent = [weights[to] for to in range(size) for _ in range(splits[to])]
    assert grad(lambda x: hvd.alltoall(x, splits, **given)[0], sum(splits)) == near(sent)
    assert grad(lambda x: hvd.alltoall(x, **given), size) == near(weights)
    spread = [each for place, each in enumerate(weights) for _ in range(2 + (place == 0))]
    scatter: Any = lambda op: grad(lambda x: hvd.reducescatter(x, op=op, **given), 2 * size + 1)  # noqa: E731
    assert scatter(hvd.Average) == near(spread)
    assert scatter(hvd.Sum) == near([size * each for each in spread])
    pair = grad(lambda x: torch.cat(hvd.grouped_reducescatter([x, 2 * x], **given)), 2 * size + 1)
    assert pair == near([3 * each for each in spread])
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot differentiate an allreduce with MAX"):
        hvd.allreduce(leaf, op=hvd.Max, **given).sum().backward()


def sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    indices, values = torch.tensor([[rank, size]]), torch.ones(2, 3) * (rank + 1)
    tensor = torch.sparse_coo_tensor(indices, values, (size + 1, 3), check_invariants=True)
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        dense = hvd.sparse_allreduce_async(tensor, "sparse", op)().to_dense()
        want = np.diag([*range(1, size + 1), size * (size + 1) / 2]) @ np.ones((size + 1, 3)) / divisor
        assert np.allclose(dense, want)


def handles() -> None:
    rank = hvd.rank()
    named = [hvd.allreduce_async(torch.full((5,), float(i)), name=f"h.{i}") for i in range(20)]
    assert all(isinstance(handle, int) for handle in named)
    assert len(set(named)) == 20
    for i in reversed(range(20)):
        assert hvd.synchronize(named[i]).tolist() == [float(i)] * 5
        assert hvd.synchronize(named[i]) is None
    with pytest.raises(ValueError, match="already synchronized"):
        hvd.poll(named[0])
    handle = hvd.broadcast_async(torch.arange(3), 0)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [0, 1, 2]
    # The second is submitted while the first waits for rank 0.
    if rank == 0:
        hvd.allgather_object("late", name="go")
        hvd.allreduce(torch.ones(2), name="twice")
    else:
        first = hvd.allreduce_async(torch.ones(2), name="twice") if ordered() else None
        if first is not None:
            with pytest.raises(hvd.DuplicateNameError, match="twice"):
                hvd.allreduce_async(torch.ones(2), name="twice")
            hvd.allgather_object("on", name="go")
            hvd.synchronize(first)
        else:
            hvd.allgather_object("on", name="go")
            hvd.allreduce(torch.ones(2), name="twice")


def ordered() -> bool:
    """Whether the engine lets ranks submit in any order."""
    from elastic_driver.worker.engine.native import NativeEngine
    from elastic_driver.worker.rounds.current import current

    return isinstance(current().engine, NativeEngine)


def mismatches() -> None:
    """Each is an error on every rank, which says who differs; and the next operation goes well."""
    odd = hvd.rank() == 1
    ones = torch.ones
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("shape", lambda: hvd.allreduce(ones(3 if odd else 2), name="m")),
        ("dtype", lambda: hvd.allreduce(ones(2, dtype=torch.float64 if odd else torch.float32), name="m")),
        ("op", lambda: hvd.allreduce(ones(2), op=hvd.Min if odd else hvd.Sum, name="m")),
        ("prescale_factor", lambda: hvd.allreduce(ones(2), prescale_factor=2.0 if odd else 1.0, name="m")),
        ("postscale_factor", lambda: hvd.allreduce(ones(2), postscale_factor=2.0 if odd else 1.0, name="m")),
        ("number of tensors", lambda: hvd.grouped_allreduce([ones(2)] * (3 if odd else 2), name="m")),
        ("root rank", lambda: hvd.broadcast(ones(2), 1 if odd else 0, name="m")),
        ("shape", lambda: hvd.broadcast(ones(2, 3 if odd else 2), 0, name="m")),
        ("shape", lambda: hvd.allgather(ones(2, 3 if odd else 2), name="m")),
        ("dtype", lambda: hvd.allgather(ones(2, dtype=torch.int32 if odd else torch.int64), name="m")),
        ("shape", lambda: hvd.alltoall(ones(3, 3 if odd else 2), name="m")),
        ("op", lambda: hvd.reducescatter(ones(3), op=hvd.Sum if odd else hvd.Average, name="m")),
        ("operation", lambda: hvd.allgather(ones(2), name="m") if odd else hvd.allreduce(ones(2), name="m")),
    ]
    texts = []
    for what, run in cases:
        with pytest.raises(hvd.MismatchError, match=rf"rank 0 has {what} .*, rank 1 has {what} ") as caught:
            run()
        assert not isinstance(caught.value, hvd.HorovodInternalError)
        texts.append(str(caught.value))
        assert hvd.allreduce(ones(1), op=hvd.Sum).tolist() == [float(hvd.size())]
    assert hvd.allgather_object(texts) == [texts] * hvd.size()
    with pytest.raises(hvd.MismatchError, match=r"rank 0 has ranks \[0, 1\], rank 1 has ranks \[1, 2\]"):
        hvd.add_process_set([1, 2] if odd else [0, 1])


def joins() -> None:
    rank, size = hvd.rank(), hvd.size()
    for batches in ([1, 3, 2], [2, 2, 2], [4, 1, 1]):
        for step in range(batches[rank]):
            active = [each for each in range(size) if batches[each] > step]
            total = hvd.allreduce(torch.full((3,), rank + 1.0), op=hvd.Sum, name=f"step.{step}")
            assert total.tolist() == [sum(each + 1.0 for each in active)] * 3, (batches, step)
            mean = hvd.allreduce(torch.full((2,), 6.0), name=f"mean.{step}")
            assert mean.tolist() == pytest.approx([6.0 * len(active) / size] * 2)
            pair = [torch.ones(2), torch.ones(1, dtype=torch.int64)]
            grouped = hvd.grouped_allreduce(pair, op=hvd.Sum, name=f"pair.{step}")
            assert grouped[1].tolist() == [len(active)]
        last = hvd.join()
        assert len(set(hvd.allgather_object(last))) == 1
        if batches.count(max(batches)) == 1:
            assert last == int(np.argmax(batches))
    if rank == 0:
        hvd.join()
    else:
        # As in Horovod: handlers of RuntimeError are where its scripts notice that others have run out of data.
        for refused in (
            lambda: hvd.alltoall(torch.ones(3), name="no"),
            lambda: hvd.broadcast(torch.ones(3), 0, name="no"),
            lambda: hvd.broadcast(torch.ones(3), 1, name="no"),
            lambda: hvd.allgather(torch.ones(3), name="no"),
            lambda: hvd.reducescatter(torch.ones(3), name="no"),
        ):
            with pytest.raises(RuntimeError, match="is not supported while rank 0 has joined") as caught:
                refused()
            assert not isinstance(caught.value, hvd.HorovodInternalError)
        hvd.join()


def sets(kinds: Kinds) -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.global_process_set.ranks == list(range(size))
    assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (size, rank)
    loose = hvd.ProcessSet([2, 0])
    assert (loose.ranks, loose.process_set_id, loose.size(), loose.rank()) == ([0, 2], None, None, None)
    with pytest.raises(ValueError, match="it was not added"):
        hvd.allreduce(torch.ones(1), process_set=loose)
    with pytest.raises(TypeError, match="as a process set"):
        hvd.allreduce(torch.ones(1), process_set=[0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has ranks 0 to 2"):
        hvd.add_process_set([0, size])
    for bad in ("x", [0, 0], [-1], 3, [0.5]):
        with pytest.raises(ValueError, match="cannot make a process set"):
            hvd.ProcessSet(bad)  # type: ignore[arg-type]
    pair, lone = hvd.add_process_set(loose), hvd.add_process_set([1])
    assert pair is loose
    assert (pair.process_set_id, lone.process_set_id) == (1, 2)
    for again in ([0, 2], list(range(size))):
        with pytest.raises(ValueError, match="a set of these ranks already exists"):
            hvd.add_process_set(again)
    mine = pair if pair.included() else lone
    other = lone if mine is pair else pair
    assert mine.rank() == mine.ranks.index(rank)
    with pytest.raises(ValueError, match="is not part of it"):
        other.rank()
    with pytest.raises(ValueError, match="is not part of it"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="the process set has ranks"):
        hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
    allreduces(mine, mine.ranks, kinds)
    moves(mine, mine.ranks, kinds)
    autograd(mine, mine.ranks)
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    assert hvd.broadcast_object(rank, mine.ranks[-1], process_set=mine) == mine.ranks[-1]
    hvd.barrier(mine)
    hvd.barrier()
    assert hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert pair.process_set_id is None
    with pytest.raises(ValueError, match="was removed"):
        hvd.allreduce(torch.ones(1), process_set=pair)
    again = hvd.add_process_set([0, 2])
    if again.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).tolist() == [2.0]
    hvd.remove_process_set(again)
    hvd.remove_process_set(lone)


def arrays() -> None:
    """The numpy API, where it is not the same code as the tensors'."""
    rank, size = nhvd.rank(), nhvd.size()
    total = size * (size + 1) // 2
    for name in ("float16", "float32", ">f8", "int16", "uint16", "int64", "bool"):
        array = np.full((2, 3), rank + 1).astype(name)
        op = nhvd.Max if name == "bool" else nhvd.Sum
        want = np.full((2, 3), total).astype(name)
        assert np.array_equal(nhvd.synchronize(nhvd.allreduce_async(array, op=op)), want)
        assert np.array_equal(nhvd.grouped_allreduce([array, array.T], op=op)[1], want.T)
        assert np.array_equal(nhvd.reducescatter(np.full((size, 2), rank + 1).astype(name), op=op), want[:1, :2])
        assert nhvd.allreduce_(array, op=op) is array
        assert np.array_equal(array, want)
        view = np.full((3, 4), rank + 1).astype(name)[:, ::2]
        nhvd.grouped_allreduce_([view], op=op)
        assert np.array_equal(view, want.T)
    for name in ("uint32", "<U3", "datetime64[s]", "complex128", "i4,f8"):
        array = np.full((2, 3), rank).astype(name)
        assert np.array_equal(nhvd.broadcast(array, 1), np.full((2, 3), 1).astype(name))
        assert nhvd.broadcast_(array, 1) is array
        assert np.array_equal(array, np.full((2, 3), 1).astype(name))
        want = np.concatenate([np.full((1, 2), each).astype(name) for each in range(size)])
        own = np.full((1, 2), rank).astype(name)
        assert np.array_equal(nhvd.allgather(own), want)
        assert np.array_equal(nhvd.grouped_allgather([own, own])[1], want)
        assert np.array_equal(nhvd.alltoall(np.full((size, 2), rank).astype(name)), want)
    out, received = nhvd.alltoall(np.arange(rank + 1), [rank + 1] + [0] * (size - 1))
    assert received.tolist() == ([each + 1 for each in range(size)] if rank == 0 else [0] * size)
    assert out.tolist() == ([i for each in range(size) for i in range(each + 1)] if rank == 0 else [])
    assert [part.tolist() for part in nhvd.grouped_reducescatter([np.arange(2.0 * size)])] == [
        [2.0 * rank, 2 * rank + 1]
    ]
    with pytest.raises(TypeError, match="objects"):
        nhvd.broadcast(np.array([{}]), 0)
    with pytest.raises(TypeError, match="writable"):
        nhvd.allreduce_([1.0])  # type: ignore[arg-type]
    frozen = np.ones(2)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        nhvd.broadcast_(frozen, 0)


def queries() -> None:
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    missing = (hvd.mpi_built, hvd.mpi_enabled, hvd.nccl_built, hvd.ddl_built, hvd.ccl_built, hvd.cuda_built)
    assert not any(query() for query in (*missing, hvd.rocm_built))
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()
    assert hvd.is_homogeneous()
    assert set(hvd.__all__) <= set(dir(hvd))


def timeline(path: str) -> None:
    own = f"{path}/trace.json"
    hvd.start_timeline(own, mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="traced")
    hvd.stop_timeline()
    hvd.barrier()
    if hvd.rank() == 0:
        with open(own, encoding="utf-8") as file:
            events = json.load(file)
        assert "allreduce.traced" in {event["args"]["name"] for event in events if event["ph"] == "M"}
        spans = [event for event in events if event["ph"] == "X"]
        assert {"NEGOTIATE_ALLREDUCE", "QUEUE", "ALLREDUCE"} <= {event["name"] for event in spans}
        assert all(event["dur"] >= 0 for event in spans)
        assert {event["name"] for event in events if event["ph"] == "i"} == {"CYCLE_START"}
        with pytest.raises(OSError, match="nowhere"):
            hvd.start_timeline(f"{path}/nowhere/trace.json")
    hvd.stop_timeline()


def everything(path: str, *names: str) -> None:
    kinds = [{"ALL": ALL, "FLAT": FLAT, "SHAPED": SHAPED, "FEW": FEW}[name] for name in names]
    other_default_device.begin()
    hvd.init()
    everyone = list(range(hvd.size()))
    assert len(everyone) == 3
    for each in kinds:
        allreduces(hvd.global_process_set, everyone, each)
        moves(hvd.global_process_set, everyone, each)
    scalars()
    flagged()
    adasum()
    autograd(hvd.global_process_set, everyone)
    sparse()
    handles()
    mismatches()
    joins()
    sets(kinds[0]._replace(moved=FEW.moved, shapes=FEW.shapes, tails=FEW.tails))
    arrays()
    queries()
    timeline(path)
    say(ok=True)


def later_sets() -> None:
    """Process sets in rounds of 3, then 2, then 3 ranks; the last with a process that knows none of them."""
    fixed = hvd.ProcessSet([0, 1, 2])
    hvd.init(process_sets=[fixed] if "NEWCOMER" not in os.environ else None)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        size, rank = hvd.size(), hvd.rank()
        if not sets:  # a newcomer adds what the others have already
            sets[:] = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
        pair, far = sets
        numbers = [fixed.process_set_id, pair.process_set_id, far.process_set_id]
        say(turn=state.turn, size=size, rank=rank, numbers=numbers)
        if size == 2:
            with pytest.raises(ValueError, match="the job has no rank 2 now"):
                hvd.allreduce(torch.ones(1), process_set=far)
        elif far.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=far).tolist() == [2.0]
        if pair.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).tolist() == [2.0]
        state.turn += 1
        while state.turn < 3:  # until the driver's notice is seen
            state.commit()

    sets: list[Any] = []
    state = hvd.elastic.ObjectState(turn=0)
    loop(state)
    say(done=True)
