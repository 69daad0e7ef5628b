"""torch.distributed inside a round: its process group, DDP and FSDP2 over it."""
