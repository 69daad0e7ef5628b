"""A journal in real servers of etcd: leases that run out, servers that die, processes that stand still.

What needs no time to pass is in tests/unit/journal/test_etcd.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.etcd.client import EtcdClient, EtcdUnreachableError
from elastic_driver.etcd.driver_record import driver_key, driver_there
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.journal.etcd_lock import EtcdLock, now_s
from tests.support.fakes.etcd_jobs import Writer, bodies, until, writer
from tests.support.processes.etcd import Cluster, cluster, needs_etcd

pytestmark = [pytest.mark.etcd, needs_etcd]

# Takes the lock of a place, and does what it is told in lines.
DRIVER = textwrap.dedent(
    """
    import contextlib, os, sys
    from elastic_driver.etcd.place import EtcdPlace
    from elastic_driver.journal.folder import JournalHeldError
    from tests.support.fakes.etcd_jobs import writer
    stack = contextlib.ExitStack()
    for line in sys.stdin:
        words = line.split()
        try:
            match words:
                case ["take", url]:
                    made = stack.enter_context(writer(EtcdPlace.parse(url, os.environ)))
                case ["release"]:
                    stack.close()
                case ["begin" | "append" as what, text]:
                    getattr(made, what)(text.encode())
                case ["late", text]:  # without a look
                    made.store.append(text.encode())
            print("done", flush=True)
        except JournalHeldError as error:
            print("held", error, flush=True)
        except OSError as error:
            print(type(error).__name__, error, flush=True)
    """
)


class Driver:
    """A process that takes a lock, and writes. Leaving its context kills it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *unused: object) -> None:
        self.process.kill()
        self.process.communicate()

    def say(self, line: str) -> None:
        """Tells it to do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        """What has come of that."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def does(self, line: str) -> str:
        """Both."""
        self.say(line)
        return self.heard()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, 3) as made:
        yield made


def is_free(place: EtcdPlace) -> bool:
    """Whether nobody has the lock."""
    with EtcdClient(place) as client:
        return client.get(driver_key(place)) is None


# --- the lock -------------------------------------------------------------------------------------------------------


def test_of_two_at_once_one_has_it_fifty_times(etcd: Cluster) -> None:
    with Driver() as first, Driver() as second:
        for number in range(50):
            # Half of the places are there already.
            url = str(etcd.place(f"/jobs/{number // 2}"))
            for racer in (first, second):
                racer.say(f"take {url}")
            answers = {racer: racer.heard().split()[0] for racer in (first, second)}
            assert sorted(answers.values()) == ["done", "held"]
            for racer, answer in answers.items():
                assert racer.does("begin x" if answer == "done" else "release") == "done"
                assert racer.does("release") == "done"


