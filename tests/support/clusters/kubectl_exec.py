"""``kubectl exec`` between a test's pods: a program in the image, and who runs the commands for it.

    kubectl exec -i POD -- WORD...

The program hands its streams over a socket that all pods see. The command is run if the Role of the caller's service
account allows it. As with the real one, a command goes on when the program that has asked for it is killed.
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

SOCKET = "kubectl.sock"
_MOST_BYTES = 1 << 20

Run = Callable[[str, str, list[str]], list[str] | str]


class KubectlServer:
    """See above. A context manager.

    Args:
        folder: where the socket is; pods see it as ``/mnt``.
        words: gives for the caller's pod, another pod and a command the words that run it there, or why it may not be.
    """

    def __init__(self, folder: Path, words: Run) -> None:
        self._words = words
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / SOCKET))
        (folder / SOCKET).chmod(0o666)
        self._server.listen()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._serve, name="kubectl")

    def __enter__(self) -> KubectlServer:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(150)
        for thread in self._threads:
            thread.join(150)  # their commands are dead with their pods
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._run, args=(connection,), name="kubectl exec")
            thread.start()
            self._threads.append(thread)

    def _run(self, connection: socket.socket) -> None:
        with connection:
            data, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
            asked = json.loads(data)
            words = self._words(asked["from"], asked["pod"], asked["words"])
            if isinstance(words, str):
                os.write(descriptors[2], f"Error from server (Forbidden): {words}\n".encode())
                words = ["false"]
            with subprocess.Popen(words, stdin=descriptors[0], stdout=descriptors[1], stderr=descriptors[2]) as process:
                for descriptor in descriptors:
                    os.close(descriptor)
                code = process.wait()
            with contextlib.suppress(OSError):  # nobody waits for it
                connection.sendall(bytes([code & 255]))


def main(words: list[str]) -> int:
    """The program."""
    if words[:2] != ["exec", "-i"] or words[3] != "--":
        sys.exit(f"error: not understood: {words}")
    asked = {"from": socket.gethostname(), "pod": words[2], "words": words[4:]}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"/mnt/{SOCKET}")
        socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
        code = connection.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
