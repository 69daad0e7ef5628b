"""Reports the warnings that this package's modules log."""

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
    """Report warnings to the user: an output file that cannot be written, a guard that died.

    Args:
        tell: called with each message. Meanwhile no other handler is.
    """
    logger, handler = logging.getLogger("elastic_driver"), _Teller(tell)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
