"""The journal of a job: what its driver has decided, on disc before it is done (docs/decisions/0044)."""
