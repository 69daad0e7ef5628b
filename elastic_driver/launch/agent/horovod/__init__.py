"""Workers that run Horovod's own library, unchanged: each has a port of its own here, and its agent speaks for it."""
