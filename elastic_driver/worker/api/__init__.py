"""The API of training scripts: collectives of numpy arrays and objects, and handles of operations in flight."""
