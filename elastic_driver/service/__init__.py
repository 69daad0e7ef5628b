"""``elasticrun rendezvous``: a rendezvous for jobs of torchrun, outside their nodes. Imports no torch."""
