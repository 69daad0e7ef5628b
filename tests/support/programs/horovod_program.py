"""A training as users of Horovod write it, with nothing but Horovod in it. Run by tests/horovod under either launcher.

It has epochs of batches, commits each batch, and writes a JSON line a batch.

Environment: STEP_LOG (file), SIZES (a size for each epoch, comma list: an epoch has at least BATCHES batches, and goes
on until one was at this size; 0 for any), BATCHES, STEP_S (seconds of work a batch), FAULTS (JSON: a list of [epoch,
rank, "exception" | "kill" | "exit"]: what the rank does in its third batch of that epoch, once), ONCE (a folder that
remembers that it has happened), STATIC (any text: no elastic.run), PROCESS_SET (ranks, comma list).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

SIZES = [int(text) for text in os.environ.get("SIZES", "0").split(",")]
BATCHES = int(os.environ.get("BATCHES", "10"))
STEP_S = float(os.environ.get("STEP_S", "0.05"))
FAULTS = json.loads(os.environ.get("FAULTS", "[]"))
FIRST_RANK = int(os.environ["HOROVOD_RANK"])
PROCESS_SET = [int(text) for text in os.environ.get("PROCESS_SET", "").split(",") if text]

process_sets = [hvd.ProcessSet(PROCESS_SET)] if PROCESS_SET else []
hvd.init(process_sets=process_sets)
for each in process_sets:
    if each.included():
        total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, process_set=each)
        assert total.item() == sum(PROCESS_SET)
torch.manual_seed(os.getpid())  # other weights in each process, until they are made equal
torch.set_num_threads(1)
model = torch.nn.Linear(100, 10)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
)
log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process


def perhaps_fail(state: Any) -> None:
    for epoch, rank, how in FAULTS:
        if (epoch, rank) != (state.epoch, hvd.rank()) or state.batch < 2:
            continue
        try:
            Path(os.environ["ONCE"], f"{epoch}-{rank}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if how == "exception":
            raise RuntimeError("a bug in the training script")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)


def one_batch(state: Any) -> None:
    time.sleep(STEP_S)
    perhaps_fail(state)
    optimizer.zero_grad()
    model(torch.full((1, 100), 0.1 + state.step % 3)).sum().backward()
    optimizer.step()
    state.step += 1
    state.batch += 1
    state.size = hvd.size()
    line = {
        "time": time.time(),
        "pid": os.getpid(),
        "host": os.environ["HOROVOD_HOSTNAME"],
        "first_rank": FIRST_RANK,
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "local_size": hvd.local_size(),
        "cross_rank": hvd.cross_rank(),
        "cross_size": hvd.cross_size(),
        "epoch": state.epoch,
        "step": state.step,
        "weights": zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters())),
    }
    log.write(json.dumps(line) + "\n")


def train(state: Any) -> None:
    while state.epoch < len(SIZES):
        while state.batch < BATCHES or SIZES[state.epoch] not in (0, state.size):
            one_batch(state)
            state.commit()
        state.epoch += 1
        state.batch = 0
        state.commit()


class Plain:
    """What a script without elastic.run trains with."""

    epoch = batch = step = size = 0

    def commit(self) -> None:
        pass


if os.environ.get("STATIC"):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(Plain())
else:
    hvd.elastic.run(train)(hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0, step=0, size=0))
print(f"rank {hvd.rank()} of {hvd.size()} is done")
print(f"rank {hvd.rank()} says goodbye", file=sys.stderr)
