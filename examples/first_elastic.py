"""The elastic version of first_plain.py. docs/first-script.md explains each line that differs."""

import sys
import time

import torch
from sklearn.datasets import load_digits

import elastic_driver.torch as hvd

hvd.init()
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 40
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
dataset = torch.utils.data.TensorDataset(images[:1440], labels[:1440])
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    for state.epoch in range(state.epoch, epochs):
        for index, (rows, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(rows), targets)
            loss.backward()
            optimizer.step()
            time.sleep(0.05)  # as if the model were larger
            sampler.record_batch(index, 32)
            state.commit()
        sampler.set_epoch(state.epoch + 1)
        right = (model(images[1440:]).argmax(dim=1) == labels[1440:]).float().mean()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: accuracy {right:.3f}, {hvd.size()} workers")


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))
