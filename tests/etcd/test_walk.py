"""Drivers that follow each other while they, and the servers of etcd, are killed and stopped at random.

What was written is there for whoever comes next, once, and in its order; however it came to be written.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.journal.etcd_lock import now_s
from tests.support.fakes.etcd_jobs import bodies, until
from tests.support.processes.etcd import Cluster, cluster, needs_etcd

pytestmark = [pytest.mark.etcd, needs_etcd]

DRIVERS, LENGTH_S = 3, 40.0

# Has the job again and again, writes words "EPOCH.NUMBER" into its journal, and into a file which of them are written.
DRIVER = textwrap.dedent(
    """
    import os, sys
    from elastic_driver.errors import ElasticError
    from elastic_driver.etcd.client import EtcdClient
    from elastic_driver.etcd.place import EtcdPlace
    from elastic_driver.journal.etcd_lock import EtcdLock
    from elastic_driver.journal.etcd_store import EtcdStore
    from elastic_driver.journal.folder import JournalError, JournalHeldError
    from elastic_driver.etcd.sealed import Secret
    from tests.support.fakes.etcd_jobs import SECRET, bodies

    place = EtcdPlace.parse(sys.argv[1], os.environ)
    file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def drive():
        lock = EtcdLock.take(place, "0123", stands_by=True)
        try:
            with EtcdClient(place) as client:
                store = EtcdStore(lock, Secret(SECRET, place.prefix), client)
                told = b"".join(bodies(place) or [b""]).decode().split()
                epoch = int(told[-1].partition(".")[0]) + 1 if told else 1
                for number in range(10**9):
                    told.append(f"{epoch}.{number}")
                    while True:
                        try:
                            store.look()
                            if store.size:
                                store.append(f" {told[-1]}".encode())
                            else:
                                store.begin(" ".join(told).encode())
                            break
                        except OSError:
                            store.close()
                    os.write(file, f"{told[-1]}\\n".encode())
        finally:
            lock.release()

    while True:
        try:
            drive()
        except JournalHeldError:
            pass  # it was stopped, and another one has it
        except (OSError, JournalError):
            pass  # etcd is away
    """
)


class Walk:
    """Some drivers of one job, and who ends them."""

    def __init__(self, etcd: Cluster, folder: Path, seed: int) -> None:
        self._etcd = etcd
        self._folder = folder
        self._draw = random.Random(seed)
        self._drivers: list[subprocess.Popen[bytes]] = []
        self.place: EtcdPlace = etcd.place()

    def begin(self) -> None:
        """Another driver."""
        words = [sys.executable, "-c", DRIVER, str(self.place), str(self._folder / "written")]
        self._drivers.append(subprocess.Popen(words))

    def end(self) -> None:
        """All of them are gone."""
        for driver in self._drivers:
            driver.kill()
            driver.wait()

    def written(self) -> list[str]:
        """What drivers know to be written; the last line may be torn."""
        path = self._folder / "written"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def step(self) -> None:
        """Something happens, and something is written after that."""
        what = self._draw.choice(["kill", "kill", "stop", "stop", "leader", "server"])
        driver = self._draw.choice(self._drivers)
        server = self._draw.choice(self._etcd.servers)
        pause_s = self._draw.uniform(0.2, 8.0)
        match what:
            case "kill":
                driver.kill()
                driver.wait()
                self._drivers.remove(driver)
                self.begin()
            case "stop":
                driver.send_signal(signal.SIGSTOP)
                _pass(pause_s)
                driver.send_signal(signal.SIGCONT)
            case "leader":
                leader = self._etcd.leader()
                leader.kill()
                _pass(pause_s / 4)
                self._etcd.start(leader)
            case _:
                server.send(signal.SIGSTOP)
                _pass(pause_s / 2)
                server.send(signal.SIGCONT)
        count = len(self.written())
        until(lambda: len(self.written()) > count + 3)


def _pass(seconds: float) -> None:
    """Time passes: leases run out, elections are held."""
    end_s = now_s() + seconds
    until(lambda: now_s() >= end_s)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, 3) as made:
        yield made


@pytest.mark.parametrize("seed", [1])
def test_what_is_written_is_there_for_the_next(etcd: Cluster, tmp_path: Path, seed: int) -> None:
    walk = Walk(etcd, tmp_path, seed)
    with ExitStack() as stack:
        stack.callback(walk.end)
        for _ in range(DRIVERS):
            walk.begin()
        until(walk.written)
        end_s = now_s() + LENGTH_S
        while now_s() < end_s:
            walk.step()
    found = b"".join(bodies(walk.place) or ()).decode().split()
    order = [tuple(map(int, word.split("."))) for word in found]
    assert order == sorted(set(order)), "once each, driver after driver"
    written = walk.written()
    assert len(written) == len(set(written))
    assert sorted(set(written) - set(found)) == []
    assert len({epoch for epoch, _ in order}) >= 3
