"""``elastic_driver.run``: call a function in many processes, and return their results.

The driver is a process of its own (:mod:`elastic_driver.function.driver`), the same as ``elasticrun`` runs. The
function, its results and its errors pass between the driver and this process through a folder that only this user can
read and that is removed before ``run`` returns; between the driver and the workers they pass over their connections
(:mod:`elastic_driver.function.delivery`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from elastic_driver.discovery.caller import Finder, answer_questions
from elastic_driver.errors import JobFailedError, SettingsError
from elastic_driver.function import driver as function_driver
from elastic_driver.function.outcome import ENV_OUTCOMES, Outcome, Raised, Returned, read_all
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.settings import IN_PLACE

_EVENTS = "events.jsonl"
LOCAL = "local"
"""A subfolder of the job's folder; see :func:`ended_job`."""
# Raised by workers because another worker has failed; the other worker's error is the one to raise.
_CONSEQUENCES = ("HorovodInternalError", "HostsUpdatedInterrupt", "KeyboardInterrupt")


class WorkerTracebackError(Exception):
    """The cause of an exception that a worker raised: its traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,  # noqa: FBT001 - Horovod's signature, as are the next
    output_filename: str | None = None,
    verbose: bool | int | None = None,  # noqa: FBT001
    use_gloo: bool | None = None,  # noqa: FBT001
    use_mpi: bool | None = None,  # noqa: FBT001
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    discovery: Finder | str | None = None,
    selector: str | None = None,
    namespace: str | None = None,
    slots_from: str | None = None,
    pod_names: str | None = None,
    elastic_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    horovod_shim: str | None = None,
    horovod_protocol: str | None = None,
    discovery_interval: float | None = None,
    discovery_timeout: float | None = None,
    heartbeat_timeout: float | None = None,
    hang_timeout: float | None = None,
    hang_action: str | None = None,
    straggler_action: str | None = None,
    reset_window: float | None = None,
    drain_timeout: float | None = None,
    grace_time: float | None = None,
    standby: int | None = None,
    np_multiple: int | None = None,
    ranks_per_host_multiple: int | None = None,
    protect: str | Sequence[str] | None = None,
    preload: Sequence[str] | None = None,
    durable_dir: str | os.PathLike[str] | None = None,
    durable_every: int | None = None,
    durable_interval: float | None = None,
    durable_keep: int | None = None,
    rendezvous_port: int | None = None,
    agent_timeout: float | None = None,
    host_timeout: float | None = None,
    accept_agents: bool | None = None,
    join_token_file: str | os.PathLike[str] | None = None,
    operator_token_file: str | os.PathLike[str] | None = None,
    launcher: str | None = None,
    rsh_agent: str | Sequence[str] | None = None,
    launcher_command: str | None = None,
    launcher_bootstrap: str | None = None,
    remote_python: str | None = None,
    ssh_connect_timeout: float | None = None,
    port_range: str | tuple[int, int] | None = None,
    tls: bool | None = None,
    check_network: bool | None = None,
    spot_notices: str | None = None,
    config_file: str | os.PathLike[str] | None = None,
    event_log: str | os.PathLike[str] | None = None,
    event_hook: str | None = None,
    page_address: str | None = None,
    page: bool | None = None,
    history: bool | None = None,
    prefix_output_with_timestamp: bool = False,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in worker processes. Blocks until all have returned.

    May be called in any thread, also while an event loop runs. The function, its arguments and its results are pickled
    with cloudpickle, so lambdas and functions of ``__main__`` and of notebooks work. The workers' output goes to this
    process's standard output and error. Ctrl-C stops the workers; so does the end of this process.

    Args:
        func: the function to call; it calls ``hvd.init()`` and ``hvd.elastic.run`` itself if it needs them.
        args, kwargs: its arguments.
        num_proc, np: number of processes to start with; two names for the same setting.
        min_num_proc, min_np: fewest processes with which training continues after some are lost. With this, or a
            script, the job is elastic.
        max_num_proc, max_np: most processes.
        slots: slots of each host that specifies none.
        reset_limit, cooldown_range, hosts, hostfile, start_timeout, output_filename, elastic_timeout: as the flags of
            elasticrun.
        host_discovery_script, discovery_interval, discovery_timeout, heartbeat_timeout, hang_timeout, hang_action,
            straggler_action, reset_window, drain_timeout, grace_time, standby, np_multiple, ranks_per_host_multiple,
            protect, durable_dir, durable_every, durable_interval, durable_keep, rendezvous_port, config_file,
            event_log, event_hook, page_address, prefix_output_with_timestamp: as the flags.
        page, history: False to disable it, as ``--no-page`` and ``--no-history``.
        discovery: finds the hosts instead of a script: an object with a method ``find_available_hosts_and_slots()``,
            see HostDiscovery. It is called here, in a thread of this process. Or "kubernetes", as the flag.
        selector, namespace, slots_from, pod_names: of pods as hosts, as the flags.
        verbose: log the driver's actions. Without it only warnings and errors are logged.
        preload: modules to import before later workers are forked; none by default.
        executable: the Python of the workers; this one by default. This package must be installed there.
        env: variables for driver and workers, on top of this process's.
        horovod_shim: as the flag --horovod-shim.
        horovod_protocol: as the flag --horovod-protocol.
        ssh_port, ssh_identity_file, network_interfaces, agent_timeout, host_timeout, accept_agents, join_token_file,
            operator_token_file, launcher, rsh_agent, launcher_command, launcher_bootstrap, remote_python,
            ssh_connect_timeout, port_range, tls, check_network, spot_notices: as the flags.
        network_interface: an older name of network_interfaces.
        use_mpi: rejected when true.
        disable_cache, use_gloo, mpi_args: for Horovod's signature; without effect.

    Returns:
        The results of the calls, by rank in the last round.

    Raises:
        SettingsError: the arguments are invalid.
        JobFailedError: the job failed, but not because of an exception of the function.
        KeyboardInterrupt: Ctrl-C, or SIGTERM to the driver.
        Exception: the function's own, as the first worker raised it; its cause is that worker's traceback.
    """
    given: dict[str, Any] = {
        "num_proc": np if np is not None and num_proc == 1 else num_proc,
        "min_num_proc": min_np if min_num_proc is None else min_num_proc,
        "max_num_proc": max_np if max_num_proc is None else max_num_proc,
        "slots_per_host": slots,
        "reset_limit": reset_limit,
        "cooldown_range_s": cooldown_range,
        "hosts": hosts,
        "hostfile": hostfile,
        "start_timeout_s": start_timeout,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "output_filename": output_filename,
        "prefix_timestamp": prefix_output_with_timestamp,
        "network_interfaces": network_interface if network_interfaces is None else network_interfaces,
        "discovery_script": host_discovery_script,
        "discovery": discovery if isinstance(discovery, str) else None,
        "pod_selector": selector,
        "pod_namespace": namespace,
        "slots_from": slots_from,
        "pod_names": pod_names,
        "elastic_timeout_s": elastic_timeout,
        "horovod_shim": horovod_shim,
        "horovod_protocol": horovod_protocol,
        "discovery_interval_s": discovery_interval,
        "discovery_timeout_s": discovery_timeout,
        "heartbeat_timeout_s": heartbeat_timeout,
        "hang_timeout_s": hang_timeout,
        "hang_action": hang_action,
        "straggler_action": straggler_action,
        "reset_window_s": reset_window,
        "drain_timeout_s": drain_timeout,
        "grace_s": grace_time,
        "num_standby": standby,
        "num_proc_multiple": np_multiple,
        "ranks_per_host_multiple": ranks_per_host_multiple,
        "protect": protect,
        "preload": preload,
        "durable_dir": durable_dir,
        "durable_every": durable_every,
        "durable_interval_s": durable_interval,
        "durable_keep": durable_keep,
        "rendezvous_port": rendezvous_port,
        "agent_timeout_s": agent_timeout,
        "host_timeout_s": host_timeout,
        "accept_agents": accept_agents,
        "join_token_file": join_token_file,
        "operator_token_file": operator_token_file,
        "launcher": launcher,
        "rsh_agent": rsh_agent,
        "launcher_command": launcher_command,
        "launcher_bootstrap": launcher_bootstrap,
        "remote_python": remote_python,
        "ssh_connect_timeout_s": ssh_connect_timeout,
        "port_range": port_range,
        "tls": tls,
        "check_network": check_network,
        "spot_notices": spot_notices,
        "config_file": config_file,
        "event_hook": event_hook,
        "page_address": page_address,
        "page": page,
        "history": history,
        "log_level": None if verbose else "WARNING",
        "verbose": bool(verbose and int(verbose) > 1),
        "mpi": use_mpi or None,  # else a config file may request it
    }
    environ = {**os.environ, **(env or {})}
    finder = None if isinstance(discovery, str) else discovery
    if finder is not None and not callable(getattr(finder, "find_available_hosts_and_slots", None)):
        raise SettingsError(f"discovery {discovery!r} has no method find_available_hosts_and_slots()")
    call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    command = (executable or sys.executable, "-m", "elastic_driver.function.worker")
    given |= {"command": command, "on_change": IN_PLACE}
    with ended_job(given, environ, call, event_log=event_log, discovery=finder) as (folder, events):
        return _results(folder, events)


