"""Whether the driver's machine says that nobody drives."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from elastic_driver.launch.agent import refusals
from elastic_driver.launch.agent.refusals import refuses
from elastic_driver.system.local_socket import SocketFolder, url_of
from tests.support.network.namespaces import cannot_make_namespaces

pytestmark = pytest.mark.integration


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def asked(request: pytest.FixtureRequest) -> Callable[[str, str], bool]:
    def ask(url: str, address: str) -> bool:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(refuses(url, address))

    return ask


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_at_which_nobody_listens(address: str, asked: Callable[[str, str], bool]) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        url = f"https://driver.example:{sock.getsockname()[1]}"
        assert asked(url, address)
        sock.listen()
        assert not asked(url, address)


def test_a_socket_of_this_machine(tmp_path: Path, asked: Callable[[str, str], bool]) -> None:
    folder = SocketFolder.new([tmp_path])
    url = url_of(folder.path / "driver.sock")
    assert asked(url, "127.0.0.1"), "it has never been there, or was removed"
    listening = folder.listen("driver.sock")
    assert not asked(url, "127.0.0.1")
    listening.close()
    assert asked(url, "127.0.0.1"), "as a killed process leaves it"
    folder.path.chmod(0o755)
    assert not asked(url, "127.0.0.1"), "another user could have made it"
    folder.path.chmod(0o700)
    folder.close()
    assert asked(url, "127.0.0.1"), "its folder was removed"


def test_a_kernel_that_cannot_tell_renews_nothing(
    monkeypatch: pytest.MonkeyPatch, asked: Callable[[str, str], bool]
) -> None:
    monkeypatch.setattr(refusals, "_kernel_tells", lambda: False)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert not asked(f"https://127.0.0.1:{sock.getsockname()[1]}", "127.0.0.1")


# Another machine, as the kernel sees it: this answers each connection to its port 1 with an ICMP message, as a firewall
# does that rejects, and to all others as a machine at whose port nobody listens.
_OTHER_MACHINE = """
import ctypes, fcntl, os, socket, struct, subprocess, threading
assert ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0  # CLONE_NEWNET
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"t0", 0x1001))  # TUNSETIFF: IFF_TUN, IFF_NO_PI
for command in ("ip addr add 10.9.9.1/24 dev t0", "ip link set t0 up"):
    subprocess.run(command.split(), check=True)

def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF

def answer():
    while True:
        packet = os.read(tun, 4096)
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            continue
        source, target = packet[12:16], packet[16:20]
        theirs, port, number = struct.unpack("!HHI", packet[20:28])
        if port == 1:
            protocol, body = socket.IPPROTO_ICMP, struct.pack("!BBHI", 3, 3, 0, 0) + packet[:28]
            body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
        else:
            protocol = socket.IPPROTO_TCP
            body = struct.pack("!HHIIBBHHH", port, theirs, 0, number + 1, 0x50, 0x14, 0, 0, 0)
            pseudo = target + source + struct.pack("!BBH", 0, protocol, len(body))
            body = body[:16] + struct.pack("!H", checksum(pseudo + body)) + body[18:]
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0, target, source)
        os.write(tun, head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body)

threading.Thread(target=answer, daemon=True).start()
try:
    socket.create_connection(("10.9.9.2", 1), 150)
except OSError as error:
    plain = type(error).__name__
import asyncio
from elastic_driver.launch.agent.refusals import refuses
print(plain, *(asyncio.run(refuses(f"https://10.9.9.2:{port}", "10.9.9.2")) for port in (1, 2)))
"""


@pytest.mark.skipif(
    bool(cannot_make_namespaces()) or not os.path.exists("/dev/net/tun"), reason="cannot play another machine here"
)
def test_a_firewall_that_rejects_says_nothing_of_the_driver() -> None:
    run = subprocess.run([sys.executable, "-c", _OTHER_MACHINE], capture_output=True, text=True, timeout=150)
    assert (run.stdout, run.returncode) == ("ConnectionRefusedError False True\n", 0), run.stderr
