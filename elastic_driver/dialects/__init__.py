"""Dialects: the environment in which each kind of worker is started."""
