"""``elastic_driver.elastic_launch``: the counterpart of ``torch.distributed.launcher.api``, with our driver.

Owns the two names that programs import from that module, and the errors that they expect. The job is the one that
``elasticrun`` runs with torchrun's flags (:mod:`elastic_driver.settings.torchrun_options` defines them); a function
and its results are transferred as those of ``elastic_driver.run``. Imports torch only to raise its own error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import cloudpickle

from elastic_driver.errors import ElasticError, JobFailedError, SettingsError
from elastic_driver.function.launch import LOCAL, ended_job, exit_code, last_message, read_events
from elastic_driver.function.outcome import RESTARTED, Outcome, Raised, Returned, read_all
from elastic_driver.function.wrapping import unhooked
from elastic_driver.hosts import WorkerId
from elastic_driver.settings.torchrun_options import OPTIONS
from elastic_driver.words import OnChange

_NO_FILE = "<N/A>"
# Signals sent to a program in order to stop the job that it runs.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass
class LaunchConfig:
    """Has the attributes of ``torch.distributed.launcher.api.LaunchConfig``, which may be used instead.

    Attributes:
        min_nodes, max_nodes: number of nodes. If there are several, each makes this same call.
        nproc_per_node: number of workers on each node.
        logs_specs: an object like torch's ``DefaultLogsSpecs``; None to write to this process's own output.
        run_id, role, rdzv_endpoint, rdzv_backend, rdzv_configs, max_restarts, monitor_interval, start_method,
            log_line_prefix_template, local_addr, event_log_handler, numa_options, signals_to_handle,
            duplicate_stdout_filters, duplicate_stderr_filters, virtual_local_rank, shutdown_timeout: as the flags of
            elasticrun. torch has "etcd" for the backend when none is given.
        rdzv_timeout: seconds to wait for what the job needs to start; -1 for ``rdzv_configs["timeout"]``.
        metrics_cfg: accepted without effect.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "c10d"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout


@dataclass
class ProcessFailure:
    """How a worker failed; torch's class of this name has the same attributes.

    Attributes:
        local_rank: its place on its host.
        pid: of its process.
        exitcode: its exit code, or minus the number of the signal that killed it.
        error_file: a file with its exception, in the format of ``@record``; "<N/A>" for none.
        message: the exception, or how the process ended.
        timestamp: unix seconds.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    message: str
    timestamp: int


class ChildFailedError(ElasticError):
    """Workers have failed, and the job with them. Raised if torch, which has a class of this name, is not installed.

    Attributes:
        name: of the function or command.
        failures: by global rank, in order of time.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        rank, first = next(iter(failures.items()))
        super().__init__(f"{name} failed on rank {rank} (local rank {first.local_rank}): {first.message}")
        self.name = name
        self.failures = failures

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank of the first failure in time, and that failure."""
        return next(iter(self.failures.items()))


class elastic_launch:
    """Calls a function, or runs a command, as workers of torchrun: ``elastic_launch(config, fn)(*args)``.

    The workers are restarted: after a failure all of them are stopped, and the function is called again, up to
    ``max_restarts`` times. The function may call ``torch.distributed.init_process_group()``. The function, its
    arguments and its results are pickled with cloudpickle.

    Args:
        config: a LaunchConfig, ours or torch's.
        entrypoint: a function; or a program or a Python file, which gets the arguments of the call.
        health_check_server: not supported.
    """

    def __init__(
        self, config: Any, entrypoint: Callable[..., Any] | str | None, health_check_server: object = None
    ) -> None:
        if health_check_server is not None:
            raise SettingsError(
                "elastic_launch does not support health_check_server: use elasticrun status to monitor the job"
            )
        if not callable(entrypoint) and not isinstance(entrypoint, str):
            raise SettingsError(f"elastic_launch cannot run {entrypoint!r}: it is neither a function nor a command")
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the workers. Blocks until all of them have ended.

        Returns:
            The results of the function, by global rank; None for a worker that exited by ``sys.exit(0)``, and for each
            worker of a command. With several nodes, each gets the results of its own workers, and none for a command.

        Raises:
            SettingsError: the config, or the command, is invalid.
            ChildFailedError: a worker failed, and no restarts remained. torch's class, if torch is installed.
            JobFailedError: the job failed in another way.
            KeyboardInterrupt: Ctrl-C.
            SystemExit: SIGTERM or SIGHUP, once the workers have ended; unless this process has handlers for them.
        """
        entrypoint, flags = self._entrypoint, flags_of(self._config)
        call = cloudpickle.dumps((entrypoint, args, {})) if callable(entrypoint) else b""
        command = (
            (sys.executable, "-m", "elastic_driver.function.worker", RESTARTED)
            if callable(entrypoint)
            else (entrypoint, *map(str, args))
        )
        given = {
            "torchrun": flags,
            "command": command,
            "on_change": OnChange.RESTART.value,
            "log_level": "WARNING",
        }
        # A program's explicit arguments are complete: torch reads these variables in torchrun only.
        environ = {name: value for name, value in unhooked(os.environ).items() if name not in _VARIABLES}
        is_one = "nnodes" not in flags
        with ended_job(given, environ, call, signals=_ENDING) as (folder, events):
            code, happened = exit_code(folder), read_events(events)
            outcomes = read_all(folder if is_one else folder / LOCAL)
            if code:
                failures = failures_of(outcomes, happened) if happened else raised_of(outcomes)
                if not failures:
                    raise JobFailedError(last_message(events), code)
                raise _error(_name_of(entrypoint, args), failures, flags.get("log_dir"))
            everybody = range(int(flags["nproc_per_node"])) if is_one else ()
            return dict.fromkeys(everybody) | values_of(outcomes, happened)


