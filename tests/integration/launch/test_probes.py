"""Agents as real processes that look for each other, under a driver that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import Close, Listen, Listening, Probe, Probed, Unlisten
from elastic_driver.rendezvous.authentication import MAC_BYTES, NO_CERTIFICATE, NONCE_BYTES, Proof, refusal
from tests.support.processes.agents import PATIENCE_S, Scene, act, scene

pytestmark = pytest.mark.integration

SECRET = "5e" * 32
CHALLENGE_BYTES = 1 + NONCE_BYTES + MAC_BYTES
STRANGER = Proof("probe b take 8 1.0", bytes(32), NO_CERTIFICATE, b"n" * 32)
ADDRESS = "127.0.0.1"


def listen(host: str, **more: Any) -> Listen:
    values = {"check": 1, "host": host, "secret": SECRET, "address": ADDRESS, "ports": [], "limit_s": 30.0} | more
    return Listen(**values)


def probe(ports: dict[str, int], *, burst_bytes: int = 0, limit_s: float = 20.0, **more: Any) -> Probe:
    values = {"check": 1, "number": 7, "burst_s": 0.3} | more
    addresses = dict.fromkeys(ports, ADDRESS)
    return Probe(addresses=addresses, ports=ports, burst_bytes=burst_bytes, limit_s=limit_s, **values)


async def two(one: Scene) -> tuple[AgentLink, AgentLink]:
    """Two agents, of hosts a and b."""
    await one.ready()
    await one.ready(one.driver.bootstrap("b"))
    a, b = one.driver.links.values()
    return a, b


async def listens(one: Scene, link: AgentLink, order: Listen) -> Listening:
    before = len(one.driver.of(Listening))
    link.send(order)
    return await one.driver.hears(Listening, nth=before + 1)


async def probes(one: Scene, link: AgentLink, order: Probe) -> Probed:
    before = len(one.driver.of(Probed))
    link.send(order)
    return await one.driver.hears(Probed, nth=before + 1)


def connect(port: int) -> socket.socket:
    return socket.create_connection((ADDRESS, port), timeout=PATIENCE_S)


async def is_refused(port: int) -> bool:
    try:
        (await asyncio.to_thread(connect, port)).close()
    except ConnectionRefusedError:
        return True
    return False


async def until_refused(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_refused(port):
            await asyncio.sleep(0.02)


def test_two_agents_reach_each_other_and_tell_how_fast(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            a, b = await two(one)
            there = await listens(one, a, listen("a"))
            back = await listens(one, b, listen("b"))
            assert there.error == back.error == ""
            answer = await probes(one, a, probe({"b": back.port}))
            assert answer.number == 7
            assert answer.rtt_s.keys() == {"b"}
            assert answer.rtt_s["b"] > 0
            assert (answer.speeds, answer.failures) == ({}, {})
            answer = await probes(one, b, probe({"a": there.port}, burst_bytes=1 << 22))
            assert answer.failures == {}
            assert all(speed > 1e5 for speed in answer.speeds["a"]), answer
            b.send(Unlisten(1))
            await until_refused(back.port)
            answer = await probes(one, a, probe({"b": back.port}))
            assert answer.failures == {"b": "nothing listens there (connection refused)"}
            assert answer.rtt_s == {}

    act(main)


def test_ports_are_taken_from_the_range(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            a, b = await two(one)
            with socket.socket() as taken, socket.socket() as spare:
                for sock in (taken, spare):
                    sock.bind((ADDRESS, 0))
                taken.listen()
                port, free = taken.getsockname()[1], spare.getsockname()[1]
                spare.close()
                answer = await listens(one, a, listen("a", ports=[port, port]))
                assert (answer.port, answer.error) == (0, f"no port in {port}-{port} is free")
                # It can look for others, though nobody can look for it.
                there = await listens(one, b, listen("b", ports=[free, free]))
                assert there.port == free
                assert (await probes(one, a, probe({"b": free}))).failures == {}
            answer = await listens(one, a, listen("a", address="192.0.2.1"))
            assert (answer.port, answer.error) == (0, os.strerror(99))
            answer = await listens(one, a, listen("a", address="no address"))
            assert answer.port == 0
            assert answer.error
            answer = await listens(one, a, listen("a", ports=[70000, 70001]))
            assert answer.port == 0
            assert answer.error
            # And without a key it answers nobody.
            for secret in ("", "5e" * 31, "no key"):
                assert (await listens(one, a, listen("a", secret=secret))).port == 0

    act(main)


def test_strangers_are_neither_served_nor_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            a, b = await two(one)
            await listens(one, a, listen("a"))
            port = (await listens(one, b, listen("b"))).port
            silent, slow = await asyncio.to_thread(connect, port), await asyncio.to_thread(connect, port)
            slow.sendall(STRANGER.request[:-1])
            for said in (b"GET / HTTP/1.1\r\n\r\n" + bytes(64), STRANGER.request + bytes(MAC_BYTES), bytes(600)):
                assert await asyncio.to_thread(answers, port, said) == b""
            # Of another host it says so; of its own it gives a nonce and a proof, which anybody may have.
            other = replace(STRANGER, name="probe bb echo 3 0.0").request
            assert await asyncio.to_thread(answers, port, other) == refusal("this is not that host's agent")
            for sent_back in (bytes(MAC_BYTES), b""):
                with await asyncio.to_thread(connect, port) as stranger:
                    stranger.sendall(STRANGER.request)
                    said = await asyncio.to_thread(receive, stranger, CHALLENGE_BYTES)
                    assert STRANGER.missing(said) == 0
                    stranger.sendall((sent_back or said[-MAC_BYTES:]) + bytes(16))
                    assert await asyncio.to_thread(receive, stranger) == b"", "who proves nothing is not answered"
            answer = await probes(one, a, probe({"b": port}, burst_bytes=1 << 20))
            assert answer.failures == {}
            assert answer.speeds.keys() == {"b"}
            for sock in (silent, slow):
                assert await asyncio.to_thread(receive, sock) == b"", "who says nothing more is cut off"
                sock.close()

            # And what answers is no agent of that host: another agent, another check's, or somebody else's server.
            answer = await probes(one, a, probe({"c": port}))
            assert answer.failures == {"c": "the process that answers there is not that host's agent"}
            await listens(one, a, listen("a", secret="00" * 32))
            answer = await probes(one, a, probe({"b": port}))
            assert answer.failures == {"b": "the process that answers there is not that host's agent"}
            with socket.create_server((ADDRESS, 0)) as server:
                answer = await probes(one, a, probe({"b": server.getsockname()[1]}, limit_s=0.5))
                assert answer.failures == {"b": "no answer within 0.5 s"}

    act(main)


def receive(sock: socket.socket, size: int = 4096) -> bytes:
    """So much, or what comes until the end."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < size and (more := sock.recv(size - len(data))):
            data += more
    return data


