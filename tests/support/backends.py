"""What a test of the workers is to be run over."""

from __future__ import annotations

import pytest

from elastic_driver.words import Backend
from elastic_driver.worker.engine.choice import usable_backends

BACKENDS = [
    pytest.param(backend, marks=pytest.mark.skipif(backend not in usable_backends(), reason="not on this machine"))
    for backend in Backend
]
