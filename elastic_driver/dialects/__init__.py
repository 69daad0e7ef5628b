"""How a worker is spoken to: the environment it is started with, by dialect."""