def test_it_is_free_when_the_lease_of_a_machine_that_is_lost_is_over(
    etcd: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = etcd.place()
    with writer(place) as made:
        # The keep-alives come to nothing, and its process cannot be looked up from where the other one is.
        monkeypatch.setattr(EtcdClient, "keep_alive", lambda client, lease: 5)
        made.lock.is_of("elsewhere")
        until(lambda: is_free(place))
        lock = EtcdLock.take(place, "0456")
        lock.release()


def test_a_driver_that_was_stopped_cannot_write_what_another_has_by_now(etcd: Cluster) -> None:
    place = etcd.place()
    with Driver() as stopped:
        assert stopped.does(f"take {place}") == "done"
        assert stopped.does("begin first") == "done"
        stopped.process.send_signal(signal.SIGSTOP)
        stopped.say("late second")
        until(lambda: is_free(place))
        with writer(place, "0456") as other:
            assert bodies(place) == [b"first"]
            other.begin(b"other")
            stopped.process.send_signal(signal.SIGCONT)
            assert stopped.heard().split()[0] in ("LockInDoubtError", "LockLostError")
            assert stopped.does("late third").split()[0] in ("LockInDoubtError", "LockLostError")
            until(lambda: stopped.does("begin fourth").startswith("held cannot use etcd://"))
            other.append(b"more")
        assert stopped.does("begin fifth").startswith("held cannot use etcd://")
    assert bodies(place) == [b"other", b"more"]


def test_a_driver_that_was_stopped_goes_on_where_nobody_else_has_come(etcd: Cluster) -> None:
    place = etcd.place()
    with Driver() as stopped:
        assert stopped.does(f"take {place}") == "done"
        assert stopped.does("begin first") == "done"
        stopped.process.send_signal(signal.SIGSTOP)
        until(lambda: is_free(place))
        stopped.process.send_signal(signal.SIGCONT)
        until(lambda: stopped.does("begin all") == "done")
        assert stopped.does("append more") == "done"
    assert bodies(place) == [b"all", b"more"]


def test_a_driver_that_is_killed_is_followed_at_once(etcd: Cluster) -> None:
    place = etcd.place()
    with Driver() as killed:
        assert killed.does(f"take {place}") == "done"
        assert killed.does("begin first") == "done"
        killed.process.kill()
        killed.process.wait()
        with EtcdClient(place) as client:
            found = driver_there(client, place)
            assert found is not None
            assert f" {killed.process.pid} " in found.process
            with writer(place, "0456") as other:
                assert bodies(place) == [b"first"]
                other.begin(b"other")


def test_one_that_stands_by_follows(etcd: Cluster) -> None:
    place = etcd.place()
    told: list[str] = []
    with Driver() as first:
        assert first.does(f"take {place}") == "done"

        def look(*, drives: bool) -> None:
            if first.process.poll() is None and told:
                first.process.kill()
                first.process.wait()

        lock = EtcdLock.take(place, "0456", stands_by=True, on_wait=told.append, look=look)
        assert told == [f"standing by: job 0123 is driven by process {first.process.pid} on {os.uname().nodename}"]
        assert lock.waited_for == "0123"
        lock.release()


# --- servers that die, or stand still -------------------------------------------------------------------------------


def goes_on(made: Writer, told: list[bytes], count: int) -> None:
    """Writes so many records, each until it is written; after an error all that there is in one."""
    for _ in range(count):
        body = b"%d," % len(told)
        told.append(body)
        while True:
            try:
                made.store.look()
                if made.store.size:
                    made.store.append(body)
                else:
                    made.store.begin(b"".join(told))
                break
            except OSError:
                made.store.close()


def test_the_leader_is_killed(three: Cluster) -> None:
    """Nothing that was written is lost, and the lock is not either."""
    place = three.place()
    told: list[bytes] = []
    with writer(place) as made:
        goes_on(made, told, 20)
        leader = three.leader()
        created = made.lock.created
        leader.kill()
        goes_on(made, told, 200)
        assert made.lock.created == created
        three.start(leader)
        goes_on(made, told, 50)
        # Another one, which has the first one back as a follower.
        three.leader().kill()
        goes_on(made, told, 50)
    assert b"".join(bodies(place) or ()) == b"".join(told)


def test_two_of_three_are_gone_for_a_while(three: Cluster) -> None:
    place = three.place()
    told: list[bytes] = []
    with writer(place) as made:
        goes_on(made, told, 20)
        for server in three.servers[1:]:
            server.kill()
        made.doubted.wait()
        assert made.lock.is_in_doubt
        with pytest.raises(OSError, match="another driver may have taken over the job by now: cannot reach etcd"):
            made.store.look()
        three.start(*three.servers[1:])
        goes_on(made, told, 20)
        assert made.doubts == [True, False]
    assert b"".join(bodies(place) or ()) == b"".join(told)


@pytest.mark.parametrize("away_s", [3, 30])
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_etcd_is_away(etcd: Cluster, away_s: int, how: str) -> None:
    """For less than the lease is long nothing comes of it. Then it is not sure for how long whose the job is."""
    place = etcd.place()
    (server,) = etcd.servers
    told: list[bytes] = []
    with writer(place) as made:
        goes_on(made, told, 20)
        began_s = now_s()
        if how == "killed":
            server.kill()
        else:
            server.send(signal.SIGSTOP)
        with pytest.raises(EtcdUnreachableError):
            made.store.append(b"lost")
        made.store.close()
        until(lambda: now_s() > began_s + away_s)
        assert made.lock.is_in_doubt == (away_s > 5) or made.doubts
        if how == "killed":
            etcd.start()
        else:
            server.send(signal.SIGCONT)
        goes_on(made, told, 20)
        assert made.doubts in ([], [True, False]) if away_s == 3 else made.doubts[:2] == [True, False]
        assert not made.lock.is_in_doubt
    found = b"".join(bodies(place) or ())
    assert found == b"".join(told)