@contextlib.contextmanager
def ended_job(
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    call: bytes,
    *,
    event_log: str | os.PathLike[str] | None = None,
    discovery: Finder | None = None,
    signals: Sequence[signal.Signals] = (),
) -> Iterator[tuple[Path, Path]]:
    """Run a job whose workers may fetch a call. Blocks until it has ended.

    Args:
        given: settings, as :func:`~elastic_driver.settings.assembly.settings_from` takes them.
        environ: environment of the driver and the workers.
        call: the call for the workers to make, pickled by cloudpickle.
        event_log: a file of the user's; None for one that only this process reads.
        discovery: see :func:`run`.
        signals: forwarded to the driver if they have no handler and this is the main thread.

    Yields:
        A folder with the workers' outcomes, which is removed afterwards, and the event log. In a job of several nodes,
        LOCAL in that folder has the outcomes of this node's workers.

    Raises:
        SettingsError: the settings are invalid.
        SystemExit: one of those signals has ended the job, and was sent to this process.
    """
    with tempfile.TemporaryDirectory(prefix="elastic-driver-run-") as name, _asked(discovery) as asked:
        folder = Path(name)
        events = folder / _EVENTS if event_log is None else Path(event_log).absolute()
        settings = settings_from(
            {**given, "event_log": events, "discovery_socket": asked and asked.fileno(), "gloo": True},
            environ,
        )
        environ = {name: value for name, value in environ.items() if name != ENV_OUTCOMES}  # set by an outer job
        if settings.nodes_at_endpoint is not None:
            (folder / LOCAL).mkdir()
            environ[ENV_OUTCOMES] = str(folder / LOCAL)
        (folder / function_driver.SETTINGS).write_bytes(pickle.dumps(settings))
        paths = [os.path.abspath(entry or os.curdir) for entry in sys.path]
        (folder / function_driver.CALL).write_bytes(pickle.dumps((paths, call)))
        _drive(folder, environ, asked, signals)
        refused = folder / function_driver.REFUSED
        if refused.exists():
            raise SettingsError(refused.read_text())
        yield folder, events


