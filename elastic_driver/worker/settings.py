"""The environment variables of a worker: name, unit, default, and accepted values of each.

Owns ``WorkerSettings`` and the process's one copy of it, read when the worker initializes. All worker code gets its
variables here; nothing else on a worker's side reads our or Horovod's variables. docs/reference/environment.md lists
them for users.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import SlotInfo
from elastic_driver.rendezvous.credentials import Credential, ranks_key
from elastic_driver.rendezvous.environment import (
    ENV_HEARTBEAT,
    ENV_HOST_TIMEOUT,
    ENV_JOB,
    ENV_MAY_CHANGE,
    ENV_OWNER,
    ENV_PATIENCE,
    ENV_PLACE,
    ENV_PORTS,
    ENV_RENDEZVOUS,
    ENV_RESTARTED,
    ENV_ROUND,
    ENV_VITALS,
    ENV_WARM,
    GLOO_TIMEOUT_S,
    MOST_GLOO_S,
    PATIENCE_S,
)
from elastic_driver.words import Backend

ENV_LANE = "ELASTIC_DRIVER_DEVICE_LANE"
ENV_PAGE_LOCKED = "ELASTIC_DRIVER_PAGE_LOCKED_BYTES"

_MOST_WAIT_S = 1e9  # elasticrun's limit
_MOST = 1 << 50  # elasticrun's limit of MB, in bytes
_ON, _OFF = ("true", "t", "yes", "y", "on"), ("false", "f", "no", "n", "off")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST:
        raise ValueError(f"it must be a number from 0 to {_MOST:g}")
    return value


def _bytes(text: str) -> int:
    return int(_number(text))


def _seconds(most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise ValueError(f"it must be a number of seconds above 0, at most {most:g}")
        return value

    return read


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MOST:
        raise ValueError("it must be an integer above 0")
    return int(text)


def _round(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST:
        raise ValueError("it must be the number of a round, or 0")
    return int(text)


def _switch(text: str) -> bool:
    word = text.strip().lower()
    with contextlib.suppress(ValueError):
        return float(word) > 0  # Horovod accepts any number above 0 as on
    if word not in (*_ON, *_OFF):
        raise ValueError(f"it must be one of 1, 0, {', '.join((*_ON, *_OFF))}")
    return word in _ON


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"it must be one of {', '.join(words)}")
        return text

    return read


def _backend(text: str) -> Backend:
    return Backend(_one_of(Backend.NATIVE, Backend.TORCH)(text))


def _timeline(text: str) -> str:
    # In Horovod this value only enables start_timeline: it is not a file.
    return "" if text.upper() == "DYNAMIC" else text


def _engine(text: str) -> str:
    if text == "plain":
        raise ValueError("this engine was removed; ELASTIC_DRIVER_BACKEND=torch runs without the native one")
    return text


def _ports(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not all(end.isascii() and end.isdecimal() and len(end) < 6 for end in (low, high)):
        raise ValueError("it must be a range of ports, LOW-HIGH")
    if not 1 <= int(low) <= int(high) <= 65535:
        raise ValueError("it must be a range of ports within 1-65535, the lower port first")
    return int(low), int(high)


def _by(variable: str, read: Callable[[str], Any]) -> Mapping[str, Any]:
    """Return a field's metadata: the variable's name, and the parser of its text, which raises ValueError with a
    reason.
    """
    return {"variable": variable, "read": read}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings in a worker's environment. An empty variable counts as not set.

    Attributes:
        rendezvous: URL of the driver's HTTP server, or of rank 0's in a job started by mpirun or srun; "" in a job of
            one.
        job: the job's id.
        round: the round that ran when this worker was started; 0 for none.
        port_range: the lowest and the highest port that workers may listen on; None for any.
        heartbeat_s: longest time between two heartbeats to the driver, seconds; 0 for the long poll's only.
        host_timeout_s: how long another member's machine may acknowledge nothing before it is given up; 0 for no limit.
        owner: the driver's process (:mod:`elastic_driver.system.process_name`).
        patience_s: how long a driver of unknown state may be silent, seconds.
        vitals: the agent's file for this worker's vitals; "" for none.
        warm: set in a process that is held at its start so that workers can be forked from it.
        hostname: this machine's name in the job, for messages.
        elastic: whether a driver has started it.
        may_change: whether hosts may join and leave.
        build_timeout_s: time limit for connecting to the peers, seconds.
        collective_timeout_s: time limit of a collective operation, seconds.
        backend: the only backend to use; None for the best that all members have.
        engine: rejected if "plain", an engine that no longer exists.
        fusion_bytes: most bytes of small tensors that run together; 0 keeps all apart.
        stall_check_disable: whether to report no stalls (ranks that wait for others).
        stall_warn_s: when to report a stall, seconds; 0 never.
        stall_fail_s: when a stall fails the round, seconds; 0 never.
        shared_memory: between ranks on one machine: "on", "staged" (without reading peers' private memory) or "off".
        machine: any text; ranks with different ones share no memory, as if they were on different machines.
        timeline: file for the trace; "" for none.
        timeline_mark_cycles: whether the trace contains the engine's cycles.
        device_lane: how CUDA tensors are carried: "auto", "cuda", "off" or "cpu" (docs/devices.md).
        page_locked_bytes: most host memory that this worker page-locks, in bytes; None for its share.
        interface: network interface in jobs started by mpirun or srun: a name, an address or a network; "" for any.
        start_timeout_s: how long ranks of such a job wait for others to call ``init()``, seconds.
        durable_dir: folder for commits on disk; None for none.
        durable_every: commits from one on disk to the next; None not to count.
        durable_interval_s: seconds from one on disk to the next; None for no interval. With neither, every commit.
        durable_keep: how many commits are kept on disk.
        credential: authenticates this worker to its driver; None without a driver.
        ranks_key: authenticates workers to each other; empty without a driver.
        launched: whether this is a rank of a job started by mpirun or srun, which rank 0 serves.
        planned: the place that the driver planned for a worker that joins late; None for others.
    """

    rendezvous: str = field(default="", metadata=_by(ENV_RENDEZVOUS, str))
    job: str = field(default="", metadata=_by(ENV_JOB, str))
    round: int = field(default=0, metadata=_by(ENV_ROUND, _round))
    restarted: bool = field(default=False, metadata=_by(ENV_RESTARTED, _switch))
    port_range: tuple[int, int] | None = field(default=None, metadata=_by(ENV_PORTS, _ports))
    heartbeat_s: float = field(default=0.0, metadata=_by(ENV_HEARTBEAT, _number))
    host_timeout_s: float = field(default=0.0, metadata=_by(ENV_HOST_TIMEOUT, _number))
    owner: str = field(default="", metadata=_by(ENV_OWNER, str))
    patience_s: float = field(default=PATIENCE_S, metadata=_by(ENV_PATIENCE, _seconds(_MOST_WAIT_S)))
    vitals: str = field(default="", metadata=_by(ENV_VITALS, str))
    warm: str = field(default="", metadata=_by(ENV_WARM, str))
    hostname: str = field(default="", metadata=_by("HOROVOD_HOSTNAME", str))
    elastic: bool = field(default=False, metadata=_by("HOROVOD_ELASTIC", _switch))
    may_change: bool = field(default=False, metadata=_by(ENV_MAY_CHANGE, _switch))
    # Horovod's default, as those of fusion and stall checks.
    build_timeout_s: float = field(
        default=GLOO_TIMEOUT_S, metadata=_by("HOROVOD_GLOO_TIMEOUT_SECONDS", _seconds(MOST_GLOO_S))
    )
    # torch.distributed's default for a process group.
    collective_timeout_s: float = field(
        default=1800.0, metadata=_by("ELASTIC_DRIVER_COLLECTIVE_TIMEOUT_S", _seconds(MOST_GLOO_S))
    )
    backend: Backend | None = field(default=None, metadata=_by("ELASTIC_DRIVER_BACKEND", _backend))
    engine: str = field(default="", metadata=_by("ELASTIC_DRIVER_ENGINE", _engine))
    fusion_bytes: int = field(default=64 << 20, metadata=_by("HOROVOD_FUSION_THRESHOLD", _bytes))
    stall_check_disable: bool = field(default=False, metadata=_by("HOROVOD_STALL_CHECK_DISABLE", _switch))
    stall_warn_s: float = field(default=60.0, metadata=_by("HOROVOD_STALL_CHECK_TIME_SECONDS", _number))
    stall_fail_s: float = field(default=0.0, metadata=_by("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _number))
    shared_memory: str = field(
        default="on", metadata=_by("ELASTIC_DRIVER_SHARED_MEMORY", _one_of("on", "staged", "off"))
    )
    machine: str = field(default="", metadata=_by("ELASTIC_DRIVER_MACHINE", str))
    timeline: str = field(default="", metadata=_by("HOROVOD_TIMELINE", _timeline))
    timeline_mark_cycles: bool = field(default=False, metadata=_by("HOROVOD_TIMELINE_MARK_CYCLES", _switch))
    device_lane: str = field(default="auto", metadata=_by(ENV_LANE, _one_of("auto", "cuda", "off", "cpu")))
    page_locked_bytes: int | None = field(default=None, metadata=_by(ENV_PAGE_LOCKED, _bytes))
    interface: str = field(default="", metadata=_by("HOROVOD_GLOO_IFACE", str))
    start_timeout_s: float = field(default=300.0, metadata=_by("HOROVOD_START_TIMEOUT", _seconds(_MOST_WAIT_S)))
    durable_dir: Path | None = field(default=None, metadata=_by("ELASTIC_DRIVER_DURABLE_DIR", Path))
    durable_every: int | None = field(default=None, metadata=_by("ELASTIC_DRIVER_DURABLE_EVERY", _count))
    durable_interval_s: float | None = field(
        default=None, metadata=_by("ELASTIC_DRIVER_DURABLE_INTERVAL", _seconds(_MOST_WAIT_S))
    )
    durable_keep: int = field(default=2, metadata=_by("ELASTIC_DRIVER_DURABLE_KEEP", _count))
    credential: Credential | None = None
    ranks_key: bytes = field(default=b"", repr=False)
    launched: bool = False
    planned: SlotInfo | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> WorkerSettings:
        """Read all variables.

        Raises:
            SettingsError: some cannot be used; one line that names each, its value, and what is allowed.
        """
        values: dict[str, Any] = {}
        problems: list[str] = []
        for setting in fields(cls):
            name = setting.metadata.get("variable", "")
            text = environ.get(name, "")
            if not text:
                continue
            try:
                values[setting.name] = setting.metadata["read"](text)
            except ValueError as error:
                problems.append(f"cannot use {name}={text!r}: {error}")

        def read(name: str, read_it: Callable[[Mapping[str, str]], Any]) -> None:
            try:
                values[name] = read_it(environ)
            except (SettingsError, ValueError) as error:
                problems.append(str(error))

        read("ranks_key", ranks_key)
        if values.get("rendezvous"):
            read("credential", Credential.of_worker)
            if environ.get(ENV_PLACE):  # a driver has started it
                values.setdefault("elastic", True)
            if (mine := values.get("credential")) is not None:
                values.setdefault("hostname", mine.identity.worker.hostname)
        # A restarted worker was started for its round, and joins no running one.
        if values.get("round") and not values.get("restarted"):
            read("planned", _planned_slot)
        if problems:
            raise SettingsError("; ".join(problems))
        return cls(**values)


DEFAULTS = WorkerSettings()
"""The settings of an empty environment."""

VARIABLES: Mapping[str, str] = {
    setting.metadata["variable"]: setting.name for setting in fields(WorkerSettings) if setting.metadata
}
"""The field of each variable."""


def _planned_slot(environ: Mapping[str, str]) -> SlotInfo:
    """Return the place that the driver planned when it started this process.

    Raises:
        SettingsError: the variable is missing, or does not hold six numbers.
    """
    try:
        return SlotInfo(*map(int, environ[ENV_PLACE].split(",")))
    except (KeyError, ValueError, TypeError) as error:
        raise SettingsError(f"cannot read this worker's planned place from {ENV_PLACE}: {error}") from error


_settings: WorkerSettings | None = None


def worker_settings() -> WorkerSettings:
    """Return this process's settings, read when it last initialized, or else when they were first needed.

    Raises:
        SettingsError: a variable cannot be used.
    """
    return _settings or read_worker_settings()


def read_worker_settings() -> WorkerSettings:
    """Read the environment now, for all later callers: programs set variables before they initialize.

    Raises:
        SettingsError: a variable cannot be used.
    """
    global _settings
    _settings = WorkerSettings.from_environ(os.environ)
    return _settings


def use_worker_settings(settings: WorkerSettings) -> None:
    """Replace this process's settings until the environment is read again: for a job whose ranks met without a
    driver.
    """
    global _settings
    _settings = settings


def way_to_driver() -> tuple[str, Credential]:
    """Return the driver's URL and this process's credential, whatever the other variables contain.

    Raises:
        SettingsError: this process was not started by a driver.
    """
    return os.environ.get(ENV_RENDEZVOUS, ""), Credential.of_worker(os.environ)
