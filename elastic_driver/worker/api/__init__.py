"""What training scripts call: collectives of numpy arrays and of objects, and the handles of what is under way."""