def answers(port: int, said: bytes) -> bytes:
    with connect(port) as stranger:
        stranger.sendall(said)
        return receive(stranger)


def test_words_in_pieces_are_put_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            await one.ready()
            port = (await listens(one, one.driver.link, listen("b"))).port
            proof = replace(STRANGER, key=bytes.fromhex(SECRET), name="probe b echo 1 0.0")
            with await asyncio.to_thread(connect, port) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for byte in proof.request:
                    sock.sendall(bytes([byte]))
                answer = b""
                while missing := proof.missing(answer):
                    answer += await asyncio.to_thread(receive, sock, missing)
                ping = os.urandom(16)
                sock.sendall(proof.response(answer) + ping)  # in one piece
                assert await asyncio.to_thread(receive, sock, 16) == ping
            # The same once more is of no use: each connection has a nonce of the listener's.
            with await asyncio.to_thread(connect, port) as sock:
                sock.sendall(proof.request)
                assert await asyncio.to_thread(receive, sock, CHALLENGE_BYTES) != answer
                sock.sendall(proof.response(answer) + ping)
                assert await asyncio.to_thread(receive, sock) == b""

    act(main)


def test_a_check_is_over_by_itself_and_a_new_one_takes_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            a, b = await two(one)
            first = await listens(one, a, listen("a"))
            second = await listens(one, a, listen("a", check=2, limit_s=1.0))
            await until_refused(first.port)
            a.send(Unlisten(1))  # of one that is over
            a.send(probe({"b": 1}))
            assert (await one.driver.hears(Probed)).failures == {"b": "the check is over"}
            await until_refused(second.port)
            # An order and its end in one breath leave nothing.
            before = len(one.driver.of(Listening))
            b.send(listen("b", check=3))
            b.send(Unlisten(3))
            third = await listens(one, b, listen("b", check=4))
            assert len(one.driver.of(Listening)) == before + 1
            assert not await is_refused(third.port)

    act(main)


def test_an_agent_ends_in_the_middle_of_a_check(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            first = await one.ready()
            a = one.driver.link
            second = await one.ready(one.driver.bootstrap("b"))
            b = one.driver.link
            await listens(one, a, listen("a"))
            port = (await listens(one, b, listen("b"))).port
            second.popen.kill()
            await second.ends()
            answer = await probes(one, a, probe({"b": port}, limit_s=1.0))
            assert answer.failures["b"] in (
                "nothing listens there (connection refused)",
                "the connection was closed immediately",
            ), answer
            # With a listener and a probe under way it ends as at any time.
            with socket.create_server((ADDRESS, 0)) as mute:
                a.send(probe({"b": mute.getsockname()[1]}))
                a.send(Close())
                assert await first.ends() == (0, "")

    act(main)


def test_a_connection_to_the_driver_that_is_cut_loses_no_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            a, b = await two(one)
            await listens(one, a, listen("a"))
            port = (await listens(one, b, listen("b"))).port
            a.send(probe({"b": port}, burst_bytes=1 << 22))
            one.driver.cut(a)
            assert (await one.driver.hears(Probed)).failures == {}

    act(main)
