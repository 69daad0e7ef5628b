"""The driver's side of the agents: which hosts the job has, and the launcher that gives their agents orders."""
