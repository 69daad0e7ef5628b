"""The journal of a job: the decisions of its driver, on disk before they take effect (docs/decisions/0044)."""
