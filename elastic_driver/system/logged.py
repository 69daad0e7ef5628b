"""What this package's modules log as a warning, and who is told."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator


class _Teller(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextlib.contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Has the user told of warnings: an output file that cannot be written, a guard that died.

    Args:
        tell: is given each in words. Meanwhile nobody else is.
    """
    logger, handler = logging.getLogger("elastic_driver"), _Teller(tell)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
