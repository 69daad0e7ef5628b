"""torch.distributed inside a round: its process group, DDP, ZeRO and FSDP2 over it."""
