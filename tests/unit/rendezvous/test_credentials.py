import hashlib
import secrets

import pytest

from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import (
    ENV_RANKS_KEY,
    KEY_BYTES,
    Credential,
    Identity,
    JobKey,
    Role,
    join_key,
    member,
    ranks_key,
)
from elastic_driver.rendezvous.environment import ENV_WORKER

pytestmark = pytest.mark.unit

WORKER = WorkerId("a", 0, 0)


def test_every_purpose_has_a_key_of_its_own():
    job = JobKey(b"k" * KEY_BYTES)
    again = WorkerId("a", 0, 1)
    one, other = Identity(Role.WORKER, WORKER), Identity(Role.WORKER, again)
    keys = [job.secret, job.of_ranks(), job.of(one), job.of(other), JobKey.new().of_ranks()]
    keys += [job.of(Identity(Role.OPERATOR)), job.of(Identity(Role.READER))]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert job.of(one) == JobKey(b"k" * KEY_BYTES).of(Identity(Role.WORKER, WorkerId("a", 0, 0)))


def test_secrets_are_not_printed():
    job = JobKey(b"k" * KEY_BYTES)
    for text in (repr(job), repr(Credential(Identity(Role.OPERATOR), job.secret)), repr(JobAddress("", job, ""))):
        assert "6b6b" not in text
        assert "kkk" not in text


def test_a_ranks_key_is_read_from_the_environment():
    key = JobKey.new().of_ranks()
    assert ranks_key({ENV_RANKS_KEY: key.hex()}) == key
    assert ranks_key({}) == b""


@pytest.mark.parametrize("text", ["no key", "abcd", "0" * 63])
def test_rubbish_is_refused(text):
    with pytest.raises(SettingsError, match=ENV_RANKS_KEY):
        ranks_key({ENV_RANKS_KEY: text})


def test_a_worker_knows_who_it_is_and_of_keys_the_ranks_only():
    job = JobKey.new()
    outer = {ENV_RANKS_KEY: "of another job"}
    env = OurDialect(outer, exported={}).environment(
        WorkerStart(WORKER, SlotInfo(0, 1, 0, 1, 0, 1), (WORKER.hostname,), round_id=0, cores=1),
        job=JobAddress("unix:/agent", job, "id"),
    )
    assert Credential.of_worker(env) == Credential(Identity(Role.WORKER, WORKER))
    assert ranks_key(env) == job.of_ranks()
    everything = "".join(env.values())
    assert "of another job" not in everything
    others = (Identity(Role.OPERATOR), Identity(Role.READER), Identity(Role.WORKER, WORKER))
    for secret in (job.secret, *map(job.of, others)):
        assert secret.hex() not in everything


def test_a_variable_that_is_missing_is_named():
    with pytest.raises(SettingsError, match=f"{ENV_WORKER} is not set"):
        Credential.of_worker({})


@pytest.mark.parametrize("identity", [Identity(Role.OPERATOR), Identity(Role.WORKER, WORKER)])
def test_names_of_identities(identity):
    assert Identity.parse(str(identity)) == identity


@pytest.mark.parametrize(
    "name", ["", "reader", "ranks", "worker", "worker ", "worker a", "worker a[0]#00", "operator a[0]#0", "Operator"]
)
def test_names_that_nobody_has(name):
    with pytest.raises(ValueError, match=r".+"):
        Identity.parse(name)


def test_a_token_s_key_costs_whoever_guesses_it_and_its_owner_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bytes, bytes, int]] = []
    scrypt = hashlib.scrypt

    def count(password: bytes, *, salt: bytes, n: int, r: int, p: int, dklen: int) -> bytes:
        asked.append((password, salt, 128 * n * r))
        return scrypt(password, salt=salt, n=n, r=r, p=p, dklen=dklen)

    monkeypatch.setattr(hashlib, "scrypt", count)
    token = secrets.token_hex(32)
    keys = [join_key(token), join_key(token), member(token).key, member(token).key]
    assert len(set(keys)) == 2, "what one of them may do the other may not"
    assert {len(key) for key in keys} == {32}
    assert {salt for _, salt, _ in asked} == {b"elastic_driver joiner", b"elastic_driver member"}
    assert [(password, memory) for password, _, memory in asked] == [(token.encode(), 16 << 20)] * 2
    assert member("").key == member("").key
    assert len(asked) == 2, "there is nothing to guess"
