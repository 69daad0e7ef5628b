"""How long the native tests wait."""

PATIENCE_S = 150.0
"""For what comes as soon as the machine has time for it."""
NEVER_S = 3600.0
"""As a time limit: beyond a test's own (pytest-timeout). What ends all the same has ended for another reason."""
