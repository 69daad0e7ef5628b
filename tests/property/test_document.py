"""Documents under any change: each is read as it stands, or refused with the one error there is for that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.core.document import DocumentError, read, write
from elastic_driver.core.events import DrainRequested
from tests.support.extent import examples
from tests.support.fakes.membership_job import Job

pytestmark = pytest.mark.property

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10),
    st.floats(),
    st.text(max_size=3),
    st.just("a[0]#0"),
    st.just([]),
    st.just({}),
)


def _job() -> Job:
    job = Job(num_proc=2, min_num_proc=1, cooldown_range_s=(1.0, 8.0))
    job.train("a:1", "b:1", commits=1)
    job.feed(DrainRequested("b", None, "as asked"))
    job.exit("b[0]", 1, draw=0.5)
    return job


TEXT = json.dumps(write(_job().state, 0.0))


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    return [(data, key) for key in keys] + [place for key in keys for place in _places(data[key])]


@given(data=st.data(), value=values, remove=st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_a_change_anywhere(data: st.DataObject, value: object, *, remove: bool) -> None:
    document = json.loads(TEXT)
    container, key = data.draw(st.sampled_from(_places(document)))
    if remove:
        del container[key]
    else:
        container[key] = value
    try:
        state = read(document, 0.0)
    except DocumentError:
        return
    # Sets and numbers may be written another way: 1 for 1.0.
    assert write(state, 0.0) == document
