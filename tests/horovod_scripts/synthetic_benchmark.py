"""The synthetic benchmark's idiom: random data, timeit, only rank 0 speaks. Imports horovod only."""

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()

hvd.init()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = optim.SGD(model.parameters(), lr=0.01)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(32, 64), torch.randint(10, (32,))


def benchmark_step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


rates = [32 * 5 / timeit.timeit(benchmark_step, number=5) for _ in range(args.num_iters)]
log(f"Img/sec per CPU: {np.mean(rates):.1f} +-{1.96 * np.std(rates):.1f}")
log(f"Total on {hvd.size()} workers: done")
