"""What the worker processes of the integration tests run: ``worker_program.py NAME ARGS``. Output is JSON lines."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import sys
import time
from typing import Any

import numpy as np
import pytest

import elastic_driver as hvd

logging.basicConfig(level=logging.INFO)


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def digest(*arrays: Any) -> str:
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


_to_hold = os.environ.get("HOLD_AT", "").split(",")


def hold(step: int) -> None:
    """Waits for the test, the first time each of the steps in HOLD_AT is reached."""
    if str(step) in _to_hold:
        _to_hold.remove(str(step))
        say(held=step)
        sys.stdin.readline()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def numpy_collectives() -> None:
    """Every operation and dtype against what numpy makes of the ranks' inputs."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for name in ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "int16", "uint16"):
        for op, combine in (
            (hvd.Sum, np.sum),
            (hvd.Min, np.min),
            (hvd.Max, np.max),
            (hvd.Product, np.prod),
            (hvd.Average, np.mean),
        ):
            inputs = [(np.arange(6).reshape(2, 3) % 2 + each % 2 + 1).astype(name) for each in range(size)]
            before = inputs[rank].copy()
            expected = combine(np.stack(inputs).astype(np.float64), axis=0)
            result = hvd.allreduce(inputs[rank], op=op)
            assert result.dtype == before.dtype
            assert result.shape == (2, 3)
            assert np.array_equal(inputs[rank], before)
            if name.startswith("float"):
                assert np.allclose(result, expected, rtol=2e-3), (name, op, result, expected)
            else:
                assert np.array_equal(result, np.trunc(expected)), (name, op, result, expected)
    flags = np.array([rank == 0, True, False])
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, True, False]
    assert hvd.allreduce(flags, op=hvd.Product).tolist() == [False, True, False]
    assert hvd.allreduce(np.array([-3 - 2 * rank], np.int64)).tolist() == [-int((3 * size + size * (size - 1)) / size)]
    assert hvd.allreduce(np.float32(2), average=False) == 2 * size
    assert np.allclose(hvd.allreduce(np.ones(3), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4), 2 * size)
    assert hvd.allreduce(np.empty((0, 3))).shape == (0, 3)
    big = np.full(1 << 20, rank + 1, np.float32)
    assert hvd.allreduce(big, op=hvd.Sum)[-1] == size * (size + 1) / 2
    strided = np.arange(20.0).reshape(4, 5)[:, ::2]
    assert np.array_equal(hvd.allreduce(strided), strided)
    for root in range(size):
        assert hvd.broadcast(np.full((2, 2), rank, np.int16), root).tolist() == [[root, root], [root, root]]
        assert hvd.broadcast_object({"of": rank, "pad": "x" * 1000 * rank}, root)["of"] == root
    gathered = hvd.allgather(np.full((rank, 2), rank, np.float32))
    assert gathered.tolist() == [[each, each] for each in range(size) for _ in range(each)]
    assert hvd.allgather_object([rank] * rank) == [[each] * each for each in range(size)]
    with pytest.raises(ValueError, match=r"rank 0 has shape \(rows, 2\), rank 1 has shape \(rows, 3\)"):
        hvd.allgather(np.zeros((1, 2 + (rank == 1))))
    hvd.barrier()
    slot = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    places = hvd.allgather_object((hvd.local_rank(), hvd.cross_rank()))
    groups = {
        "local": tuple(each for each, (_, cross) in enumerate(places) if cross == hvd.cross_rank()),
        "cross": tuple(each for each, (local, _) in enumerate(places) if local == hvd.local_rank()),
    }
    members = {}
    for name, group in groups.items():
        mine: Any = None
        for ranks in sorted(set(map(tuple, hvd.allgather_object(group)))):
            if len(ranks) < size:
                added = hvd.add_process_set(list(ranks))
                mine = added if added.included() else mine
        if mine is not None and len(group) > 1:
            members[name] = int(hvd.allreduce(np.array([1 << (4 * rank)]), op=hvd.Sum, process_set=mine)[0])
    say(ok=True, slot=slot, members=members)


