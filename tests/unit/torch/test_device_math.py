"""One rank's part of an operation on a device, with a group that passes everything through."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from elastic_driver.torch.device.groups import Peers
from elastic_driver.torch.device.math import Instruction, absent, carry_out
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import Kind


class Alone:
    """A group of one, which remembers what it was given."""

    size, index = 1, 0

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def allreduce(self, flat: torch.Tensor, op: ReduceOp) -> None:
        """Leaves it as it is."""
        self.given.append(flat)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
def test_no_other_view_of_a_flat_tensor_is_made(op: ReduceOp) -> None:
    group, buffer = Alone(), torch.ones(8)
    instruction = Instruction(Kind.ALLREDUCE, op, 0, (0.5, 2.0), may_overwrite=True)
    result = carry_out(cast(Peers, group), instruction, buffer, 0, 1, ())
    assert group.given[0] is buffer
    assert result is buffer
    assert buffer.tolist() == [1.0] * 8


def test_a_tensor_keeps_its_shape() -> None:
    group, source = Alone(), torch.ones(2, 3)
    instruction = Instruction(Kind.ALLREDUCE, ReduceOp.SUM, 0, (3.0, 1.0), may_overwrite=False)
    result = carry_out(cast(Peers, group), instruction, source, 0, 1, ())
    assert group.given[0].shape == (6,)
    assert result.tolist() == [[3.0] * 3] * 2
    assert source.tolist() == [[1.0] * 3] * 2


class Twins(Alone):
    """A group of two members with the same values."""

    size = 2

    def allreduce(self, flat: torch.Tensor, op: ReduceOp) -> None:
        """Adds the other's."""
        flat += flat.clone()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_averages_of_small_integers_do_not_overflow(dtype: torch.dtype) -> None:
    high = torch.iinfo(dtype).max
    instruction = Instruction(Kind.ALLREDUCE, ReduceOp.AVERAGE, 0, (1.0, 1.0), may_overwrite=False)
    result = carry_out(cast(Peers, Twins()), instruction, torch.full((3,), high, dtype=dtype), 0, 1, ())
    assert result.dtype == dtype
    assert result.tolist() == [high] * 3


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_factors_beyond_the_range_saturate(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    source = torch.tensor([0, 1] if limits.min == 0 else [-1, 0, 1], dtype=dtype)
    for factor, ends in ((1e30, {-1: limits.min, 0: 0, 1: limits.max}), (float("nan"), {-1: 0, 0: 0, 1: 0})):
        instruction = Instruction(Kind.ALLREDUCE, ReduceOp.SUM, 0, (factor, 1.0), may_overwrite=False)
        result = carry_out(cast(Peers, Alone()), instruction, source, 0, 1, ())
        assert result.tolist() == [ends[value] for value in source.tolist()]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint8", "int64"])
def test_what_a_rank_that_has_joined_gives_changes_nothing(dtype: str) -> None:
    ours = torch.tensor([1, 2, 100]).to(getattr(torch, dtype))
    combine = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVERAGE: torch.add,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.PRODUCT: torch.mul,
    }
    for op, function in combine.items():
        theirs = absent(dtype, (3,), torch.device("cpu"), op)
        assert theirs.dtype == ours.dtype
        assert function(ours, theirs).tolist() == ours.tolist()


class Answering(Alone):
    """A member of a group whose reduction gave this."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self._answer = answer

    def allreduce(self, flat: torch.Tensor, op: ReduceOp) -> None:
        """Gives it."""
        flat.copy_(self._answer)


def reduced_as_by_gloo(parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """In the order of ranks. What is not less, or not greater, is not taken: so it is with every NaN."""
    result = parts[0]
    for part in parts[1:]:
        result = torch.where(part < result if op is ReduceOp.MIN else part > result, part, result)
    return result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name)
@pytest.mark.parametrize("kind", [Kind.ALLREDUCE, Kind.REDUCESCATTER], ids=lambda kind: kind.name)
def test_nan_of_any_rank_is_the_least_and_the_greatest(kind: Kind, op: ReduceOp, dtype: str) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        [nan, 1.0, 1.0, -inf, -1.0, inf, nan, 0.5, inf, -2.0],
        [2.0, nan, 2.0, nan, -2.0, inf, nan, -0.5, -inf, -2.0],
        [3.0, 3.0, nan, inf, -1.5, inf, nan, 0.0, 1.0, -4.0],
    ]
    sources = [torch.tensor(row).to(getattr(torch, dtype)) for row in rows]
    combine = torch.minimum if op is ReduceOp.MIN else torch.maximum
    wanted = combine(combine(sources[0], sources[1]), sources[2])
    # A rank that has joined changes nothing.
    sources.insert(1, absent(dtype, (10,), torch.device("cpu"), op))
    instruction = Instruction(kind, op, 0, (1.0, 1.0), may_overwrite=False)
    given = []
    for source in sources:
        group = Alone()
        carry_out(cast(Peers, group), instruction, source, 0, 1, ())
        given.append(group.given[0].clone())
    answer = reduced_as_by_gloo(given, op)
    for source in sources:
        group = Answering(answer)  # all rows of a scattered one
        result = carry_out(cast(Peers, group), instruction, source, 0, 1, ())
        assert result.dtype == source.dtype
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
