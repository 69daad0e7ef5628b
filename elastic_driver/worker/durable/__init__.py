"""Commits on disc: written behind the training's back, read when all holders of the state are gone."""
