"""Starting a job's ranks by mpirun: finds out which mpirun it is, and composes its command line.

Owns the words of the command line, by implementation: Open MPI's own launcher, and hydra, of MPICH and others. Pure,
except for finding mpirun. The ranks' own part is in worker/launched/.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.hosts import Host
from elastic_driver.settings.settings import Settings

# Until the launcher has reported its version. It starts nothing for that.
_VERSION_S = 30.0
# From so many hosts on Open MPI's starts by tree and in turns cost more than they save; Horovod's figure.
_MANY_HOSTS = 64
# If a cluster's manager has allocated hosts to this job, mpirun uses them unless it is given others.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


class Flavour(Enum):
    """The implementation of the launcher."""

    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH"


@dataclass(frozen=True, slots=True)
class Call:
    """The command to execute.

    Attributes:
        words: the program's path first.
        environ: its environment.
    """

    words: tuple[str, ...]
    environ: Mapping[str, str]


def find_mpirun(environ: Mapping[str, str]) -> tuple[str, Flavour]:
    """Return the mpirun on this environment's PATH. Blocks until it has reported its version.

    Raises:
        SettingsError: there is none, or it is unknown.
    """
    path = shutil.which("mpirun", path=environ.get("PATH"))
    if path is None:
        raise SettingsError(
            "cannot find mpirun on the PATH (--mpi): install Open MPI or MPICH (Debian: openmpi-bin, mpich), or omit "
            "--mpi: elasticrun does not need MPI"
        )
    try:
        said = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_S,
            env=dict(environ),
            check=False,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"cannot determine the MPI implementation of {path} (--mpi): {in_words(error)}") from error
    return path, flavour_of(path, said)


def flavour_of(path: str, said: str) -> Flavour:
    """Return the implementation, given what it reports as its version.

    Raises:
        SettingsError: it is unknown.
    """
    if "Open MPI" in said or "OpenRTE" in said:
        return Flavour.OPEN_MPI
    if any(name in said for name in ("HYDRA", "MPICH", "Intel(R) MPI")):
        return Flavour.HYDRA
    first = said.strip().partition("\n")[0][:80]
    raise SettingsError(
        f"cannot use {path} (--mpi): it is neither Open MPI nor MPICH: mpirun --version prints {first!r}"
    )


def call_of(
    settings: Settings,
    path: str,
    flavour: Flavour,
    *,
    environ: Mapping[str, str],
    names: Sequence[str],
    is_root: bool,
) -> Call:
    """Return the command that starts a job's ranks.

    Args:
        settings: of a job with ``mpi``.
        path: mpirun's.
        flavour: its kind.
        environ: of the ranks; mpirun is started in it.
        names: the variables to pass to other machines.
        is_root: whether the user is root, for whom Open MPI starts nothing unless a flag allows it.

    Raises:
        SettingsError: this mpirun does not support the settings.
    """
    assert settings.mpi is not None
    hosts = settings.hosts or ()
    if not settings.mpi.names_hosts and any(environ.get(name) for name in _ALLOCATIONS):
        hosts = ()
    make = _open_mpi if flavour is Flavour.OPEN_MPI else _hydra
    more = dict(environ)
    words = make(settings, hosts, names, more, is_root=is_root)
    return Call((path, "-np", str(settings.num_proc), *words, *settings.mpi.args, *settings.command), more)


def _open_mpi(
    settings: Settings, hosts: Sequence[Host], names: Sequence[str], environ: dict[str, str], *, is_root: bool
) -> list[str]:
    assert settings.mpi is not None
    words = ["--tag-output", *(["--allow-run-as-root"] if is_root else [])]
    if settings.prefix_timestamp:
        words.append("--timestamp-output")
    if settings.output_filename is not None:
        words += ["--output-filename", str(settings.output_filename)]
    if hosts:
        words += ["-H", _listed(hosts)]
    words += settings.mpi.binding or ("-bind-to", "none", "-map-by", "slot")
    ssh = _ssh_words(settings)
    if ssh:
        words += ["-mca", "plm_rsh_args", shlex.join(ssh)]
    if settings.rsh_agent:
        words += ["-mca", "plm_rsh_agent", shlex.join(settings.rsh_agent)]
    if settings.network_interfaces:
        for part in ("btl", "oob"):
            words += ["-mca", f"{part}_tcp_if_include", ",".join(settings.network_interfaces)]
    if len(hosts) >= _MANY_HOSTS:
        words += ["-mca", "plm_rsh_no_tree_spawn", "true", "-mca", "plm_rsh_num_concurrent", str(len(hosts))]
    for name in names:
        words += ["-x", name]
    return words


def _hydra(
    settings: Settings, hosts: Sequence[Host], names: Sequence[str], environ: dict[str, str], *, is_root: bool
) -> list[str]:
    assert settings.mpi is not None
    for given, flag in (
        (settings.prefix_timestamp, "--prefix-output-with-timestamp"),
        (settings.output_filename, "--output-filename"),
    ):
        if given:
            raise SettingsError(f"cannot use {flag} with --mpi and MPICH's mpirun, which has no equivalent")
    words = ["-prepend-rank"]
    if hosts:
        words += ["-hosts", _listed(hosts)]
    words += settings.mpi.binding
    if ssh := _ssh_words(settings):
        words += ["-launcher", "ssh"]
        environ["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(ssh)
    if settings.rsh_agent:
        if len(settings.rsh_agent) > 1:
            raise SettingsError(
                "cannot use --rsh-agent with several words and MPICH's mpirun, which accepts only a path"
            )
        words += ["-launcher", "ssh", "-launcher-exec", settings.rsh_agent[0]]
    if settings.network_interfaces:
        words += ["-iface", settings.network_interfaces[0]]
    if names:
        # Otherwise it passes all of its own variables, some of which are meant for this machine only.
        words += ["-genvlist", ",".join(names)]
    return words


def _listed(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _ssh_words(settings: Settings) -> list[str]:
    words = []
    if settings.ssh_port is not None:
        words += ["-p", str(settings.ssh_port)]
    if settings.ssh_identity_file:
        words += ["-i", settings.ssh_identity_file]
    return words
