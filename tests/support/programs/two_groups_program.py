"""A program that has a default group of its own, and the round's beside it; a job of one process, without a driver."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

import elastic_driver.torch as hvd


def main() -> None:
    warnings.simplefilter("error")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = dist.group.WORLD
    hvd.init()
    state = hvd.elastic.DDPState(model=torch.nn.Linear(3, 2), rounds=0)
    former = []

    @hvd.elastic.run
    def train(state: hvd.elastic.DDPState) -> None:
        group = hvd.process_group()
        assert group is hvd.process_group() is not own
        assert group not in former
        assert dist.group.WORLD is own, "the program's stays the default"
        assert all(each not in dist.distributed_c10d._world.pg_map for each in former)
        former.append(group)
        assert state.ddp is state.ddp
        state.ddp(torch.ones(4, 3)).sum().backward()
        data = torch.ones(1)
        dist.all_reduce(data, group=group)
        dist.all_reduce(data)
        assert data.item() == 1
        state.rounds += 1
        state.commit()
        if state.rounds < 3:
            raise hvd.HorovodInternalError("once more")
        dist.destroy_process_group(group)  # the program may; then there is another
        assert hvd.process_group() is not group
        dist.all_reduce(data, group=hvd.process_group())

    train(state)
    hvd.shutdown()
    assert list(dist.distributed_c10d._world.pg_map) == [own]
    dist.destroy_process_group()
    print("well")


if __name__ == "__main__":
    main()
