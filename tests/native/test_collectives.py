"""Every operation on every element type against numpy, with threads as ranks."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest

from .conftest import in_threads, native
from .limits import NEVER_S

OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]
SIZE = 3


def values(rank: int, dtype: str, count: int) -> Any:
    random = np.random.default_rng(1000 + rank)
    if dtype.startswith("float"):
        return random.normal(size=count).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, size=count, dtype=dtype, endpoint=True)


def succeeds(size: int, body: Any) -> None:
    errors = in_threads(size, body)
    assert not errors, errors


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(dtype: str, op: str) -> None:
    def body(member: Any, rank: int) -> None:
        for count in (0, 1, 5, 1021, 300_007):
            mine = values(rank, dtype, count)
            member.allreduce("global", mine, dtype, op, NEVER_S)
            with np.errstate(all="ignore"):
                wide = np.float32 if dtype == "float16" else dtype
                wanted = reduce(OPS[op], (values(r, dtype, count).astype(wide) for r in range(SIZE)))
            if dtype == "float16":
                np.testing.assert_allclose(mine, wanted.astype(dtype), rtol=2e-3, atol=2e-3)
            elif dtype.startswith("float"):
                np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(mine, wanted)

    succeeds(SIZE, body)


@pytest.mark.parametrize("size", [2, 4, 5])
def test_all_ranks_get_the_same_bits(size: int) -> None:
    results = {}

    def body(member: Any, rank: int) -> None:
        mine = values(rank, "float32", 100_003)
        member.allreduce("global", mine, "float32", "sum", NEVER_S)
        results[rank] = mine.tobytes()

    succeeds(size, body)
    assert len(results) == size
    assert len(set(results.values())) == 1


def test_16_bit_floats_are_rounded_as_numpy_rounds() -> None:
    """Every float16, and every bfloat16, added to zero by the kernel: bits must come back as they were."""
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)

    def body(member: Any, rank: int) -> None:
        for dtype in ("float16", "bfloat16"):
            mine = every.copy() if rank == 0 else np.zeros(1 << 16, np.uint16)
            if rank == 1:
                mine[:] = 0x8000  # minus zero keeps the sign of zeros
            member.allreduce("global", mine, dtype, "sum", NEVER_S)
            if dtype == "float16":
                numbers, original = mine.view(np.float16), every.view(np.float16)
            else:
                numbers = (mine.astype(np.uint32) << 16).view(np.float32)
                original = (every.astype(np.uint32) << 16).view(np.float32)
            nan = np.isnan(original)
            assert np.isnan(numbers[nan]).all()
            np.testing.assert_array_equal(mine[~nan], every[~nan])

    succeeds(2, body)


def test_float16_sums_round_to_nearest_even() -> None:
    random = np.random.default_rng(7)
    a, b = (random.normal(scale=300, size=200_000).astype(np.float16) for _ in range(2))

    def body(member: Any, rank: int) -> None:
        mine = (a if rank == 0 else b).copy()
        member.allreduce("global", mine, "float16", "sum", NEVER_S)
        np.testing.assert_array_equal(mine, (a.astype(np.float32) + b.astype(np.float32)).astype(np.float16))

    succeeds(2, body)


@pytest.mark.parametrize("count", [0, 1, 1000, 3_000_000])
def test_broadcast(count: int) -> None:
    def body(member: Any, rank: int) -> None:
        for root in range(SIZE):
            mine = values(rank, "uint8", count)
            member.broadcast("global", mine, root, NEVER_S)
            np.testing.assert_array_equal(mine, values(root, "uint8", count))

    succeeds(SIZE, body)


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 1, 1], [0, 5, 2], [100_000, 0, 1], [3, 3, 200_000]])
def test_allgather_of_uneven_parts(counts: list[int]) -> None:
    def body(member: Any, rank: int) -> None:
        mine = values(rank, "uint8", counts[rank])
        output = np.full(sum(counts), 99, np.uint8)
        member.allgather("global", mine, output, counts, NEVER_S)
        np.testing.assert_array_equal(output, np.concatenate([values(r, "uint8", counts[r]) for r in range(SIZE)]))

    succeeds(SIZE, body)


def test_barrier_holds_until_the_last_is_there() -> None:
    arrived: list[int] = []
    seen: list[int] = []

    def body(member: Any, rank: int) -> None:
        arrived.append(rank)
        member.barrier("global", NEVER_S)
        seen.append(len(arrived))

    succeeds(4, body)
    assert seen == [4, 4, 4, 4]


def test_a_group_of_one_needs_no_peers() -> None:
    member = native.ContextGroup([("global", [0], 0)], host="127.0.0.1")
    member.connect([member.prepare()], 1.0)
    data = np.arange(5, dtype=np.float32)
    member.allreduce("global", data, "float32", "sum", 1.0)
    output = np.zeros(20, np.uint8)
    member.allgather("global", data, output, [20], 1.0)
    member.barrier("global", 1.0)
    np.testing.assert_array_equal(output.view(np.float32), np.arange(5))
    member.close()


def test_wrong_arguments_are_refused() -> None:
    member = native.ContextGroup([("global", [0, 1], 0)], host="127.0.0.1")
    data = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="none of float16"):
        member.allreduce("global", data, "complex64", "sum", 1.0)
    with pytest.raises(ValueError, match="none of sum"):
        member.allreduce("global", data, "float32", "xor", 1.0)
    with pytest.raises(ValueError, match="above 0"):
        member.allreduce("global", data, "float32", "sum", 0.0)
    with pytest.raises(ValueError, match="no group 'other'"):
        member.barrier("other", 1.0)
    with pytest.raises(ValueError, match="15 bytes is no array"):
        member.allreduce("global", bytearray(15), "float32", "sum", 1.0)
    with pytest.raises(BufferError):
        member.allreduce("global", b"\0\0\0\0", "float32", "sum", 1.0)
    with pytest.raises(ValueError, match="not C-contiguous"):
        member.allreduce("global", np.zeros((4, 4), np.float32)[:, 1], "float32", "sum", 1.0)
    with pytest.raises(TypeError):
        member.allreduce("global", 7, "float32", "sum", 1.0)
    with pytest.raises(ValueError, match="no member number 2"):
        member.broadcast("global", data, 2, 1.0)
    with pytest.raises(ValueError, match="counts add up to"):
        member.allgather("global", data, np.zeros(5, np.uint8), [16, 16], 1.0)
    with pytest.raises(native.CollectiveError, match="not connected"):
        member.barrier("global", 1.0)
    member.close()
    with pytest.raises(ValueError, match="no member number"):
        native.ContextGroup([("global", [0, 1], 2)], host="127.0.0.1")
    with pytest.raises(ValueError, match="named twice"):
        native.ContextGroup([("global", [0, 1], 0), ("global", [0, 1], 0)], host="127.0.0.1")


def test_garbage_for_addresses_is_refused() -> None:
    member = native.ContextGroup([("global", [0, 1], 0)], host="127.0.0.1")
    good = member.prepare()
    for garbage in (b"EDG1", b"not a blob at all", good[:-1], good + b"x", good[:4] + b"\xff" * 40):
        with pytest.raises(native.CollectiveError, match="cannot read a peer's addresses"):
            member.connect([good, garbage], 1.0)
    for blobs in ([good], [good, b""]):
        with pytest.raises(native.CollectiveError, match="no addresses of rank 1"):
            member.connect(blobs, 1.0)
    other = native.ContextGroup([("global", [0, 1, 2], 1)], host="127.0.0.1")
    with pytest.raises(native.CollectiveError, match="another group"):
        member.connect([good, other.prepare()], 1.0)
    member.close()
    other.close()


def test_an_address_that_is_not_ours_is_a_clear_error() -> None:
    member = native.ContextGroup([("global", [0, 1], 0)], host="192.0.2.1")
    with pytest.raises(native.CollectiveError, match=r"cannot listen on 192\.0\.2\.1"):
        member.prepare()
    member.close()
