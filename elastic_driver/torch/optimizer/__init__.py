"""Gradient reduction: buckets sent during the backward pass, compression, Adasum, and the optimizer around them."""
