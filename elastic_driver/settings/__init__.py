"""The settings of a job, and their checks."""
