"""Calls ``elastic_driver.run`` over machines: ``run_over_machines.py HOSTS INTERFACE``. Prints a line of JSON."""

from __future__ import annotations

import json
import os
import socket
import sys

import elastic_driver


def work(factor: int) -> tuple[str, int, float, str]:
    import numpy as np

    import elastic_driver as hvd

    hvd.init()
    total = float(hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")[0])
    print(f"rank {hvd.rank()} on {socket.gethostname()}")
    return socket.gethostname(), hvd.rank() * factor, total, os.environ.get("GIVEN", "")


def fail() -> None:
    import elastic_driver as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError(f"no luck on {socket.gethostname()}")
    hvd.barrier()


def main() -> None:
    hosts, interface = sys.argv[1:]
    results = elastic_driver.run(
        work, (10,), num_proc=2, hosts=hosts, network_interface=interface, env=os.environ | {"GIVEN": "yes"}
    )
    try:
        elastic_driver.run(fail, num_proc=2, hosts=hosts)
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"results": results, "error": error}))


if __name__ == "__main__":
    main()
