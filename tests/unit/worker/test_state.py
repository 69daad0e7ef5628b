"""States in a job of one: save, restore, commit, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import elastic_driver as hvd
from elastic_driver.elastic import ObjectState, State, run
from elastic_driver.errors import HorovodInternalError, HostsUpdatedInterrupt, NotInitializedError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.messages import RunningReport
from elastic_driver.worker.engine.collectives import divide_inplace
from elastic_driver.worker.rounds.current import current
from elastic_driver.worker.rounds.runtime import runtime

torch = pytest.importorskip("torch")

from elastic_driver.torch import DistributedOptimizer, broadcast_optimizer_state  # noqa: E402
from elastic_driver.torch.elastic import ElasticSampler, TorchState  # noqa: E402
from elastic_driver.torch.snapshot import HostCopies, HostCopy, flatten, unflatten  # noqa: E402

pytestmark = pytest.mark.unit


def test_use_before_init_is_a_clear_error() -> None:
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.barrier, lambda: hvd.allreduce(np.ones(1))):
        with pytest.raises(NotInitializedError, match="not been initialized"):
            call()
    with pytest.raises(ValueError, match="init"):
        run(lambda state: None)(ObjectState(x=1))


@pytest.mark.usefixtures("job_of_one")
def test_object_state_commits_and_restores() -> None:
    state = ObjectState(step=0, history=[1])
    state.step, state.history = 5, [*state.history, 2]
    state.history.append(3)
    state.restore()
    assert (state.step, state.history, state._commits) == (0, [1], 0)
    state.history.append(9)
    state.commit()
    state.history.append(10)
    state.restore()
    assert (state.history, state._commits) == ([1, 9], 1)
    state.history.append(11)
    state.sync()
    state.restore()
    assert (state.history, state._commits) == ([1, 9, 11], 1)


# The public methods of Horovod's State, ObjectState and TorchState (0.28.1): its scripts can use no others.
HOROVODS = (
    *("check_host_updates", "commit", "on_hosts_updated", "on_reset", "register_reset_callbacks"),
    *("reset", "restore", "save", "sync"),
)
# What a training may call its values, whatever a state needs itself.
USUAL = (
    *("commits", "names", "values", "saved", "handlers", "durable", "durable_values", "load_durable", "owner", "check"),
    *("rank", "size", "local_rank", "round", "round_id", "rendezvous", "sync_id", "host_messages", "callbacks"),
    *("step", "epoch", "batch", "name", "state", "copy", "value", "tree", "kwargs", "args", "self_", "cls", "type"),
    *("state_dict", "load_state_dict", "items", "keys", "get", "update", "run", "init", "join", "set", "restored"),
)


@pytest.mark.parametrize("make", [ObjectState, TorchState])
def test_only_horovods_names_are_taken(make: Any) -> None:
    assert sorted(name for name in dir(make) if not name.startswith("_")) == sorted(
        {*HOROVODS, *(("model", "optimizer") if make is TorchState else ())}
    )
    for name in (*HOROVODS, "_commits"):
        with pytest.raises(ValueError, match=f"cannot keep attributes named {name}: a state reserves these names"):
            make(**{name: 1})
    with pytest.raises(ValueError, match="named save"):
        TorchState(save=torch.nn.Linear(1, 1))


@pytest.mark.usefixtures("job_of_one")
@pytest.mark.parametrize("make", [ObjectState, TorchState])
def test_a_training_may_call_its_values_what_it_likes(make: Any) -> None:
    state = make(**dict.fromkeys(USUAL, 0))

    def values() -> set[int]:
        return {getattr(state, name) for name in USUAL}

    for number in (1, 2):
        for name in USUAL:
            setattr(state, name, number)
        if number == 1:
            state.commit()
    state.restore()
    assert values() == {1}
    for name in USUAL:
        setattr(state, name, 3)
    state.sync()
    state.restore()
    assert values() == {3}
    calls: list[int] = []

    @run
    def train(state: Any) -> None:
        for name in USUAL:
            setattr(state, name, 4)
        calls.append(1)
        if len(calls) == 1:
            state.commit()
            raise HorovodInternalError("a peer is gone")

    train(state)
    assert values() == {4}
    assert state._commits == 2


@pytest.mark.usefixtures("job_of_one")
def test_values_of_all_kinds_by_any_name() -> None:
    model, optimizer = _training("sgd")
    state = TorchState(commits=model, durable=optimizer, rank=ElasticSampler(range(4)))
    assert (state.model, state.optimizer) == (None, None)
    state.rank.record_batch(0, 2)
    state.commit()
    before = _bits(model, optimizer)
    _step(model, optimizer, 1)
    state.rank.record_batch(1, 2)
    state.restore()
    assert _bits(model, optimizer) == before
    assert state.rank.processed_num == 2
    with pytest.raises(TypeError, match="bcast_object"):
        TorchState(bcast_object=1)


@pytest.mark.usefixtures("job_of_one")
def test_what_horovods_elastic_scripts_ask_of_a_state() -> None:
    class Own(State):
        def __init__(self) -> None:
            super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)

    state = Own()
    assert state._host_messages.empty()
    current().on_hosts_updated(leave=True, reason="host b added")
    assert not state._host_messages.empty()
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


@pytest.mark.usefixtures("job_of_one")
def test_run_restores_and_goes_on_after_a_failure_and_an_interrupt() -> None:
    seen, resets = [], []

    @run
    def train(state: ObjectState, goal: int) -> str:
        while state.step < goal:
            state.step += 1
            seen.append(state.step)
            if state.step % 2 == 0:
                state.commit()
            if len(seen) == 3:
                raise HorovodInternalError("a peer is gone")
            if len(seen) == 6:
                raise HostsUpdatedInterrupt(reason="a host came")
        return "end"

    state = ObjectState(step=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    assert train(state, goal=7) == "end"
    assert seen == [1, 2, 3, 3, 4, 5, 6, 7]
    assert resets == [1, 1]


@pytest.mark.usefixtures("job_of_one")
def test_run_passes_the_users_exceptions_on() -> None:
    @run
    def train(state: ObjectState) -> None:
        raise KeyError(state.step)

    with pytest.raises(KeyError):
        train(ObjectState(step=0))


@pytest.mark.usefixtures("job_of_one")
def test_a_collective_in_a_reset_callback_may_fail() -> None:
    failures = [HorovodInternalError("again")]

    def callback() -> None:
        if failures:
            raise failures.pop()

    calls = []

    @run
    def train(state: ObjectState) -> int:
        calls.append(1)
        if len(calls) == 1:
            raise HorovodInternalError("first")
        return len(calls)

    state = ObjectState(step=0)
    state.register_reset_callbacks([callback])
    assert train(state) == 2


def _training(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    match kind:
        case "adam":
            return model, torch.optim.Adam(model.parameters(), lr=0.01)
        case "adam-amsgrad":
            return model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
        case "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        case "rmsprop":
            return model, torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True, momentum=0.5)
        case _:
            model = model.to(torch.bfloat16)
            return model, torch.optim.Adagrad(model.parameters(), lr=0.01)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def _bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    _, tensors = flatten([model.state_dict(), optimizer.state_dict()])
    return [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.usefixtures("job_of_one")
@pytest.mark.parametrize("kind", ["adam", "adam-amsgrad", "sgd", "rmsprop", "bfloat16"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_restore_is_bitwise_and_repeatable(kind: str, wrapped: bool) -> None:
    model, optimizer = _training(kind)
    if wrapped:
        optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = TorchState(model, optimizer, scheduler=scheduler, epoch=0)
    blank = _bits(model, optimizer)
    _step(model, optimizer, 0)
    state.restore()
    assert _bits(model, optimizer) == blank  # with no optimizer state at all
    for seed in range(3):
        _step(model, optimizer, seed)
        scheduler.step()
    state.epoch = 1
    state.commit()
    saved, rates = _bits(model, optimizer), scheduler.get_last_lr()
    for _ in range(3):
        for seed in range(2):
            _step(model, optimizer, seed)
            scheduler.step()
        state.epoch = 2
        assert _bits(model, optimizer) != saved
        state.restore()
        assert _bits(model, optimizer) == saved
        assert scheduler.get_last_lr() == rates
        assert optimizer.param_groups[0]["lr"] == rates[0]
        assert state.epoch == 1
        assert all(param.grad is None for param in model.parameters())


def test_flatten_and_unflatten_are_inverse() -> None:
    tree = {"a": [torch.ones(2), (1, None)], 3: {"b": torch.zeros((), dtype=torch.int64)}, "c": "text"}
    skeleton, tensors = flatten(tree)
    again = unflatten(skeleton, tensors)
    assert again["a"][1] == (1, None)
    assert again["a"][0] is tensors[0] or torch.equal(again["a"][0], torch.ones(2))
    assert again[3]["b"].dtype == torch.int64
    assert again["c"] == "text"


@pytest.mark.usefixtures("job_of_one")
def test_distributed_optimizer_alone_is_the_plain_one() -> None:
    model, plain = _training("adam")
    other, base = _training("adam")
    wrapped = DistributedOptimizer(base, named_parameters=other.named_parameters())
    assert isinstance(wrapped, torch.optim.Adam)
    for seed in range(4):
        _step(model, plain, seed)
        _step(other, wrapped, seed)
    assert _bits(model, plain) == _bits(other, wrapped)
    lbfgs = DistributedOptimizer(torch.optim.LBFGS(other.parameters(), lr=0.1))
    data = torch.ones(3, 4)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = other(data).square().mean()
        loss.backward()
        return loss

    assert torch.is_tensor(lbfgs.step(closure))


def test_distributed_optimizer_checks_its_arguments() -> None:
    model, optimizer = _training("sgd")
    with pytest.raises(ValueError, match="must be unique"):
        DistributedOptimizer(optimizer, named_parameters=[("a", param) for param in model.parameters()])
    with pytest.raises(ValueError, match="were not named"):
        DistributedOptimizer(optimizer, named_parameters=list(model.named_parameters())[:1])
    with pytest.raises(ValueError, match="at least 1"):
        DistributedOptimizer(optimizer, backward_passes_per_step=0)


@pytest.mark.usefixtures("job_of_one")
def test_the_distributed_optimizer_has_horovods_names() -> None:
    model, optimizer = _training("sgd")
    named = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert named._parameter_names == {param: name for name, param in model.named_parameters()}
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = [{"params": first.parameters()}, {"params": second.parameters()}]
    names = DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))._parameter_names
    assert names[second.bias] == "allreduce.noname.1.1"
    assert len(set(names.values())) == len(names) == 4


@pytest.mark.usefixtures("job_of_one")
@pytest.mark.parametrize("wrapped", [False, True])
def test_broadcast_optimizer_state_leaves_gradients_of_zeros(wrapped: bool) -> None:
    """As Horovod, whose tests read them; and only where the optimizer has no state."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if wrapped:
        optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    before = [param.detach().clone() for param in model.parameters()]
    broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert model[0].weight.grad is None
    trained = [param for param in model.parameters() if param.requires_grad]
    assert [param.grad.tolist() for param in trained] == [torch.zeros_like(param).tolist() for param in trained]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    grads = [param.grad.clone() for param in trained]
    broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(trained, grads, strict=True))


