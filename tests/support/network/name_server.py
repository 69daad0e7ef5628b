"""A name server for a few names. Stopped (SIGSTOP), it says nothing any more.

    python name_server.py NAME=ADDRESS...
    python name_server.py @FILE

A file has a NAME=ADDRESS on each line, and is read again for each question.

Answers on 127.0.0.1, port 53, for addresses of IPv4; of other kinds the names have none, and other names do not exist.
Prints a line when it listens.
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

_HEADER = struct.Struct(">HHHHHH")
_TYPE_A, _CLASS_IN = 1, 1
_ANSWERS, _NO_SUCH_NAME = 0x8580, 0x8583  # an authority that could have been asked to look further
_TTL_S = 0


def answer(query: bytes, addresses: dict[str, str]) -> bytes:
    """What this query is answered, with one question."""
    number, _, _, _, _, _ = _HEADER.unpack_from(query)
    labels, at = [], _HEADER.size
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    question = query[_HEADER.size : at + 5]
    kind = struct.unpack_from(">H", query, at + 1)[0]
    address = addresses.get(".".join(labels).lower())
    if address is None:
        return _HEADER.pack(number, _NO_SUCH_NAME, 1, 0, 0, 0) + question
    if kind != _TYPE_A:
        return _HEADER.pack(number, _ANSWERS, 1, 0, 0, 0) + question
    # The name is that of the question, at byte 12.
    record = struct.pack(">HHHIH", 0xC00C, _TYPE_A, _CLASS_IN, _TTL_S, 4) + socket.inet_aton(address)
    return _HEADER.pack(number, _ANSWERS, 1, 1, 0, 0) + question + record


def main(words: list[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 53))
        print("listens", flush=True)
        while True:
            query, sender = server.recvfrom(4096)
            server.sendto(answer(query, known(words)), sender)


def known(words: list[str]) -> dict[str, str]:
    """Addresses by name."""
    if words and words[0].startswith("@"):
        words = Path(words[0][1:]).read_text().split()
    return dict(word.split("=") for word in words)


if __name__ == "__main__":
    main(sys.argv[1:])
