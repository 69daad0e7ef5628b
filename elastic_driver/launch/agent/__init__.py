"""The agent: one process on each host, which starts and watches the host's workers, and speaks for them."""