@pytest.mark.usefixtures("job_of_one")
@pytest.mark.parametrize("kind", ["sparse-adam", "sgd"])
def test_gradients_of_zeros_are_sparse_where_the_next_ones_are(kind: str) -> None:
    model = torch.nn.Embedding(10, 3, sparse=True)
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        broadcast_optimizer_state(optimizer, 0, model)
    else:
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.5)
        broadcast_optimizer_state(optimizer, 0)
    assert model.weight.grad.is_sparse
    assert model.weight.grad.to_dense().abs().sum() == 0
    model(torch.tensor([1, 4])).sum().backward()  # adds to them
    before = model.weight.detach().clone()
    optimizer.step()
    assert (model.weight != before).any(dim=1).nonzero().flatten().tolist() == [1, 4]


@pytest.mark.usefixtures("job_of_one")
def test_step_after_synchronize_warns_unless_skipped() -> None:
    model, base = _training("sgd")
    optimizer = DistributedOptimizer(base)
    _step(model, optimizer, 0)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def test_integers_are_divided_toward_zero() -> None:
    for value, divisor, expected in ((7, 2, 3), (-7, 2, -3), (-8, 2, -4), (-1, 3, 0), (2**62 + 3, 2, 2**61 + 1)):
        array = np.array([value], np.int64)
        divide_inplace(array, divisor)
        assert array[0] == expected


