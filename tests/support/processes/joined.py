"""Hosts of this machine that join a job by ``elasticrun join``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.support.paths import PROGRAMS
from tests.support.processes import forked
from tests.support.processes.jobs import Job

_APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
TOKEN = "a token of the test's own"


@contextmanager
def joined(
    folder: Path,
    host: str,
    driver: str,
    *,
    token: str = TOKEN,
    apart: bool = True,
    timeout_s: int = 20,
    **env: str,
) -> Iterator[subprocess.Popen[str] | forked.ForkedProcess]:
    """An agent that joins by itself; its secret comes on standard input.

    Args:
        folder: for what it says.
        host: its name.
        driver: where it joins.
        token: the secret.
        apart: whether agents do not see each other's processes, as on machines of their own.
        timeout_s: how long it tries.
        env: variables of its own.
    """
    where = ("--driver", driver, "--slots", "1", "--host", host)
    words = ["join", *where, "--join-token-file", "-", "--agent-timeout", str(timeout_s)]
    read, write = os.pipe()
    with open(read, "rb") as secret, open(write, "w") as told, (folder / f"{host}.txt").open("wb") as said:
        agent = _start(words, {**os.environ, **env}, secret.fileno(), said, apart=apart)
        told.write(token)
    try:
        yield agent
    finally:
        if agent.poll() is None:
            agent.kill()
        agent.wait(150)


def _start(
    words: list[str], env: dict[str, str], stdin: int, said: IO[bytes], *, apart: bool
) -> subprocess.Popen[str] | forked.ForkedProcess:
    if forked.starts_afresh():
        command = [*(_APART if apart else ()), sys.executable, "-m", "elastic_driver", *words]
        return subprocess.Popen(command, stdin=stdin, stdout=said, stderr=said, text=True, env=env)
    command = [str(PROGRAMS / "forked_join.py"), *words]
    env = {**env, "APART": "1" if apart else ""}
    return forked.start_driver(command, env, said, said, Path.cwd(), stdin=stdin, workers=True)


def write_token(folder: Path) -> Path:
    """A file of the secret, for the driver."""
    token = folder / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    return token


def where_to_join(job: Job) -> str:
    """What the driver says."""
    said: str = job.wait_for("where to join", lambda: job.said().partition("elasticrun join --driver ")[2])
    return said.split()[0]
