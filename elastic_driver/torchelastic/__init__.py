"""The rendezvous for torch: a Store, and the handler of ``torchrun --rdzv-backend=elastic``."""
