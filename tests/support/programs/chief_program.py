"""A chief without TensorFlow: follows its servers, says what it sees, and does what a file tells it.

Usage: chief_program.py ORDERS. Each line that is appended to ORDERS is one order: "take-out" (from now on, who is to
leave is taken out at once), "exit N". What it prints: "cluster JSON" once, with its
process, then "servers JSON" at each change.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from elastic_driver.errors import RendezvousClosedError
from elastic_driver.tensorflow.driver_link import DriverLink


def say(word: str, value: object) -> None:
    os.write(1, f"{word} {json.dumps(value)}\n".encode())  # in one piece: another thread, or a handler, speaks too


def main() -> None:
    orders = Path(sys.argv[1])
    done = len(orders.read_text().splitlines()) if orders.exists() else 0
    signal.signal(signal.SIGTERM, lambda *_: (say("sigterm", 0), os._exit(7)))
    link = DriverLink.from_environment()
    assert link is not None
    say("cluster", json.loads(os.environ["TF_CONFIG"]) | {"pid": os.getpid()})
    takes_out = threading.Event()
    leaving: set[str] = set()

    def take_out() -> None:
        for address in sorted(leaving):
            link.left(address)

    def follow() -> None:
        version = 0
        while True:
            try:
                servers = link.wait(version)
            except RendezvousClosedError as error:
                say("closed", str(error))
                return
            if servers is None:
                continue
            version = servers.version
            workers = {one.address: [one.leaving, one.leave_within_s] for one in servers.workers}
            say("servers", {"version": version, "ps": servers.parameter_servers, "workers": workers})
            leaving.clear()
            leaving.update(one.address for one in servers.workers if one.leaving)
            if takes_out.is_set():
                take_out()

    threading.Thread(target=follow, daemon=True).start()
    while True:
        lines = orders.read_text().splitlines() if orders.exists() else []
        for line in lines[done:]:
            done += 1
            word, _, value = line.partition(" ")
            if word == "exit":
                say("exits", value)
                os._exit(int(value))
            takes_out.set()
            take_out()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
