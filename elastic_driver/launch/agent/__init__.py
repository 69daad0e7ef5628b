"""The agent: one process per host that starts and supervises the host's workers, and speaks for them to the driver."""
