"""A training with transformers' Trainer, as its users write it: save_steps, and the last whole checkpoint."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from told import tell
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Steps(TrainerCallback):
    """Says each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tell(state.global_step, args.process_index, args.world_size)
        time.sleep(0.05)


class Sentences(torch.utils.data.Dataset):
    """Made up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(8) + index % 8, "attention_mask": torch.ones(8).long(), "labels": index % 2}


config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
folder = os.environ["CHECKPOINTS"]
arguments = TrainingArguments(
    folder,
    use_cpu=True,
    max_steps=int(os.environ["STEPS"]),
    per_device_train_batch_size=4,
    save_steps=4,
    save_total_limit=2,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Sentences(), callbacks=[Steps()])
# Who is killed while it saves leaves a part of a checkpoint behind, which get_last_checkpoint() would take for one.
whole = [file.parent for file in Path(folder).glob("checkpoint-*/trainer_state.json")]
last = max(whole, key=lambda each: int(each.name.partition("-")[2]), default=None)
trainer.train(resume_from_checkpoint=None if last is None else str(last))
