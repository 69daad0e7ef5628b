"""Processes of this machine: starting them, feeling their deaths, ending whole trees of them."""
