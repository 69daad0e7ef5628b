"""Processes of this machine: starting them, detecting their deaths, ending whole trees of them."""
