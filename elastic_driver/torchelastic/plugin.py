"""The entry point ``torchrun.handlers``: what torch loads, in every process that imports its elastic agent.

Imports nothing heavy: most of them use another rendezvous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_handler() -> Callable[[Any], Any]:
    """What torch calls to get the function that makes handlers."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """Makes the handler of an agent.

    Args:
        parameters: torch's RendezvousParameters, made of torchrun's flags.

    Raises:
        SettingsError: they cannot be used.
    """
    from elastic_driver.torchelastic.handler import ElasticHandler, HandlerSettings

    return ElasticHandler(HandlerSettings.of(parameters))
