"""A process that does on the wire what one with unmodified Horovod 0.28.1 does, without Horovod and torch.

It sums ones round a ring, step by step, and writes a JSON line for each reset, for each ``--log-every`` steps, and for
its ends, into STEP_LOG. A fault is ``KIND:RANK:WHEN[:CODE]``, once a job (a file beside STEP_LOG marks it); see
``_FAULTS``. Rank and step are those of the moment.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from horovod_wire import Context, InitError, InternalError, NotificationService, Store

_FAULTS = {
    "exit": "at step WHEN, with exit code CODE",
    "kill": "at step WHEN, by SIGKILL",
    "stop": "at step WHEN, by SIGSTOP",
    "error": "at step WHEN, a collective of its own fails",
    "meet": "in its first init after a reset, by SIGKILL after the PUT of its WHEN-th context",
    "meet-first": "likewise in the first init of its process",
    "resign": "at step WHEN, it leaves by itself, and resets",
}
_PROCESS_SETS = "_process_set_hash_6bd5ea1bd3f40e2f"
_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class HostsUpdatedError(Exception):
    def __init__(self, *, skip_sync: bool) -> None:
        self.skip_sync = skip_sync


class Worker:
    """One process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        env = os.environ
        self.store = Store(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
        self.host = env["HOROVOD_HOSTNAME"]
        self.timeout_s = float(env.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
        self.place = [int(env[f"HOROVOD_{name}"]) for name in _NUMBERS]
        self.step = self.committed = 0
        self.resets = -1
        self.seen = self.newest = 0.0
        self.contexts: list[Context] = []
        self.left_open: list[Context] = []
        self.notifications: NotificationService | None = None
        self._read_notices = 0
        self._log = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process

    # --- what it tells -----------------------------------------------------------------------------------------------

    def tell(self, what: str, **more: Any) -> None:
        rank, size, local_rank = self.place[:3]
        line = {"time": time.time(), "pid": os.getpid(), "what": what, "rank": rank, "size": size, "step": self.step}
        line |= {"host": self.host, "local_rank": local_rank, "reset": self.resets, **more}
        self._log.write(json.dumps(line) + "\n")
        print(what, f"rank {rank} of {size}, step {self.step}, pid {os.getpid()}", flush=True)

    def abort(self, error: object) -> NoReturn:
        self.tell("abort", error=str(error))
        os.abort()

    # --- init and shutdown -------------------------------------------------------------------------------------------

    def init(self) -> None:
        """What fails in it ends the process: Horovod's background thread has nobody who catches."""
        self.resets += 1
        try:
            if self.resets and "HOROVOD_ELASTIC" in os.environ:
                self._take_place(self._ask_place())
            elif self.options.asks_first:
                self._ask_as_the_hook_does()
            self._meet()
        except InitError as error:
            self.abort(error)
        self.tell("init")

    def _ask_place(self) -> bytes | None:
        path = f"/rank_and_size/{self.host}:{self.place[2]}"
        if not self.options.late_put:
            return self.store.ask("GET", path)
        asked = self.store.send("GET", path)
        for context in self.left_open + self.contexts:
            self.store.ask("PUT", f"/{context.scope}/{context.rank}", context.body)
        return self.store.read(asked)[1]

    def _take_place(self, answer: bytes | None) -> None:
        if answer is None or answer.startswith(b"-1"):
            if self.options.stubborn:
                self.tell("stays")
                while True:
                    signal.pause()
            raise InitError(f"{self.host}[{self.place[2]}] has been removed from elastic job")
        self.place = [int(number) for number in answer.split(b",")]

    def _ask_as_the_hook_does(self) -> None:
        connection = http.client.HTTPConnection(self.store.address, self.store.port)
        process = f"{os.getpid()} {threading.get_native_id()}"
        path = f"/rank_and_size/{self.host}:{self.place[2]}"
        connection.request("GET", path, headers={"X-Elastic-Driver-Process": process})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        if body.startswith(b"-1"):
            sys.exit(0)
        self.place = [int(number) for number in body.split(b",")]
        interface = answer.headers.get("X-Elastic-Driver-Interface")
        if interface:
            os.environ["HOROVOD_GLOO_IFACE"] = interface

    def _meet(self) -> None:
        rank, size, local_rank, local_size, cross_rank, cross_size = self.place
        scopes = [
            ("global", rank, size),
            (f"local_{self.host}", local_rank, local_size),
            (f"cross_{local_rank}", cross_rank, cross_size),
        ]
        scopes += [(scope + _PROCESS_SETS, *numbers) for scope, *numbers in scopes]
        for number, (scope, own, of) in enumerate(scopes, 1):
            after_put = self._fault_in_meeting(number)
            self.contexts.append(Context(self.store, scope, own, of, timeout_s=self.timeout_s, after_put=after_put))

    def shutdown(self, *, after_error: bool) -> None:
        """After an error the process set's connections stay open: peers of the same ring hear nothing."""
        for context in self.contexts:
            if after_error and context.scope.endswith(_PROCESS_SETS):
                self.left_open.append(context)
            else:
                context.close()
        self.contexts = []

    # --- the training ------------------------------------------------------------------------------------------------

    def allreduce(self, *values: float) -> list[float]:
        return [float(sum(column)) for column in zip(*self.contexts[3].gather(values), strict=True)]

    def train(self) -> None:
        is_over = 0.0
        while self.step < self.options.steps and not is_over:
            time.sleep(self.options.step_s)
            self._fault_in_step()
            end = self.options.end_when
            size, is_over = self.allreduce(1, end is not None and end.exists())
            if size != self.place[1]:
                self.abort("the sum is wrong")
            self.step += 1
            if self.step % self.options.log_every == 0:
                self.tell("step")
            if self.step % self.options.commit_every == 0 and not is_over:
                self.commit()

    def commit(self) -> None:
        self.committed = self.step
        if self.notifications is None:
            return
        if self.place[1] == 1 and len(self.notifications.notices) < self.options.alone_until_told:
            return
        notices = self.notifications.notices[self._read_notices :]
        self._read_notices += len(notices)
        previous, changes = self.seen, 0
        for timestamp, res in notices:
            if timestamp > self.newest:
                self.newest, changes = timestamp, changes | res
        previous, newest, changes = self.contexts[3].gather([previous, self.newest, changes])[0]
        self.seen = newest
        if newest > previous:
            raise HostsUpdatedError(skip_sync=changes == 1)

    def elastic(self) -> None:
        """``hvd.elastic.run``: until the steps are done."""
        self.notifications = NotificationService(os.environ.get("HOROVOD_GLOO_IFACE", ""))
        self._register(self.notifications)
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    self.step = self.committed = self.contexts[3].gather(self.step)[0]
                    self.tell("sync")
                self.train()
                return
            except InternalError as error:
                self.step, skip_sync = self.committed, False
                self.tell("error", error=str(error))
                self.shutdown(after_error=True)
            except HostsUpdatedError as update:
                skip_sync = update.skip_sync
                self.tell("notice", skip_sync=skip_sync, notices=self.notifications.notices)
                self.shutdown(after_error=False)
            self.init()
            self._read_notices = len(self.notifications.notices)  # what came meanwhile is lost

    def _register(self, service: NotificationService) -> None:
        body = b"rubbish" if self.options.rubbish_registration else service.registration()
        connection = http.client.HTTPConnection(self.store.address, self.store.port)
        connection.request("PUT", f"/worker_addresses/{self.host}:{self.place[2]}", body)
        status = connection.getresponse().status
        if self.options.rubbish_registration:
            assert status == 400, status
        elif status != 200:
            raise RuntimeError(f"cannot register: {status}")

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def _due(self, *kinds: str) -> Any:
        """The faults of these kinds of this rank that have not happened: (kind, when, code, mark)."""
        for number, text in enumerate(self.options.fault):
            kind, rank, when, *code = text.split(":")
            mark = Path(f"{os.environ['STEP_LOG']}.fault{number}")
            if kind in kinds and int(rank) == self.place[0] and not mark.exists():
                yield kind, int(when), int(code[0]) if code else 1, mark

    def _fault_in_step(self) -> None:
        for kind, when, code, mark in self._due("exit", "kill", "stop", "error", "resign"):
            if self.step < when:
                continue
            mark.touch()
            self.tell(kind)
            match kind:
                case "exit":
                    os._exit(code)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "error":
                    raise InternalError("a fault")
                case "resign":
                    raise HostsUpdatedError(skip_sync=False)

    def _fault_in_meeting(self, number: int) -> Any:
        def fault() -> None:
            for kind, when, _, mark in self._due("meet", "meet-first"):
                if when == number and (kind == "meet-first" or self.resets):
                    mark.touch()
                    self.tell(kind)
                    os.kill(os.getpid(), signal.SIGKILL)

        return fault

    def be_strange(self) -> None:
        """What no worker of Horovod's asks."""
        for method, path, body, wanted in (
            ("HEAD", "/global/0", b"", 405),
            ("GET", "/a/b/c/d", b"", 400),
            ("GET", "/", b"", 400),
            ("PUT", "/global/0", b"x" * (5 << 20), 413),
        ):
            try:
                connection = self.store.send(method, path, body)
                status, _ = self.store.read(connection)
            except OSError:
                status = wanted if body else 0  # cut off while it was sending
            assert status == wanted, (method, path, status)
        with socket.create_connection((self.store.address, self.store.port)) as silent:
            silent.sendall(b"GET /glo")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--end-when", type=Path, help="a file: when it is there, all end after that step")
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--commit-every", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--alone-until-told", type=int, default=0, help="one alone acts on no fewer notices than these")
    parser.add_argument("--boot-until", type=Path, help="a file: processes with a place above rank 0 wait for it")
    parser.add_argument("--asks-first", action="store_true")
    parser.add_argument("--late-put", action="store_true")
    parser.add_argument("--stubborn", action="store_true", help="ignores SIGTERM, and that it was removed")
    parser.add_argument("--rubbish-registration", action="store_true")
    parser.add_argument("--strange", action="store_true")
    parser.add_argument("--static", action="store_true", help="not under elastic.run")
    parser.add_argument("--fault", action="append", default=[])
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = Worker(options)
    worker.tell("boot")
    if options.boot_until is not None and worker.place[0]:
        while not options.boot_until.exists():
            time.sleep(0.02)
    if options.strange:
        worker.be_strange()
    worker.init()
    if options.static:
        worker.train()
    else:
        worker.elastic()
    worker.tell("end")


if __name__ == "__main__":
    main()
