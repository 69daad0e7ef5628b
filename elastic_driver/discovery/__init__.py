"""Discovery: the sources of a job's hosts."""