@pytest.mark.usefixtures("job_of_one")
def test_the_driver_is_told_when_another_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the same one is begun again, in another round."""
    told: list[tuple[int, bool]] = []

    class Client:
        def running(self, report: RunningReport) -> None:
            told.append((report.commits, report.another))

    process = runtime()
    monkeypatch.setattr(process, "_client", Client())
    monkeypatch.setattr(process, "_worker", WorkerId("a", 0, 0))
    monkeypatch.setattr(process, "_begins_another", False)  # other tests have trained in this process
    # The same round stands for the next one.
    monkeypatch.setattr(current(), "abort", lambda _: None)
    monkeypatch.setattr(process, "reset", lambda *_, **__: None)

    @run
    def train(state: ObjectState) -> None:
        state.commit()
        if state._commits == 1:
            raise HorovodInternalError("once")

    train(ObjectState())
    train(ObjectState())
    monkeypatch.undo()
    assert told == [(0, False), (1, False), (0, True), (1, False)]


class Stubborn:
    """Has a state; fails at the given call of each kind."""

    def __init__(self, *, load_fails: BaseException | None = None) -> None:
        self.value = torch.zeros(2)
        self.fails: BaseException | None = None
        self.load_fails = load_fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails is not None:
            raise self.fails
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.load_fails is not None:
            error, self.load_fails = self.load_fails, None
            raise error
        self.value = state["value"]


class Uncopied:
    """A plain attribute that cannot be copied while it has an error to raise."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __deepcopy__(self, memo: Any) -> Uncopied:
        if self.error is not None:
            raise self.error
        return self


