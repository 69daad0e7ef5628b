"""Other users of the machine who connect to whatever listens while ranks find each other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from elastic_driver.errors import HorovodInternalError

from .conftest import native
from .engines import (
    NEVER_S,
    PATIENCE_S,
    SEAL,
    After,
    Meeting,
    Seal,
    allreduce,
    each_rank,
    make_engine,
    port_of,
    together,
)

# Rounds take milliseconds here. That nobody waits for a time limit, nor for one stranger after the other (5 s each),
# the tests prove by ending.

# Looks for new listeners all the time, as sock_diag and /proc/net/tcp show them to everybody, connects to each, says
# something or nothing, and binds the port as soon as it is free.
ATTACKER = textwrap.dedent(
    """
    import os, socket, sys
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    def listeners():
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[1].startswith("0100007F")}
    known, held, each = listeners(), [], int(sys.argv[1])
    print("ready", flush=True)
    while True:
        for port in listeners() - known:
            for turn in range(each):
                guest = socket.socket()
                guest.setblocking(False)
                guest.connect_ex(("127.0.0.1", port))
                if turn % 2:
                    try:
                        guest.send(bytes.fromhex("0270a5e1") + (1).to_bytes(4, "little") + bytes(100))
                    except OSError:
                        pass
                held.append(guest)
            known.add(port)
            print(port, flush=True)
            squat = socket.socket()
            try:
                squat.bind(("127.0.0.1", port))
                squat.listen(1)
            except OSError:
                pass
            held.append(squat)
        del held[:-900]
    """
)


@contextlib.contextmanager
def attacker(each: int) -> Iterator[subprocess.Popen[str]]:
    """Another local user, where this process may become one."""
    process = subprocess.Popen([sys.executable, "-c", ATTACKER, str(each)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def attacked(process: subprocess.Popen[str]) -> int:
    """How many listeners it has found so far."""
    assert process.stdout is not None
    descriptor, found = process.stdout.fileno(), b""
    while select.select([descriptor], [], [], 0)[0]:
        found += os.read(descriptor, 65536)
    return found.count(b"\n")


def listening() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("guests", [1, 200])
def test_strangers_who_come_first_keep_no_peer_out(guests: int) -> None:
    """To each listener of a round's contexts, before any peer, again and again."""
    for _ in range(5):
        before = listening()
        groups = [[("global", [0, 1, 2], rank), ("cross", [0, 1, 2], rank)] for rank in range(3)]
        members = [native.ContextGroup(each, host="127.0.0.1", key=b"key", purpose="test") for each in groups]
        blobs = [member.prepare() for member in members]
        ports = listening() - before
        assert ports
        strangers = [socket.create_connection(("127.0.0.1", port)) for port in ports for _ in range(guests)]
        errors: list[BaseException] = []

        def run(
            rank: int,
            members: list[Any] = members,
            blobs: list[bytes] = blobs,
            errors: list[BaseException] = errors,
        ) -> None:
            try:
                members[rank].connect(blobs, NEVER_S)
                for group in ("global", "cross"):
                    data = np.full(1000, rank, np.float32)
                    members[rank].allreduce(group, data, "float32", "sum", NEVER_S)
                    assert data[0] == 3
            except BaseException as error:
                errors.append(error)
                for member in members:
                    member.abort("another has failed")

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        for member in members:
            member.close()
        for stranger in strangers:
            stranger.close()


def test_rounds_form_while_another_user_connects_to_all_that_listens() -> None:
    """Rank 0's link, each rank's connections over the network, and those of a process set that comes later."""
    with attacker(300) as process:
        for _ in range(3):
            meeting = Meeting()
            made = [make_engine(rank, 3, shared_memory=False) for rank in range(3)]

            def body(engine: Any, rank: int, meeting: Meeting = meeting) -> None:
                def wait_for_guests(where: bytes) -> None:
                    # The others let the stranger come first.
                    deadline = time.monotonic() + 0.2
                    while rank and time.monotonic() < deadline and not attacked(process):
                        pass

                engine.connect(After(meeting, wait_for_guests), timeout_s=NEVER_S)
                engine.add_process_set(1, [0, 2])
                array = np.full(1000, rank, np.float32)
                allreduce(engine, array)
                assert array[0] == 3
                if rank != 1:
                    allreduce(engine, array, process_set=1)
                    assert array[0] == 6

            try:
                together(made, body)
            finally:
                for engine in made:
                    engine.close()


def test_a_relay_to_rank_0_is_refused() -> None:
    """It passes on what both say, byte for byte; rank 1 dials it because it was told a wrong address."""
    meeting, relays = Meeting(), []

    class Diverted(After):
        def share(self, scope: str, value: bytes | None) -> bytes:
            where = super().share(scope, value)
            if value is not None:
                return where
            relays.append(Relay(port_of(where)))
            return where[: 1 + where[0]] + seven_bits(relays[0].port)

    made = [make_engine(rank, 2) for rank in range(2)]

    def body(engine: Any, rank: int) -> None:
        try:
            engine.connect(Diverted(meeting, lambda where: None), timeout_s=NEVER_S)
        except HorovodInternalError:
            made[1 - rank].abort("the other one has failed")
            raise

    errors = each_rank(made, body)
    assert "does not prove that he is this rank of this job" in str(errors[1])
    assert sorted(errors) == [0, 1]
    assert relays[0].passed > 50
    for each in (*made, *relays):
        each.close()