def values_of(outcomes: Iterable[Outcome], events: Iterable[Mapping[str, Any]]) -> dict[int, Any]:
    """Return the results of the last generation of workers, by global rank, without those that did ``sys.exit(0)``.

    Args:
        outcomes: of the workers.
        events: of the job; empty on a node other than the driver's.
    """
    rounds = [event["round_id"] for event in events if event.get("event") == "round_formed"]
    every = [outcome for outcome in outcomes if isinstance(outcome, Returned)]
    last = max(rounds or [each.round_id for each in every], default=0)
    returned = [each for each in every if each.round_id == last]
    return {each.rank: cloudpickle.loads(each.value) for each in sorted(returned, key=lambda each: each.rank)}


_VARIABLES = frozenset(option.variable for option in OPTIONS.values())


def flags_of(config: Any) -> dict[str, str]:
    """Return torchrun's flags with the meaning of a LaunchConfig."""
    is_one = (config.min_nodes, config.max_nodes) == (1, 1)
    specs, numa = config.logs_specs, config.numa_options
    logs = _log_choices(specs)
    filters = logs.get("local_ranks_filter")
    flags: dict[str, object] = {
        "nproc_per_node": config.nproc_per_node,
        "nnodes": None if is_one else f"{config.min_nodes}:{config.max_nodes}",
        "rdzv_endpoint": None if is_one else config.rdzv_endpoint,
        "node_rank": None if is_one or config.rdzv_backend != "static" else config.rdzv_configs.get("rank"),
        "rdzv_id": config.run_id,
        "role": config.role,
        "rdzv_backend": config.rdzv_backend,
        "rdzv_conf": ",".join(f"{key}={value}" for key, value in config.rdzv_configs.items()),
        "max_restarts": config.max_restarts,
        "monitor_interval": config.monitor_interval,
        "start_method": config.start_method,
        "log_line_prefix_template": config.log_line_prefix_template,
        "local_addr": config.local_addr,
        "event_log_handler": config.event_log_handler,
        "numa_binding": None if numa is None else _text(numa.affinity_mode),
        "signals_to_handle": config.signals_to_handle,
        "duplicate_stdout_filters": _filters(config.duplicate_stdout_filters),
        "duplicate_stderr_filters": _filters(config.duplicate_stderr_filters),
        "virtual_local_rank": "1" if config.virtual_local_rank else None,
        # Attributes that only newer versions of torch have.
        "shutdown_timeout": getattr(config, "shutdown_timeout", None),
        "log_dir": logs.get("log_dir"),
        "redirects": _streams(logs.get("redirects") or 0),
        "tee": _streams(logs.get("tee") or 0),
        "local_ranks_filter": ",".join(str(rank) for rank in sorted(filters)) if filters else None,
    }
    return {name: str(value) for name, value in flags.items() if value not in (None, "")}


def _log_choices(specs: Any) -> Mapping[str, Any]:
    if specs is None:
        return {}
    from elastic_driver.torch_private.agents import log_choices  # late: a program with such specs has imported torch

    return log_choices(specs)


