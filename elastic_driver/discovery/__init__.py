"""Where the hosts of a job come from."""
