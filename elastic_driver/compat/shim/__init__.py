"""A folder for PYTHONPATH: what is in it can be imported by the name it has here."""
