"""The entry point ``torchrun.handlers``, which torch loads in every process that imports its elastic agent.

Imports nothing heavy: most of these processes use another rendezvous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_handler() -> Callable[[Any], Any]:
    """Return the function that creates handlers."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """Create the handler of an agent.

    Args:
        parameters: torch's RendezvousParameters, from torchrun's flags.

    Raises:
        SettingsError: a parameter is invalid.
    """
    from elastic_driver.torchelastic.handler import ElasticHandler, HandlerSettings

    return ElasticHandler(HandlerSettings.of(parameters))
