"""What it costs the rendezvous that all workers of a round find each other."""

from __future__ import annotations

import asyncio
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_driver.rendezvous.authentication import NONCE_BYTES, Proof
from elastic_driver.rendezvous.certificate import client_context
from elastic_driver.rendezvous.entries import unpack_entries
from elastic_driver.rendezvous.server.peer_connection import ServerLimits
from elastic_driver.words import Backend
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.fakes.rendezvous_service import CERTIFICATE, IDENTITY, KEY, Service, request
from tests.support.processes.backends import OTHERS_AT_RELEASE

pytestmark = pytest.mark.integration

MANY = 400
LIMIT_S = 150.0


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MANY
    if soft < wanted <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_four_hundred_workers_exchange_in_one_request_each() -> None:
    value = b"a" * 200

    async def worker(port: int, key: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context())

        async def answer() -> bytes:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return await reader.readexactly(length)

        certificate = bytes.fromhex(CERTIFICATE.fingerprint)
        proof = Proof(str(IDENTITY), KEY.of(IDENTITY), certificate, os.urandom(NONCE_BYTES))
        writer.write(proof.request)
        challenge = b""
        while missing := proof.missing(challenge):
            challenge += await reader.readexactly(missing)
        target = f"/v1/rounds/1/exchange/global?key={key}&count={MANY}&wait_s={LIMIT_S:g}"
        writer.write(proof.response(challenge) + request("POST", target, f"{key:04}".encode() + value))
        body = await answer()
        writer.close()
        await writer.wait_closed()
        return body

    async def everybody(port: int) -> list[bytes]:
        return await asyncio.gather(*(worker(port, key) for key in range(MANY)))

    service = Service(limits=ServerLimits(request_s=LIMIT_S, idle_s=LIMIT_S))  # so many take their time to shake hands
    try:
        answers = asyncio.run(everybody(service.port))
    finally:
        service.stop()
    assert len(answers) == MANY
    assert set(answers) == {answers[0]}
    assert unpack_entries(answers[0]) == [(str(key), f"{key:04}".encode() + value) for key in range(MANY)]


@pytest.mark.parametrize("backend", OTHERS_AT_RELEASE)
def test_a_mesh_takes_few_requests_a_worker(backend: Backend) -> None:
    workers, rounds = workers_on(a=2, b=1), 4
    asked: Counter[int] = Counter()
    with FakeJob(backend=backend) as job:
        serve = job._server.serve

        def count(connection: Any, method: bytes, url: bytes, body: bytes) -> None:
            if found := re.match(rb"/v1/rounds/(\d+)/", url):
                asked[int(found[1])] += 1
            serve(connection, method, url, body)

        job._server.serve = count  # type: ignore[method-assign]
        job.start(workers, "rebuild", str(rounds))
        for round_id in range(1, rounds + 1):
            job.wait_for(lambda round_id=round_id: len(job.rounds) == round_id, f"round {round_id}")
            job.plan(workers)
        for worker in workers:
            job.wait_end(worker)
    # None at all would mean that nothing was counted. Over torch's Gloo one more, about the ends of the connections.
    most = len(workers) * (2 if backend is Backend.TORCH else 1)
    assert all(0 < asked[round_id] <= most for round_id in range(1, rounds + 1)), asked
