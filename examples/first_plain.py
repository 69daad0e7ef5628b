"""A plain training loop: one process learns to read scikit-learn's handwritten digits."""

import sys
import time

import torch
from sklearn.datasets import load_digits

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 40
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
dataset = torch.utils.data.TensorDataset(images[:1440], labels[:1440])
loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train() -> None:
    for epoch in range(epochs):
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(rows), targets)
            loss.backward()
            optimizer.step()
            time.sleep(0.05)  # as if the model were larger
        right = (model(images[1440:]).argmax(dim=1) == labels[1440:]).float().mean()
        print(f"epoch {epoch}: accuracy {right:.3f}")


train()
