"""The library inside the training process. Imports nothing of the driver's side."""
