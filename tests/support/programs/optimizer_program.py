"""What the workers of test_optimizer.py and test_sync_batch_norm.py run: checks, each of which prints a line.

``run_checks`` runs named checks in order, on all ranks alike; most compare with one process that has the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import other_default_device
import pytest
import torch
from torch.nn import functional

import elastic_driver.torch as hvd
from elastic_driver.errors import HorovodInternalError, MismatchError
from elastic_driver.torch.elastic import TorchState
from elastic_driver.torch.optimizer import reducer
from elastic_driver.torch.optimizer.compression import Compressor
from elastic_driver.worker.settings import read_worker_settings

reducer.FIRST_BUCKET_BYTES, reducer.BUCKET_BYTES = 400, 1000  # so that there are several buckets


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def net(width: int = 12) -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(5)), torch.nn.Linear(width, 3))


def turn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).sum().backward()
    optimizer.step()


def batch(rows: int = 12, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch and this rank's share of it."""
    data = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    return data, data[hvd.rank() :: hvd.size()]


def worst(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).double().abs().sum()) for a, b in pairs)


def check_same(model: torch.nn.Module) -> None:
    """All ranks have the same parameters, bit for bit."""
    mine = [param.detach().double().flatten().tolist() for param in model.parameters()]
    everybody = hvd.allgather_object(mine)
    assert all(theirs == mine for theirs in everybody)


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | options)


def distribute(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    options = {"named_parameters": model.named_parameters()} | options
    return hvd.DistributedOptimizer(optimizer or sgd(model), **options)


def compare(
    options: dict[str, Any],
    *,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    factor: float = 1.0,
    limit: float = 1e-6,
    model: Callable[[], torch.nn.Module] = net,
    steps: int = 3,
) -> None:
    """Trains alone and distributed."""
    data, mine = batch()
    alone, shared = model(), model()
    plain, dist = make(alone), distribute(shared, make(shared), **options)
    assert isinstance(dist, type(plain))
    for step in range(steps):
        plain.zero_grad(set_to_none=step % 2 == 0)
        dist.zero_grad(set_to_none=step % 2 == 0)
        (alone(data).square().mean() * factor).backward()
        for _ in range(options.get("backward_passes_per_step", 1)):
            shared(mine).square().mean().backward()
        plain.step()
        dist.step()
    assert worst(alone, shared) < limit, (options, worst(alone, shared))
    check_same(shared)


class Halver(Compressor):
    """A user's compressor, whose tensors are of another dtype and shape."""

    seen = 0

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        Halver.seen += 1
        return (tensor.double() / 2).t(), (tensor.dtype, tensor.shape)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor * 2).t().to(ctx[0]).reshape(ctx[1])


# --- checks -----------------------------------------------------------------------------------------------------------


def plain_averages() -> None:
    compare({})
    compare({"named_parameters": None})
    compare({}, make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), limit=1e-5)
    compare({"gradient_predivide_factor": 2.0})
    compare({"op": hvd.Sum}, factor=hvd.size())


def several_passes() -> None:
    compare({"backward_passes_per_step": 2}, factor=2.0)
    data, mine = batch()
    alone, shared = net(), net()
    plain, dist = sgd(alone), distribute(shared)
    dist.set_backward_passes_per_step(3)
    (alone(data).square().mean() * 3).backward()
    for _ in range(3):
        shared(mine).square().mean().backward()
    plain.step()
    dist.step()
    assert worst(alone, shared) < 1e-6
    with pytest.raises(ValueError, match="at least 1"):
        dist.set_backward_passes_per_step(0)


def compressed() -> None:
    compare({"compression": hvd.Compression.none})
    compare({"compression": hvd.Compression.fp16}, limit=1e-3)
    compare({"compression": hvd.Compression.fp16, "backward_passes_per_step": 2}, factor=2.0, limit=2e-3)
    compare({"compression": hvd.Compression.bf16}, limit=1e-2)
    compare({"compression": Halver})
    compare({"compression": Halver()}, steps=1)
    assert Halver.seen == 12 * 4
    # A class of the user's that derives from one of the library's.
    Loud = type("Loud", (type(hvd.Compression.fp16) and hvd.Compression.fp16,), {"compress": Halver.compress})
    Loud.decompress = Halver.decompress
    compare({"compression": Loud}, steps=1)
    assert Halver.seen == 12 * 5


def grouped() -> None:
    compare({"groups": 3})
    compare({"groups": 100})
    with pytest.warns(DeprecationWarning, match="num_groups"):
        compare({"num_groups": 2})
    data, mine = batch()
    alone, shared = net(), net()
    params = list(shared.parameters())
    plain, dist = sgd(alone), distribute(shared, groups=[[params[0], params[5]], [params[3]], []])
    for _ in range(2):
        plain.zero_grad()
        dist.zero_grad()
        alone(data).square().mean().backward()
        shared(mine).square().mean().backward()
        plain.step()
        dist.step()
    members = [bucket.params for bucket in dist._reducer._buckets]
    assert any([id(p) for p in bucket] == [id(params[0]), id(params[5])] for bucket in members)
    assert worst(alone, shared) < 1e-6


