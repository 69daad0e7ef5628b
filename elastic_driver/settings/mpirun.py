"""What a user may say of a job that mpirun is to start (``--mpi``), and what goes with that.

Owns which flags mean nothing there: the ranks of such a job stay as they are, and mpirun starts, watches and ends them.
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
    """How mpirun is to be called.

    Attributes:
        args: more words for it (--mpi-args).
        binding: words that say which processors ranks run on, in place of our own (--binding-args).
        names_hosts: whether the user has named hosts; else an allocation of a cluster may have them.
        start_timeout_s: what the user gave for that; None for nothing.
    """

    args: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()
    names_hosts: bool = False
    start_timeout_s: float | None = None


def read_mpirun(chosen: Mapping[str, Any], tuning: frozenset[str], flag_of: Callable[[str], str]) -> Mpirun:
    """Reads what was given beside --mpi.

    Args:
        chosen: all that was given, by name.
        tuning: names of what is exported to the workers.
        flag_of: the flag of a name.

    Raises:
        SettingsError: something does not go with it, or cannot be read.
    """
    strange = sorted(name for name in chosen if chosen[name] and name not in _ALLOWED and name not in tuning)
    if strange:
        raise SettingsError(
            f"cannot use {flag_of(strange[0])} with --mpi: mpirun starts, watches and ends that job, whose ranks stay "
            "as they are; leave one of the two away"
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
