"""Workers that run Horovod's own library, unchanged: the agent gives each a port of its own, and represents it."""
