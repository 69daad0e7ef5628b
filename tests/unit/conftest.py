"""What unit tests of a worker's side share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def job_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a job by itself, while the test lasts."""
    import elastic_driver as hvd  # late: most unit tests need no worker

    monkeypatch.delenv("ELASTIC_DRIVER_RENDEZVOUS", raising=False)
    hvd.init()
    yield
    hvd.shutdown()
