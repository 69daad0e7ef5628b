"""``elasticrun token [FILE]``: creates a secret for joining hosts, for nodes, or for ``elasticrun rendezvous``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic_driver.cli.parser import Parser
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.token_file import make_token, new_token


def parser_of_token() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun token",
        description="Generates a random secret of 64 hexadecimal digits, for --join-token-file, "
        "--operator-token-file and elasticrun rendezvous --token-file, and writes it to a new file that only this "
        "user can read. Without FILE, prints it: "
        'kubectl create secret generic NAME --from-literal=token="$(elasticrun token)".',
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="file to write; it must not exist yet")
    return parser


def token(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage, or the file cannot be written.
    """
    file = parser_of_token().parse_args(words).file
    if file is None:
        print(new_token(), flush=True)
        return 0
    try:
        make_token(Path(file))
    except FileExistsError:
        raise SettingsError(f"cannot write a token to {file}: the file exists already") from None
    return 0
