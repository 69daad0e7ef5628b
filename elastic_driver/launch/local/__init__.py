"""The workers of this machine: starts and watches their processes, and forwards their output."""
