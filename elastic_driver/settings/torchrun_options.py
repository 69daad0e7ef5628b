"""torchrun's options (torch 2.13), and their meaning here.

Owns their names, the variables ``PET_*`` that replace them, and their conversion to values of Settings. An unsupported
option is rejected with a sentence that says what to do instead; an option without effect, because its purpose is served
otherwise, is accepted. docs/torchrun_flags.md is the table for users.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elastic_driver.dialects.horovod import ENV_PROTOCOL, OFF
from elastic_driver.dialects.horovod_shim import ENV_SHIM, NEVER
from elastic_driver.dialects.torchrun import HANDLED_SIGNALS
from elastic_driver.errors import SettingsError
from elastic_driver.settings.logs import Logs, Streams, read_filters, read_ranks, read_streams
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.processors import count_processes
from elastic_driver.words import Sizing

_Value = TypeVar("_Value")

DEFAULT_PORT = 29500
"""torchrun's default for --master-port, and for an --rdzv-endpoint without a port."""
# torchrun's default, between SIGTERM and SIGKILL.
_GRACE_S = 30.0
_ENV_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_ENV_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_ENV_PYTHON = "PYTHON_EXEC"
_ENV_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
SIGNALS = (*HANDLED_SIGNALS, "SIGUSR1", "SIGUSR2", "SIGALRM")
"""Signals that --signals-to-handle may name."""


@dataclass(frozen=True, slots=True)
class Option:
    """One of torchrun's options.

    Attributes:
        name: its name in torch's parser: the long flag with underscores.
        help: for --help.
        metavar: of its value; "" for a switch.
        short: its short flag.
        places: whether it determines the processes and how nodes meet, which -np and -H do in another way.
    """

    name: str
    help: str
    metavar: str = ""
    short: str = ""
    places: bool = False

    @property
    def flag(self) -> str:
        """The long flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def underscored(self) -> str:
        """The long flag with underscores."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The variable that replaces the flag."""
        return f"PET_{self.name.upper()}"


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("nproc_per_node", "workers on this node: a number, auto, cpu, gpu or xpu (default 1)", "N", places=True),
        Option("nnodes", "number of nodes, or MIN:MAX (default 1)", "N|MIN:MAX", places=True),
        Option("node_rank", "rank of this node (default: assigned)", "N", places=True),
        Option("master_addr", "with --master-port: same as --rdzv-endpoint", "HOST", places=True),
        Option("master_port", f"see --master-addr (default {DEFAULT_PORT})", "PORT", places=True),
        Option("rdzv_endpoint", "rendezvous of the nodes; must be the same on each node", "HOST[:PORT]", places=True),
        Option("rdzv_id", "the job's id; must be the same on each node", "NAME", places=True),
        Option(
            "rdzv_backend",
            "static, c10d or elastic, which all mean elasticrun's own rendezvous; others are rejected",
            "NAME",
            places=True,
        ),
        Option(
            "rdzv_conf",
            "rendezvous options: join_timeout, last_call_timeout, close_timeout, ...",
            "KEY=VALUE,...",
            places=True,
        ),
        Option("standalone", "run on this node only; ignore the rendezvous flags", places=True),
        Option("local_addr", "address at which other nodes reach this one (default: detected)", "ADDRESS", places=True),
        Option("max_restarts", "same as --reset-limit (default: no limit)", "N"),
        Option("role", "role of the workers, their ROLE_NAME (default: default)", "NAME"),
        Option("module", "run the command as a module: python -m MODULE", short="-m"),
        Option("no_python", "run the command as it is, even if it is a Python file"),
        Option("run_path", "run the command as a Python file, even if it is executable"),
        Option("log_dir", "folder for -r and -t: DIR/ID/LOCAL_RANK/stdout.log, appended to", "DIR"),
        Option(
            "redirects",
            "write output to files: 0 none, 1 stdout, 2 stderr, 3 both; per local rank: 0:3,1:2",
            "3|0:3,1:2",
            "-r",
        ),
        Option("tee", "same as -r, but write to the terminal, too", "3|0:3,1:2", "-t"),
        Option("local_ranks_filter", "show only these local ranks on the terminal", "N,..."),
        Option(
            "log_line_prefix_template", "prefix of lines: text with ${role_name}, ${rank} and ${local_rank}", "TEXT"
        ),
        Option(
            "duplicate_stdout_filters",
            "copy stdout lines that contain one of these to DIR/ID/filtered_stdout.log",
            "TEXT,...",
        ),
        Option("duplicate_stderr_filters", "same for stderr", "TEXT,..."),
        Option("logs_specs", "only default is accepted: such plug-ins are not supported", "NAME"),
        Option("shutdown_timeout", f"same as --grace-time (default with one of these flags: {_GRACE_S:g})", "S"),
        Option(
            "signals_to_handle",
            f"signals that end the job and are passed on to the workers (default: {','.join(HANDLED_SIGNALS)})",
            "SIGNAL,...",
        ),
        Option(
            "numa_binding",
            "bind each worker to the CPUs near its GPU: node, socket, exclusive, core-complex",
            "HOW",
        ),
        Option("virtual_local_rank", "give each worker LOCAL_RANK 0 and only its own GPU"),
        Option(
            "start_method",
            "accepted for compatibility: workers are forked from a warm process or started (--no-preload)",
            "METHOD",
        ),
        Option("monitor_interval", "accepted for compatibility: exits of workers are noticed at once", "S"),
        Option("event_log_handler", "only null is accepted: see --event-log", "NAME"),
    )
}

