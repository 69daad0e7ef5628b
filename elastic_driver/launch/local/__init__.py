"""The workers of this machine: started, watched, and their output carried on."""