@pytest.mark.usefixtures("job_of_one")
@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["a plain attribute", "a state_dict", "after the tensors"])
def test_a_commit_that_fails_half_way_leaves_the_restore_point(
    where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _training("adam")
    last, plain = Stubborn(), Uncopied()
    state = TorchState(model, optimizer, last=last, step=0, plain=plain)
    _step(model, optimizer, 1)
    state.step = 1
    last.value += 1
    state.commit()
    saved = _bits(model, optimizer)
    for _ in range(3):  # each of the buffers gets its turn
        _step(model, optimizer, 2)
        state.step = 2
        last.value += 1
        with monkeypatch.context() as patch:
            if where == "a plain attribute":
                plain.error = error
            elif where == "a state_dict":
                last.fails = error
            else:  # as a signal's handler raises when the call in which it came returns
                copy_into = torch._foreach_copy_

                def interrupted(*args: Any, copy_into: Any = copy_into, **options: Any) -> None:
                    copy_into(*args, **options)
                    raise error

                patch.setattr(torch, "_foreach_copy_", interrupted)
            with pytest.raises(type(error)):
                state.commit()
        plain.error = last.fails = None
        assert state._commits == 1
        state.restore()
        assert _bits(model, optimizer) == saved
        assert (state.step, last.value.tolist(), state._commits) == (1, [1.0, 1.0], 1)
    state.commit()
    assert state._commits == 2


@pytest.mark.usefixtures("job_of_one")
def test_an_object_states_values_and_number_are_of_one_commit() -> None:
    plain = Uncopied()
    state = ObjectState(step=0, plain=plain, more=[0])
    state.step, state.more[0] = 1, 1
    state.commit()
    state.step, state.more[0] = 2, 2
    plain.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        state.commit()
    plain.error = None
    state.restore()
    assert (state.step, state.more, state._commits) == (1, [1], 1)
    state.save()
    assert state._commits == 1, "that was no commit"


@pytest.mark.usefixtures("job_of_one")
def test_a_restore_that_was_interrupted_can_be_run_again() -> None:
    model, optimizer = _training("adam")
    last = Stubborn(load_fails=KeyboardInterrupt())
    state = TorchState(model, optimizer, last=last, step=0)
    _step(model, optimizer, 1)
    state.step = 1
    state.commit()
    saved = _bits(model, optimizer)
    _step(model, optimizer, 2)
    state.step = 2
    with pytest.raises(KeyboardInterrupt):
        state.restore()
    state.restore()
    assert _bits(model, optimizer) == saved
    assert state.step == 1


def test_copies_use_the_memory_of_the_one_before_the_last() -> None:
    model, _ = _training("sgd")
    copies = HostCopies()
    former: list[HostCopy] = []
    for number in range(6):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        former.append(copies.take(model.state_dict()))
        for name, value in model.state_dict().items():
            assert torch.equal(former[-1].tree()[name], value)
            assert former[-1].tree()[name].data_ptr() != value.data_ptr()
        if number:
            copies.let_go(former[-2])
    places = [[tensor.data_ptr() for tensor in one.tensors] for one in former]
    assert places[0] == places[2] == places[4]
    assert places[1] == places[3] == places[5]
    assert set(places[0]).isdisjoint(places[1])


def test_a_lent_copy_stays_until_the_next_is_lent() -> None:
    copies, value = HostCopies(), torch.zeros(3)
    lent = present = copies.take({"value": value})
    copies.lend(present)
    seen = set()
    for _ in range(6):
        value += 1
        former, present = present, copies.take({"value": value})
        copies.let_go(former)
        seen.add(present.tensors[0].data_ptr())
        assert lent.tree()["value"].tolist() == [0.0, 0.0, 0.0]
    assert len(seen) == 2
    copies.lend(present)
    value += 1
    copies.let_go(present)
    assert copies.take({"value": value}).tensors[0].data_ptr() == lent.tensors[0].data_ptr()
    assert present.tree()["value"].tolist() == [6.0] * 3
