"""The variables that a worker reads, and the list of them in docs/reference/environment.md."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from elastic_driver.cli.flags import build_parser
from elastic_driver.cli.main import ENV_OPTIONS
from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.driver.trainer_status import ENV_SWITCH
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.agent.clouds import ENV_AWS, ENV_AZURE, ENV_GCP
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY, Credential, Identity, JobKey, Role
from elastic_driver.rendezvous.environment import (
    ENV_CHIEF,
    ENV_PLACE,
    ENV_RENDEZVOUS,
    ENV_REPORT,
    ENV_REPORT_FD,
    ENV_ROUND,
    ENV_TASK,
    ENV_WORKER,
)
from elastic_driver.rendezvous.token_file import ENV_TOKEN_FILE
from elastic_driver.settings import mpi_launcher
from elastic_driver.settings import settings as driver_settings
from elastic_driver.settings.grace import ENV_GRACE
from elastic_driver.settings.join_token import ENV_JOIN_TOKEN, ENV_JOIN_TOKEN_FILE
from elastic_driver.words import Backend
from elastic_driver.worker import settings as module
from elastic_driver.worker.engine.native import EngineSettings
from elastic_driver.worker.settings import DEFAULTS, VARIABLES, WorkerSettings, read_worker_settings, worker_settings

pytestmark = [pytest.mark.unit]

DOCS = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
PLANNED = [f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]


def read(**environ: str) -> WorkerSettings:
    return WorkerSettings.from_environ(environ)


def test_without_variables_the_defaults_hold() -> None:
    assert read() == DEFAULTS
    assert read(**dict.fromkeys(VARIABLES, "")) == DEFAULTS, "what is empty is not set"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "2.5", 2.5),
        ("ELASTIC_DRIVER_PATIENCE_S", "0.5", 0.5),
        ("ELASTIC_DRIVER_HEARTBEAT_S", "0", 0.0),
        ("ELASTIC_DRIVER_BACKEND", "torch", Backend.TORCH),
        ("ELASTIC_DRIVER_PORT_RANGE", "5000-5009", (5000, 5009)),
        ("HOROVOD_FUSION_THRESHOLD", "1e3", 1000),
        ("HOROVOD_FUSION_THRESHOLD", "0", 0),
        ("HOROVOD_STALL_CHECK_DISABLE", "2", True),
        ("HOROVOD_STALL_CHECK_DISABLE", "False", False),
        ("HOROVOD_STALL_CHECK_DISABLE", " 1\n", True),
        ("HOROVOD_STALL_CHECK_DISABLE", "-1", False),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1.0", True),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "Y", True),
        ("HOROVOD_TIMELINE", "dynamic", ""),
        ("HOROVOD_TIMELINE", "trace.json", "trace.json"),
        ("ELASTIC_DRIVER_DURABLE_DIR", "/d", Path("/d")),
        ("ELASTIC_DRIVER_DURABLE_INTERVAL", "1e9", 1e9),
        ("ELASTIC_DRIVER_DURABLE_KEEP", "3", 3),
        ("ELASTIC_DRIVER_PAGE_LOCKED_BYTES", "0", 0),
    ],
)
def test_values(name: str, text: str, value: object) -> None:
    assert getattr(read(**{name: text}), VARIABLES[name]) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "never", "it must be a number of seconds above 0, at most 1e+07"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "0", "above 0"),
        ("ELASTIC_DRIVER_COLLECTIVE_TIMEOUT_S", "inf", "at most 1e+07"),
        ("ELASTIC_DRIVER_PATIENCE_S", "nan", "above 0"),
        ("ELASTIC_DRIVER_HEARTBEAT_S", "-1", "it must be a number from 0"),
        ("ELASTIC_DRIVER_ROUND", "1.5", "it must be the number of a round, or 0"),
        ("ELASTIC_DRIVER_BACKEND", "gloo", "it must be one of native, torch"),
        ("ELASTIC_DRIVER_ENGINE", "plain", "ELASTIC_DRIVER_BACKEND=torch runs without the native one"),
        ("ELASTIC_DRIVER_SHARED_MEMORY", "yes", "it must be one of on, staged, off"),
        ("ELASTIC_DRIVER_PORT_RANGE", "5000", "it must be a range of ports, LOW-HIGH"),
        ("ELASTIC_DRIVER_PORT_RANGE", "6000-5000", "within 1-65535, the lower port first"),
        ("ELASTIC_DRIVER_PORT_RANGE", "0-70000", "within 1-65535, the lower port first"),
        ("ELASTIC_DRIVER_DEVICE_LANE", "gpu", "it must be one of auto, cuda, off, cpu"),
        ("ELASTIC_DRIVER_DURABLE_EVERY", "0", "it must be an integer above 0"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "perhaps", "it must be one of 1, 0, true"),
    ],
)
def test_what_cannot_be_read(name: str, text: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(**{name: text})
    assert str(caught.value).startswith(f"cannot use {name}={text!r}: ")
    assert allowed in str(caught.value)


def test_all_that_cannot_be_read_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        read(
            HOROVOD_GLOO_TIMEOUT_SECONDS="soon",
            ELASTIC_DRIVER_DURABLE_KEEP="few",
            **{ENV_RANKS_KEY: "secret", ENV_RENDEZVOUS: "http://a:1", ENV_ROUND: "3"},
        )
    said = str(caught.value)
    for name in ("HOROVOD_GLOO_TIMEOUT_SECONDS='soon'", "ELASTIC_DRIVER_DURABLE_KEEP='few'", ENV_RANKS_KEY, ENV_WORKER):
        assert name in said
    assert "planned place" in said
    assert "secret" not in said
    assert "\n" not in said


def test_what_the_driver_sets_can_be_read() -> None:
    worker, slot, key = WorkerId("a", 1, 2), SlotInfo(3, 4, 1, 2, 0, 1), JobKey.new()
    address = JobAddress("unix:/agent", key, "job", "the driver")
    exported = {"ELASTIC_DRIVER_HEARTBEAT_S": "15"}
    env = OurDialect({}, exported=exported).environment(
        WorkerStart(worker, slot, ("a",), round_id=7, cores=4), job=address
    )
    settings = WorkerSettings.from_environ(env)
    assert (settings.rendezvous, settings.job, settings.owner) == ("unix:/agent", "job", "the driver")
    assert (settings.hostname, settings.round) == ("a", 7)
    assert (settings.planned, settings.elastic, settings.heartbeat_s) == (slot, True, 15.0)
    assert settings.credential == Credential(Identity(Role.WORKER, worker))
    assert settings.ranks_key == key.of_ranks()
    assert settings.ranks_key.hex() not in repr(settings)


def test_they_are_read_once_until_they_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_settings", None)
    monkeypatch.setenv("ELASTIC_DRIVER_MACHINE", "one")
    assert worker_settings().machine == "one"
    monkeypatch.setenv("ELASTIC_DRIVER_MACHINE", "other")
    assert worker_settings().machine == "one"
    assert read_worker_settings().machine == "other"
    assert worker_settings().machine == "other"


def test_the_engine_is_made_of_them() -> None:
    assert EngineSettings.of(DEFAULTS) == EngineSettings()
    quiet = dataclasses.replace(DEFAULTS, stall_check_disable=True, stall_fail_s=9.0, shared_memory="staged")
    assert EngineSettings.of(quiet) == EngineSettings(
        stall_warn_s=0.0, stall_fail_s=0.0, shared_memory=True, direct_reads=False
    )
    assert not EngineSettings.of(dataclasses.replace(DEFAULTS, shared_memory="off")).shared_memory


def documented() -> dict[str, set[str]]:
    """The defaults that docs/reference/environment.md gives for each variable, in its tables."""
    found: dict[str, set[str]] = {}
    for names, default in re.findall(r"^\| (`[A-Z].*?) \| (.*?) \|", DOCS, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            found.setdefault(name, set()).add(default)
    return found


def shown(value: object) -> str:
    if value in (None, ""):
        return "-"
    return str(int(value)) if isinstance(value, bool | int | float) else str(value)


def test_the_docs_list_each_variable_with_its_default() -> None:
    by_fields = {each.name: each.default for each in dataclasses.fields(driver_settings.Settings)}
    expected = {name: {shown(getattr(DEFAULTS, field))} for name, field in VARIABLES.items()}
    expected |= {key: {"-"} for key in (ENV_WORKER, ENV_RANKS_KEY, ENV_CHIEF, ENV_TASK, ENV_PLACE, *PLANNED)}
    expected |= {name: {"-"} for name in (ENV_JOIN_TOKEN, ENV_JOIN_TOKEN_FILE, ENV_OPTIONS, ENV_GRACE)}
    expected |= {name: {"-"} for name in mpi_launcher.VARIABLES}
    expected |= {name: {"-"} for name in (ENV_REPORT, ENV_REPORT_FD)}
    expected |= {ENV_SWITCH: {"on"}}
    expected |= {name: {"the clouds' own"} for name in (ENV_AWS, ENV_GCP, ENV_AZURE)}
    expected |= {name: {"-"} for name in (ENV_TOKEN_FILE, "ETCDCTL_ENDPOINTS", "ETCDCTL_CACERT")}
    expected |= {f"ETCDCTL_{name}": {"-"} for name in ("CERT", "KEY", "USER", "PASSWORD")}
    expected |= {"ELASTIC_DRIVER_AGENTS_ETCDCTL_USER": {"the driver's own"}}
    for field, name in driver_settings.VARIABLES.items():
        expected.setdefault(name, set()).add(shown(by_fields[field]))
    assert documented() == expected


def test_defaults_that_the_workers_own_stand_in_the_help() -> None:
    text = " ".join(build_parser().format_help().split())
    assert f"keep the last K commits on disk (default {DEFAULTS.durable_keep})" in text
    gloo = driver_settings.Settings.__dataclass_fields__["gloo_timeout_s"].default
    assert gloo == DEFAULTS.build_timeout_s, "both sides of one variable"


def test_nothing_else_of_the_workers_side_looks_into_the_environment() -> None:
    root = Path(module.__file__).parents[1]
    readers = {
        str(path.relative_to(root)): sorted(set(re.findall(r"environ(?:\.get\(|\[)([^),\]]+)", text)))
        for folder in ("worker", "torch", "function")
        for path in (root / folder).rglob("*.py")
        if "os.environ" in (text := path.read_text())
    }
    assert readers.pop("worker/settings.py") is not None
    assert readers == {
        "function/launch.py": ["ENV_OUTCOMES"],  # the driver's environment, handed on without an outer job's
        "function/torch_launcher.py": [],  # likewise
        "function/worker.py": [
            '"LOCAL_RANK"',
            '"RANK"',
            '"WORLD_SIZE"',
            "ENV_OUTCOMES",
            "ENV_ROUND",
            "ENV_WORKER",
        ],  # without init()
        "worker/rounds/runtime.py": [],  # written to: what torch's NCCL groups read
        "worker/api/figures.py": ["ENV_REPORT", "ENV_REPORT_FD"],  # likewise
        "worker/checkpoint.py": ['"RANK"', '"WORLD_SIZE"', "ENV_RENDEZVOUS", "ENV_ROUND", "ENV_WORKER"],  # likewise
        "torch/device/lane.py": ['"CUDA_VISIBLE_DEVICES"'],  # CUDA's own
        "torch/distributed/group.py": ["_GLOO_INTERFACE"],  # torch's own
        "torch/distributed/sockets.py": ['"TORCH_GLOO_LAZY_INIT"'],  # torch's own
    }
