"""Checks on this machine before a job starts: whether its programs can run, and its folders are writable.

Owns the settings' checks that access disk and PATH. Called once, by the process that runs the job.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.operator_token import read_operator_key
from elastic_driver.settings.join_token import who_else_reads
from elastic_driver.settings.journal_place import KEY_FLAG
from elastic_driver.settings.pods import KUBERNETES
from elastic_driver.settings.settings import Settings, script_words
from elastic_driver.system.mounted_volumes import is_in_mounted_volume
from elastic_driver.system.safe_files import make_folder, who_else_writes

# A word that the shell uses unchanged. Any other (a variable, a tilde, a bracket) it expands first.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+:,./-]+")
# Programs that start most trainings, and are often mistyped.
_USUAL_PROGRAMS = ("python", "python3", "bash", "accelerate")
_PYTHON = re.compile(r"python[0-9.]*")


def preflight(settings: Settings, *, runs_already: bool = False) -> Sequence[str]:
    """Check that files and programs named by the settings exist, and make the folders for output and commits.

    Args:
        settings: of the job.
        runs_already: whether the job is taken over: its workers have read their script.

    Returns:
        Warnings for the user: who else can write to the named folders.

    Raises:
        SettingsError: a program cannot be run, or a folder cannot be made or written to; one line that names the flag.
    """
    if settings.discovery_script is not None:
        _check_script(settings.discovery_script, "--host-discovery-script", "the host discovery script")
    if settings.event_hook is not None:
        _check_script(settings.event_hook, "--event-hook", "the event hook")
    if settings.discovery == KUBERNETES and importlib.util.find_spec("kubernetes_asyncio") is None:
        raise SettingsError(
            f"--discovery {KUBERNETES} needs the package kubernetes_asyncio: pip install 'elastic-driver[kubernetes]'"
        )
    _check_files(settings)
    _check_command(settings.command[0])
    if not runs_already:
        _check_training_script(settings)
        _check_ways_to_hosts(settings)
    if settings.durable_dir is not None:
        try:
            make_folder(settings.durable_dir)
        except OSError as error:
            raise SettingsError(
                f"cannot use the folder {settings.durable_dir} (--durable-dir): {in_words(error)}"
            ) from error
    return _suspicions(settings)


def _check_files(settings: Settings) -> None:
    log = settings.event_log
    logs = settings.logs.folder if settings.logs.keeps_files else None
    for folder, flag in ((settings.output_filename, "--output-filename"), (logs, "--log-dir")):
        if folder is None:
            continue
        try:
            make_folder(folder)
        except OSError as error:
            raise SettingsError(f"cannot create the folder {folder} ({flag}): {in_words(error)}") from error
        if not os.access(folder, os.W_OK):
            raise SettingsError(f"cannot write to the folder {folder} ({flag})")
    if log is not None and not log.parent.is_dir():
        raise SettingsError(f"cannot write {log} (--event-log): there is no folder {log.parent}")


def _check_script(script: str, flag: str, role: str) -> None:
    program = script_words(script, flag)[0]
    if not _PLAIN_WORD.fullmatch(program):
        return
    if "/" in program:
        if not Path(program).exists() and is_in_mounted_volume(Path(program)):
            return  # it may be mounted at this moment: the first run will show
        _check_program(program, role, hint="chmod +x it")
    elif shutil.which(program) is None and Path(program).is_file():
        # It may be a word of the shell itself ("cd ... && ..."), so a name that is not found is left to the first run.
        raise SettingsError(f"cannot find {role} {program!r} on the PATH: write ./{program}")


def _check_command(program: str) -> None:
    hint = f"run it as: python {program}" if program.endswith(".py") else "chmod +x it"
    _check_program(program, "the command", hint=hint)


def _check_training_script(settings: Settings) -> None:
    """Check the script where workers run on this machine, in this folder."""
    program, *rest = settings.command
    words = [word for word in rest if word != "-u"]
    if not _PYTHON.fullmatch(Path(program).name) or not words or not words[0].endswith(".py"):
        return
    script = Path(words[0])
    if not lists_this_machine(settings):
        return
    with contextlib.suppress(OSError):  # it may not be accessible from here, or the folder no longer exists
        if not script.exists() and not is_in_mounted_volume(script):
            where = "" if script.is_absolute() else f" in {Path.cwd()}"
            text = f"cannot find the script {words[0]!r}: there is no such file{where}"
            raise SettingsError(f"{text}{_meant(script)}")


def _meant(script: Path) -> str:
    """Return a hint at a script in the same folder with a similar name, if there is one."""
    try:
        there = sorted(path.name for path in script.parent.iterdir() if path.suffix == ".py")
    except OSError:
        return ""
    near = difflib.get_close_matches(script.name, there, n=1)
    return f" (did you mean {script.with_name(near[0])}?)" if near else ""


def lists_this_machine(settings: Settings) -> bool:
    """Return whether this machine is in a list of hosts. Hosts of discovery, or that join, are not known yet."""
    here = {"localhost", "127.0.0.1", "::1", platform.node()}
    return settings.hosts is not None and any(host.name in here for host in settings.hosts)


def _check_ways_to_hosts(settings: Settings) -> None:
    """Check the files for reaching other hosts; otherwise a missing one would only show when the first host is
    started.
    """
    key = settings.ssh_identity_file
    # ssh expands ~ and % itself.
    if key is not None and "%" not in key and not os.access(os.path.expanduser(key), os.R_OK):
        raise SettingsError(f"cannot read the file {key} (--ssh-identity-file)")
    if settings.rsh_agent is not None:
        _check_program(settings.rsh_agent[0], "--rsh-agent", hint="chmod +x it")


def _check_program(program: str, role: str, *, hint: str) -> None:
    if "/" not in program:
        if shutil.which(program) is None:
            meant = difflib.get_close_matches(program, _USUAL_PROGRAMS, n=1)
            near = f" (did you mean {meant[0]}?)" if meant else ""
            if Path(program).is_file():
                python = program.endswith(".py") and not os.access(program, os.X_OK)
                near = f"; there is a file of this name here: {hint if python else f'write ./{program}'}"
            raise SettingsError(f"cannot find {role} {program!r} on the PATH{near}")
        return
    path = Path(program)
    if not path.exists():
        raise SettingsError(f"cannot find {role} {program!r}: there is no such file")
    if not path.is_file():
        raise SettingsError(f"cannot run {role} {program!r}: it is not a file")
    if not os.access(path, os.X_OK):
        raise SettingsError(f"cannot run {role} {program!r}: it is not executable; {hint}")


def _suspicions(settings: Settings) -> list[str]:
    folders = (
        # The job may resume from a commit that another user adds.
        (
            settings.durable_dir,
            "--durable-dir",
            True,
            "anyone who can write to it can change the commits that the job resumes from",
        ),
        (
            settings.output_filename,
            "--output-filename",
            False,
            "anyone who can write to it can change the workers' output",
        ),
        (
            settings.logs.folder if settings.logs.keeps_files else None,
            "--log-dir",
            False,
            "anyone who can write to it can change the workers' output",
        ),
        (
            settings.event_log and settings.event_log.parent,
            "--event-log",
            False,
            "anyone who can write to it can change the log",
        ),
    )
    found = ["--tls has no effect: connections between machines are always encrypted"] if settings.tls else []
    for folder, flag, only_adding, consequence in folders:
        others = who_else_writes(folder, only_adding=only_adding) if folder is not None else ""
        if others:
            found.append(f"the folder {folder} ({flag}): {others}; {consequence}")
    token = settings.join_token_file
    others = who_else_reads(token) if token is not None else ""
    if others:
        found.append(
            f"the file {token} (--join-token-file): {others}; anyone who can read it can join the job: run chmod "
            "600 on it"
        )
    key = settings.journal.key if settings.journal is not None else None
    if key is not None and (others := who_else_reads(key)):
        found.append(
            f"the file {key} ({KEY_FLAG}): {others}; it decrypts the job's secrets in etcd: run chmod 600 on it"
        )
    token = settings.operator_token_file
    if token is not None:
        read_operator_key(token)  # raises if it holds no key
        if others := who_else_reads(token):
            found.append(f"the file {token} (--operator-token-file): {others}; anyone who can read it can end the job")
    return found