@contextlib.contextmanager
def _asked(discovery: Finder | None) -> Iterator[socket.socket | None]:
    """Answer the driver's questions to the object in a thread. Yields the driver's end of the socket, or None."""
    if discovery is None:
        yield None
        return
    ours, drivers = socket.socketpair()
    # A daemon: an object that hangs cannot be stopped. Otherwise the thread ends when the driver's end is closed.
    threading.Thread(
        target=answer_questions, args=(discovery, ours), name="elastic-driver-discovery", daemon=True
    ).start()
    with drivers:
        yield drivers


def _drive(
    folder: Path, environ: Mapping[str, str], asked: socket.socket | None, signals: Sequence[signal.Signals]
) -> None:
    """Run the driver until it ends, in a session of its own: Ctrl-C reaches it through this process, once."""
    sys.stdout.flush()
    sys.stderr.flush()
    paths = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    prefix = f"import sys; sys.path[:] = {paths!r}; from elastic_driver.function.driver import main; "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{prefix}sys.exit(main(sys.argv[1:]))", str(folder), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        env=environ,
        pass_fds=() if asked is None else (asked.fileno(),),
        start_new_session=True,
    )
    interrupt: BaseException | None = None
    with _passed_on(signals, process):
        while True:
            try:
                process.wait()
                break
            except BaseException as error:  # whatever the error, no process is left behind
                interrupt = interrupt or error
                process.send_signal(signal.SIGINT)
    if process.returncode - 128 in signals:
        raise SystemExit(process.returncode)
    if interrupt is not None:
        raise interrupt


