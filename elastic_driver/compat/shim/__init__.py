"""A folder for PYTHONPATH: its packages become top-level packages."""
