"""What a user may set, and whether it can be."""
