"""``elasticrun join``: makes this machine a host of a running job, while this process lives."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from elastic_driver.cli.parser import Parser, read_by
from elastic_driver.errors import RendezvousError, SettingsError
from elastic_driver.hosts import MAX_SLOTS_PER_HOST, parse_host, parse_labels
from elastic_driver.rendezvous.agent_messages import Bootstrap
from elastic_driver.rendezvous.credentials import Role, join_key
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.token_file import JOIN, MOST_BYTES, read_token, token_in
from elastic_driver.reporting.printable import one_line
from elastic_driver.settings.assembly import integer, number
from elastic_driver.settings.grace import ENV_GRACE, grace_s
from elastic_driver.settings.join_token import ENV_JOIN_TOKEN, who_else_reads
from elastic_driver.settings.settings import check_agent_timeout, check_seconds
from elastic_driver.words import Cloud

_STDIN = "-"


def parser_of_join() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun join",
        description="Joins this machine to a running job that was started with --accept-agents, as if host "
        "discovery had found it. SIGTERM or elasticrun leave drains it; if this process is killed, the "
        "host is lost. The secret comes from a file, from standard input, or from the variable "
        f"{ENV_JOIN_TOKEN}.",
    )
    add = parser.add_argument
    text = "URL of the job's driver, as printed at its start; several are tried in order"
    add("--driver", metavar="URL", action="append", required=True, help=text)
    add(
        "--slots", metavar="N", type=read_by(integer), required=True, help="number of workers that this machine can run"
    )
    add("--host", metavar="NAME", default="", help="name of this host in the job (default: the machine's hostname)")
    text = "label of this host, key=value or a word, e.g. rack=r1 or spot; may be repeated"
    add("--label", metavar="LABEL", action="append", default=[], help=text)
    add("--join-token-file", metavar="FILE", help=f"file with the secret; {_STDIN} for standard input")
    add(
        "--agent-timeout",
        metavar="S",
        type=read_by(number),
        default=15.0,
        help="seconds without an acknowledgement from the driver before giving up on joining (default %(default)g); "
        "once joined, the job's own --agent-timeout applies",
    )
    text = (
        "watch this machine's cloud for preemption and maintenance notices, whatever the job is set to: "
        + ", ".join(Cloud)
    )
    add("--spot-notices", metavar="CLOUD", choices=tuple(Cloud), default="", help=text)
    add(
        "--grace",
        metavar="S",
        type=read_by(number),
        help="this machine or pod shuts down S seconds after SIGTERM: workers that have not left one second before "
        f"are killed (default: ${ENV_GRACE}, or the job's --drain-timeout)",
    )
    text = (
        "exit code when this machine has left while the job continues (default %(default)s); a scheduler may take "
        "0 as completion"
    )
    add("--leave-code", metavar="N", type=read_by(integer), default=0, help=text)
    return parser


def join(words: Sequence[str]) -> int:
    """Run the subcommand. Blocks until this host has left the job, or the job has ended. Returns its exit code.

    Raises:
        SettingsError: bad usage, or the token cannot be read.
    """
    bootstrap = read(words, os.environ)
    from elastic_driver.launch.agent.agent import run_agent  # late: bad usage is reported before the large imports

    return run_agent(bootstrap)


def read(words: Sequence[str], environ: MutableMapping[str, str]) -> Bootstrap:
    """Return the agent's settings.

    Args:
        words: arguments of the command line.
        environ: this process's environment. The token's variable is removed from it, else workers would inherit it.

    Raises:
        SettingsError: bad usage, or the token cannot be read.
    """
    in_environment = environ.pop(ENV_JOIN_TOKEN, "")
    arguments = parser_of_join().parse_args(words)
    if not 0 <= arguments.leave_code <= 255:
        raise SettingsError(f"--leave-code {arguments.leave_code} is not within 0 to 255")
    if arguments.grace is not None:
        check_seconds("--grace", arguments.grace)
    urls, fingerprint = _drivers(arguments.driver)
    if not 1 <= arguments.slots <= MAX_SLOTS_PER_HOST:
        raise SettingsError(f"--slots {arguments.slots} is not within 1 to {MAX_SLOTS_PER_HOST}")
    check_agent_timeout(arguments.agent_timeout)
    try:
        labels = parse_labels(arguments.label)
    except SettingsError as error:
        raise SettingsError(f"argument --label: {error}") from None
    host = _host_name(arguments.host, arguments.slots) if arguments.host else ""
    token, source = _token(arguments.join_token_file, in_environment)
    return Bootstrap(
        urls,
        identity=Role.JOINER,
        key=join_key(token).hex(),
        host=host,
        slots=arguments.slots,
        labels=labels,
        agent_timeout_s=arguments.agent_timeout,
        fingerprint=fingerprint,
        spot_notices=arguments.spot_notices,
        leave_code=arguments.leave_code,
        grace_s=grace_s(environ) if arguments.grace is None else arguments.grace,
        source=source,
    )


def _drivers(texts: Sequence[str]) -> tuple[tuple[str, ...], str]:
    try:
        drivers = [DriverUrl.parse(text) for text in texts]
    except RendezvousError as error:
        raise SettingsError(f"argument --driver: {error}") from error
    if len({driver.fingerprint for driver in drivers}) > 1:
        raise SettingsError("the --driver addresses belong to different drivers: their fingerprints differ")
    return tuple(driver.url for driver in drivers), drivers[0].fingerprint


def _host_name(text: str, slots: int) -> str:
    host = parse_host(text, default_slots=slots)
    if host.slots != slots:
        raise SettingsError(f"--host {text!r} conflicts with --slots {slots}: drop the slots from --host")
    return host.name


def _token(file: str | None, in_environment: str) -> tuple[str, str]:
    """Return the job's secret, and its source as text."""
    if file == _STDIN:
        source = "standard input"
        return token_in(sys.stdin.buffer.read(MOST_BYTES), source, JOIN), source
    if file is not None:
        if others := who_else_reads(Path(file)):
            print(one_line(f"elasticrun: warning: the join token's file {file}: {others}"), file=sys.stderr)
        return read_token(Path(file), JOIN), f"the file {file} (--join-token-file)"
    if not in_environment:
        raise SettingsError(
            f"the job's secret is missing: give --join-token-file FILE ({_STDIN} for standard input) or set the "
            f"variable {ENV_JOIN_TOKEN}"
        )
    source = f"the variable {ENV_JOIN_TOKEN}"
    return token_in(in_environment.encode(errors="surrogateescape"), source, JOIN), source
