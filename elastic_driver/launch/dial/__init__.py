"""How an agent is started on a host."""
