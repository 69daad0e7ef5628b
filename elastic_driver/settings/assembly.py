"""The only way to make Settings: combines flags or arguments, the config file and environment variables.

Owns the precedence (a flag or an argument over the config file, that over the environment), the conversion of texts to
values, and derived values (the hosts, the least and most workers). :mod:`elastic_driver.settings.settings` owns
defaults and checks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any

from elastic_driver.dialects.horovod import ENV_PROTOCOL
from elastic_driver.dialects.horovod_shim import ENV_SHIM
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.settings.exported import TUNING, exported, of_horovod_alone
from elastic_driver.settings.host_lists import HostList, parse_list, read_hostfile
from elastic_driver.settings.journal_place import KEY_FLAG, JournalPlace, place_of
from elastic_driver.settings.machines import read_passed, read_port_range
from elastic_driver.settings.mpi_launcher import given_hostfile, given_slots, is_launcher_pod
from elastic_driver.settings.mpirun import read_mpirun
from elastic_driver.settings.settings import FLAGS, VARIABLES, Settings, check_seconds
from elastic_driver.settings.torchrun_options import torchrun_values

# Given values that are not fields: handled here, or for Horovod's command line and without effect.
_READ_HERE = frozenset(
    {"config_file", "hostfile", "mpi", "gloo", "mpi_args", "binding_args", "jsrun", "min_slots", "max_slots"}
)
# Sources of hosts that are polled.
_SOURCES = ("discovery_script", "discovery_socket", "discovery")
# Flags that rule out an rsh agent, whatever a variable says.
_OTHER_THAN_RSH = frozenset({"launcher", "launcher_command", "ssh_port", "ssh_identity_file"})
_SWITCH = {"on": True, "1": True, "off": False, "0": False}
_WITHOUT_EFFECT = frozenset({"disable_cache"})
# The driver's process may have another working directory by the time it opens these.
_ABSOLUTE = frozenset({"durable_dir", "join_token_file", "operator_token_file"})


def integer(text: str) -> int:
    """Parse an integer. Raises ValueError with a reason for the user."""
    try:
        return int(text)
    except ValueError:
        # Python does not parse integers of thousands of digits.
        why = "has too many digits" if re.fullmatch(r"[+-]?[0-9]+", text) else "is not an integer"
        raise ValueError(f"{text[:40]!r} {why}") from None


def number(text: str) -> float:
    """Parse a number. Raises ValueError with a reason for the user."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a number") from None


_READERS: Mapping[str, Callable[[str], Any]] = {"int": integer, "float": number, "Path": Path}
# By the first word of a field's annotation. Other types are used as given.
_FIELDS: Mapping[str, Callable[[str], Any] | None] = {
    setting.name: _READERS.get(str(setting.type).partition(" ")[0]) for setting in fields(Settings)
}


def reader_of(name: str) -> Callable[[str], Any] | None:
    """Return the parser of a field's text; None for a field that is neither a number nor a path."""
    return _FIELDS[name]