def other_ops() -> None:
    rank, size = hvd.rank(), hvd.size()
    for op, expected in (
        (hvd.Min, 1.0),
        (hvd.Max, float(size)),
        (hvd.Product, float(torch.arange(1, size + 1).prod())),
    ):
        model = torch.nn.Linear(2, 1, bias=False)
        dist = distribute(model, op=op)
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        dist.synchronize()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[expected, expected]], op


def adasum() -> None:
    """Equal steps stay one step; orthogonal ones add up. Halfway between is between."""
    rank, size = hvd.rank(), hvd.size()
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)), torch.nn.Parameter(torch.ones(3))])
    dist = distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), op=hvd.Adasum)
    for step in range(1, 3):
        dist.zero_grad()
        (model[0][rank] + model[1].sum()).backward()
        with pytest.raises(AssertionError, match="race condition"):
            dist.zero_grad()
        dist.step()
        assert torch.allclose(model[0].detach(), torch.full((size,), -0.5 * step)), model[0]
        assert torch.allclose(model[1].detach(), torch.full((3,), 1 - 0.5 * step)), model[1]
    with pytest.raises(AssertionError, match="Adasum"), dist.skip_synchronize():
        pass
    with pytest.raises(ValueError, match="predivide"):
        distribute(model, op=hvd.Adasum, gradient_predivide_factor=2.0)
    shared = net()
    _, mine = batch()
    dist = distribute(shared, op=hvd.Adasum, compression=hvd.Compression.fp16, backward_passes_per_step=2)
    for _ in range(2):
        shared(mine).square().mean().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        shared(mine).square().mean().backward()
    dist.step()
    check_same(shared)


def gradients_live_in_the_buffer() -> None:
    _, mine = batch()
    model = net()
    dist = distribute(model)
    addresses: list[list[int]] = []
    for _ in range(3):
        dist.zero_grad()
        model(mine).square().mean().backward()
        dist.step()
        addresses.append([param.grad.data_ptr() for param in model.parameters()])
    assert addresses[0] == addresses[1] == addresses[2]
    assert len({param.grad.untyped_storage().data_ptr() for param in model.parameters()}) < 12
    # Zeroed in place, autograd adds up in the buffer.
    dist.zero_grad(set_to_none=False)
    model(mine).square().mean().backward()
    assert [param.grad.data_ptr() for param in model.parameters()] == addresses[0]
    dist.step()


def kept_gradients_stay() -> None:
    data, mine = batch()
    ways: list[Callable[[torch.Tensor], Any]] = [
        lambda g: g,
        lambda g: g.view(-1),
        lambda g: g.numpy(),
        lambda g: g[:1],
    ]
    for keep in ways:
        alone, shared = net(), net()
        plain, dist = sgd(alone), distribute(shared)
        kept: list[Any] = []
        values: list[Any] = []
        for _ in range(3):
            plain.zero_grad()
            dist.zero_grad()
            alone(data).square().mean().backward()
            shared(mine).square().mean().backward()
            plain.step()
            dist.step()
            for param in shared.parameters():
                kept.append(keep(param.grad))
                values.append(copy.deepcopy(kept[-1]))
        assert all((one == other).all() for one, other in zip(kept, values, strict=True))
        assert worst(alone, shared) < 1e-6


def rules() -> None:
    _, mine = batch()
    model = net()
    dist = distribute(model)
    model(mine).square().mean().backward()
    with pytest.raises(AssertionError, match="race condition"):
        dist.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        model(mine).square().mean().backward()
    with pytest.warns(UserWarning, match="while they were being reduced"):
        dist.synchronize()
    with dist.skip_synchronize():
        dist.step()
    dist.zero_grad()
    model(mine).square().mean().backward()
    dist.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        dist.step()
    dist.step()  # without any gradients of its own: those of before count again
    dist = distribute(model, backward_passes_per_step=2)
    dist.zero_grad()
    model(mine).square().mean().backward()
    with pytest.raises(AssertionError, match="race condition"):
        dist.zero_grad()
    dist.synchronize()
    dist.zero_grad()
    warnings.simplefilter("ignore")
    with pytest.raises(AssertionError, match="create_graph"):
        model(mine).square().mean().backward(create_graph=True)
    warnings.simplefilter("error")
    dist.synchronize()


def bad_arguments() -> None:
    model = net()
    named = list(model.named_parameters())
    bad: list[tuple[dict[str, Any], str]] = [
        ({"named_parameters": [p for _, p in named]}, "sequence of tuples"),
        ({"named_parameters": [*named, named[0]]}, "unique. Found duplicates: 0.weight"),
        ({"named_parameters": named[1:]}, "were not named"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "predivide"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": 0}, "at least 1"),
        ({"groups": [named]}, "must consist of"),
        ({"groups": [[named[0][1]], [named[0][1]]]}, "only appear once"),
        ({"groups": [named[0][1]]}, "must consist of|list of list"),
        ({"op": "sum"}, "cannot reduce"),
    ]
    for options, match in bad:
        with pytest.raises(ValueError, match=match):
            distribute(model, **options)


def clipping() -> None:
    data, mine = batch()
    alone, shared = net(), net()
    plain, dist = sgd(alone), distribute(shared)
    for _ in range(3):
        plain.zero_grad()
        dist.zero_grad()
        (alone(data).square().mean() * 100).backward()
        (shared(mine).square().mean() * 100).backward()
        dist.synchronize()
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in (alone, shared)]
        assert norms[0] > 1
        assert torch.allclose(norms[0], norms[1])
        plain.step()
        with dist.skip_synchronize():
            dist.step()
    assert worst(alone, shared) < 1e-6


