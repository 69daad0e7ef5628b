"""The library inside the training process: its place in the round, its collectives, its state.

Never imports the driver's side.
"""
