"""The driver's side of the agents: which hosts there are, and the launcher that has agents do what is to be done."""
