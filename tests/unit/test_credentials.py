import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY, KEY_BYTES, JobKey, ranks_key

pytestmark = pytest.mark.unit


def test_every_purpose_has_a_key_of_its_own():
    job = JobKey(b"k" * KEY_BYTES)
    first, again = WorkerId("a", 0, 0), WorkerId("a", 0, 1)
    keys = [job.secret, job.of_ranks(), job.of_worker(first), job.of_worker(again), JobKey.new().of_ranks()]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert job.of_worker(first) == JobKey(b"k" * KEY_BYTES).of_worker(WorkerId("a", 0, 0))


def test_the_secret_is_not_printed():
    assert "6b6b" not in repr(JobKey(b"k" * KEY_BYTES))
    assert "kkk" not in repr(JobKey(b"k" * KEY_BYTES))


def test_a_ranks_key_is_read_from_the_environment():
    key = JobKey.new().of_ranks()
    assert ranks_key({ENV_RANKS_KEY: key.hex()}) == key
    assert ranks_key({}) == b""


@pytest.mark.parametrize("text", ["no key", "abcd", "0" * 63])
def test_rubbish_is_refused(text):
    with pytest.raises(SettingsError, match=ENV_RANKS_KEY):
        ranks_key({ENV_RANKS_KEY: text})
