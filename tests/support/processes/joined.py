"""Hosts of this machine that join a job by ``elasticrun join``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes.jobs import Job

# As on machines of their own, agents do not see each other's processes.
HOST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
TOKEN = "a token of the test's own"


@contextmanager
def joined(
    folder: Path,
    host: str,
    driver: str,
    *,
    token: str = TOKEN,
    prefix: Sequence[str] = HOST,
    timeout_s: int = 20,
    **env: str,
) -> Iterator[subprocess.Popen[str]]:
    """An agent that joins by itself; its secret comes on standard input.

    Args:
        folder: for what it says.
        host: its name.
        driver: where it joins.
        token: the secret.
        prefix: words before the command.
        timeout_s: how long it tries.
        env: variables of its own.
    """
    words = (
        "join",
        "--driver",
        driver,
        "--slots",
        "1",
        "--host",
        host,
        "--join-token-file",
        "-",
        "--agent-timeout",
        str(timeout_s),
    )
    command = [*prefix, sys.executable, "-m", "elastic_driver", *words]
    with (folder / f"{host}.txt").open("w") as said:
        agent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=said, text=True, env={**os.environ, **env}
        )
    try:
        assert agent.stdin is not None
        with agent.stdin:
            agent.stdin.write(token)
        yield agent
    finally:
        if agent.poll() is None:
            agent.kill()
        agent.wait(150)


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
