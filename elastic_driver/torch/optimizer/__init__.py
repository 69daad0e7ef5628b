"""Gradients: buckets that go while the backward pass runs, compression, Adasum, and the optimizer around them."""
