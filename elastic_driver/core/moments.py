"""Points in time, marked as such, so that a state can be moved to another clock.

Owns the mark only. Durations are plain floats, their names end in ``_s``.
"""

from __future__ import annotations

from typing import Annotated

from elastic_driver.codec import MOMENT

# Seconds of the core's clock, which never goes back and begins anywhere. The clock of one process means nothing to
# another: elastic_driver.core.document writes a Moment relative to the time of writing.
Moment = Annotated[float, MOMENT]
