"""Prints what a program can know of the process it runs in, as JSON. Started warmed and afresh by test_warm."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import struct
import sys
import threading
import traceback
from pathlib import Path

import numpy as np

if "torch" in os.environ.get("PROBE", ""):
    import torch
else:
    torch = None

F_GETOWN_EX = 16  # Python's fcntl takes the negative answer of F_GETOWN for an error


def main() -> None:
    """Prints the facts, then the streams, which are to differ, then waits if it was asked to."""
    here = sys.modules["__main__"]
    status = Path("/proc/self/status").read_text().splitlines()
    wanted = ("SigBlk", "SigIgn", "SigCgt", "Umask", "NoNewPrivs", "Cpus_allowed")
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
            # What has the kernel end it when the driver dies.
            asks = bool(fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ASYNC)
            kind, whom = struct.unpack("ii", fcntl.fcntl(int(name), F_GETOWN_EX, bytes(8)))
            whom = {1: "it", 2: "its group"}.get(kind) if whom == os.getpid() else None
            descriptors[int(name)] = [what, asks, fcntl.fcntl(int(name), fcntl.F_GETSIG), whom]
        except OSError:
            continue
    facts = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "main": {key: str(value) for key, value in vars(here).items() if key.startswith("__")},
        "main_is_this": vars(here) is globals(),
        "path": sys.path,
        "flags": str(sys.flags),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "environ": dict(os.environ),
        "proc_environ": [item for item in Path("/proc/self/environ").read_bytes().decode().split("\0") if item],
        "cmdline": Path("/proc/self/cmdline").read_bytes().decode(),
        "comm": Path("/proc/self/comm").read_text(),
        "cwd": os.getcwd(),
        "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
        "ppid": os.getppid(),
        "status": [line for line in status if line.split(":")[0] in wanted],
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "stack": [frame.name for frame in traceback.extract_stack()],
        "threads": [thread.name for thread in threading.enumerate()],
        "native_id": threading.main_thread().native_id == os.getpid() == threading.get_native_id(),
        "streams": [
            [str(s), s.line_buffering, s.write_through, s.seekable(), s.isatty(), s.encoding, s.errors]
            for s in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "descriptors": sorted(descriptors.items()),
        "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "site": "sitecustomize" in sys.modules,
        "importers": [path for path in sys.path_importer_cache if "/warm/hook" in path],
        "cpu": resource.getrusage(resource.RUSAGE_SELF).ru_utime < 60,
        "openblas": float((np.ones((300, 300)) @ np.ones((300, 300)))[0, 0]),
    }
    if torch is not None:
        facts["torch"] = [
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()),
        ]
    # Not earlier: a forked worker has the threads of OpenBLAS from its first product on.
    facts["tasks"] = len(os.listdir("/proc/self/task"))
    print("FACTS " + json.dumps(facts))
    streams = [random.random(), float(np.random.rand()), os.urandom(4).hex()]
    if torch is not None:
        streams += [torch.initial_seed(), torch.rand(1).item()]
    print("RANDOM " + json.dumps(streams))
    # A thread may signal the main one: the C library has to know the main thread's own id for that.
    signal.signal(signal.SIGUSR2, lambda *_: print("SIGNALLED", flush=True))
    thread = threading.Thread(target=lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2))
    thread.start()
    thread.join()
    sys.stdout.flush()
    match sys.argv[-1]:
        case "raise":
            raise ValueError("as asked")
        case "exit":
            import atexit

            atexit.register(print, "AT EXIT")
            sys.exit(7)
        case "wait":
            signal.pause()


if __name__ == "__main__":
    main()
