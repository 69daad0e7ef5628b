"""A job that mpirun starts, ``elasticrun --mpi``: without a driver. This process becomes mpirun.

Owns the environment of the ranks. Since it becomes mpirun, output, exit code and signals are mpirun's own, with nothing
between it and the caller.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import NoReturn

from elastic_driver.dialects.horovod_shim import ENV_SHIM, with_shim
from elastic_driver.dialects.ours import inheritable
from elastic_driver.driver.other_python import check_python
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.launch.mpirun import call_of, find_mpirun
from elastic_driver.settings.machines import remote_environment
from elastic_driver.settings.preflight import preflight
from elastic_driver.settings.settings import Settings

# With a driver each worker gets its own.
_INTERFACE = "HOROVOD_GLOO_IFACE"


def run_by_mpirun(settings: Settings, environ: Mapping[str, str]) -> NoReturn:
    """Become mpirun, which runs the job.

    Raises:
        SettingsError: there is no mpirun, it does not support a setting, or the command cannot be run.
    """
    for warning in (*preflight(settings), *check_python(settings), *settings.remarks):
        print(f"elasticrun: warning: {warning}", file=sys.stderr)
    own = environment_of(settings, environ)
    path, flavour = find_mpirun(own)
    names = sorted(set(remote_environment(own)) | settings.passed_env.keys())
    call = call_of(settings, path, flavour, environ=own, names=names, is_root=os.geteuid() == 0)
    if settings.verbose:
        print(f"elasticrun: {shlex.join(call.words)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(call.words[0], call.words, dict(call.environ))
    except OSError as error:
        raise SettingsError(f"cannot start {path} (--mpi): {in_words(error)}") from error


def environment_of(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks."""
    env = {**inheritable(environ), **settings.worker_env, **settings.passed_env}
    python_path = with_shim(env.pop("PYTHONPATH", None), settings.horovod_shim)
    if python_path is not None:
        env["PYTHONPATH"] = python_path
    env |= {ENV_SHIM: settings.horovod_shim, "PYTHONUNBUFFERED": "1"}
    if settings.mpi is not None and settings.mpi.start_timeout_s is not None:
        env["HOROVOD_START_TIMEOUT"] = f"{settings.mpi.start_timeout_s:g}"
    if settings.network_interfaces:
        env[_INTERFACE] = settings.network_interfaces[0]
    elif environ.get(_INTERFACE):
        env[_INTERFACE] = environ[_INTERFACE]
    return env
