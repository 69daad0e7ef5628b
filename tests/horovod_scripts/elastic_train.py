"""Horovod's elastic idiom: TorchState, ElasticSampler, reset callbacks. Imports horovod only.

With KILL_MARK in the environment, one process kills itself once, when it is rank 1 and the file is not there.
"""

import os
import signal

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.sampler import ElasticSampler
from torch import nn, optim

hvd.init()
torch.manual_seed(0)
features = torch.randn(128, 4)
labels = (features.sum(1) > 0).long()
dataset = torch.utils.data.TensorDataset(features, labels)
sampler = ElasticSampler(dataset, shuffle=True)
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Linear(4, 2)
optimizer = optim.SGD(model.parameters(), lr=0.05 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
seen = []


def on_state_reset():
    seen.append(hvd.size())
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * hvd.size()


@hvd.elastic.run
def train(state):
    while state.epoch < 3:
        state.batch = 0
        for index, (data, target) in enumerate(loader):
            mark = os.environ.get("KILL_MARK")
            if mark and state.epoch == 1 and index == 2 and hvd.rank() == 1 and not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
            state.batch = index
            state.sampler.record_batch(index, 8)
            state.commits += 1
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commits += 1
        state.commit()
    assert state._host_messages.empty()  # what Horovod's own elastic script waits on


assert issubclass(HorovodInternalError, RuntimeError)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, commits=0)
state.register_reset_callbacks([on_state_reset])
train(state)
print(f"rank {hvd.rank()} of {hvd.size()} epochs {state.epoch} resets {len(seen)} commits {state.commits}", flush=True)
