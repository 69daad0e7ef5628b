"""Commits on disk: written in the background of the training, read when no process has the state any more."""
