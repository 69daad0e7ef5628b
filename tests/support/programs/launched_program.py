"""A rank of a job that mpirun or srun has started, or that a test has started as they do. First argument: what it does.

Its answer is a JSON line in the folder ANSWERS, in a file of its rank's; what it waits for are files of the test's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import elastic_driver as hvd
from elastic_driver.worker.launched.launcher import launch_of

ANSWERS = Path(os.environ["ANSWERS"])
LAUNCH = launch_of(os.environ)
RANK = LAUNCH.rank if LAUNCH is not None else 0
DIES = int(os.environ.get("DIES", "-1"))


def answer(**values: Any) -> None:
    with (ANSWERS / f"{RANK}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **values}) + "\n")


def wait_for(name: str) -> None:
    end = time.monotonic() + 150
    while not (ANSWERS / name).exists():
        assert time.monotonic() < end, f"{name} does not come"
        time.sleep(0.01)


def place() -> None:
    total = hvd.allreduce(np.full(2, float(hvd.rank())), op=hvd.Sum, name="ranks")
    sizes = (hvd.size(), hvd.local_size(), hvd.cross_size())
    answer(
        ranks=(hvd.rank(), hvd.local_rank(), hvd.cross_rank()),
        sizes=sizes,
        total=total.tolist(),
        homogeneous=hvd.is_homogeneous(),
        mpi=(hvd.mpi_enabled(), hvd.mpi_built()),
        token=hvd.broadcast_object(os.environ.get("TOKEN", ""), root_rank=0),
    )


def meet() -> None:
    hvd.init()
    place()


def again() -> None:
    for _ in range(3):
        hvd.init()
        place()
        hvd.shutdown()


def train() -> None:
    """Trains until it cannot go on."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def steps(state: hvd.elastic.ObjectState) -> None:
        while True:
            if state.step == 5:
                answer(trains=True)
                if RANK == DIES:
                    os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(np.ones(1000), name="gradient")
            state.step += 1
            state.commit()

    try:
        steps(state)
    except hvd.HorovodInternalError as error:
        answer(error=str(error))
        raise


def alone() -> None:
    """One rank ends without the others; these have nothing to ask it, and go on by themselves."""
    hvd.init()
    place()
    if RANK != 0:
        wait_for("0.ended")


def forked() -> None:
    """A process that rank 0 has forked outlives it."""
    hvd.init()
    place()
    if RANK == 0:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        answer(child=child)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        hvd.allreduce(np.ones(1), name="more")
    except hvd.HorovodInternalError as error:
        answer(error=str(error))


def child() -> None:
    """A process that a rank starts has its variables."""
    hvd.init()
    place()
    if RANK == 1:
        done = subprocess.run([sys.executable, __file__, "meet"], capture_output=True, text=True)
        answer(code=done.returncode, said=done.stderr.splitlines()[-1])
    hvd.barrier()


def some() -> None:
    """Ranks by a list: those with odd numbers backwards, and the others."""
    assert LAUNCH is not None
    odd = list(range(1, LAUNCH.size, 2))[::-1]
    hvd.init(comm=odd if RANK % 2 else list(range(0, LAUNCH.size, 2)))
    place()


def split() -> None:
    """Likewise, by a communicator."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(RANK % 2, -RANK)
    hvd.init(comm=comm)
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.size)
    place()
    answer(threads=hvd.mpi_threads_supported(), same=MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def horovod() -> None:
    """A script for Horovod, as it stands."""
    import elastic_driver.compat

    elastic_driver.compat.install()
    import horovod.torch as horovod_torch
    import torch

    horovod_torch.init()
    model = torch.nn.Linear(2, 1)
    horovod_torch.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = horovod_torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    model(torch.full((1, 2), float(horovod_torch.rank()))).sum().backward()
    optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    answer(place=(horovod_torch.rank(), horovod_torch.size(), horovod_torch.local_rank()), weights=weights.tolist())


def group() -> None:
    """A rank dies while others wait for it in torch's own process group, where no collective of ours tells of it.

    In a ring of four Gloo's broadcast has ranks wait that are no neighbors of the one that dies.
    """
    import torch
    import torch.distributed as dist

    import elastic_driver.torch as hvd_torch

    hvd_torch.init()
    members = hvd_torch.process_group()
    dist.all_reduce(torch.ones(1), group=members)
    answer(trains=True)
    if RANK == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(torch.ones(100_000), group=members)
    except RuntimeError as error:
        answer(error=str(error))
        raise


def refused() -> None:
    """What init() says to what COMM is."""
    comm: object = json.loads(os.environ["COMM"])
    try:
        hvd.init(comm=comm)
    except ValueError as error:
        answer(error=str(error))


def without_mpi4py() -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    hvd.init()


globals()[sys.argv[1]]()
