"""What a TorchState keeps of values of unusual kinds: bit for bit, or one clear error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.errors import DurableError, HorovodInternalError, UnsupportedOperationError

torch = pytest.importorskip("torch")

from elastic_driver.torch import broadcast_parameters, snapshot  # noqa: E402
from elastic_driver.torch.distributed.shards import put_back, taken_out  # noqa: E402
from elastic_driver.torch.elastic import TorchState  # noqa: E402
from elastic_driver.torch.snapshot import broadcast_tensors, flatten, unflatten  # noqa: E402
from elastic_driver.worker.durable import format as durable_format  # noqa: E402
from elastic_driver.worker.rounds.current import current  # noqa: E402
from elastic_driver.worker.rounds.process_sets import Members  # noqa: E402

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("job_of_one")]


class Versioned(torch.nn.Module):
    """Of its second version: what it is given without a version it takes for one of the first, and doubles it."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.extra = 1

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_modules_keep_their_versions(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Versioned(), torch.nn.BatchNorm1d(2))
    state = TorchState(model, step=0)
    with torch.no_grad():
        model[0].weight.fill_(3)
    model[0].extra = 7
    state.commit()
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.fill_(5)
        model[0].extra = 8
        state.restore()
        assert (model[0].weight.tolist(), model[0].extra) == ([3.0, 3.0], 7)
    saved = model.state_dict()
    values = state._durable_values()
    assert values["model"]._metadata == saved._metadata
    # On disk, and on its way to another rank.
    path = tmp_path / "commit"
    with path.open("wb") as file:
        durable_format.write(durable_format.encode(values), file)
    again = durable_format.read(path)[1]["model"]
    assert again._metadata == saved._metadata
    skeleton, tensors = flatten(saved)
    sent = unflatten(copy.deepcopy(skeleton), tensors)
    assert sent._metadata == saved._metadata
    assert list(sent) == list(saved)
    assert put_back(taken_out(saved)[0], lambda sharded: sharded)._metadata == saved._metadata
    for tree in (again, sent):
        other = torch.nn.Sequential(Versioned(), torch.nn.BatchNorm1d(2))
        other.load_state_dict(tree)
        assert (other[0].weight.tolist(), other[0].extra) == ([3.0, 3.0], 7)


def _uncoalesced() -> Any:
    return torch.sparse_coo_tensor([[0, 1, 1], [1, 0, 0]], [1.0, 2.0, 3.0], (2, 3), check_invariants=False)


def _csr(count: int = 3) -> Any:
    crow = torch.tensor([min(row, count) for row in range(4)])
    return torch.sparse_csr_tensor(crow, torch.arange(count), torch.arange(count) + 0.5, (3, 3), check_invariants=False)


# How a buffer is made, and what a step makes of it.
KINDS: dict[str, Any] = {
    "sparse": (_uncoalesced, lambda module: module.kind.zero_()),
    "sparse and empty": (
        lambda: torch.sparse_coo_tensor(
            torch.zeros((2, 0), dtype=torch.int64), torch.zeros(0), (2, 3), check_invariants=False
        ),
        lambda module: module.kind.add_(_uncoalesced()),
    ),
    "sparse, coalesced": (lambda: _uncoalesced().coalesce(), lambda module: module.kind.mul_(2)),
    "csr": (_csr, lambda module: module.kind.values().zero_()),
    "csr with more values": (_csr, lambda module: setattr(module, "kind", _csr(2))),
    "complex": (lambda: torch.arange(3) * 1j, lambda module: module.kind.zero_()),
    "conjugate": (lambda: (torch.arange(3) * 1j).conj(), lambda module: module.kind.zero_()),
    "negative": (lambda: torch._neg_view(torch.ones(3)), lambda module: module.kind.zero_()),
    "no dimension": (lambda: torch.tensor(3.0), lambda module: module.kind.zero_()),
    "no element": (lambda: torch.empty(0, 3), lambda module: None),
    "strided": (lambda: torch.arange(6.0).reshape(2, 3).t(), lambda module: module.kind.zero_()),
    "expanded": (lambda: torch.ones(1, 3).expand(4, 3), lambda module: module.kind[0].zero_()),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), lambda module: module.kind.copy_(torch.zeros(3))),
    "uint16": (lambda: torch.ones(3, dtype=torch.uint16), lambda module: module.kind.copy_(torch.zeros(3))),
}


def bits(tensor: torch.Tensor) -> list[Any]:
    """All that makes a tensor what it is, but for its strides."""
    parts = [tensor]
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values(), torch.tensor(tensor.is_coalesced())]
    elif tensor.layout is torch.sparse_csr:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    plain = [part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for part in parts]
    return [tensor.layout, tensor.dtype, tensor.shape, *(part.tolist() for part in plain)]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_all_kinds_come_back_bitwise(kind: str) -> None:
    make, change = KINDS[kind]
    module = torch.nn.Linear(2, 2)
    module.register_buffer("kind", make())
    state = TorchState(module, step=0)
    for _ in range(3):
        saved = bits(module.kind)
        assert saved == bits(make())
        with torch.no_grad():
            change(module)
        assert bits(module.kind) != saved or module.kind.numel() == 0
        state.restore()
        assert bits(module.kind) == saved
        state.commit()
    # As it travels to other ranks.
    skeleton, tensors = flatten(module.state_dict())
    assert all(tensor.layout is torch.strided for tensor in tensors)
    assert bits(unflatten(copy.deepcopy(skeleton), tensors)["kind"]) == bits(make())