# Keys of --rdzv-conf: seconds that are used here, and keys whose purpose is served otherwise here.
_CONF_SECONDS = frozenset(("join_timeout", "last_call_timeout", "close_timeout", "timeout"))
_CONF_OTHERWISE: Mapping[str, str] = {
    "heartbeat_timeout": "see --host-timeout",
    "keep_alive_interval": "see --host-timeout and --agent-timeout",
    "keep_alive_max_attempt": "see --host-timeout and --agent-timeout",
    "read_timeout": "see --agent-timeout",
    "rank": "see --node-rank",
    "use_libuv": "",
}
_CONF_WORDS = frozenset(("is_host", "store_type", "grow"))
TRUE, FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
"""The values of is_host, in lower case."""


# Settings' values if workers are counted in torchrun's style, and neither a flag nor this variable says otherwise.
# Libraries check for a Horovod, and would use it for training if they found one.
_NO_HOROVOD: Mapping[str, tuple[str, str]] = {
    "horovod_shim": (NEVER, ENV_SHIM),
    "horovod_protocol": (OFF, ENV_PROTOCOL),
}


@dataclass(frozen=True, slots=True)
class _Said:
    """The value given for an option, and its source, for messages."""

    text: str
    where: str


def torchrun_values(
    flags: Mapping[str, str], environ: Mapping[str, str], *, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert torchrun's flags and variables to values, by the names of Settings.

    Args:
        flags: the text of each option given as a flag, by its name; "1" for a switch.
        environ: with ``PET_*``.
        others: values given otherwise; they override the same values of these.

    Returns:
        Empty if none of the options was given.

    Raises:
        SettingsError: an option is not supported, or two conflict; one line for the user.
    """
    placed = [name for name in ("num_proc", "hosts", "hostfile", "discovery_script", "discovery") if name in others]
    said = _said(flags, environ, without_places=bool(placed))
    if not said:
        return {}
    if placed:
        flag = next((option.flag for name, option in OPTIONS.items() if option.places and name in said), None)
        if flag is not None:
            names = {"num_proc": "-np", "hosts": "-H", "hostfile": "--hostfile", "discovery": "--discovery"}
            other = names.get(placed[0], "--host-discovery-script")
            raise SettingsError(f"give either {flag} or {other}, not both: both set the number of workers")
    _refuse(said)
    asks = _Asks(said, environ)
    asks.check_what_is_without_effect()
    values = {
        "command": asks.command(tuple(others.get("command", ()))),
        "logs": asks.logs(),
        "virtual_local_rank": asks.switch("virtual_local_rank"),
        "numa_binding": asks.text("numa_binding"),
        "more_signals": asks.signals(),
        "reset_limit": asks.integer("max_restarts"),
        "grace_s": asks.grace_s(),
        "blames_hosts": "cooldown_range_s" in others,
        **(asks.places() if not placed else {"nodes": Nodes(role=asks.role)}),
    }
    wins = {name for name in others if name != "command"}
    return {name: value for name, value in values.items() if value is not None and name not in wins}


def _said(flags: Mapping[str, str], environ: Mapping[str, str], *, without_places: bool) -> dict[str, _Said]:
    said: dict[str, _Said] = {}
    for name, option in OPTIONS.items():
        if name in flags:
            said[name] = _Said(flags[name], f"argument {option.flag}")
        elif environ.get(option.variable) and not (without_places and option.places):
            said[name] = _Said(environ[option.variable], f"the variable {option.variable}")
    # A switch's variable may be 0.
    off = [name for name, one in said.items() if not OPTIONS[name].metavar and not _read(one, _switch)]
    return {name: one for name, one in said.items() if name not in off}


def _refuse(said: Mapping[str, _Said]) -> None:
    """Raise SettingsError if an unsupported value was given."""
    for name, allowed, instead in (
        (
            "rdzv_backend",
            ("static", "c10d", "elastic"),
            "drop it: elasticrun runs the rendezvous itself",
        ),
        ("logs_specs", ("default",), "drop it: use --log-dir, -r and -t"),
        ("event_log_handler", ("null",), "drop it: --event-log FILE writes the job's events as JSON lines"),
        ("start_method", ("spawn", "fork", "forkserver"), "drop it: it has no effect here"),
        ("numa_binding", ("node", "socket", "exclusive", "core-complex"), "give one of these"),
    ):
        one = said.get(name)
        if one is not None and one.text.strip().lower() not in allowed:
            raise SettingsError(f"{one.where}: {one.text[:40]!r} is not one of {', '.join(allowed)}; {instead}")
    if "module" in said and "no_python" in said:
        raise SettingsError(f"{said['no_python'].where} cannot be combined with --module, which Python has to run")


def _read(one: _Said, read: Callable[[str], _Value]) -> _Value:
    try:
        return read(one.text)
    except ValueError as error:
        raise SettingsError(f"{one.where}: {error}") from None


class _Asks:
    """The supported options, converted to values."""

    def __init__(self, said: Mapping[str, _Said], environ: Mapping[str, str]) -> None:
        self._said = said
        self._environ = environ

    def text(self, name: str) -> str | None:
        """Return a text; None if not given."""
        one = self._said.get(name)
        return None if one is None else one.text.strip()

    def switch(self, name: str) -> bool | None:
        """Return True, or None if not given."""
        return True if name in self._said else None

    def integer(self, name: str) -> int | None:
        """Return a number; None if not given."""
        return self._value(name, lambda text: _bounded(text, 0, 2**31 - 1))

    @property
    def role(self) -> str:
        """Role of the workers."""
        return self.text("role") or "default"

    def check_what_is_without_effect(self) -> None:
        """Reject invalid values of options without effect, too."""
        self._value("monitor_interval", _seconds)

    def command(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command of each worker: Python runs a Python file or a module, as in torchrun."""
        if not words:
            return words
        python = (self._environ.get(_ENV_PYTHON) or sys.executable, "-u")
        if "module" in self._said:
            return (*python, "-m", *words)
        if "no_python" in self._said and "run_path" not in self._said:
            return words
        path = Path(words[0])
        is_script = "run_path" in self._said or path.suffix in (".py", ".pyc")
        # Under torchrun a script may have any name. An executable program, such as a shell script, is not a Python
        # script.
        return (*python, *words) if is_script or (path.is_file() and not os.access(path, os.X_OK)) else words

    def logs(self) -> Logs | None:
        """Return the destinations of the output; None if not given."""
        prefix = self._value("log_line_prefix_template", str)
        if prefix is None:
            prefix = self._environ.get(_ENV_PREFIX) or None
        folder = self.text("log_dir")
        asked = Logs(
            folder=Path(folder).absolute() if folder and folder != os.devnull else None,
            redirects=self._value("redirects", read_streams) or Streams(),
            tee=self._value("tee", read_streams) or Streams(),
            shown=self._value("local_ranks_filter", read_ranks),
            prefix=prefix,
            stdout_filters=self._value("duplicate_stdout_filters", read_filters) or (),
            stderr_filters=self._value("duplicate_stderr_filters", read_filters) or (),
        )
        if folder == os.devnull:  # torchrun then keeps no files, and shows all output
            asked = Logs(shown=asked.shown, prefix=asked.prefix)
        return None if asked == Logs() else asked

    def signals(self) -> tuple[str, ...]:
        """Return the names of signals that end the job."""

        def read(text: str) -> tuple[str, ...]:
            names = tuple(word.strip() for word in text.split(",") if word.strip())
            for name in names:
                if name not in SIGNALS:
                    raise ValueError(f"{name[:40]!r} is not one of {', '.join(SIGNALS)}")
            return names

        asked = self._value("signals_to_handle", read)
        if asked is None and (text := self._environ.get(_ENV_SIGNALS)):
            asked = _read(_Said(text, f"the variable {_ENV_SIGNALS}"), read)
        return HANDLED_SIGNALS if asked is None else asked

    def grace_s(self) -> float:
        """Return the time between SIGTERM and SIGKILL."""
        asked = self._value("shutdown_timeout", _seconds)
        text = self._environ.get(_ENV_GRACE)
        if asked is None and text:
            asked = _read(_Said(text, f"the variable {_ENV_GRACE}"), _seconds)
        return _GRACE_S if asked is None else asked

    def places(self) -> dict[str, Any]:
        """Return the values for the number of workers, and how nodes meet."""
        least, most = self._value("nnodes", _read_nnodes) or (1, 1)
        each = self._value("nproc_per_node", lambda text: _processes(text, self._environ)) or 1
        rank = self.integer("node_rank")
        if rank is not None and rank >= most:
            raise SettingsError(
                f"{self._said['node_rank'].where}: {rank} is not the rank of one of the {most} nodes, which are "
                "numbered from 0"
            )
        if "standalone" in self._said and most > 1:
            raise SettingsError(f"--standalone is for one node: drop {self._said['nnodes'].where}")
        conf = self._value("rdzv_conf", _read_conf) or {}
        nodes = Nodes(
            least=least,
            most=most,
            nproc_per_node=each,
            endpoint=self._endpoint(most) if most > 1 else "",
            run_id="" if "standalone" in self._said else self.text("rdzv_id") or "",
            node_rank=rank,
            local_addr=self.text("local_addr") or "",
            role=self.role,
            conf=conf,
        )
        waits_s = next((float(conf[key]) for key in ("join_timeout", "timeout") if key in conf), None)
        workers: dict[str, Any] = {"num_proc": least * each, "max_num_proc": most * each}
        if most > 1:  # else no other host can join, and the job has a fixed size
            workers |= {"min_num_proc": least * each, "accept_agents": True}
        return {
            **{name: value for name, (value, variable) in _NO_HOROVOD.items() if not self._environ.get(variable)},
            "nodes": nodes,
            "sizing": Sizing.NNODES if most > 1 else Sizing.NPROC,
            **workers,
            "elastic_timeout_s": waits_s,
            "remarks": tuple(_conf_remark(key) for key in conf if key in _CONF_OTHERWISE) or None,
        }

    def _endpoint(self, most: int) -> str:
        if endpoint := self.text("rdzv_endpoint"):
            return _check_endpoint(endpoint, self._said["rdzv_endpoint"].where)
        host, port = self.text("master_addr"), self.text("master_port")
        if not host:
            raise SettingsError(
                f"--nnodes up to {most} needs --rdzv-endpoint HOST:PORT (or --master-addr and --master-port), the "
                "same on each node: one node runs the driver there, and the others join it"
            )
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        if port and not (re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
            raise SettingsError(f"{self._said['master_port'].where}: {port[:40]!r} is not a port: 1 to 65535")
        return _check_endpoint(f"{host}:{port or DEFAULT_PORT}", self._said["master_addr"].where)

    def _value(self, name: str, read: Callable[[str], _Value]) -> _Value | None:
        one = self._said.get(name)
        return None if one is None else _read(one, read)


def _switch(text: str) -> bool:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
        raise ValueError(f"{text[:40]!r} is neither 1 (on) nor 0 (off)")
    return bool(int(text))


def _bounded(text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        raise ValueError(f"{text[:40]!r} is not an integer")
    if not least <= int(text) <= most:
        raise ValueError(f"{text.strip()} is not within {least} to {most}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a number of seconds") from None
    if not 0 <= value <= 1e9:  # false for NaN, too
        raise ValueError(f"{text.strip()[:40]} is not a number of seconds, 0 or above")
    return value


def _processes(text: str, environ: Mapping[str, str]) -> int:
    count = count_processes(text, environ)
    if count < 1:
        raise ValueError(f"{count} is below 1")
    return count


# Against typing errors; Settings limits the workers.
_MOST_NODES = 65536


def _read_nnodes(text: str) -> tuple[int, int]:
    words = text.split(":")
    if len(words) > 2:
        raise ValueError(f"{text[:40]!r} is not a number of nodes or MIN:MAX")
    least, most = (_bounded(words[0], 1, _MOST_NODES), _bounded(words[-1], 1, _MOST_NODES))
    if least > most:
        raise ValueError(f"{text.strip()!r} has a minimum above its maximum")
    return least, most


def _read_conf(text: str) -> dict[str, str]:
    conf: dict[str, str] = {}
    text = text.strip()
    if text[:1] in ("'", '"') and text[:1] == text[-1:]:  # from a command that no shell has parsed
        text = text[1:-1]
    for pair in text.split(",") if text.strip() else ():
        key, _, value = (word.strip() for word in pair.partition("="))
        if not key or not value:
            raise ValueError(f"{pair.strip()[:40]!r} is not of the form KEY=VALUE")
        known = _CONF_SECONDS | _CONF_OTHERWISE.keys() | _CONF_WORDS
        if key not in known:
            raise ValueError(f"{key[:40]!r} is not one of {', '.join(sorted(known))}")
        if key in _CONF_SECONDS and _seconds(value) <= 0:
            raise ValueError(f"{key}: {value[:40]!r} is not a number of seconds above 0")
        if key == "store_type" and value.lower() != "tcp":
            raise ValueError(f"store_type {value[:40]!r}: elasticrun keeps the store itself; drop it")
        if key == "is_host" and value.lower() not in (*TRUE, *FALSE):
            raise ValueError(f"is_host {value[:40]!r} is neither true nor false")
        conf[key] = value
    return conf


def _conf_remark(key: str) -> str:
    see = _CONF_OTHERWISE[key]
    return f"{key} of --rdzv-conf has no effect here{f': {see}' if see else ''}"


def _check_endpoint(text: str, where: str) -> str:
    """Return the endpoint, if it is ``HOST``, ``HOST:PORT`` or either with an IPv6 address in brackets."""
    match = re.fullmatch(
        r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?)(:(?P<port>[0-9]{1,5}))?", text
    )
    if match is None:
        raise SettingsError(f"{where}: {text[:80]!r} is not of the form HOST:PORT")
    port = match["port"]
    if port is not None and not 1 <= int(port) <= 65535:
        raise SettingsError(f"{where}: {port} is not a fixed port: 1 to 65535")
    return text
