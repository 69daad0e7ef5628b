"""Settings of a job on several machines: their parsing and checks, and which variables are sent to workers.

Owns the notations of interfaces, port ranges and ``-x``, and the filter for the environment of workers on other
machines. Touches neither disk nor network: whether an interface exists is found out on its machine.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence

from elastic_driver.errors import SettingsError
from elastic_driver.etcd.credentials import CREDENTIALS

STDIN = "stdin"
BOOTSTRAPS = (STDIN, "command")
"""How an agent started by the driver gets its parameters: on its standard input, or as a one-time ticket in its
command.
"""

AUTO_LAUNCHER, NO_LAUNCHER = LAUNCHERS = ("auto", "none")
"""Whether the driver starts agents on listed hosts, or they join by themselves."""

# The agent checks acknowledgements every 0.5 s, and they arrive every second.
LEAST_AGENT_TIMEOUT_S = 2.0
# Two leases in etcd: the next driver starts when the last one's lease is over, and then has to be found.
LEAST_AGENT_TIMEOUT_OF_ETCD_S = 10.0
LEAST_HOST_TIMEOUT_S = 2.0

_INTERFACE = re.compile(r"[^\s/]{1,15}")  # Linux's IFNAMSIZ, without the terminating zero
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Variables of the driver's shell, login and machine; another machine's own are right there, if it has any. Horovod also
# keeps back the first two and CUDA_VISIBLE_DEVICES.
_STAYS = re.compile(
    r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|PWD|SHLVL|_|HOME|USER|LOGNAME|SHELL|MAIL|HOSTNAME|TERM|DISPLAY"
    r"|XAUTHORITY|SSH_.*|XDG_.*|DBUS_SESSION_BUS_ADDRESS|OMPI_MCA_(plm|orte)_.*|ELASTIC_DRIVER_JOIN_TOKEN|_HOROVOD_SECRET_KEY"
    # Of a launcher pod: that it is one, and that it has no GPUs.
    r"|K_MPI_JOB_ROLE|I_MPI_(HYDRA_.*|PERHOST)|HYDRA_(HOST_FILE|LAUNCH_EXTRA_ARGS)"
    r"|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)"
    # Only drivers may have these.
    rf"|ELASTIC_DRIVER_BESIDE|{CREDENTIALS}"
)


# A driver's defaults for workers without their own; "" for any value, else only if the value is this one.
_DEFAULTS = {"OMP_NUM_THREADS": "", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def check_interface(flag: str, text: str) -> None:
    """Raise SettingsError unless this is an interface's name, an address, or a network such as ``10.0.0.0/8``."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        if not _INTERFACE.fullmatch(text) or re.fullmatch(r"[0-9.]+", text):
            raise SettingsError(
                f"{flag} {text!r} is not an interface name, an address or a network such as 10.0.0.0/8"
            ) from None


def read_port_range(text: str) -> tuple[int, int]:
    """Parse ``LOW-HIGH``, or one port. Raises ValueError with a reason for the user."""
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a range of ports such as 40000-40999")
    return int(match[1]), int(match[2] or match[1])


def check_port_range(flag: str, ports: tuple[int, int]) -> None:
    """Raise SettingsError unless these are a valid first and last port."""
    low, high = ports
    if not 1 <= low <= high <= 65535:
        raise SettingsError(f"{flag} {low}-{high} is not a range of ports from 1 to 65535, lower bound first")


def read_passed(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse ``-x NAME`` and ``-x NAME=VALUE``; the last one for a name wins.

    Raises:
        SettingsError: the name is invalid, or a variable without a value is not set here.
    """
    passed = {}
    for word in words:
        name, has_value, value = word.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise SettingsError(f"-x {word[:80]!r} does not begin with a variable name: write NAME or NAME=VALUE")
        if "\0" in value:
            raise SettingsError(f"-x {name}: its value contains a NUL byte")
        if not has_value and name not in environ:
            raise SettingsError(f"-x {name}: the variable is not set here; write -x {name}=VALUE or drop the flag")
        passed[name] = value if has_value else environ[name]
    return passed


def remote_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the driver's environment that workers on other machines get; ``-x`` adds to it."""
    return {name: value for name, value in environ.items() if _travels(name)}


def node_environment(own: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Merge the environment of a worker in a job of nodes: its node's own variables, overridden by the driver's.

    The node's own values win over the driver's defaults. On the PYTHONPATH the driver's folders come first.
    """
    env = {**own, **given}
    for name, value in _DEFAULTS.items():
        if name in own and value in ("", env[name]):
            env[name] = own[name]
    if "PYTHONPATH" in own and "PYTHONPATH" in given:
        entries = [*given["PYTHONPATH"].split(os.pathsep), *own["PYTHONPATH"].split(os.pathsep)]
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    return env


@functools.cache  # called for each of thousands of workers
def _travels(name: str) -> bool:
    return bool(_VARIABLE.fullmatch(name)) and not _STAYS.fullmatch(name)
