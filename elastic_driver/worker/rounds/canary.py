"""A thread that does nothing: when it ends, the process is ending.

A process that is killed is not dead for its parent before the last of its memory is free, which takes 0.3 s a GB and
more. Its threads end at once. So the driver watches one that never ends by itself.
"""

from __future__ import annotations

import os
import threading

_pid = 0
_thread_id = 0


def thread_id() -> int:
    """The system's id of this process's canary; starts it at the first call."""
    global _pid, _thread_id
    if _pid != os.getpid():  # also in a forked child, where the parent's does not live
        # A daemon: the interpreter waits for others before it runs exit handlers.
        thread = threading.Thread(target=threading.Event().wait, name="elastic-canary", daemon=True)
        thread.start()
        _pid, _thread_id = os.getpid(), thread.native_id or 0
    return _thread_id
