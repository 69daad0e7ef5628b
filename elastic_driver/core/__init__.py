"""The membership core: pure values, ``step(state, event, now)``, and every decision about a job.

Imports the ground only.
"""
