"""A Horovod script in its usual idiom: DistributedSampler, broadcasts at the start, an averaged metric."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from torch import nn, optim


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main():
    hvd.init()
    torch.manual_seed(42 + hvd.rank())
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(256, 8, generator=generator)
    labels = (features[:, 0] > 0).long()
    dataset = torch.utils.data.TensorDataset(features, labels)
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
    )
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
    accuracy = metric_average((model(features).argmax(1) == labels).float().mean().item(), "avg_accuracy")
    weights = hvd.allgather_object(sum(p.double().sum().item() for p in model.parameters()))
    assert all(weight == weights[0] for weight in weights), weights
    print(f"rank {hvd.rank()} of {hvd.size()} accuracy {accuracy:.3f}", flush=True)
    return 0 if accuracy > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
