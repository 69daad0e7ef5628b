"""The driver process of ``elastic_driver.run``: ``python -m elastic_driver.function.driver FOLDER CALLER_PID``.

A process of its own, so that the caller may have any event loop, threads and signal handlers. It runs the job as
``elasticrun`` does; when its caller dies, it ends the job and removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from elastic_driver.errors import SettingsError
from elastic_driver.function.delivery import Delivery
from elastic_driver.launch.dial.early import EarlyAgent
from elastic_driver.system.kernel import pidfd_open

SETTINGS, CALL, REFUSED, EXIT_CODE = "settings.pickle", "call.pickle", "refused.txt", "exit_code.txt"
_POLL_S = 0.2


def _wait_for_end_of(caller: int) -> None:
    """Block until the caller, which is the parent of this process, has died."""
    with contextlib.suppress(OSError):
        descriptor = pidfd_open(caller)
        try:
            if os.getppid() == caller:  # else the id may belong to another process
                select.select([descriptor], [], [])
            return
        finally:
            os.close(descriptor)
    while os.getppid() == caller:
        time.sleep(_POLL_S)


def main(argv: list[str]) -> int:
    """Run the job described by the folder. Returns elasticrun's exit code, which is also written to the folder."""
    folder, caller = Path(argv[0]), int(argv[1])
    orphaned = threading.Event()
    # In this session only the caller sends SIGINT, to end the job. The caller may itself ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Until the job has its own handlers, this one makes sure that the folder is removed when the caller dies.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def watch() -> None:
        _wait_for_end_of(caller)
        orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        # A daemon: only the caller's death wakes it.
        threading.Thread(target=watch, name="elastic-driver-caller", daemon=True).start()
        early = EarlyAgent()
        from elastic_driver.driver.job import run_job  # late: the agent is imported meanwhile

        settings = pickle.loads((folder / SETTINGS).read_bytes())
        delivery = Delivery((folder / CALL).read_bytes(), folder)
        try:
            if (nodes := settings.nodes_at_endpoint) is not None:
                from elastic_driver.driver.nodes import run_node

                early.dismiss()
                code = run_node(settings, nodes, routes=delivery.routes)
            else:
                code = run_job(settings, routes=delivery.routes, early=early)
        finally:
            delivery.close()
        (folder / EXIT_CODE).write_text(str(code))
    except SettingsError as error:
        (folder / REFUSED).write_text(str(error))
        code = 2
    finally:
        if orphaned.is_set():
            shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