def changed_on_their_way() -> None:
    """Gradients that are changed before they were waited for: said, since ranks may step with different ones."""
    _, mine = batch()
    model = net()
    dist = distribute(model)
    for change in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda: model[0].weight.grad.zero_(),
    ):
        model(mine).square().mean().backward()
        change()
        with pytest.warns(UserWarning, match=r"changed after loss.backward\(\) and before"):
            dist.synchronize()
        change()
        with dist.skip_synchronize():
            dist.step()
        dist.zero_grad()
    turn(model, dist, mine)


def forgotten_passes() -> None:
    """A pass that ends without its step, in a round that goes on: another rank may still be in its backward pass."""
    _, mine = batch()
    model = net()
    dist = distribute(model)
    state = TorchState(model=model, optimizer=dist)
    saved = copy.deepcopy(dist.state_dict())
    for forget in (state.restore, lambda: dist.load_state_dict(saved)):
        for _ in range(5):
            model(mine).square().mean().backward()
            forget()
            dist.zero_grad()
        turn(model, dist, mine)
    check_same(model)


def missing_gradients() -> None:
    """No gradient counts as one of zeros; on some ranks, and on all."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(1)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(30, 1, bias=False) for name in ("all", "some", "none")})
    dist = distribute(model)
    for _ in range(2):
        dist.zero_grad()
        x = torch.ones(1, 30)
        y = model["all"](x)
        if rank == size - 1:
            y = y + model["some"](x)
        y.sum().backward()
        dist.synchronize()
        expected = {"all": 1.0, "some": 1.0 / size, "none": 0.0}
        for name, value in expected.items():
            assert torch.allclose(model[name].weight.grad, torch.full((1, 30), value)), name
        with dist.skip_synchronize():
            dist.step()
    dist.zero_grad()
    dist.step()  # nobody had any
    assert not model["none"].weight.grad.any()


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(12, 12)
        self.last = torch.nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(torch.tanh(self.first(x)))) @ self.first.weight


def used_twice() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(2)
        return Twice()

    compare({}, model=make)
    compare({"backward_passes_per_step": 2}, model=make, factor=2.0)


def changing_requires_grad() -> None:
    """Two players that take turns, as in a GAN; layers frozen and thawed after the optimizer was made."""
    torch.manual_seed(3)
    gen, disk = torch.nn.Conv2d(1, 10, 1), torch.nn.Conv2d(10, 1, 1)
    optimizers = [distribute(model, sgd(model, momentum=0.0)) for model in (gen, disk)]
    for turn in range(6):
        for index, model in enumerate((gen, disk)):
            for param in model.parameters():
                param.requires_grad_(turn % 2 == index)
        for optimizer in optimizers:
            optimizer.zero_grad()
        disk(gen(torch.rand(1, 1, 20, 20))).sum().backward()
        for index, model in enumerate((gen, disk)):
            for param in model.parameters():
                assert (param.grad is not None and bool(param.grad.max() != 0)) == (turn % 2 == index)
        optimizers[turn % 2].step()
    check_same(gen)
    check_same(disk)
    data, mine = batch()
    alone, shared = net(), net()
    frozen = {turn: list(range(turn)) for turn in (3, 0, 5, 2)}
    for model in (alone, shared):
        for param in list(model.parameters())[:3]:
            param.requires_grad_(False)
    plain, dist = sgd(alone), distribute(shared)
    for fixed in frozen.values():
        for model in (alone, shared):
            for index, param in enumerate(model.parameters()):
                param.requires_grad_(index not in fixed)
        plain.zero_grad()
        dist.zero_grad()
        alone(data).square().mean().backward()
        shared(mine).square().mean().backward()
        plain.step()
        dist.step()
    # Thawed between backward passes of one step.
    dist.zero_grad()
    plain.zero_grad()
    shared[0].requires_grad_(False)
    alone[0].requires_grad_(False)
    dist.set_backward_passes_per_step(2)
    for thawed in (False, True):
        shared[0].requires_grad_(thawed)
        alone[0].requires_grad_(thawed)
        alone(data).square().mean().backward()
        shared(mine).square().mean().backward()
    plain.step()
    dist.step()
    assert worst(alone, shared) < 1e-6
    check_same(shared)


class Words(torch.nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = torch.nn.Embedding(20, 3, sparse=sparse)
        self.last = torch.nn.Linear(3, 2)

    def forward(self, words: torch.Tensor, *, use: bool = True) -> torch.Tensor:
        return self.last(self.table(words) if use else torch.ones(len(words), 3))


def sparse_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    words = torch.randint(0, 20, (4 * size,), generator=torch.Generator().manual_seed(5))
    mine = words[rank::size]
    for options in ({}, {"sparse_as_dense": True}, {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}):
        alone, shared = Words(sparse=False), Words(sparse=True)
        plain = sgd(alone, momentum=0.0)
        dist = distribute(shared, sgd(shared, momentum=0.0), **options)
        for step in range(4):
            plain.zero_grad()
            dist.zero_grad()
            factor = size if "op" in options else 1
            # In the last steps there is no sparse gradient on some ranks; then on none, but on the first dense ones.
            use = step < 2 or (rank == 0 and step == 2)
            if step < 2:
                (alone(words).square().mean() * factor).backward()
            else:
                parts = [alone(words[r::size], use=r == 0 and step == 2).square().mean() for r in range(size)]
                (sum(parts) / size * factor).backward()
            shared(mine, use=use).square().mean().backward()
            dist.synchronize()
            if step < 2 or (use and not options.get("sparse_as_dense")):
                assert shared.table.weight.grad.is_sparse
            plain.step()
            with dist.skip_synchronize():
                dist.step()
        assert worst(alone, shared) < (1e-3 if "compression" in options else 1e-6), (options, worst(alone, shared))
        check_same(shared)
    model = Words(sparse=True)
    dist = hvd.DistributedOptimizer(torch.optim.SparseAdam([model.table.weight], lr=0.1))
    model(mine).sum().backward()
    dist.step()
    assert model.table.weight.grad.is_sparse
    model = Words(sparse=True)
    dist = distribute(model, sgd(model, momentum=0.0), op=hvd.Max)
    with pytest.raises(NotImplementedError, match="sparse"):
        turn(model, dist, mine)


def sparse_on_some_ranks() -> None:
    """In the first pass the ranks tell each other; later it is an error."""
    size = hvd.size()
    for op in (hvd.Average, hvd.Sum):
        model = Words(sparse=True)
        dist = distribute(model, sgd(model, momentum=0.0, lr=0.0), op=op)
        for turn_number in range(3):
            dist.zero_grad()
            model(torch.tensor([1, 2]), use=hvd.rank() == 0 or turn_number == 2).sum().backward()
            dist.synchronize()
            grad = model.table.weight.grad
            assert grad.is_sparse
            users = size if turn_number == 2 else 1
            found = grad.to_dense()
            assert (found.count_nonzero(dim=1) > 0).nonzero().flatten().tolist() == [1, 2]
            if turn_number == 0:
                first = found
            ratio = (found[1].abs().sum() / first[1].abs().sum()).item()
            assert abs(ratio - users) < 0.2 * users, (op, turn_number, ratio)
            with dist.skip_synchronize():
                dist.step()
        check_same(model)
    model = Words(sparse=True)
    dist = distribute(model)
    model(torch.tensor([1, 2]), use=False).sum().backward()
    dist.step()
    dist.zero_grad()
    model(torch.tensor([1, 2]), use=hvd.rank() == 0).sum().backward()
    with pytest.raises(MismatchError):
        dist.step()


def adasum_with_a_closure() -> None:
    """The closure is called once, gives the loss, and leaves nothing under way."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3))])
    dist = distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), op=hvd.Adasum)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        dist.zero_grad()
        loss = model[0].sum()
        loss.backward()
        return loss

    for step in range(1, 3):
        assert dist.step(closure).item() == 3 - 1.5 * (step - 1)
        assert torch.allclose(model[0].detach(), torch.full((3,), 1 - 0.5 * step))
    assert len(calls) == 2
    dist.zero_grad()


