"""The YAML file of ``--config-file``: Horovod's sections and keys, and some more, each for a flag.

Horovod ignores unknown names. Here a section or key similar to a known one is an error: otherwise a setting would
silently have no effect. Other unknown names cause a remark.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.system.safe_files import read_named

# A file with every key, and a page of comment for each, is smaller.
_MAX_BYTES = 1 << 20

# section -> key -> (name of the value that the flag gives, type)
_KEYS: dict[str, dict[str, tuple[str, type]]] = {
    "params": {
        "fusion_threshold_mb": ("fusion_threshold_mb", int),
        "cycle_time_ms": ("cycle_time_ms", float),
        "cache_capacity": ("cache_capacity", int),
        "hierarchical_allreduce": ("hierarchical_allreduce", bool),
        "hierarchical_allgather": ("hierarchical_allgather", bool),
        "torus_allreduce": ("torus_allreduce", bool),
    },
    "autotune": {
        "enabled": ("autotune", bool),
        "log_file": ("autotune_log_file", str),
        "warmup_samples": ("autotune_warmup_samples", int),
        "steps_per_sample": ("autotune_steps_per_sample", int),
        "bayes_opt_max_samples": ("autotune_bayes_opt_max_samples", int),
        "gaussian_process_noise": ("autotune_gaussian_process_noise", float),
    },
    "timeline": {"filename": ("timeline_filename", str), "mark_cycles": ("timeline_mark_cycles", bool)},
    "stall_check": {
        "enabled": ("stall_check", bool),
        "warning_time_seconds": ("stall_check_warning_time_seconds", int),
        "shutdown_time_seconds": ("stall_check_shutdown_time_seconds", int),
    },
    "library_options": {
        "mpi_threads_disable": ("mpi_threads_disable", bool),
        "num_nccl_streams": ("num_nccl_streams", int),
        "thread_affinity": ("thread_affinity", int),
        "gloo_timeout_seconds": ("gloo_timeout_s", int),
    },
    "placement": {
        "np_multiple": ("num_proc_multiple", int),
        "ranks_per_host_multiple": ("ranks_per_host_multiple", int),
        "protect": ("protect", str),
    },
    "warm_starts": {"enabled": ("warm_starts", bool), "preload": ("preload", str)},
    "agents": {
        "accept": ("accept_agents", bool),
        "join_token_file": ("join_token_file", str),
        "operator_token_file": ("operator_token_file", str),
        "timeout_seconds": ("agent_timeout_s", float),
        "host_timeout_seconds": ("host_timeout_s", float),
        "spot_notices": ("spot_notices", str),
        "tls": ("tls", bool),
    },
    "discovery": {
        "kind": ("discovery", str),
        "selector": ("pod_selector", str),
        "namespace": ("pod_namespace", str),
        "pod_names": ("pod_names", str),
        "slots_from": ("slots_from", str),
        "rack_from": ("rack_from", str),
        "departure_taints": ("departure_taints", str),
    },
    "launcher": {
        "kind": ("launcher", str),
        "rsh_agent": ("rsh_agent", str),
        "command": ("launcher_command", str),
        "bootstrap": ("launcher_bootstrap", str),
        "remote_python": ("remote_python", str),
    },
    "ssh": {
        "port": ("ssh_port", int),
        "identity_file": ("ssh_identity_file", str),
        "connect_timeout_seconds": ("ssh_connect_timeout_s", float),
    },
    "network": {
        "interfaces": ("network_interfaces", str),
        "port_range": ("port_range", str),
        "check": ("check_network", bool),
    },
    "logging": {"level": ("log_level", str), "with_timestamp": ("log_with_timestamp", bool)},
}

# Of older releases of Horovod; the current one ignores them, and its own tests have one.
_FORMER = {"logging": {"hide_timestamp": "with_timestamp"}}


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the file.

    Returns:
        Values by name, as accepted by :func:`elastic_driver.settings.assembly.settings_from`; among them ``remarks``,
        if there are any.

    Raises:
        SettingsError: it cannot be read, is not YAML, has a section or key similar to a known one, or an invalid value.
    """
    try:
        text = read_named(path, _MAX_BYTES).decode()
        _refuse_doubles(path, yaml.compose(text, Loader=yaml.SafeLoader))
        data = yaml.safe_load(text)
    except OSError as error:
        raise SettingsError(f"cannot read the config file {path}: {in_words(error)}") from error
    except SettingsError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: bytes that are not UTF-8, or an invalid date.
        reason = " ".join(str(error).split())
        raise SettingsError(f"cannot read the config file {path}: it is not YAML ({reason})") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"cannot read the config file {path}: its top level is not a mapping of sections")
    values: dict[str, Any] = {}
    remarks: list[str] = []
    for section, content in data.items():
        if section == "controller":
            values["mpi"] = _controller(path, content) == "mpi"
            continue
        if section not in _KEYS:
            remarks.append(_unknown(path, "section", section, ["controller", *_KEYS]))
            continue
        if content is None:
            continue
        if not isinstance(content, dict):
            raise SettingsError(f"cannot read the config file {path}: section {section!r} is not a mapping of keys")
        for key, value in content.items():
            if key in _FORMER.get(section, {}):
                remarks.append(
                    f"{section}.{key} of the config file {path} has no effect: it is now called {_FORMER[section][key]}"
                )
                continue
            if key not in _KEYS[section]:
                remarks.append(_unknown(path, f"key in section {section!r}:", key, list(_KEYS[section])))
                continue
            name, kind = _KEYS[section][key]
            accepted = isinstance(value, (int, float) if kind is float else kind)
            if not accepted or (isinstance(value, bool) and kind is not bool):
                wanted = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
                raise SettingsError(f"cannot use {section}.{key} of the config file {path}: {value!r} is not {wanted}")
            values[name] = value
    return {**values, "remarks": tuple(remarks)} if remarks else values


def _refuse_doubles(path: Path, top: yaml.Node | None) -> None:
    """Reject equal keys: YAML's reader uses the last one, and the first would silently have no effect."""
    for node in (top, *(value for _, value in (top.value if isinstance(top, yaml.MappingNode) else ()))):
        if not isinstance(node, yaml.MappingNode):
            continue
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise SettingsError(
                        f"the config file {path} has {key.value!r} twice (again on line {key.start_mark.line + 1})"
                    )
                seen.add(key.value)


def _controller(path: Path, value: object) -> str:
    if not isinstance(value, str) or value.lower() not in ("gloo", "mpi"):
        raise SettingsError(f"cannot use controller {value!r} of the config file {path}: it must be gloo or mpi")
    return value.lower()


def _unknown(path: Path, place: str, name: object, known: list[str]) -> str:
    """Return the remark on an unknown name. Raises SettingsError if it is similar to a known one."""
    text = f"the config file {path} has an unknown {place} {name!r}"
    near = difflib.get_close_matches(str(name), known, 1)
    if near:
        raise SettingsError(f"{text}; did you mean {near[0]!r}?")
    return f"{text}, which has no effect; known: {', '.join(known)}"
