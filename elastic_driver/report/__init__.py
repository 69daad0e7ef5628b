"""What users are told: the terminal, the event log, and what both are told of."""