def other_shapes_are_an_error() -> None:
    model = torch.nn.Linear(3 + hvd.rank(), 1)
    dist = distribute(model)
    with pytest.raises(MismatchError, match="weight"):
        turn(model, dist, torch.ones(1, 3 + hvd.rank()))
    # As many values, in another order.
    model = torch.nn.Conv2d(2, 2, 2)
    dist = distribute(model.to(memory_format=torch.channels_last) if hvd.rank() == 0 else model)
    with pytest.raises(MismatchError, match="strides"):
        turn(model, dist, torch.ones(1, 2, 2, 2))


def closures() -> None:
    data, mine = batch()
    for make in (sgd, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, line_search_fn="strong_wolfe")):
        alone, shared = net().double(), net().double()
        plain, dist = make(alone), distribute(shared, make(shared))

        def closed(model: Any, optimizer: Any, rows: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            one = plain.step(functools.partial(closed, alone, plain, data.double()))
            other = dist.step(functools.partial(closed, shared, dist, mine.double()))
            assert isinstance(other, torch.Tensor)
            if make is not sgd:
                assert torch.allclose(one, other.to(one.dtype), atol=1e-4)
        assert worst(alone, shared) < 1e-8, worst(alone, shared)
        check_same(shared)


def param_groups_and_schedulers() -> None:
    data, mine = batch()
    alone, shared = net(), net()
    few = [[*model[:3].parameters()] for model in (alone, shared)]
    plain, base = (torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in few)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (plain, base)]  # before
    dist = hvd.DistributedOptimizer(base)
    schedulers += [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (plain, dist)]  # after
    for step in range(6):
        if step == 2:
            for optimizer, model in ((plain, alone), (dist, shared)):
                optimizer.add_param_group({"params": [*model[3:].parameters()], "lr": 0.05, "initial_lr": 0.05})
                for scheduler in schedulers:
                    if scheduler.optimizer in (optimizer, base if optimizer is dist else None):
                        scheduler.base_lrs.append(0.05)
        if step == 4:  # a state dict, by way of pickle and deepcopy, into the same optimizer
            for optimizer in (plain, dist):
                memory = io.BytesIO()
                torch.save(copy.deepcopy(optimizer.state_dict()), memory)
                memory.seek(0)
                optimizer.load_state_dict(torch.load(memory))
        plain.zero_grad()
        dist.zero_grad()
        alone.zero_grad()
        shared.zero_grad()
        alone(data).square().mean().backward()
        shared(mine).square().mean().backward()
        plain.step()
        dist.step()
        for scheduler in schedulers:
            scheduler.step()
        assert [group["lr"] for group in plain.param_groups] == [group["lr"] for group in dist.param_groups]
    assert plain.param_groups[0]["lr"] < 0.1 / 100
    assert worst(alone, shared) < 1e-6
    assert not any(key.startswith("_") for key in dist.state_dict())


