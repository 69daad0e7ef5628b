"""A training with Lightning: a Trainer over DDP, a checkpoint every few steps, and ckpt_path="last"."""

import os
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from told import tell


class Net(lightning.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        features, target = batch
        tell(self.global_step + 1, self.global_rank, self.trainer.world_size)
        time.sleep(0.05)
        return torch.nn.functional.mse_loss(self.layer(features), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    folder = Path(os.environ["CHECKPOINTS"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=int(os.environ["STEPS"]),
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=4, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=8), ckpt_path="last")