def test_a_stranger_who_knows_all_but_the_key_is_no_rank() -> None:
    """It dials rank 0 before rank 1 does, says that it is rank 1, and cares for no answer."""
    made = [make_engine(rank, 2) for rank in range(2)]

    def come_first(where: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port_of(where)), timeout=PATIENCE_S) as stranger:
            of_no_name = hashlib.sha256(b"").digest()[:8]
            stranger.sendall(bytes.fromhex("0270a5e1") + (1).to_bytes(4, "little") + of_no_name + bytes(16))
            answer = b""
            while len(answer) < 16 + 32:
                part = stranger.recv(16 + 32 - len(answer))
                assert part, "it was not taken for rank 1 for as long as it could be"
                answer += part
            stranger.sendall(bytes(32))
            assert stranger.recv(1) == b"", "it was welcomed"

    meeting = Meeting()

    def body(engine: Any, rank: int) -> None:
        engine.connect(After(meeting, come_first) if rank else meeting, timeout_s=NEVER_S)
        array = np.ones(3)
        allreduce(engine, array)
        assert array[0] == 2

    try:
        together(made, body)
    finally:
        for engine in made:
            engine.close()


@pytest.mark.parametrize("machines", ["", "ab"])
@pytest.mark.parametrize("wrong", [Seal(b"another key", SEAL.round_id), Seal(SEAL.key, SEAL.round_id + 1)])
def test_a_rank_of_another_job_or_round_is_refused(wrong: Seal, machines: str) -> None:
    meeting = Meeting()
    made = [
        make_engine(0, 2, machines[:1], shared_memory=True),
        make_engine(1, 2, machines[1:], seal=wrong, shared_memory=True),
    ]

    def body(engine: Any, rank: int) -> None:
        try:
            engine.connect(meeting, timeout_s=NEVER_S)
        finally:
            made[1 - rank].abort("the other one has failed")

    errors = each_rank(made, body)
    assert sorted(errors) == [0, 1]
    assert "does not prove" in str(errors[1])
    for engine in made:
        engine.close()


RANK_0 = textwrap.dedent(
    """
    import os, resource, sys, threading, time
    import numpy as np
    from tests.native.engines import NEVER_S, After, Meeting, allreduce, make_engine

    hear, tell = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")

    def then(where):
        # As many as the round needs, and some.
        highest = len(os.listdir("/proc/self/fd")) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        print(where.hex(), file=tell, flush=True)
        threading.Thread(target=look).start()

    def look():
        hear.readline()  # all the guests are there
        # Who spins is always seen running, or ready to run.
        looks = 0
        while looks < 10:
            looks = looks + 1 if others_sleep() else 0
            time.sleep(0.01)
        print("sleeps", file=tell, flush=True)

    def others_sleep():
        try:
            threads = [each for each in os.listdir("/proc/self/task") if int(each) != threading.get_native_id()]
            states = [open(f"/proc/self/task/{each}/stat").read().rpartition(")")[2].split()[0] for each in threads]
        except OSError:  # for this moment the guests have all descriptors that there are
            return False
        return set(states) == {"S"}

    engine = make_engine(0, 2)
    engine.connect(After(Meeting(), then), timeout_s=NEVER_S)
    array = np.ones(3)
    allreduce(engine, array)
    assert array[0] == 2
    hear.readline()
    engine.close()
    """
)


def test_guests_do_not_use_up_the_descriptors() -> None:
    """Hundreds that say nothing: the oldest are dropped, nothing spins, and who belongs there still gets in."""
    to_child, from_child = os.pipe(), os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", RANK_0, str(to_child[0]), str(from_child[1])],
        pass_fds=(to_child[0], from_child[1]),
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(to_child[0])
    os.close(from_child[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    guests: list[socket.socket] = []
    engine = make_engine(1, 2)
    try:
        with os.fdopen(to_child[1], "w") as tell, os.fdopen(from_child[0]) as hear:
            where = bytes.fromhex(hear.readline())
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
            for _ in range(1000):
                guests.append(socket.create_connection(("127.0.0.1", port_of(where)), timeout=PATIENCE_S))
            print("there", file=tell, flush=True)
            assert hear.readline() == "sleeps\n"
            meeting = Meeting()
            meeting.share("engine", where)
            engine.connect(meeting, timeout_s=NEVER_S)
            array = np.ones(3)
            allreduce(engine, array)
            assert array[0] == 2
            print("done", file=tell, flush=True)
        assert child.wait(PATIENCE_S) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        engine.close()
        for guest in guests:
            guest.close()
        child.kill()
        _, said = child.communicate()
        print(said)


def seven_bits(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


class Relay:
    """Between a port of its own and another: one connection, byte for byte."""

    def __init__(self, target: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.passed = 0
        self._target = target
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._listener.settimeout(PATIENCE_S)
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        with near, far:
            while True:
                for one in select.select([near, far], [], [], PATIENCE_S)[0]:
                    try:
                        data = one.recv(4096)
                    except ConnectionError:
                        data = b""
                    if not data:
                        return
                    self.passed += len(data)
                    (far if one is near else near).sendall(data)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()