def _text(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def _filters(texts: Iterable[str] | None) -> str | None:
    return ",".join(text.replace(",", ",,") for text in texts) if texts else None


def _streams(chosen: int | Mapping[int, int]) -> str:
    if isinstance(chosen, Mapping):
        return ",".join(f"{rank}:{int(bits)}" for rank, bits in chosen.items()) or "0"
    return str(int(chosen))


def _name_of(entrypoint: Callable[..., Any] | str, args: tuple[Any, ...]) -> str:
    if isinstance(entrypoint, str):
        words = [str(word) for word in args if not str(word).startswith("-")]
        return words[0] if entrypoint == sys.executable and words else entrypoint
    return getattr(entrypoint, "__name__", repr(entrypoint))


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker that failed.

    Attributes:
        rank, local_rank: its global rank, and its rank on its host.
        pid: of its process.
        exitcode: its exit code, or minus the number of the signal.
        time: unix seconds.
        raised: the exception of the function there; None if unknown.
    """

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    time: float
    raised: Raised | None = None


def failures_of(outcomes: Iterable[Outcome], events: Iterable[Mapping[str, Any]]) -> list[Failed]:
    """Return the failures in the last generation of workers, in order of time.

    Args:
        outcomes: of the workers.
        events: of the job.
    """
    raised = {
        outcome.place.worker: outcome
        for outcome in outcomes
        if isinstance(outcome, Raised) and outcome.place is not None
    }
    ranks: dict[str, int] = {}
    ended: list[tuple[str, Mapping[str, Any]]] = []
    for event in events:
        match event.get("event"):
            case "round_formed":
                # Workers that failed before this round have been restarted.
                ranks = {member["worker"]: member["rank"] for member in event["members"]}
                ended = [each for each in ended if each[0] in ranks]
            case "worker_exited" if event["returncode"] and not event["expected"]:
                ended.append((event["worker"], event))
            case "first_failure" if event["rank"] is not None:
                ranks.setdefault(event["worker"], event["rank"])
            case _:
                pass
    found: list[Failed] = []
    for key, event in ended:
        slot, place = WorkerId.parse(key).slot, raised[key].place if key in raised else None
        if place is None:
            failed = Failed(ranks.get(key, slot), slot, event["pid"], event["returncode"], event["time"])
        else:
            failed = Failed(place.rank, place.local_rank, place.pid, event["returncode"], place.time, raised[key])
        found.append(failed)
    return sorted(found, key=lambda failed: failed.time)


def raised_of(outcomes: Iterable[Outcome]) -> list[Failed]:
    """Return the exceptions in the last generation of workers, for a node that has no events of the job.

    Args:
        outcomes: of the workers.
    """
    raised = [
        (outcome.place, outcome) for outcome in outcomes if isinstance(outcome, Raised) and outcome.place is not None
    ]
    last = max((place.round_id for place, _ in raised), default=0)
    found = [
        Failed(place.rank, place.local_rank, place.pid, 1, place.time, each)
        for place, each in raised
        if place.round_id == last
    ]
    return sorted(found, key=lambda failed: failed.time)


def _error(name: str, failures: list[Failed], log_dir: str | None) -> Exception:
    """Return torch's own error if torch is installed: programs catch it by its class."""
    folder: Path | None = None
    if any(failed.raised is not None for failed in failures):
        # These files stay, as under torchrun: the program that catches the error may read them.
        folder = Path(tempfile.mkdtemp(prefix="errors_", dir=log_dir if log_dir and Path(log_dir).is_dir() else None))
    files = {failed.rank: _write_error(folder, failed) for failed in failures}
    try:
        from torch.distributed.elastic.multiprocessing import errors
    except ImportError:
        return ChildFailedError(
            name,
            {
                failed.rank: ProcessFailure(
                    failed.local_rank,
                    failed.pid,
                    failed.exitcode,
                    files[failed.rank],
                    _message(failed),
                    int(failed.time),
                )
                for failed in failures
            },
        )
    theirs = {
        failed.rank: errors.ProcessFailure(failed.local_rank, failed.pid, failed.exitcode, files[failed.rank])
        for failed in failures
    }
    return errors.ChildFailedError(name, theirs)


def _message(failed: Failed) -> str:
    if failed.raised is not None:
        return failed.raised.traceback.strip().splitlines()[-1]
    return f"killed by signal {-failed.exitcode}" if failed.exitcode < 0 else f"exited with code {failed.exitcode}"


def _write_error(folder: Path | None, failed: Failed) -> str:
    """Write the file that ``torch.distributed.elastic.multiprocessing.errors.record`` writes. Returns its path."""
    if folder is None or failed.raised is None:
        return _NO_FILE
    extra = {"py_callstack": failed.raised.traceback, "timestamp": str(int(failed.time))}
    path = folder / f"{failed.rank}.json"
    path.write_text(json.dumps({"message": {"message": _message(failed), "extraInfo": extra}}))
    return str(path)
