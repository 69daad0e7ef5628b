"""A wire that is slow and loses frames: passes on what comes at one interface out of the other. Run as root.

    python lossy_wire.py INTERFACE INTERFACE DELAY_S LOSS SEED

Both ways alike: each frame leaves DELAY_S after it has come, in order, or is lost with probability LOSS, as random
numbers from SEED say. Prints a line when it passes frames on. For kernels without netem.
"""

from __future__ import annotations

import collections
import random
import select
import socket
import sys
import time

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, _PACKET_MR_PROMISC, _PACKET_VNET_HDR = 263, 1, 1, 15
_SO_RCVBUFFORCE = 33
# What a veth passes on at once: a segment of 64 KB that no card has cut up yet, and the header that says so.
_LONGEST = (1 << 16) + 256


def tap(interface: str) -> socket.socket:
    """Takes and gives all frames of an interface, with what is left to do for them: checksums, cutting up."""
    tapped = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    tapped.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    tapped.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 8 << 20)
    tapped.bind((interface, _ETH_P_ALL))
    index = socket.if_nametoindex(interface)
    promiscuous = index.to_bytes(4, sys.byteorder) + _PACKET_MR_PROMISC.to_bytes(2, sys.byteorder) + bytes(10)
    tapped.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, promiscuous)
    tapped.setblocking(False)
    return tapped


def main(one: str, other: str, delay_s: float, loss: float, seed: int) -> None:
    chance = random.Random(seed)
    taps = (tap(one), tap(other))
    out = {taps[0]: taps[1], taps[1]: taps[0]}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("passes frames on", flush=True)
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(taps, (), (), pause_s)
        now = time.monotonic()
        for tapped in readable:
            while True:
                try:
                    frame, address = tapped.recvfrom(_LONGEST)
                except BlockingIOError:
                    break
                if address[2] != socket.PACKET_OUTGOING and chance.random() >= loss:
                    waiting.append((now + delay_s, out[tapped], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, tapped, frame = waiting.popleft()
            try:
                tapped.send(frame)
            except OSError:  # the other end is full, or down: a frame is lost
                continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
