"""What the server program uses of TensorFlow, for tests that need none of it: a server that accepts connections.

With HOLD_IMPORT=FILE the import takes as long as that file is there.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import types
from pathlib import Path
from typing import Any

while (held := os.environ.get("HOLD_IMPORT")) and Path(held).exists():
    time.sleep(0.02)


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
