"""A thread that does nothing: when it ends, the process is ending.

For its parent a killed process is not dead before all of its memory is freed, which takes 0.3 s a GB or more. Its
threads end at once. So the driver watches one that never ends by itself.
"""

from __future__ import annotations

import os
import threading

_pid = 0
_thread_id = 0


def thread_id() -> int:
    """Return the kernel's id of this process's canary thread, started at the first call."""
    global _pid, _thread_id
    if _pid != os.getpid():  # also in a forked child, which does not have the parent's thread
        # A daemon: the interpreter waits for others before it runs exit handlers.
        thread = threading.Thread(target=threading.Event().wait, name="elastic-canary", daemon=True)
        thread.start()
        _pid, _thread_id = os.getpid(), thread.native_id or 0
    return _thread_id