def settings_from(given: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Make Settings from the user's input.

    Args:
        given: values by the names of Settings' fields and of the tuning flags, ``hosts`` as text, and ``config_file``,
            ``hostfile``, ``mpi``, ``gloo``, ``jsrun``, ``min_slots``, ``max_slots``; and ``torchrun``, the texts of
            torchrun's flags, with which its variables are read as well. None means not given.
        environ: the environment.

    Raises:
        SettingsError: a value is invalid; one line for the user.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("config_file"):
        from elastic_driver.settings.config_file import read_config_file  # late: YAML's reader takes a while to load

        chosen = {**read_config_file(Path(chosen["config_file"])), **chosen}
    flags = chosen.pop("torchrun", None)
    flags_of_nodes = False
    mpi = None
    if chosen.get("mpi"):
        if chosen.get("gloo"):
            raise SettingsError(
                "this job runs on Gloo only: drop --mpi (use_mpi) and the config file's 'controller: mpi'"
            )
        if flags:
            raise SettingsError("cannot use torchrun's flags with --mpi: use only one of the two")
        mpi = read_mpirun(chosen, TUNING, lambda name: FLAGS.get(name) or f"--{name.replace('_', '-')}")
    elif flags is not None:
        asked = torchrun_values(flags, environ, others=chosen)
        flags_of_nodes = "num_proc" in asked
        chosen |= asked
        if flags_of_nodes and not chosen.get("accept_agents"):
            # A single node has nobody to authenticate to, but its script may be for any number of nodes.
            chosen.pop("join_token_file", None)
    of_mpirun = [name for name in ("mpi_args", "binding_args") if chosen.get(name)]
    if of_mpirun and mpi is None:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in of_mpirun)
        chosen["remarks"] = (
            *(chosen.get("remarks") or ()),
            f"{names} without --mpi: no effect, since no mpirun is run",
        )
    chosen["journal"] = _journal_in(chosen)
    strangers = chosen.keys() - _FIELDS.keys() - TUNING - _READ_HERE - _WITHOUT_EFFECT
    if strangers:
        raise TypeError(f"there is no setting named {', '.join(sorted(strangers))}")
    if chosen.get("jsrun"):
        raise SettingsError("cannot use --jsrun: elasticrun starts the ranks itself or with mpirun (--mpi)")
    if "num_proc" not in chosen:
        raise SettingsError(
            "-np is missing: give the number of slots needed before training starts (or torchrun's --nproc-per-node)"
        )
    if "log_level" in chosen:
        chosen["log_level"] = chosen["log_level"].upper()  # the config file's may be lower case
    # Workers inherit the environment: only the rest is exported.
    values = {**_from_variables(environ, but=chosen), **{name: _typed(name, value) for name, value in chosen.items()}}
    values["passed_env"] = read_passed(values.get("passed_env", ()), environ)
    if mpi is None and values.get("rsh_agent") is None:
        values["remarks"] = (*(values.get("remarks") or ()), *_of_ssh_in_variable(environ, but=chosen))
    if not flags_of_nodes and (mounted := _mounted_hostfile(values, environ)) is not None:
        values["hostfile"], remark = mounted
        values["remarks"] = (*(values.get("remarks") or ()), remark)
    fixed = _fixed_hosts(values)
    num_proc = values["num_proc"]
    _bound_by_slots(values)
    elastic = bool(values.get("accept_agents")) or not values.keys().isdisjoint((*_SOURCES, "min_num_proc"))
    values.setdefault("min_num_proc", num_proc)
    if not elastic or values.get("num_standby"):
        values.setdefault("max_num_proc", num_proc)
    values["mpi"] = mpi
    if fixed is not None:
        if fixed.logins and mpi is not None:
            raise SettingsError(f"mpirun does not accept login names: {', '.join(fixed.logins.values())}")
        values |= {"hosts": fixed.hosts, "logins": fixed.logins}
    values |= {"elastic": elastic, "worker_env": exported(chosen)}
    values["of_horovod_alone"] = of_horovod_alone(chosen)
    values["orders_hosts"] = is_launcher_pod(environ)
    settings = Settings(**{name: value for name, value in values.items() if name in _FIELDS and value is not None})
    _check_can_be_read_again(settings)
    return settings


def _check_can_be_read_again(settings: Settings) -> None:
    """Raise SettingsError for a pipe that holds a secret which each later driver of this command reads, too."""
    files = {}
    if settings.journal is not None:
        files[KEY_FLAG] = settings.journal.key
        if settings.nodes_at_endpoint is not None:
            files["--join-token-file"] = settings.join_token_file
    for flag, path in files.items():
        if path is not None and _is_pipe(path):
            raise SettingsError(
                f"{flag} {path} is a pipe, which can be read only once: a restarted driver has to read it again, so "
                "give a regular file"
            )


def _is_pipe(path: Path) -> bool:
    try:
        return path.is_fifo()
    except OSError:  # reading it later reports the error
        return False


def _journal_in(chosen: dict[str, Any]) -> JournalPlace | None:
    """Return the journal's place; its key is not a setting of its own."""
    journal, key = chosen.pop("journal", ""), chosen.pop("journal_key", "")
    if str(journal):
        return place_of(journal, key)
    if str(key):
        raise SettingsError(f"{KEY_FLAG} has no effect: give --journal etcd://..., too")
    return None


def _bound_by_slots(values: dict[str, Any]) -> None:
    """Convert bounds in slots (of machines) to workers; parameter servers take some. Explicit bounds of workers win."""
    servers = max(0, values.get("num_parameter_servers") or 0)
    least, most = values.get("min_slots"), values.get("max_slots")
    if least is not None:
        values.setdefault("min_num_proc", max(1, min(least - servers, values["num_proc"])))
    if most is not None:
        values.setdefault("max_num_proc", most - servers)


