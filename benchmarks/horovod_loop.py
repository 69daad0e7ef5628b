"""The same loop as elastic_loop.py for Horovod itself: nothing but Horovod in it.

``benchmarks/elastic.py --worker horovod`` runs it under elasticrun and under horovodrun. Appends a JSON line for each
step to STEP_LOG; and, where REQUEST_LOG is given, one for each request that its Horovod makes of the launcher. Then
requests take a way around, through a thread here that counts them, and no other figure of the run is to be trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from typing import Any

import horovod.torch as hvd
import torch

NUMEL = 1 << 20


def count_requests() -> None:
    """Puts a relay between Horovod and the launcher. Each connection is one request."""
    there = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1"
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(listener.getsockname()[1])
    log = open(os.environ["REQUEST_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        try:
            with source.makefile("rb", buffering=0) as reading, sink.makefile("wb", buffering=0) as writing:
                shutil.copyfileobj(reading, writing)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one of them has gone away
            source.close()
            sink.close()

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            log.write(json.dumps({"time": time.time()}) + "\n")
            far = socket.create_connection(there)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=(one, other), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def main() -> None:
    if "REQUEST_LOG" in os.environ:
        count_requests()
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, NUMEL // 1024, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    log = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    data = torch.randn(4, 1024)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            time.sleep(0.05)
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            state.step += 1
            line = {"time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "step": state.step}
            log.write(json.dumps(line) + "\n")
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main()
