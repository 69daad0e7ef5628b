"""How the workers are: who hangs, who is slow, who is silent. See the core for what comes of it."""
