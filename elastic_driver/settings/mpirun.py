"""Settings for a job that mpirun starts (``--mpi``), and the flags that may be combined with that.

Owns which flags are invalid there: the ranks of such a job never change, and mpirun starts, watches and ends them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_driver.errors import SettingsError

_ALLOWED = frozenset(
    {
        "binding_args",
        "command",
        "config_file",
        "disable_cache",
        "gloo_timeout_s",
        "history",
        "horovod_shim",
        "hostfile",
        "hosts",
        "log_level",
        "mpi",
        "mpi_args",
        "network_interfaces",
        "num_proc",
        "output_filename",
        "passed_env",
        "prefix_timestamp",
        "remarks",
        "rsh_agent",
        "slots_per_host",
        "ssh_identity_file",
        "ssh_port",
        "start_timeout_s",
        "verbose",
    }
)


@dataclass(frozen=True, slots=True)
class Mpirun:
    """How to call mpirun.

    Attributes:
        args: further arguments (--mpi-args).
        binding: arguments that bind ranks to processors, instead of our own (--binding-args).
        names_hosts: whether the user has named hosts; else a cluster's allocation may.
        start_timeout_s: the user's value; None if not given.
    """

    args: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()
    names_hosts: bool = False
    start_timeout_s: float | None = None


def read_mpirun(chosen: Mapping[str, Any], tuning: frozenset[str], flag_of: Callable[[str], str]) -> Mpirun:
    """Parse the flags given with --mpi.

    Args:
        chosen: all given values, by name.
        tuning: names of the values exported to the workers.
        flag_of: returns the flag of a name.

    Raises:
        SettingsError: a flag cannot be combined with --mpi, or cannot be parsed.
    """
    strange = sorted(name for name in chosen if chosen[name] and name not in _ALLOWED and name not in tuning)
    if strange:
        raise SettingsError(
            f"cannot use {flag_of(strange[0])} with --mpi: mpirun starts, watches and ends that job, which is not "
            "elastic; use only one of the two"
        )
    return Mpirun(
        _words(chosen, "mpi_args"),
        _words(chosen, "binding_args"),
        names_hosts=any(chosen.get(name) is not None for name in ("hosts", "hostfile")),
        start_timeout_s=chosen.get("start_timeout_s"),
    )


def _words(chosen: Mapping[str, Any], name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(chosen.get(name) or ""))
    except ValueError as error:
        raise SettingsError(f"cannot read --{name.replace('_', '-')}: {error}") from None
