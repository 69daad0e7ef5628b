"""One rank's part of an operation on a device, with a group that passes everything through."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from elastic_driver.torch.device.groups import Peers
from elastic_driver.torch.device.math import Instruction, carry_out
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
