"""torch.distributed inside a round: its process group, and DDP, ZeRO and FSDP2 over it."""