def several_optimizers() -> None:
    """Of the same names, in one backward pass; one of them not stepped in every turn."""
    data, mine = batch()
    alone, shared = [net(), net()], [net(), net()]
    plain = [sgd(model) for model in alone]
    dist = [hvd.DistributedOptimizer(sgd(model)) for model in shared]
    for turn in range(3):
        for optimizer in (*plain, *dist):
            optimizer.zero_grad()
        for models, rows in ((alone, data), (shared, mine)):
            (models[0](rows).square().mean() + models[1](rows).abs().mean()).backward()
        for index in range(2):
            if index == 0 or turn != 1:
                plain[index].step()
                dist[index].step()
            else:
                dist[index].synchronize()
                dist[index]._synchronized = False
    assert max(worst(*pair) for pair in zip(alone, shared, strict=True)) < 1e-6
    # One that is gone sends nothing any more.
    hooks = dist[0]._reducer._hooks
    assert hooks
    count = len(shared[0][0].weight._post_accumulate_grad_hooks)
    del dist[0], optimizer
    assert len(shared[0][0].weight._post_accumulate_grad_hooks or {}) == count - 1


class Odd(torch.nn.Module):
    """Parameters of all sorts: no dimensions, no elements, other strides, other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.strided = torch.nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.turned = torch.nn.Parameter(torch.randn(3, 12).t())
        self.wide = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.narrow = torch.nn.Parameter(torch.randn(5).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :, None, None].expand(-1, -1, 4, 5)[:, :3]
        y = self.conv(image).mean((2, 3)) @ self.strided + x @ self.turned
        y = y * self.scale + self.wide.sum().float() + self.narrow.sum().float() + self.empty.sum()
        return torch.tanh(y / 10)


def odd_parameters() -> None:
    compare({}, model=Odd, limit=3e-2)  # a bfloat16's precision
    compare({"groups": 2}, model=Odd, limit=3e-2)
    compare({"compression": hvd.Compression.fp16}, model=Odd, limit=3e-2)
    model = Odd()
    dist = distribute(model)
    model(batch()[1]).square().mean().backward()
    dist.step()
    for param in model.parameters():
        assert param.grad.dtype == param.dtype
        assert param.grad.shape == param.shape
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()
    bad = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    dist = hvd.DistributedOptimizer(torch.optim.SGD([bad], lr=0.1))
    with pytest.raises(TypeError, match="complex64"):
        (bad * bad.conj()).real.sum().backward()


def some_ranks() -> None:
    """A process set of the first two ranks; the others train alone."""
    first = hvd.add_process_set([0, 1])
    data = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    alone, shared = net(), net()
    inside = hvd.rank() < 2
    mine = data[hvd.rank() :: 2] if inside else data
    plain, dist = sgd(alone), distribute(shared, process_set=first)
    for _ in range(2):
        plain.zero_grad()
        dist.zero_grad()
        alone(data).square().mean().backward()
        shared(mine).square().mean().backward()
        if not inside:
            dist.zero_grad()  # nothing is under way here
            shared(mine).square().mean().backward()
        dist.synchronize()
        plain.step()
        with dist.skip_synchronize():
            dist.step()
    assert worst(alone, shared) < 1e-6
    with pytest.raises(NotImplementedError, match="Adasum"):
        distribute(shared, process_set=first, op=hvd.Adasum)
    hvd.remove_process_set(first)
    if inside:
        with pytest.raises(ValueError, match="removed"):
            dist.step()


def uneven_inputs() -> None:
    """Ranks run out of data one after the other; those that have joined count as having gradients of zeros."""
    rank, size = hvd.rank(), hvd.size()
    alone, shared = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    shared.load_state_dict(alone.state_dict())
    hvd.broadcast_parameters(shared.state_dict(), 0)
    alone.load_state_dict(shared.state_dict())
    plain, dist = sgd(alone), distribute(shared)
    for step in range(size):
        plain.zero_grad()
        parts = [alone(torch.full((1, 4), r + 1.0)).sum() for r in range(size) if step <= r]
        (sum(parts) / size).backward()
        plain.step()
    for _ in range(rank + 1):
        dist.zero_grad()
        shared(torch.full((1, 4), rank + 1.0)).sum().backward()
        dist.step()
    assert hvd.join() == size - 1
    hvd.broadcast_parameters(shared.state_dict(), size - 1)
    assert worst(alone, shared) < 1e-6
    # A rank without any inputs has not used what the others have, and then uses them in another order.
    first, second = (distribute(torch.nn.Linear(4, 1)) for _ in range(2))
    models = {id(first): first.param_groups[0]["params"], id(second): second.param_groups[0]["params"]}

    def use(one: Any) -> None:
        for param in models[id(one)]:
            param.grad = torch.full_like(param, rank + 1.0)
        one.step()

    if rank:
        use(first)
        use(second)
    hvd.join()
    for one in (second, first, second):
        use(one)
        assert torch.allclose(models[id(one)][0].grad, torch.full((1, 4), (size + 1) / 2))


def one_process() -> None:
    """No copies, no buffers, and the state of the optimizer it was made from."""
    data, _ = batch()
    assert hvd.size() == 1
    alone, shared = net(), net()
    plain, dist = sgd(alone), distribute(shared)
    for _ in range(3):
        plain.zero_grad()
        dist.zero_grad()
        alone(data).square().mean().backward()
        shared(data).square().mean().backward()
        before = [param.grad.data_ptr() for param in shared.parameters()]
        plain.step()
        dist.step()
        assert [param.grad.data_ptr() for param in shared.parameters()] == before
    assert not dist._reducer._buckets
    assert worst(alone, shared) == 0
    unused = torch.nn.Linear(1, 1)
    dist = distribute(unused)
    dist.step()
    assert unused.weight.grad is None
    with elastic_environment():
        dist.step()  # of a job that was larger, and may be again
        assert unused.weight.grad.tolist() == [[0.0]]


@contextlib.contextmanager
def elastic_environment() -> Iterator[None]:
    os.environ["HOROVOD_ELASTIC"] = "1"
    read_worker_settings()
    try:
        yield
    finally:
        del os.environ["HOROVOD_ELASTIC"]
        read_worker_settings()


# --- resets -----------------------------------------------------------------------------------------------------------


def killed_in_backward() -> None:
    """The last rank dies between two layers of a backward pass; the others go on without it."""
    hvd.init()
    model = net()
    optimizer = distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    data = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    failures: list[str] = []

    class Die(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 8:
            optimizer.zero_grad()
            x = data[hvd.rank() :: hvd.size()]
            for index, layer in enumerate(model):
                x = layer(x)
                if index == 2 and state.step == 3 and hvd.size() == 3 and hvd.rank() == 2:
                    x = Die.apply(x)
            try:
                x.square().mean().backward()
                optimizer.step()
            except HorovodInternalError as error:
                failures.append(str(error))
                raise
            state.step += 1
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, step=0)
    train(state)
    assert failures
    check_same(model)
    # The same, alone: three ranks, then two, have the same rows together.
    alone = net()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    for _ in range(8):
        plain.zero_grad()
        alone(data).square().mean().backward()
        plain.step()
    assert worst(alone, model) < 1e-5, worst(alone, model)
    say(check="killed_in_backward", ok=True, failures=failures)


# --- SyncBatchNorm ----------------------------------------------------------------------------------------------------


def share(data: torch.Tensor) -> slice:
    """Rows of this rank: uneven shares."""
    bounds = [len(data) * r * (r + 1) // (hvd.size() * (hvd.size() + 1)) for r in range(hvd.size() + 1)]
    return slice(bounds[hvd.rank()], bounds[hvd.rank() + 1])


def norm_against_whole_batch(
    shape: tuple[int, ...], limit: float = 1e-5, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
    alone = kind[len(shape)](shape[1], **options)
    shared = hvd.SyncBatchNorm(shape[1], **options)
    generator = torch.Generator().manual_seed(6)
    for norm in (alone, shared):
        generator.manual_seed(6)
        if norm.affine:
            torch.nn.init.normal_(norm.weight, generator=generator)
            torch.nn.init.normal_(norm.bias, generator=generator)
        norm.to(dtype if dtype is torch.float64 else torch.float32)
    for turn in range(3):
        data = (torch.randn(shape, generator=generator) * 2 + 5).to(dtype)
        weights = torch.randn(shape, generator=generator)
        rows = share(data)
        whole, part = data.clone().requires_grad_(True), data[rows].clone().requires_grad_(True)
        for norm in (alone, shared):
            norm.zero_grad()
            norm.train(turn < 2)
        expected, got = alone(whole.float() if dtype.itemsize == 2 else whole), shared(part)
        assert got.dtype == dtype
        assert torch.allclose(expected[rows].to(dtype), got, atol=limit, rtol=limit), (shape, turn)
        (expected * weights).sum().backward()
        (got * weights[rows]).sum().backward()
        assert torch.allclose(whole.grad[rows], part.grad, atol=limit, rtol=limit), (shape, turn)
        for (name, value), (_, other) in zip(alone.state_dict().items(), shared.state_dict().items(), strict=True):
            assert value.dtype == other.dtype
            assert torch.allclose(value, other, atol=limit, rtol=limit), (name, value, other)
        for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
            total = hvd.allreduce(other.grad, op=hvd.Sum)
            assert torch.allclose(one.grad, total, atol=limit * 30, rtol=limit * 30), (shape, one.grad, total)


def norms() -> None:
    """All kinds of inputs and options; forward, backward, and running statistics."""
    for shape in ((24, 3), (24, 3, 5), (24, 4, 3, 5), (24, 2, 3, 2, 2)):
        norm_against_whole_batch(shape)
    norm_against_whole_batch((24, 3), affine=False)
    norm_against_whole_batch((24, 3, 4), momentum=None)
    norm_against_whole_batch((24, 3, 4), momentum=0.5, eps=0.1)
    norm_against_whole_batch((24, 3, 4), track_running_stats=False)
    norm_against_whole_batch((24, 3, 4, 4), dtype=torch.float64, limit=1e-12)
    norm_against_whole_batch((24, 3, 4, 4), dtype=torch.bfloat16, limit=6e-2)
    norm_against_whole_batch((24, 3, 4, 4), dtype=torch.float16, limit=8e-3)


def norms_far_from_zero() -> None:
    """A mean a million times the deviation does not hide the variance."""
    data = torch.randn(24, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e6
    alone, shared = torch.nn.BatchNorm1d(2).double(), hvd.SyncBatchNorm(2).double()
    rows = share(data)
    assert torch.allclose(alone(data)[rows], shared(data[rows]), atol=1e-6)


def norms_in_channels_last() -> None:
    data = torch.randn(24, 4, 3, 3, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
    rows = share(data)
    assert torch.allclose(torch.nn.BatchNorm2d(4)(data)[rows], hvd.SyncBatchNorm(4)(data[rows]), atol=1e-5)


def norms_with_empty_batches() -> None:
    data = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    mine = data if hvd.rank() == 0 else data[:0]
    norm = hvd.SyncBatchNorm(2)
    leaf = mine.clone().requires_grad_(True)
    output = norm(leaf)
    assert output.shape == mine.shape
    output.square().sum().backward()
    assert leaf.grad is not None
    assert torch.isfinite(norm.running_var).all()
    if hvd.rank() == 0:
        assert torch.allclose(output, torch.nn.BatchNorm1d(2)(data), atol=1e-6)


def norm_errors() -> None:
    norm = hvd.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="at least 2D"):
        norm(torch.zeros(2))
    with pytest.raises(ValueError, match="2 channels"):
        norm(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="more than 1 value"):
        norm(torch.zeros(1 if hvd.rank() == 0 else 0, 2))


def norms_of_some_ranks() -> None:
    first = hvd.add_process_set([0, 1])
    data = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    norm = hvd.SyncBatchNorm(2, process_set=first)
    if hvd.rank() < 2:
        rows = slice(0, 3) if hvd.rank() == 0 else slice(3, 8)
        assert torch.allclose(norm(data[rows]), torch.nn.BatchNorm1d(2)(data)[rows], atol=1e-5)
    else:
        with pytest.raises(ValueError, match="not part of it"):
            norm(data)
    hvd.remove_process_set(first)


def norms_in_a_model() -> None:
    """With DistributedOptimizer: as one process with BatchNorm and the whole batch."""

    def make(norm: Callable[[int], torch.nn.Module]) -> torch.nn.Module:
        torch.manual_seed(8)
        return torch.nn.Sequential(torch.nn.Linear(12, 6), norm(6), torch.nn.ReLU(), torch.nn.Linear(6, 2))

    data, mine = batch()
    alone, shared = make(torch.nn.BatchNorm1d), make(hvd.SyncBatchNorm)
    plain, dist = sgd(alone), distribute(shared)
    for _ in range(4):
        plain.zero_grad()
        dist.zero_grad()
        functional.mse_loss(alone(data), torch.ones(len(data), 2)).backward()
        functional.mse_loss(shared(mine), torch.ones(len(mine), 2)).backward()
        plain.step()
        dist.step()
    assert worst(alone, shared) < 1e-5
    assert torch.allclose(alone[1].running_var, shared[1].running_var, atol=1e-5)


def _convert_data(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for param in model.parameters():
        param.data = param.data.to(dtype)
        param.grad = None


def _replace_data(model: torch.nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def _replace_grads(model: torch.nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data = param.grad.data.clone()


def _renew_grads(model: torch.nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad.clone()


CONVERSIONS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "float": lambda model: model.float(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "data in double": lambda model: _convert_data(model, torch.float64),
    "data": _replace_data,
    "data of gradients": _replace_grads,
    "gradients": _renew_grads,
    "shared": lambda model: model.share_memory(),
}


def converted_models() -> None:
    """A model that is converted between steps is trained as one process trains it."""

    def make() -> torch.nn.Module:
        torch.manual_seed(7)
        return torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
        )

    data = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    for name, convert in CONVERSIONS.items():
        for to_none in (True, False):
            alone, shared = make(), make()
            plain, dist = sgd(alone, momentum=0.0), distribute(shared, sgd(shared, momentum=0.0))
            for step in range(4):
                for model, optimizer, rows in ((alone, plain, data), (shared, dist, data[hvd.rank() :: hvd.size()])):
                    optimizer.zero_grad(set_to_none=to_none)
                    if step == 2:
                        convert(model)
                    model(rows.to(next(model.parameters()).dtype)).square().mean().backward()
                    optimizer.step()
                dtypes = {param.dtype for param in shared.parameters()} | {
                    param.grad.dtype for param in shared.parameters()
                }
                assert dtypes == {next(alone.parameters()).dtype}, name
            check_same(shared)
            assert worst(alone, shared) < (0.2 if name == "bfloat16" else 1e-5), (name, to_none, worst(alone, shared))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the gradients were changed while they were on their way
        for name in ("data of gradients", "gradients", "channels last"):
            alone, shared = make(), make()
            plain, dist = sgd(alone, momentum=0.0), distribute(shared, sgd(shared, momentum=0.0))
            for step in range(3):
                for model, optimizer, rows in ((alone, plain, data), (shared, dist, data[hvd.rank() :: hvd.size()])):
                    optimizer.zero_grad()
                    model(rows).square().mean().backward()
                    if name != "channels last" or step == 1:  # when buckets go out during the backward pass
                        CONVERSIONS[name](model)
                    optimizer.step()
            check_same(shared)
            assert worst(alone, shared) < 1e-5, name
    for name in ("double", "data in double"):
        shared = make()
        dist = distribute(shared, sgd(shared, momentum=0.0))
        for _ in range(2):
            shared(data).sum().backward()
            dist.step()
        shared(data).sum().backward()
        CONVERSIONS[name](shared)
        with pytest.raises(TypeError, match=r"between backward\(\) and step\(\)"):
            dist.step()
        dist.zero_grad()
        shared(data.double()).sum().backward()
        dist.step()
        check_same(shared)


def converted_states() -> None:
    """A state whose model was converted goes back, and to the other ranks, in the dtypes that were kept."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = distribute(model, torch.optim.Adam(model.parameters(), lr=0.1))
    state = TorchState(model, optimizer)
    state.sync()

    def bits() -> list[Any]:
        trees = [model.state_dict(), *optimizer.state_dict()["state"].values()]
        return [(value.dtype, value.double().tolist()) for tree in trees for value in tree.values()]

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()

    step()
    state.commit()
    saved = bits()
    for convert in (model.half, model.double):
        convert()
        state.restore()
        assert bits() == saved
        step()
        state.restore()
        assert bits() == saved
    if hvd.rank() == 0:
        model.double()
    state.sync()
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    check_same(model)
    converted = bits()
    with torch.no_grad():
        model[0].weight.zero_()
    state.restore()
    assert bits() == converted