def _typed(name: str, value: Any) -> Any:
    """Convert a value to its field's type. Arguments of a function may be numbers, texts or paths."""
    read = _FIELDS.get(name)
    try:
        if read is Path:
            return (Path(value).absolute() if name in _ABSOLUTE else Path(value)) if str(value) else None
        if read is not None:
            return read(str(value))
        if name == "cooldown_range_s":
            if len(value) != 2:
                raise ValueError("expected 2 arguments")
            return tuple(number(str(bound)) for bound in value)
        if name == "rsh_agent":
            return tuple(shlex.split(value) if isinstance(value, str) else value)
        if name == "port_range":
            return read_port_range(value) if isinstance(value, str) else tuple(integer(str(port)) for port in value)
    except ValueError as error:
        raise SettingsError(f"argument {FLAGS[name]}: {error}") from None
    if name in ("preload", "network_interfaces", "protect", "departure_taints"):
        texts = [value] if isinstance(value, str) else value
        # Commands and arguments give them one by one or with commas; a flag may be repeated.
        words = [word.strip() for text in texts for word in text.split(",")]
        if name == "protect":
            words = [word[1:-1] if word.startswith("[") and word.endswith("]") else word for word in words]
        return tuple(dict.fromkeys(word for word in words if word))
    return value.lower() if name in ("horovod_shim", "horovod_protocol") else value


def _from_variables(environ: Mapping[str, str], *, but: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    slots = given_slots(environ)
    for name, variable in VARIABLES.items():
        text = environ.get(variable)
        if not text and name == "slots_per_host" and slots is not None:
            text, variable = slots
        if not text or name in but or (name == "rsh_agent" and but.keys() & _OTHER_THAN_RSH):
            continue
        if variable in (ENV_SHIM, ENV_PROTOCOL):
            values[name] = text.lower()
        elif name == "history":
            if text.lower() not in _SWITCH:
                raise SettingsError(f"the variable {variable} is {text!r}, not on or off")
            values[name] = _SWITCH[text.lower()]
        elif _FIELDS[name] is number:
            try:
                values[name] = float(text)
            except ValueError:
                raise SettingsError(f"the variable {variable} is {text!r}, not a number of seconds") from None
            check_seconds(f"the variable {variable}:", values[name])
        else:
            try:
                values[name] = integer(text) if _FIELDS[name] is integer else _rsh_agent(text, environ)
            except ValueError as error:
                raise SettingsError(f"cannot read the variable {variable}: {error}") from None
    return values


def _mounted_hostfile(values: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a launcher pod's hostfile and a remark on it, if nothing else names hosts.

    Without it the job would run on this machine alone: in a pod that has none of the job's resources.
    """
    named = ("hosts", "hostfile", *_SOURCES, "accept_agents")
    mounted = given_hostfile(environ)
    if mounted is None or any(values.get(name) is not None for name in named):
        return None
    path, variable = mounted
    script = Path(path).with_name("discover_hosts.sh")
    return path, (
        f"using the hosts in {path} ({variable}), since no flag names hosts; with --host-discovery-script {script} "
        "the job follows changes of the replicas"
    )


def _rsh_agent(text: str, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the command in Open MPI's variable (the first, if it lists several with colons); None if it is plain ssh.

    A site's or a user's profile may name ssh for mpirun, but this job's own ssh is configured by flags. In a pod the
    variable was set for the job.
    """
    words = tuple(shlex.split(text.partition(":")[0]))
    if not words or words == ("ssh",) or (_names_ssh(words) and not _is_pod(environ)):
        return None
    return words


def _names_ssh(words: Sequence[str]) -> bool:
    return bool(words) and PurePath(words[0]).name == "ssh"


def _is_pod(environ: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ or is_launcher_pod(environ)


def _of_ssh_in_variable(environ: Mapping[str, str], *, but: Mapping[str, Any]) -> list[str]:
    """Return a remark if the variable has arguments for ssh, which are ignored."""
    text = environ.get(VARIABLES["rsh_agent"], "").partition(":")[0]
    if but.keys() & _OTHER_THAN_RSH or not _names_ssh(words := shlex.split(text)) or len(words) == 1:
        return []
    return [
        f"OMPI_MCA_plm_rsh_agent is {text.strip()!r}: its ssh arguments are ignored; set them in ~/.ssh/config or "
        "by flags (--ssh-port, --ssh-identity-file)"
    ]


def _fixed_hosts(values: Mapping[str, Any]) -> HostList | None:
    listed, file, slots = values.get("hosts"), values.get("hostfile"), values.get("slots_per_host") or 1
    if listed is not None and file is not None:
        raise SettingsError("argument -hostfile/--hostfile: not allowed with argument -H/--hosts")
    if listed is not None:
        return parse_list(listed, slots)
    if file is not None:
        return read_hostfile(Path(file), slots)
    if not values.keys().isdisjoint(_SOURCES):
        return None
    if values.get("accept_agents"):
        return HostList((), {})
    slots = values["num_proc"] + max(0, values.get("num_parameter_servers") or 0)
    return HostList((Host("localhost", slots),) if values["num_proc"] > 0 else (), {})
