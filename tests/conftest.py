"""Puts this folder on the import path, for what tests of several kinds share (``membership_job``)."""
