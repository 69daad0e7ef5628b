"""What is done to a model before it joins the others, and which states take which optimizers."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import elastic_driver.torch as hvd
from elastic_driver.errors import UnsupportedOperationError

pytestmark = pytest.mark.unit


class UserError(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_compiling_ahead_leaves_everything_as_it_was(*, fails: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    gradient = model[0].weight.grad = torch.ones(4, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    caps: list[int] = []

    def step(given: torch.nn.Module) -> None:
        caps.append(DistributedDataParallel._get_active_ddp_module().bucket_bytes_cap)
        assert given is model
        assert given[0].weight.grad is None
        given(torch.randn(5, 3)).sum().backward()
        if fails:
            raise UserError

    try:
        hvd.compile_ahead(model, step, bucket_cap_mb=2)
        assert not fails
    except UserError:
        assert fails
    assert caps == [2 << 20], "as under DDP"
    assert DistributedDataParallel._get_active_ddp_module() is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 3))
    assert model[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), random)


class Divided(torch.optim.SGD):
    """As ZeroRedundancyOptimizer, which needs a process group."""

    def consolidate_state_dict(self) -> None:
        pass


def test_a_divided_optimizer_is_refused_where_no_rank_has_all_of_it() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedOperationError, match=r"cannot keep a Divided: .*ZeroState"):
        hvd.elastic.DDPState(model=model, optimizer=Divided(model.parameters(), lr=0.1))
