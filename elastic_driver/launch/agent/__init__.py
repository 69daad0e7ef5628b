"""The agent: one process per host that starts and supervises the host's workers, and represents them to the driver."""