@contextlib.contextmanager
def _passed_on(signals: Sequence[signal.Signals], process: subprocess.Popen[bytes]) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    mine = [number for number in signals if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, lambda number, frame: process.send_signal(number))
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def exit_code(folder: Path) -> int:
    """Return the exit code of the driver.

    Raises:
        JobFailedError: it has not written one.
        KeyboardInterrupt: it was interrupted.
    """
    try:
        code = int((folder / function_driver.EXIT_CODE).read_text())
    except (OSError, ValueError):
        raise JobFailedError("the driver ended without reporting an exit code", 70) from None
    if code in (129, 130, 131, 143):
        raise KeyboardInterrupt
    return code


def _results(folder: Path, events: Path) -> list[Any]:
    outcomes = read_all(folder)
    code = exit_code(folder)
    if code:
        _raise_first([outcome for outcome in outcomes if isinstance(outcome, Raised)], code, last_message(events))
    return returned_values(outcomes)


def returned_values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the results of the last round's members, by rank.

    Raises:
        JobFailedError: one of them has no result.
    """
    returned = [outcome for outcome in outcomes if isinstance(outcome, Returned)]
    last_round = max((outcome.round_id for outcome in returned), default=0)
    by_rank = {outcome.rank: outcome for outcome in returned if outcome.round_id == last_round}
    size = next((outcome.size for outcome in by_rank.values()), 1)
    missing = [rank for rank in range(size) if rank not in by_rank]
    if missing:
        raise JobFailedError(
            f"rank {', '.join(map(str, missing))} ended without a result: it called sys.exit or os._exit", 1
        )
    return [cloudpickle.loads(by_rank[rank].value) for rank in range(size)]


def _raise_first(errors: list[Raised], code: int, message: str) -> NoReturn:
    if not errors:
        raise JobFailedError(message, code)
    # The earliest, but not one that only reports the loss of another worker.
    first = min(errors, key=lambda raised: raised.kind in _CONSEQUENCES)
    cause = WorkerTracebackError(first.traceback)
    error = None if first.error is None else cloudpickle.loads(first.error)
    if not isinstance(error, Exception):
        raise JobFailedError(f"the function raised {first.kind}", code) from cause
    raise error from cause


def read_events(events: Path) -> list[dict[str, Any]]:
    """Return the job's events, as far as they can be read."""
    found = []
    with contextlib.suppress(OSError, UnicodeError):
        if events.is_file():  # reading a pipe would block
            for line in events.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
    return found


def last_message(events: Path) -> str:
    """Return why the job has ended."""
    ends = [event for event in read_events(events) if event.get("event") == "job_ended"]
    return str(ends[-1]["message"]) if ends else "the job failed"