def test_tied_weights_stay_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    state = TorchState(model)
    with torch.no_grad():
        model[0].weight.zero_()
    state.restore()
    assert model[1].weight is model[0].weight
    assert bool(model[0].weight.any())
    model.double()
    state.restore()
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.float32


class OfItsOwnMaking(torch.nn.Module):
    """Its state_dict has tensors that are not its own: a count, a history that it keeps as it comes, half a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.count, self.history = 0, [torch.zeros(1)]
        self.register_state_dict_post_hook(lambda module, tree, prefix, _: self._scale(tree, f"{prefix}weight", 0.5))
        self.register_load_state_dict_pre_hook(lambda module, tree, prefix, *_: self._scale(tree, f"{prefix}weight", 2))

    @staticmethod
    def _scale(tree: Any, name: str, factor: float) -> None:
        tree[name] = tree[name] * factor

    def get_extra_state(self) -> Any:
        return [torch.tensor(self.count), self.history]

    def set_extra_state(self, state: Any) -> None:
        self.count, self.history = int(state[0]), state[1]


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.count = 0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state)


def test_a_state_dict_of_other_tensors_than_the_modules_comes_back() -> None:
    model, counted = torch.nn.Sequential(OfItsOwnMaking()), torch.nn.Sequential(Counted())
    state = TorchState(model, counted=counted)
    for commits in (1, 2, 3):
        with torch.no_grad():
            model[0].weight.fill_(commits)
            counted[0].weight.fill_(commits)
        model[0].count = counted[0].count = commits
        model[0].history[0].fill_(commits)
        state.commit()
        for _ in range(2):  # what a restore has given away is no part of the restore point
            with torch.no_grad():
                model[0].weight.fill_(9)
            model[0].count = counted[0].count = 9
            model[0].history[0].fill_(9)
            state.restore()
            assert model[0].weight.tolist() == counted[0].weight.tolist() == [commits] * 2
            assert (model[0].count, counted[0].count, model[0].history[0].item()) == (commits, commits, commits)


def test_an_optimizers_own_hooks_see_its_state_come_back() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    def scaled(tree: Any, factor: float) -> Any:
        state = {n: {"momentum_buffer": one["momentum_buffer"] * factor} for n, one in tree["state"].items()}
        return {**tree, "state": state}

    optimizer.register_state_dict_post_hook(lambda _, tree: scaled(tree, 0.5))
    optimizer.register_load_state_dict_pre_hook(lambda _, tree: scaled(tree, 2))
    state = TorchState(model, optimizer)
    momentum = optimizer.state[model.weight]["momentum_buffer"].tolist()
    state.restore()
    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == momentum


REFUSED: dict[str, Any] = {
    "meta device": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_is_refused_at_once_by_its_name(kind: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module[0].register_buffer("odd", REFUSED[kind]())
    with pytest.raises(UnsupportedOperationError, match=rf"^cannot keep model\.0\.odd: .*{kind}"):
        TorchState(module, step=0)
    with pytest.raises(UnsupportedOperationError, match=r"^cannot keep 0\.odd"):
        broadcast_parameters(module.state_dict(), 0)
    with pytest.raises(UnsupportedOperationError, match=r"^cannot keep 0\.odd"):
        broadcast_parameters(module.named_buffers(), 0)
    with pytest.raises(UnsupportedOperationError, match=r"^cannot keep number 0"):
        broadcast_parameters(module.buffers(), 0)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_is_refused_until_it_has_values() -> None:
    module = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with pytest.raises(UnsupportedOperationError, match=r"^cannot keep model\.0\.weight: .*lazy"):
        TorchState(module, step=0)
    module(torch.ones(1, 3))
    state = TorchState(module, step=0)
    saved = module[0].weight.tolist()
    with torch.no_grad():
        module[0].weight.zero_()
    state.restore()
    assert module[0].weight.tolist() == saved


def test_a_sparse_buffer_is_refused_on_disk_by_its_name() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("odd", _uncoalesced())
    with pytest.raises(DurableError, match=r"state\.model\['odd'\] to disk: .*sparse_coo"):
        durable_format.encode(TorchState(module)._durable_values())


def test_a_broadcast_that_arrives_after_the_rounds_end_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    context = current()
    members = Members(context, 0, (1, 0), 1)  # as if another were the root
    tensor = torch.ones(3)

    def arrives(engine: Any, data: Any, *unused: Any) -> None:
        data[:] = 1
        context.abort("a peer is gone")
        context.quiesce()

    monkeypatch.setattr(snapshot, "broadcast", arrives)
    with pytest.raises(HorovodInternalError, match="cannot deliver a result: a peer is gone"):
        broadcast_tensors(members, [tensor], 1)
    assert tensor.tolist() == [1, 1, 1]
