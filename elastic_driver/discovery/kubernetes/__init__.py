"""Hosts from the pods of a Kubernetes cluster. Needs the extra ``kubernetes``."""
