"""The memory of tensors as bytes, also of one element of many."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from elastic_driver.torch.device.groups import Peers
from elastic_driver.torch.device.math import Instruction, carry_out
from elastic_driver.torch.tensors import flat_bytes, tensor_bytes
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import Kind

TENSORS = {
    "one of many": torch.arange(4.0)[2::2],
    "one of a column": torch.arange(4.0).reshape(4, 1).t()[:, 3:],
    "none": torch.empty(0, 3),
    "a scalar": torch.tensor(5, dtype=torch.int64),
    "many": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "truths": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_contiguous_tensors_bytes_are_its_memory(name: str) -> None:
    tensor = TENSORS[name]
    assert tensor.is_contiguous()
    for data in (flat_bytes(tensor).numpy(), tensor_bytes(tensor)):
        assert data.size == tensor.numel() * tensor.element_size()
        if tensor.numel():
            assert torch.equal(torch.from_numpy(data.copy()).view(tensor.dtype), tensor.reshape(-1))
    if tensor.numel():
        assert flat_bytes(tensor).data_ptr() == tensor.data_ptr()


class Root:
    """A group whose root this member is."""

    size, index = 2, 0

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Leaves it as it is."""


@pytest.mark.parametrize("name", TENSORS)
def test_a_device_sends_them(name: str) -> None:
    instruction = Instruction(Kind.BROADCAST, ReduceOp.SUM, 0, (1.0, 1.0), may_overwrite=False)
    result = carry_out(cast(Peers, Root()), instruction, TENSORS[name], 0, 1, ())
    assert torch.equal(result, TENSORS[name])
