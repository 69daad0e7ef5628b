"""A rank's client of rank 0. Owns what rank 0's silence means: it would not be restarted."""

from __future__ import annotations

from elastic_driver.errors import RendezvousClosedError, RendezvousError, RendezvousTimeoutError, StaleRoundError
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.messages import Notice, WatchRequest


class JobClient(RendezvousClient):
    """A client of rank 0."""

    def watch(self, request: WatchRequest, *, wait_s: float = 30.0) -> Notice | None:
        """Long-poll once for a notice.

        Raises:
            StaleRoundError: the round has passed.
            RendezvousClosedError: rank 0 has ended, or cannot be reached; or :meth:`close` was called.
        """
        try:
            return super().watch(request, wait_s=wait_s)
        except (StaleRoundError, RendezvousClosedError, RendezvousTimeoutError):
            raise
        except RendezvousError as error:
            raise RendezvousClosedError(f"rank 0 no longer answers: {error}") from error
