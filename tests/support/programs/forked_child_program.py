"""What the workers of test_forked_children.py run: a worker's children have its numbers, and are not the worker."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from worker_program import say

import elastic_driver.torch as hvd
from elastic_driver.errors import ForkedProcessError
from elastic_driver.torch.elastic import ElasticSampler, ObjectState, TorchState


def numbers() -> list[Any]:
    """All that a process may ask of its place."""
    return [
        hvd.is_initialized(),
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        hvd.is_homogeneous(),
        hvd.global_process_set.size(),
        hvd.global_process_set.rank(),
    ]


def in_child(what: Callable[[], None]) -> int:
    """Runs a function in a forked child that ends as Python does; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        what()
        sys.exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refusals() -> None:
    """In a child: each way to act for the worker is an error that says why."""
    hvd.init()
    pair = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    states = [TorchState(model, optimizer, step=0), ObjectState(step=0)]
    before = numbers()
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="begun by the worker")

    def child() -> None:
        assert numbers() == before
        assert (pair.size(), pair.included()) == (len(pair.ranks), hvd.rank() in pair.ranks)
        sampler = ElasticSampler(range(10))
        assert (sampler.rank, sampler.num_replicas) == (hvd.rank(), hvd.size())
        model(torch.ones(1, 2)).sum().backward()
        calls: list[Callable[[], Any]] = [
            lambda: hvd.allreduce(torch.ones(1)),
            lambda: hvd.allgather(torch.ones(1)),
            lambda: hvd.broadcast_object(1),
            lambda: hvd.broadcast_parameters(model.state_dict(), 0),
            lambda: hvd.synchronize(handle),
            lambda: hvd.poll(handle),
            lambda: hvd.add_process_set([0, 1]),
            lambda: hvd.elastic.run(lambda state: None)(states[1]),
            hvd.barrier,
            hvd.join,
            optimizer.step,
            *(call for state in states for call in (state.commit, state.sync, state.check_host_updates)),
        ]
        for call in calls:
            with pytest.raises(ForkedProcessError, match="forked from process"):
                call()
        for state in states:
            assert state._commits == 0
            state.save()
            state.restore()
        if os.environ.get("ELASTIC_DRIVER_RENDEZVOUS"):
            with pytest.raises(ForkedProcessError):
                hvd.init()
            assert numbers() == before
            assert in_child(lambda: None) == 5
        hvd.shutdown()
        assert not hvd.is_initialized()
        if os.environ.get("ELASTIC_DRIVER_RENDEZVOUS"):
            with pytest.raises(ForkedProcessError, match="place in the job"):
                hvd.init()
        else:
            hvd.init()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [1.0]

    assert in_child(child) == 5
    total = hvd.synchronize(handle)
    hvd.shutdown()

    def late() -> None:
        if os.environ.get("ELASTIC_DRIVER_RENDEZVOUS"):
            with pytest.raises(ForkedProcessError, match="place in the job"):
                hvd.init()

    assert in_child(late) == 5
    say(total=int(total))


class _Data(torch.utils.data.IterableDataset[Any]):
    """A share of the numbers, as a script deals them out in its loader's workers."""

    def __iter__(self) -> Iterator[Any]:
        yield torch.tensor([hvd.rank(), hvd.size(), os.getpid()])


def loader() -> None:
    """A data loader whose forked workers ask for the rank."""
    hvd.init()
    context = multiprocessing.get_context("fork")
    (batch,) = list(torch.utils.data.DataLoader(_Data(), num_workers=1, multiprocessing_context=context))
    rank, size, pid = batch[0].tolist()
    assert (rank, size) == (hvd.rank(), hvd.size())
    assert pid != os.getpid()
    say(total=int(hvd.allreduce(torch.ones(1), op=hvd.Sum)[0]))
