"""What the server program uses of TensorFlow, for tests that need none of it: a server that accepts connections."""

from __future__ import annotations

import socket
import threading
import types
from typing import Any


class ClusterSpec:
    def __init__(self, cluster: dict[str, list[str]]) -> None:
        self.cluster = cluster


class Server:
    """Listens, as the real one does, on all addresses, at port 0 where the system likes."""

    def __init__(self, cluster: ClusterSpec, *, job_name: str, task_index: int) -> None:
        port = int(cluster.cluster[job_name][task_index].rpartition(":")[2])
        self._listener = socket.create_server(("", port))
        self.target = f"grpc://localhost:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=connection.recv, args=(1,), daemon=True).start()

    def join(self) -> None:
        threading.Event().wait()


train: Any = types.SimpleNamespace(ClusterSpec=ClusterSpec)
distribute: Any = types.SimpleNamespace(Server=Server)
