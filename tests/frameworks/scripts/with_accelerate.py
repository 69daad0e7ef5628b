"""A training with accelerate: prepare(), save_state() every few steps, load_state() at the start."""

import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from told import tell

accelerator = Accelerator(cpu=True)
folder = Path(os.environ["CHECKPOINTS"]) / "state"
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
count = torch.zeros(1)


class Counter:
    """What accelerate saves beside the model."""

    def state_dict(self) -> dict[str, int]:
        return {"step": int(count)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        count.fill_(state["step"])


accelerator.register_for_checkpointing(Counter())
if folder.exists():
    accelerator.load_state(str(folder))
while count < int(os.environ["STEPS"]):
    for features, target in loader:
        loss = torch.nn.functional.mse_loss(model(features), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        tell(int(count), accelerator.process_index, accelerator.num_processes)
        time.sleep(0.05)
        if count % 4 == 0:
            accelerator.save_state(str(folder))
