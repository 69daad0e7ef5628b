"""The private parts of torch: used behind one door only, all checked, and what is lost where one is gone."""

from __future__ import annotations

import ast
import importlib
import logging
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.utils import store
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg

from elastic_driver.cli import check_build
from elastic_driver.errors import HorovodInternalError, UnsupportedTorchError
from elastic_driver.torch.distributed import group as round_groups
from elastic_driver.torch.distributed.data_parallel import compile_ahead
from elastic_driver.torch.distributed.shards import box_of
from elastic_driver.torch.snapshot import HostCopies, set_optimizer
from elastic_driver.torch.sync_batch_norm import SyncBatchNorm
from elastic_driver.torch_private import agents, groups, lost, tensors
from elastic_driver.torch_private.features import TRIED_WITH, Feature
from tests.support.sources import trees, trees_below

pytestmark = pytest.mark.unit

DOOR = "torch_private"
# Where torch is used; tensorflow/ has a door, and a test, of its own.
ROOMS = ("torch", "torchelastic", "worker", "function", "compat", "launch/warm")
# Private parts of others, and of torch in the files that cannot import the door (see its docstring).
ELSEWHERE = {
    "compat/init_hook.py": {"torch._dynamo"},  # imported early to save time, or not at all
    "compat/finder.py": {"_targets"},  # of our own modules
    "launch/warm/preload.py": {"torch._dynamo"},
    "launch/warm/hook/sitecustomize.py": {"_exit", "_set_native_id", "_startTime"},  # Python's
    "worker/durable/commits.py": {"_commits", "_durable_values"},  # of our own State
    "worker/durable/format.py": {"_metadata"},  # of a state_dict; a file's form, whatever torch does
    "worker/rounds/advice.py": {"_current_frames", "_getframe"},  # Python's
    "worker/rounds/ending.py": {"_exit"},  # Python's
    "worker/run.py": {"_commits", "_prepare"},  # of our own State
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def of_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private attributes of other objects, private modules and names of torch's, by whatever way they are named."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value, name) if is_private(name) and not of_self(value):
                yield name
            case ast.Call(ast.Name("getattr" | "hasattr" | "setattr" | "delattr"), [_, ast.Constant(str(name)), *_]):
                if is_private(name):
                    yield name
            case ast.Call(ast.Name("getattr" | "hasattr" | "setattr" | "delattr"), [_, ast.JoinedStr(parts), *_]):
                if isinstance(parts[0], ast.Constant) and is_private(parts[0].value):
                    yield parts[0].value
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.partition(".")[0] == "torch":
                yield from (part for part in module.split(".") if is_private(part))
                yield from (alias.name for alias in names if is_private(alias.name))
            case ast.Import(names):
                yield from (alias.name for alias in names if alias.name.startswith("torch.") and "._" in alias.name)
            case ast.Constant(str(text)) if text.startswith("torch.") and "._" in text and text.isprintable():
                if " " not in text:
                    yield text
            case _:
                pass


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a file defines itself."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.Attribute(value, name, ast.Store()) if of_self(value):
                yield name
            case ast.AnnAssign(ast.Name(name)):
                yield name
            case _:
                pass


def names_in_checks(tree: ast.Module) -> set[str]:
    """What the functions that look for changes name, themselves or by a constant of their module."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith("_changes")]
    inside: list[ast.AST] = list(checks)
    inside += [
        constants[node.id]
        for check in checks
        for node in ast.walk(check)
        if isinstance(node, ast.Name) and node.id in constants
    ]
    named: set[str] = set()
    for part in inside:
        named |= {
            node.value for node in ast.walk(part) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        named |= {node.attr for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    return named


def test_private_parts_of_torch_are_used_behind_the_door_only() -> None:
    behind = {name for tree in trees_below(DOOR).values() for name in private_names(tree)}
    assert "_set_pg_timeout" in behind
    found = {}
    for room in ROOMS:
        for path, tree in trees_below(room).items():
            used = set(private_names(tree)) - ELSEWHERE.get(path, set())
            # What a file defines is its own, unless torch has it too: then the door knows it.
            strangers = {name for name in used if name in behind} | used - set(own_names(tree))
            if strangers:
                found[path] = sorted(strangers)
    assert not found, "move it to torch_private/, with a check"


def test_all_that_is_private_is_checked() -> None:
    """Where it is not, it would be missed at work: when a worker is lost, say."""
    for path, tree in trees_below(DOOR).items():
        own = set(own_names(tree)) | {"_C", "_distributed_c10d", "_internal"}  # modules: their names are checked
        used = set(private_names(tree)) - own
        assert used <= names_in_checks(tree), path


def test_what_is_used_of_the_c_extension_is_public_elsewhere_or_checked() -> None:
    checked = names_in_checks(trees_below(DOOR)["torch_private/groups.py"])
    used = {
        node.attr
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "c10d"
    }
    assert {"TCPStore", "AllreduceOptions"} <= used
    assert {name for name in used if not hasattr(dist, name)} <= checked


FEATURES = [feature for feature in lost.features() if feature is not groups.NCCL]


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # of an import of torch's own
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature._look.__name__)
def test_this_torch_has_all_parts(feature: Feature) -> None:
    assert anew(feature).changes == []


def anew(feature: Feature) -> Feature:
    """As it would be in a process that begins now."""
    return Feature(feature.name, feature._look, feature._loss)


@pytest.mark.parametrize(
    ("owner", "name", "feature"),
    [
        (torch, "_foreach_copy_", tensors.FAST_COPIES),
        (torch._C, "_storage_Use_Count", tensors.GRADIENTS_IN_PLACE),
        (batchnorm, "_BatchNorm", tensors.BATCH_NORM),
        (groups.c10d, "AllreduceOptions", groups.GLOO),
        (groups.c10d, "ProcessGroupGloo", groups.GLOO),
        (distributed_c10d, "_set_pg_timeout", groups.PROCESS_GROUP),
        (distributed_c10d, "_world", groups.PROCESS_GROUP),
        (distributed_c10d, "_new_process_group_helper", groups.SECOND_GROUP),
        (DistributedDataParallel, "_inside_ddp_forward", groups.COMPILE_AHEAD),
        ("torch.distributed.tensor.placement_types", "_StridedShard", groups.STRIDED),
        (fake_pg, "FakeStore", groups.REHEARSAL),
        (SimpleElasticAgent, "_assign_worker_ranks", agents.AGENTS_RANKS),
    ],
)
def test_a_name_that_is_gone(owner: Any, name: str, feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(owner, str):  # an import of seconds, for the process alone that runs this
        owner = importlib.import_module(owner)
    monkeypatch.delattr(owner, name)
    (change,) = anew(feature).changes
    assert name in change


@pytest.mark.parametrize(
    ("function", "name", "feature"),
    [
        (torch.optim.Optimizer.__init__, "_optimizer_state_dict_pre_hooks", tensors.STATES),
        (torch.nn.Module.state_dict, "_metadata", tensors.STATES),
        (torch.optim.lr_scheduler.LRScheduler.step, "_opt_called", tensors.SCHEDULERS),
        (DistributedDataParallel.__init__, "reducer", groups.WRAPPERS),
        (SimpleElasticAgent._invoke_run, "_remaining_restarts", agents.RESTART_COUNT),
        (SimpleElasticAgent._assign_worker_ranks, agents.ROLE_INFO, agents.AGENTS_RANKS),
        (LogsSpecs.__init__, "_root_log_dir", agents.LOG_CHOICES),
    ],
)
def test_an_attribute_of_another_name(
    function: Any, name: str, feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    monkeypatch.setattr(function, "__code__", renamed(function.__code__, name))
    (change,) = anew(feature).changes
    assert change.endswith(f"no longer uses {name}")


def renamed(code: types.CodeType, name: str) -> types.CodeType:
    constants = tuple(
        renamed(each, name) if isinstance(each, types.CodeType) else "other" if each == name else each
        for each in code.co_consts
    )
    return code.replace(
        co_names=tuple("other" if each == name else each for each in code.co_names), co_consts=constants
    )


def test_another_key_at_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_NUM_MEMBERS", "/members")
    (change,) = anew(agents.AGENTS_BARRIER).changes
    assert change == "torch.distributed.elastic.utils.store._NUM_MEMBERS is no longer /num_members"


def test_a_parameter_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", lambda seconds, group: None)
    (change,) = anew(groups.PROCESS_GROUP).changes
    assert change.endswith("has no parameter timeout")


# --- what is lost ---


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a feature one whose parts are gone."""

    def lack(feature: Feature) -> None:
        monkeypatch.setattr(feature, "_found", ["torch._part is gone"])
        monkeypatch.setattr(feature, "_has_warned", False)

    return lack


def test_the_error_says_what_is_gone_what_needs_it_and_what_has_it(lacks: Any) -> None:
    lacks(groups.COMPILE_AHEAD)
    with pytest.raises(UnsupportedTorchError) as caught:
        compile_ahead(torch.nn.Linear(1, 1), lambda _: None)
    assert str(caught.value) == (
        f"cannot use hvd.compile_ahead() with torch {torch.__version__}: torch._part is gone. It works with torch "
        + ", ".join(f"{version}.x" for version in TRIED_WITH)
    )
    assert not isinstance(caught.value, HorovodInternalError), "which would be tried again forever"


def test_what_is_lost_is_named_before_a_job_meets_it(lacks: Any) -> None:
    lines = check_build.report().splitlines()
    start = next(at for at, line in enumerate(lines) if "private APIs of PyTorch" in line)
    assert f"({torch.__version__}; tested with {', '.join(f'{version}.x' for version in TRIED_WITH)}):" in lines[start]
    assert lines[start + 1] == "    [X] all available"
    lacks(groups.COMPILE_AHEAD)
    lacks(tensors.FAST_COPIES)
    assert check_build.report().splitlines()[start + 1 : start + 4] == [
        "    [ ] commits and gradients: tensors are copied one by one, which is slower (torch._part is gone)",
        "    [ ] hvd.compile_ahead(): cannot be used (torch._part is gone)",
        "",
    ]


def test_a_torch_that_cannot_be_imported_is_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def broken(name: str) -> Any:
        if name == "torch":
            raise OSError("libtorch.so: cannot open shared object file")
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "[ ] PyTorch (elastic_driver.torch): torch cannot be imported: OSError: libtorch.so" in check_build.report()


def test_a_group_is_refused_before_the_round_knows_of_it(lacks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(groups.PROCESS_GROUP)
    context = SimpleNamespace(check=lambda: None)  # and neither attach nor abort
    monkeypatch.setattr(round_groups, "current", lambda: context)
    with pytest.raises(UnsupportedTorchError, match=r"cannot use hvd\.process_group\(\) with"):
        round_groups.process_group()


def test_other_features_without_a_substitute(lacks: Any) -> None:
    from torch.distributed.tensor import Partial

    for feature in (tensors.BATCH_NORM, tensors.SPARSE, groups.STRIDED, groups.REHEARSAL, groups.GLOO):
        lacks(feature)
    with pytest.raises(UnsupportedTorchError, match="SyncBatchNorm"):
        SyncBatchNorm(3)
    with pytest.raises(UnsupportedTorchError, match="sparse tensors"):
        HostCopies().take({"a": torch.eye(2).to_sparse()})
    with pytest.raises(UnsupportedTorchError, match="tensor parallelism"):
        box_of((2,), SimpleNamespace(get_coordinate=lambda: [0]), (Partial(),))
    with pytest.raises(UnsupportedTorchError, match="before a round"):
        groups.fake_store()
    with pytest.raises(UnsupportedTorchError, match="Gloo"):
        groups.gloo_device("127.0.0.1")


def test_copies_go_on_one_by_one_and_say_so_once(lacks: Any, caplog: pytest.LogCaptureFixture) -> None:
    lacks(tensors.FAST_COPIES)
    target = [torch.zeros(2), torch.zeros(3)]
    with caplog.at_level(logging.WARNING):
        tensors.copy_each(target, [torch.ones(2), torch.ones(3)])
        assert [each.sum().item() for each in target] == [2, 3]
        tensors.zero_each(target)
    assert [each.sum().item() for each in target] == [0, 0]
    (message,) = caplog.messages
    assert "tensors are copied one by one, which is slower, with torch" in message
    assert "torch._part is gone. It works with" in message


def test_states_go_torchs_own_way(lacks: Any, caplog: pytest.LogCaptureFixture) -> None:
    lacks(tensors.STATES)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 2.0
    set_optimizer(optimizer, saved)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert tensors.has_load_hooks(torch.nn.Linear(1, 1))
    assert len(caplog.messages) == 1


def test_no_version_is_no_change(lacks: Any) -> None:
    lacks(tensors.GRADIENTS_IN_PLACE)
    tensor = torch.zeros(1)
    before = tensors.version_of(tensor)
    tensor.add_(1)
    assert tensors.version_of(tensor) == before == 0


class Agent(SimpleElasticAgent):
    """torch's, which asks the handler for its place."""

    def __init__(self, most: int, left: int) -> None:
        self._worker_group: Any = SimpleNamespace(spec=SimpleNamespace(max_restarts=most))
        self._remaining_restarts = left

    def ask(self) -> bool:
        return agents.give_back_a_restart()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None: ...

    _start_workers = _stop_workers = _monitor_workers = _shutdown  # type: ignore[assignment]


def test_a_restart_is_given_back_up_the_stack() -> None:
    agent = Agent(most=3, left=2)
    assert agent.ask()
    assert agent._remaining_restarts == 3
    assert not agent.ask(), "the generation did not end by a failure"
    assert agent._remaining_restarts == 3


def test_an_agent_that_counts_in_another_way_is_left_alone(lacks: Any, caplog: pytest.LogCaptureFixture) -> None:
    lacks(agents.RESTART_COUNT)
    agent = Agent(most=3, left=2)
    assert not agent.ask()
    assert not agent.ask()
    assert agent._remaining_restarts == 2
    (message,) = caplog.messages
    assert "the loss of another node counts against --max-restarts" in message


def test_another_kind_of_agent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(agents.RESTART_COUNT, "_found", [])
    monkeypatch.setattr(agents.RESTART_COUNT, "_has_warned", False)
    assert not agents.give_back_a_restart()
    (message,) = caplog.messages
    assert "the calling agent is not a SimpleElasticAgent" in message


def test_a_torch_without_the_agent_we_know(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr("torch.distributed.elastic.agent.server.api.SimpleElasticAgent")
    monkeypatch.setattr(agents, "RESTART_COUNT", anew(agents.RESTART_COUNT))
    assert not agents.give_back_a_restart()
    assert len(caplog.messages) == 1
