"""elastic_launch without processes: what a LaunchConfig says as flags, and who failed, by what is known of a job."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

import elastic_driver
from elastic_driver.errors import SettingsError
from elastic_driver.function.outcome import Place, Raised, Returned
from elastic_driver.function.torch_launcher import (
    ChildFailedError,
    LaunchConfig,
    ProcessFailure,
    elastic_launch,
    failures_of,
    flags_of,
    values_of,
)
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.logs import Logs, Streams

pytestmark = [pytest.mark.unit]


def test_the_names_are_the_packages() -> None:
    assert elastic_driver.elastic_launch is elastic_launch
    assert elastic_driver.LaunchConfig is LaunchConfig
    assert elastic_driver.ChildFailedError is ChildFailedError


def test_the_fields_are_torchs() -> None:
    api = pytest.importorskip("torch.distributed.launcher.api")
    theirs, ours = api.LaunchConfig.__dataclass_fields__, LaunchConfig.__dataclass_fields__
    assert list(theirs) == list(ours), "also by place"
    for name in theirs:
        if name != "rdzv_backend":
            assert theirs[name].default == ours[name].default, name


def test_torchs_object_says_the_same() -> None:
    api = pytest.importorskip("torch.distributed.launcher.api")
    more: dict[str, Any] = {"rdzv_backend": "c10d", "role": "x", "rdzv_timeout": 7, "shutdown_timeout": 9}
    theirs = flags_of(api.LaunchConfig(1, 1, 2, **more))
    theirs.pop("log_dir")  # torch makes one
    assert theirs == flags_of(LaunchConfig(1, 1, 2, **more))


def settings(config: LaunchConfig) -> Any:
    return settings_from({"torchrun": flags_of(config), "command": ("true",)}, {})


def test_what_a_config_asks_for() -> None:
    specs = SimpleNamespace(
        _root_log_dir="/l", _redirects={0: 3, 1: 0}, _tee=1, _local_ranks_filter={1, 0}, reify=lambda envs: None
    )
    made = settings(
        LaunchConfig(
            1,
            1,
            4,
            specs,
            "job",
            role="r",
            rdzv_configs={"join_timeout": 3},
            duplicate_stdout_filters=["a,b", "c"],
            log_line_prefix_template="${rank}",
            virtual_local_rank=True,
            shutdown_timeout=0,
        )
    )
    assert (made.num_proc, made.reset_limit, made.elastic_timeout_s, made.grace_s) == (4, 3, 3.0, 0.0)
    assert (made.nodes.run_id, made.nodes.role, made.virtual_local_rank) == ("job", "r", True)
    logs: Logs = made.logs
    assert (str(logs.folder), logs.redirects.of(0), logs.redirects.of(1), logs.tee) == ("/l", 3, 0, Streams(1))
    assert (logs.shown, logs.stdout_filters, logs.prefix) == ({0, 1}, ("a,b", "c"), "${rank}")


def test_several_nodes() -> None:
    made = settings(LaunchConfig(1, 3, 2, rdzv_endpoint="node0:29400", rdzv_configs={"rank": 1}))
    assert (made.nodes.least, made.nodes.most, made.nodes.endpoint) == (1, 3, "node0:29400")
    assert made.nodes.node_rank is None, "c10d finds it by itself"
    static = LaunchConfig(2, 2, 2, rdzv_endpoint="node0", rdzv_backend="static", rdzv_configs={"rank": 1})
    assert settings(static).nodes.node_rank == 1


def test_numa_options_of_torch() -> None:
    binding = pytest.importorskip("torch.numa.binding")
    for mode in binding.AffinityMode:
        config = LaunchConfig(1, 1, 1, numa_options=binding.NumaOptions(affinity_mode=mode))
        assert settings(config).numa_binding == mode.value


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (LaunchConfig(1, 2, 1), "--nnodes up to 2 needs --rdzv-endpoint"),
        (LaunchConfig(1, 1, 0), "--nproc-per-node: 0 is below 1"),
        (LaunchConfig(1, 1, 1, rdzv_backend="etcd"), "'etcd' is not one of static, c10d, elastic"),
        (LaunchConfig(1, 1, 1, event_log_handler="console"), "--event-log-handler: 'console' is not one of null"),
        (LaunchConfig(1, 1, 1, max_restarts=-1), "--max-restarts: -1 is not within"),
    ],
)
def test_what_is_refused(config: LaunchConfig, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        settings(config)


def test_what_cannot_be_launched() -> None:
    with pytest.raises(SettingsError, match="neither a function nor a command"):
        elastic_launch(LaunchConfig(1, 1, 1), None)
    with pytest.raises(SettingsError, match="does not support health_check_server"):
        elastic_launch(LaunchConfig(1, 1, 1), print, object())


# --- who failed -------------------------------------------------------------------------------------------------------


def ended(worker: str, returncode: int, time: float, *, expected: bool = False) -> dict[str, Any]:
    return {
        "event": "worker_exited",
        "worker": worker,
        "pid": 7,
        "returncode": returncode,
        "expected": expected,
        "time": time,
    }


def formed(**ranks: int) -> dict[str, Any]:
    members = [{"worker": f"{name[0]}[{name[1]}]#{name[2]}", "rank": rank} for name, rank in ranks.items()]
    return {"event": "round_formed", "members": members}


def raised(worker: str, rank: int, time: float) -> Raised:
    return Raised(None, "ValueError", "Traceback\nValueError: boom\n", Place(worker, 1, rank, 0, 8, time))


def test_the_last_generations_failures_in_order() -> None:
    events = [
        formed(a00=0, b00=1),
        ended("a[0]#0", 1, 10.0),
        formed(a01=1, b01=0, c00=2),
        ended("b[0]#1", -9, 21.0),
        ended("a[0]#1", 1, 20.5),
        ended("c[0]#0", -15, 22.0, expected=True),
    ]
    found = failures_of([raised("a[0]#0", 0, 9.0), raised("a[0]#1", 1, 20.0)], events)
    assert [(failed.rank, failed.exitcode, failed.pid, failed.time) for failed in found] == [
        (1, 1, 8, 20.0),
        (0, -9, 7, 21.0),
    ]
    assert found[0].raised is not None
    assert found[1].raised is None


def test_a_generation_that_was_never_whole() -> None:
    events = [
        ended("a[1]#0", 3, 5.0),
        {"event": "first_failure", "worker": "a[1]#0", "rank": 5},
        {"event": "job_ended", "exit_code": 1, "message": "x"},
    ]
    (failed,) = failures_of([], events)
    assert (failed.rank, failed.local_rank, failed.exitcode) == (5, 1, 3)


def test_what_an_earlier_generation_returned_is_no_result() -> None:
    outcomes = [Returned(1, 0, 2, pickle.dumps("old")), Returned(2, 1, 2, pickle.dumps("new"))]
    events = [{"event": "round_formed", "round_id": 1}, {"event": "round_formed", "round_id": 2}]
    assert values_of(outcomes, events) == {1: "new"}
    assert values_of([], []) == {}


def test_nobody_failed() -> None:
    assert failures_of([], [formed(a00=0), ended("a[0]#0", 0, 1.0)]) == []


def test_the_error_where_there_is_no_torch() -> None:
    failures = {3: ProcessFailure(1, 7, -9, "<N/A>", "killed by signal 9", 5)}
    error = ChildFailedError("train", failures)
    assert str(error) == "train failed on rank 3 (local rank 1): killed by signal 9"
    assert error.get_first_failure() == (3, failures[3])
