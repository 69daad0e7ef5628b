"""The dialect of TensorFlow servers, which get their work from a chief that runs beside the driver.

Owns the servers' environment and the chief's. Servers run :mod:`elastic_driver.task_server`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.rendezvous.environment import (
    ENV_CHIEF,
    ENV_JOB,
    ENV_OWNER,
    ENV_RENDEZVOUS,
    ENV_TASK,
    ENV_WORKER,
)
from elastic_driver.words import OnChange

ENV_TF_CONFIG = "TF_CONFIG"
# Unless the user says otherwise, the chief detects a lost server instead of waiting for it.
_FAIL_FAST = {"GRPC_FAIL_FAST": "use_caller"}
_PYTHON = re.compile(r"python[0-9.]*")
_FLAG = re.compile(r"-[bBdEiIOPqsSuvx]+")
_MODULE = "elastic_driver.task_server"


def server_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the servers' command, with the interpreter of the chief's command if that begins with one."""
    named = command[0] if command and _PYTHON.fullmatch(PurePath(command[0]).name) else sys.executable
    return named, "-m", _MODULE


def missing_script(command: Sequence[str], folder: Path) -> str:
    """Return the script in a Python command if that file does not exist; "" otherwise."""
    if not (command and _PYTHON.fullmatch(PurePath(command[0]).name)):
        return ""
    script = next((word for word in command[1:] if not _FLAG.fullmatch(word)), "")
    # Any other option may take a value, or the script may be a module.
    return script if script.endswith(".py") and not script.startswith("-") and not (folder / script).exists() else ""


class ServerDialect:
    """The environment of servers and of their chief; a Dialect.

    Args:
        inherited: the part of the driver's environment that workers inherit.
        exported: variables that the driver and its flags set.
    """

    def __init__(self, inherited: Mapping[str, str], *, exported: Mapping[str, str]) -> None:
        own = {name: value for name, value in inherited.items() if name != ENV_TF_CONFIG}
        self._env = {**own, **exported, "PYTHONUNBUFFERED": "1"}

    @property
    def on_change(self) -> OnChange:
        """Their kind: each server runs independently."""
        return OnChange.NO_ROUNDS

    def environment(self, start: WorkerStart, *, job: JobAddress) -> dict[str, str]:
        """Return the whole environment of one server's process."""
        task = f"worker {start.planned.rank}" if start.parameter_server is None else f"ps {start.parameter_server}"
        return {
            **self._env,
            ENV_RENDEZVOUS: job.url,
            ENV_WORKER: start.worker.key,
            ENV_JOB: job.job_id,
            ENV_OWNER: job.owner,
            ENV_TASK: task,
        }

    def environment_of_chief(
        self, number: int, address: str, parameter_servers: Sequence[str], workers: Sequence[str], *, job: JobAddress
    ) -> dict[str, str]:
        """Return the whole environment of the chief's process.

        Args:
            number: of its start.
            address: at which its own server is to listen.
            parameter_servers, workers: addresses of the servers.
            job: the address of the driver.
        """
        cluster = {"chief": [address], "ps": list(parameter_servers), "worker": list(workers)}
        return {
            **_FAIL_FAST,
            **self._env,
            ENV_TF_CONFIG: json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}),
            ENV_RENDEZVOUS: job.url,
            ENV_CHIEF: str(number),
            ENV_JOB: job.job_id,
            ENV_OWNER: job.owner,
        }