def state_and_parameters() -> None:
    """All that a rank gets of another: parameters, an optimizer's state, a state with values of all kinds."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (hvd.rank() + 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    check_same(model)
    if hvd.rank() == 0:
        turn(model, optimizer, torch.randn(5, 3))
    hvd.broadcast_optimizer_state(optimizer, 0)
    own = hvd.rank() + 1
    sparse = torch.sparse_coo_tensor([list(range(own))], [float(own)] * own, (3,), check_invariants=False)
    model.register_buffer("sparse", sparse)
    model.register_buffer("conjugate", (torch.ones(2) * own * 1j).conj())
    model.register_buffer("expanded", torch.full((1, 2), float(own)).expand(3, 2))
    state = TorchState(model, optimizer, plain=torch.full((2,), float(hvd.rank())), step=hvd.rank())
    state.sync()
    check_same(model)
    assert model.sparse.to_dense().tolist() == [1.0, 0.0, 0.0]
    assert model.conjugate.resolve_conj().tolist() == [-1j, -1j]
    assert model.expanded.tolist() == [[1.0, 1.0]] * 3
    own = hvd.rank() + 2
    model.conjugate.copy_(torch.ones(2) * own * 1j)
    hvd.broadcast_parameters({"conjugate": model.conjugate, "expanded": model.expanded}, 0)
    assert model.conjugate.resolve_conj().tolist() == [2j, 2j]
    assert (state.plain.tolist(), state.step) == ([0.0, 0.0], 0)
    assert [float(value["step"]) for value in optimizer.state.values()] == [1.0] * 4
    turn(model, optimizer, torch.randn(5, 3))
    state.commit()
    turn(model, optimizer, torch.randn(5, 3))
    state.restore()
    assert [float(value["step"]) for value in optimizer.state.values()] == [2.0] * 4
    hvd.allreduce(model[0].weight.detach())


def run_checks(*names: str) -> None:
    warnings.simplefilter("error")
    other_default_device.begin()
    hvd.init()
    torch.set_num_threads(1)
    for name in names:
        try:
            globals()[name]()
        except Exception:
            say(check=name, error=traceback.format_exc())
            os._exit(3)
        hvd.barrier()
        say(check=name, ok=True)
