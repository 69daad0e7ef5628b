"""A sharded model's first build, on ranks that are not there."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic_driver.hosts import SlotInfo
from elastic_driver.torch.distributed.rehearsal import rehearse
from elastic_driver.worker.rounds.current import CurrentRound

pytestmark = pytest.mark.unit

PLANNED = SlotInfo(3, 4, 1, 2, 1, 2)


def test_a_model_is_built_in_its_place_and_nothing_is_left_of_it() -> None:
    from torch.distributed.fsdp import fully_shard  # here, as it takes seconds

    met: list[Any] = []

    def make(mesh: DeviceMesh) -> Any:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        for each in (mesh, both):
            model = torch.nn.Linear(8, 8)
            fully_shard(model, mesh=each)
            met.append(model.weight.to_local().shape)
        met.append((dist.get_rank(), dist.get_world_size(), mesh.size()))
        return model

    for _ in range(2):
        rehearse(make, PLANNED, "cpu")
        assert not dist.is_initialized()
    assert met == [(2, 8), (4, 8), (3, 4, 4)] * 2


def test_what_goes_wrong_is_left_to_the_build_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    now = CurrentRound()
    joins: list[str] = []
    now.plan(PLANNED, lambda: joins.append("joined"))

    def make(mesh: DeviceMesh) -> None:
        now.context.check()  # as a collective of ours does

    with caplog.at_level("INFO"), now.kept_out():
        rehearse(make, PLANNED, "cpu")
        rehearse(lambda mesh: sys.exit("no checkpoint"), PLANNED, "cpu")
    assert "there is no round yet" in caplog.text
    assert "SystemExit: no checkpoint" in caplog.text
    assert not joins
    assert not dist.is_initialized()
    with pytest.raises(Exception, match="not been initialized"):
        now.context.check()
    assert joins == ["joined"], "afterwards it joins as before"


def test_random_numbers_are_those_of_before() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.random()), torch.rand(()).item()]

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    plain = drawn()
    seed()
    rehearse(lambda mesh: drawn(), PLANNED, "cpu")
    assert drawn() == plain


def test_a_program_with_a_group_of_its_own_has_no_rehearsal() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rehearse(lambda mesh: pytest.fail("it was called"), PLANNED, "cpu")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
