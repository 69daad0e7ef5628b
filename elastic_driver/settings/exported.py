"""Flags that become workers' variables: tuning, logging, and others that Horovod's users expect.

Owns the names of the variables and the format of their values. Flags not given set nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_driver.errors import SettingsError
from elastic_driver.settings.settings import FLAGS

_MB = 1 << 20
# Workers parse them as 64-bit integers, in bytes where a flag has MB.
_MOST = 10**9

_VARIABLES: Mapping[str, str] = {
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "hierarchical_allgather": "HOROVOD_HIERARCHICAL_ALLGATHER",
    "torus_allreduce": "HOROVOD_TORUS_ALLREDUCE",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "mpi_threads_disable": "HOROVOD_MPI_THREADS_DISABLE",
    "num_nccl_streams": "HOROVOD_NUM_NCCL_STREAMS",
    "thread_affinity": "HOROVOD_THREAD_AFFINITY",
    "gloo_timeout_s": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "log_level": "HOROVOD_LOG_LEVEL",
}
_AUTOTUNE_VARIABLES: Mapping[str, str] = {
    "autotune_log_file": "HOROVOD_AUTOTUNE_LOG",
    "autotune_warmup_samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "autotune_steps_per_sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "autotune_bayes_opt_max_samples": "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "autotune_gaussian_process_noise": "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
}

TUNING = frozenset(_VARIABLES.keys() | _AUTOTUNE_VARIABLES.keys()) | {
    "autotune",
    "fusion_threshold_mb",
    "log_with_timestamp",
    "stall_check",
    "tcp",
    "timeline_filename",
    "timeline_mark_cycles",
}
"""The names of all exported values. Two of them are also fields of Settings."""


# Those that no worker of this package reads: its engine has no such feature. Horovod's own library does.
_OF_HOROVOD_ALONE = (
    *("cycle_time_ms", "cache_capacity", "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
    *("autotune", *_AUTOTUNE_VARIABLES, "mpi_threads_disable", "num_nccl_streams", "thread_affinity"),
)


def of_horovod_alone(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the given flags that affect only Horovod's own library.

    A flag that asks for what is never done (``--no-autotune``) is not among them.
    """
    given = [name for name in _OF_HOROVOD_ALONE if values.get(name) is not None and values[name] is not False]
    if "autotune" in given:  # its details are implied
        given = [name for name in given if name not in _AUTOTUNE_VARIABLES]
    flags = [f"--{name.replace('_', '-')}" for name in given]
    with_timestamp = values.get("log_with_timestamp")
    if with_timestamp is not None:
        flags.append("--log-with-timestamp" if with_timestamp else "--log-without-timestamp")
    return tuple(flags)


def exported(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that tuning and logging flags set for the workers.

    Args:
        values: by name, as in ``--cache-capacity`` -> ``cache_capacity``; others than :data:`TUNING` are ignored.

    Raises:
        SettingsError: a number is negative, or too large.
    """
    env: dict[str, str] = {}

    def put(variable: str, name: str) -> None:
        value = values.get(name)
        if value is None:
            return
        if isinstance(value, bool):
            env[variable] = "1" if value else "0"
            return
        if isinstance(value, int | float):
            flag = f"{FLAGS.get(name) or '--' + name.replace('_', '-')} {value}"
            if not value >= 0:  # false for NaN, too
                raise SettingsError(f"{flag} is not a number, 0 or above")
            if value > _MOST:
                raise SettingsError(f"{flag} is above the maximum of {_MOST}")
        env[variable] = str(value)

    for name, variable in _VARIABLES.items():
        put(variable, name)
    put("HOROVOD_FUSION_THRESHOLD", "fusion_threshold_mb")
    if "HOROVOD_FUSION_THRESHOLD" in env:
        env["HOROVOD_FUSION_THRESHOLD"] = str(values["fusion_threshold_mb"] * _MB)
    put("HOROVOD_AUTOTUNE", "autotune")
    if values.get("autotune"):
        noise = values.get("autotune_gaussian_process_noise")
        if noise is not None and not 0 <= noise <= 1:
            raise SettingsError(f"--autotune-gaussian-process-noise {noise} is not within 0 to 1")
        for name, variable in _AUTOTUNE_VARIABLES.items():
            put(variable, name)
    put("HOROVOD_TIMELINE", "timeline_filename")
    if values.get("timeline_filename"):
        put("HOROVOD_TIMELINE_MARK_CYCLES", "timeline_mark_cycles")
    if values.get("stall_check") is not None:
        env["HOROVOD_STALL_CHECK_DISABLE"] = "0" if values["stall_check"] else "1"
    if values.get("log_with_timestamp") is not None:
        env["HOROVOD_LOG_HIDE_TIME"] = "0" if values["log_with_timestamp"] else "1"
    if values.get("tcp"):
        env["NCCL_IB_DISABLE"] = "1"
    return env
