"""``kubectl exec POD -- WORD...`` for mpi-operator v1: the command, and what answers it in place of an API server.

Like the real ones: no input is passed on, output is, and what runs in the pod goes on when the command is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.clusters.pods import Pod


class ApiServer:
    """Runs what is asked for. A context manager; each request has a thread, which ends with what it runs.

    Args:
        path: of its socket.
        pods: finds a running pod by its name.
    """

    def __init__(self, path: Path, pods: Callable[[str], Pod | None]) -> None:
        self._pods = pods
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        path.chmod(0o666)
        self._listening.listen()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="api-server")
        self._accepting.start()

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(self, *unused: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join(150)
        self._listening.close()
        for thread in self._threads:
            thread.join(150)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="api-server-exec")
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as asked:
            name, *command = json.loads(asked.readline())
            pod = self._pods(name)
            if pod is None:
                _say(connection, text=f'Error from server (NotFound): pods "{name}" not found\n', code=1)
                return
            running = subprocess.Popen(
                pod.inside(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert running.stdout is not None
            with running.stdout:
                for line in running.stdout:
                    _say(connection, text=line)
            code = running.wait()
            if code:
                _say(connection, text=f"command terminated with exit code {code}\n", code=1)
            else:
                _say(connection, code=0)


def _say(connection: socket.socket, **words: Any) -> None:
    with contextlib.suppress(OSError):  # whoever has asked is gone
        connection.sendall(json.dumps(words).encode() + b"\n")


def main() -> int:
    verb, pod, dashes, *command = sys.argv[1:]
    assert (verb, dashes) == ("exec", "--"), sys.argv
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, connection.makefile("rb") as answers:
        connection.connect(os.environ["KUBECTL_SOCKET"])
        connection.sendall(json.dumps([pod, *command]).encode() + b"\n")
        for line in answers:
            said = json.loads(line)
            sys.stderr.write(said.get("text", ""))
            sys.stderr.flush()
            if "code" in said:
                return int(said["code"])
    return 1


if __name__ == "__main__":
    sys.exit(main())
