"""What a test of the workers is to be run over."""

from __future__ import annotations

import pytest

from elastic_driver.worker.engine.choice import usable_backends

# Each engine that can be had here: for what each has to get right by itself.
EACH = usable_backends()
# The one that workers get: for all that is above the engines.
FIRST = EACH[:1]
# Where the others differ little: they are asked at a release.
OTHERS_AT_RELEASE = (*FIRST, *(pytest.param(backend, marks=pytest.mark.release) for backend in EACH[1:]))
