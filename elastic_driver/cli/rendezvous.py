"""``elasticrun rendezvous``: serves jobs that torchrun runs (``--rdzv-backend=elastic``), and torch Stores."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_driver.cli.parser import Parser, read_by
from elastic_driver.errors import SettingsError, shortage
from elastic_driver.hosts import with_number
from elastic_driver.rendezvous.token_file import ENV_TOKEN_FILE, make_token, read_token
from elastic_driver.reporting.printable import one_line
from elastic_driver.settings.assembly import integer

LOOPBACK = "127.0.0.1"


def parser_of_rendezvous() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun rendezvous",
        description="Serves the rendezvous of any number of jobs started with torchrun --rdzv-backend=elastic "
        "--rdzv-endpoint=HOST:PORT --rdzv-id=JOB, and torch Stores (elastic_driver.torch.HTTPStore). Run one "
        "process, outside the jobs' nodes; it keeps nothing on disk. If it listens beyond this machine, it "
        "requires a token, from a file that it creates if needed; agents read the same token from the file "
        f"named by the variable {ENV_TOKEN_FILE} or --rdzv-conf token_file=FILE. See "
        "docs/torchrun_rendezvous.md.",
    )
    parser.add_argument(
        "--port", metavar="P", type=read_by(integer), required=True, help="port to listen on; 0 for any free port"
    )
    text = f"local address to listen on (default {LOOPBACK}: for this machine only)"
    parser.add_argument("--host", metavar="ADDRESS", default=LOOPBACK, help=text)
    text = (
        f"file with the token; created, readable by this user only, if it does not exist (default: ${ENV_TOKEN_FILE})"
    )
    parser.add_argument("--token-file", metavar="FILE", help=text)
    return parser


def rendezvous(words: Sequence[str]) -> int:
    """Run the subcommand. Blocks until SIGINT or SIGTERM. Returns its exit code.

    Raises:
        SettingsError: bad usage, the token cannot be read or written, or the port is not available.
    """
    arguments = parser_of_rendezvous().parse_args(words)
    if not 0 <= arguments.port < 65536:
        raise SettingsError(f"--port {arguments.port} is not within 0 to 65535")
    token = _token(arguments.token_file or os.environ.get(ENV_TOKEN_FILE), arguments.host)
    from elastic_driver.service.service import Place, serve
    from elastic_driver.system.loops import new_loop

    def tell(text: str) -> None:
        print(one_line(f"elasticrun rendezvous: {text}"), file=sys.stderr, flush=True)

    def listening(port: int, fingerprint: str) -> None:
        asks = "clients need a token" if token else "no token required: all users of this machine may use it"
        tell(f"listens at {with_number(arguments.host, port)}; {asks}; its certificate: sha256:{fingerprint}")

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(serve(Place(arguments.host, arguments.port, token), tell=tell, on_listening=listening))
    except (MemoryError, RuntimeError) as error:
        reason = shortage(error)
        if not reason:
            raise
        raise SettingsError(f"cannot serve: {reason}") from error


def _token(file: str | None, host: str) -> str:
    if file is None:
        if _is_loopback(host):
            return ""
        raise SettingsError(
            f"a rendezvous at {host} is reachable from other machines and needs a token: give --token-file FILE "
            f"(created if it does not exist), and give agents the same file in the variable {ENV_TOKEN_FILE}"
        )
    path = Path(file)
    try:
        token = make_token(path)
    except FileExistsError:
        return read_token(path)
    print(one_line(f"elasticrun rendezvous: wrote a new token to {path}"), file=sys.stderr, flush=True)
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