def torch_collectives() -> None:
    """The tensors' API: dtypes, in place, autograd."""
    import torch

    import elastic_driver.torch as thvd

    thvd.init()
    rank, size = thvd.rank(), thvd.size()
    total = size * (size + 1) // 2
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64):
        tensor = torch.full((3, 2), rank + 1).to(dtype)
        assert thvd.allreduce(tensor, op=thvd.Sum).tolist() == [[total, total]] * 3, dtype
        assert thvd.allreduce(tensor, op=thvd.Max).tolist() == [[size, size]] * 3, dtype
        assert thvd.allreduce(tensor, op=thvd.Product)[0, 0] == np.prod(range(1, size + 1)), dtype
        assert thvd.allreduce(tensor).dtype == dtype
        assert tensor[0, 0] == rank + 1
        assert thvd.allreduce_(tensor, op=thvd.Sum) is tensor
        assert tensor[0, 0] == total
        assert thvd.broadcast(torch.full((2,), rank).to(dtype), 1).tolist() == [1, 1]
    assert torch.allclose(
        thvd.allreduce(torch.full((4,), 1.5 + rank), compression=thvd.Compression.fp16), torch.tensor(1 + size / 2)
    )
    column = torch.zeros(4, 3)[:, 1]
    thvd.broadcast_(column.fill_(rank), 1)
    assert column.tolist() == [1.0] * 4
    gathered = thvd.allgather(torch.full((rank, 2), rank, dtype=torch.bfloat16))
    assert gathered.shape == (size * (size - 1) // 2, 2)
    leaf = torch.full((2,), float(rank), requires_grad=True)
    (thvd.allreduce(leaf, op=thvd.Sum) * (rank + 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [total, total]
    leaf = torch.ones(rank + 1, requires_grad=True)
    (thvd.allgather(leaf) * (rank + 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [total / size] * (rank + 1)
    leaf = torch.ones(2, requires_grad=True)
    (thvd.broadcast(leaf, 0) * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == ([2] * 2 if rank == 0 else [0, 0])
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    thvd.broadcast_parameters(model.state_dict(), 0)
    say(ok=True, digest=digest(*(value.numpy() for value in model.state_dict().values())))


def train(steps: str, commit_each: str = "1", pause_s: str = "0.01") -> None:
    """A numpy training: weights move by an average over the ranks that depends on the step alone."""
    hvd.init()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        say(entered=state.step, commits=state._commits, rank=hvd.rank(), size=hvd.size(), weights=digest(state.weights))
        while state.step < int(steps):
            hold(state.step)
            time.sleep(float(pause_s))  # stands for the computing
            grads = np.random.default_rng([state.step, hvd.rank() % 2]).standard_normal(1000).astype(np.float32)
            state.weights = state.weights + hvd.allreduce(grads)
            state.step += 1
            say(step=state.step, rank=hvd.rank(), size=hvd.size(), pid=os.getpid())
            if state.step % int(commit_each) == 0:
                state.commit()

    state = hvd.elastic.ObjectState(step=0, weights=np.zeros(1000, np.float32))
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    loop(state)
    equal = hvd.allgather_object(digest(state.weights))
    assert len(set(equal)) == 1, equal
    say(done=True, weights=equal[0], resets=resets, pid=os.getpid(), descriptors=descriptors())


def blocked() -> None:
    """All but rank 0 wait in a collective that rank 0 never enters in the first round."""
    hvd.init()

    @hvd.elastic.run
    def wait(state: Any) -> None:
        if hvd.size() > state.least:
            say(entering=True, rank=hvd.rank(), step=0)
            if hvd.rank() == 0:
                sys.stdin.read()
            try:
                hvd.allreduce(np.ones(1 << 18))
            except hvd.HorovodInternalError as error:
                say(error=str(error))
                raise
            raise AssertionError("the collective ended well")
        say(total=int(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))

    wait(hvd.elastic.ObjectState(least=2))


def end(how: str) -> None:
    """Ends after a collective: with an exception, an exit code, or well, while a second thread also waits."""
    hvd.init()
    hvd.allreduce(np.ones(3))
    say(ready=True)
    if how == "raise":
        raise KeyError("user's own")
    if how == "exit":
        sys.exit(7)
    if how == "fork":
        pid = os.fork()
        if pid == 0:
            sys.exit(5)  # runs the child's atexit functions
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        say(total=int(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))
    if how == "again":
        hvd.shutdown()
        hvd.shutdown()
        hvd.init()
        say(total=int(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))


def torch_train(
    steps: str, samples: str = "64", workers: str = "0", kind: str = "adam", epochs: str = "100000"
) -> None:
    """A torch training with everything that a state keeps; data through a DataLoader that fetches ahead."""
    import torch

    import elastic_driver.torch as thvd

    thvd.init()
    torch.manual_seed(os.getpid())  # blank processes differ
    count = int(samples)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(count, 5, generator=generator), torch.randn(count, 2, generator=generator)
    numbers = torch.arange(count)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(5, 5)
            self.unused = torch.nn.Linear(5, 5)
            self.sometimes = torch.nn.Linear(5, 5)
            self.last = torch.nn.Linear(5, 2)
            self.norm = torch.nn.BatchNorm1d(5)

        def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
            x = self.first(torch.tanh(self.first(x)))  # used twice
            x = self.norm(x) if len(x) > 1 else x
            return self.last(self.sometimes(x) if odd else x)

    model = Net()
    base = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
    if kind == "sgd":
        base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = thvd.DistributedOptimizer(base, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    sampler = thvd.elastic.ElasticSampler(range(count), shuffle=True, seed=3)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets, numbers),
        batch_size=2,
        sampler=sampler,
        num_workers=int(workers),
    )

    def fingerprint() -> str:
        tensors = list(model.state_dict().values())
        packed = optimizer.state_dict()
        for number in sorted(packed["state"]):
            for name in sorted(packed["state"][number]):
                tensors.append(packed["state"][number][name])
        return digest(*(t.numpy() for t in tensors if t is not None), np.array(scheduler.get_last_lr()))

    @thvd.elastic.run
    def loop(state: Any) -> None:
        say(entered=state.step, rank=thvd.rank(), size=thvd.size(), state=fingerprint(), commits=state._commits)
        while state.step < int(steps) and state.epoch < int(epochs):
            for index, (x, y, which) in enumerate(loader):
                hold(state.step)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x, (state.step + thvd.rank()) % 4 == 0), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
                state.step += 1
                assert model.unused.weight.grad is None or not model.unused.weight.grad.any()
                say(step=state.step, epoch=state.epoch, used=which.tolist(), size=thvd.size(), pad=sampler.rank_padding)
                sampler.record_batch(index, 2)
                state.commit()
                if state.step >= int(steps):
                    return
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    state = thvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, step=0)
    loop(state)
    state.restore()
    # What a rank computes alone is its own: the running statistics of the batch norm.
    own = [name for name, _ in model.named_buffers()]
    digests = thvd.allgather_object(digest(*(v.numpy() for n, v in model.state_dict().items() if n not in own)))
    assert len(set(digests)) == 1, digests
    say(done=True, weights=digests[0], pid=os.getpid())


def gradients() -> None:
    """The distributed optimizer against one process with the whole batch."""
    import torch

    import elastic_driver.torch as thvd
    from elastic_driver.torch.optimizer import reducer as module

    module.FIRST_BUCKET_BYTES, module.BUCKET_BYTES = 400, 1000  # so that there are several buckets
    thvd.init()
    rank, size = thvd.rank(), thvd.size()

    def net() -> torch.nn.Sequential:
        torch.manual_seed(7)
        return torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(5)), torch.nn.Linear(12, 3))

    data = torch.randn(4 * size, 12, generator=torch.Generator().manual_seed(1))
    mine = data[rank::size]
    for options in (
        {},
        {"gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 2},
        {"compression": thvd.Compression.fp16},
        {"op": thvd.Sum},
    ):
        alone, shared = net(), net()
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        dist = thvd.DistributedOptimizer(
            torch.optim.SGD(shared.parameters(), lr=0.1, momentum=0.9),
            named_parameters=shared.named_parameters(),
            **options,
        )
        assert isinstance(dist, torch.optim.SGD)
        factor = {"backward_passes_per_step": 2.0, "op": float(size)}.get(next(iter(options), ""), 1.0)
        for _ in range(3):
            plain.zero_grad()
            dist.zero_grad()
            (alone(data).square().mean() * factor).backward()
            for _ in range(options.get("backward_passes_per_step", 1)):
                shared(mine).square().mean().backward()
            plain.step()
            dist.step()
        worst = max(
            float((a - b).detach().abs().max()) for a, b in zip(alone.parameters(), shared.parameters(), strict=True)
        )
        assert worst < (1e-3 if "compression" in options else 1e-6), (options, worst)
        prints = thvd.allgather_object(digest(*(p.detach().numpy() for p in shared.parameters())))
        assert len(set(prints)) == 1
        dist.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            shared(mine).square().mean().backward()
        with pytest.raises(AssertionError, match="race condition"):
            dist.zero_grad()
        dist.synchronize()
        with dist.skip_synchronize():
            dist.step()
    shared(mine).sum().backward()
    say(ok=True)


def peer_dies_in_sync(how: str) -> None:
    """Rank 0 dies in its sync, before anything was sent or after the half; what the other then restores is its own."""
    import torch

    import elastic_driver.torch as thvd
    from elastic_driver.errors import HorovodInternalError
    from elastic_driver.torch import snapshot
    from elastic_driver.worker.engine.byte_collectives import broadcast

    thvd.init()
    torch.manual_seed(thvd.rank())
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = thvd.elastic.TorchState(model, optimizer, step=0)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state.step = 1 + thvd.rank()
    state.commit()
    before = digest(*(value.numpy() for value in model.state_dict().values()))
    snapshot.CHUNK_BYTES = 300  # a message for each tensor
    sent = 0

    def dying(*args: Any) -> None:
        nonlocal sent
        if sent == (3 if how == "half" else 0):
            os._exit(9)
        sent += 1
        broadcast(*args)

    if thvd.rank() == 0:
        snapshot.broadcast = dying
    try:
        state.sync()
    except HorovodInternalError:
        state.restore()
        after = digest(*(value.numpy() for value in model.state_dict().values()))
        say(same=before == after, step=state.step, commits=state._commits)


def bad_gradient() -> None:
    """More backward passes than said."""
    import torch

    import elastic_driver.torch as thvd

    thvd.init()
    model = torch.nn.Linear(2, 2)
    dist = thvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    try:
        model(torch.ones(1, 2)).sum().backward()
    except AssertionError as error:
        say(error=str(error))
    dist.synchronize()


def rebuild(times: str) -> None:
    """Many rounds in one process: nothing is left behind."""
    hvd.init()
    counts = []
    for _ in range(int(times)):
        assert hvd.allreduce(np.ones(2), op=hvd.Sum)[0] == hvd.size()
        counts.append(descriptors())
        hvd.shutdown()
        say(step=len(counts))
        hvd.init()
    import threading

    say(done=True, first=counts[3], last=counts[-1], threads=sorted(one.name for one in threading.enumerate()))


if __name__ == "__main__":
    where, _, what = sys.argv[1].rpartition(".")
    (vars(importlib.import_module(where)) if where else globals())[what](*sys.argv[2:])
