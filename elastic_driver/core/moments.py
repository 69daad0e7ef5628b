"""Points in time, marked as such, so that a state can be moved to another clock.

Owns the mark only. Durations are plain floats, their names end in ``_s``.
"""

from __future__ import annotations

from typing import Annotated

from elastic_driver.codec import MOMENT

# Seconds of the core's clock, which never goes back and begins anywhere. What a clock of one process says means nothing
# to another process: elastic_driver.core.document writes a Moment down relative to the moment of writing.
Moment = Annotated[float, MOMENT]
