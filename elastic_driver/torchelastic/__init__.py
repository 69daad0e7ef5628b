"""What torch takes from the rendezvous: a Store, and the handler of ``torchrun --rdzv-backend=elastic``."""
