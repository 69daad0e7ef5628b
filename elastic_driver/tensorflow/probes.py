"""Probes of TensorFlow's servers: whether a server answers, and which process it is. A request has a few bytes.

Owns the channels. Knows nothing of workers and closures.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc
import psutil
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorflow.core.framework import device_attributes_pb2

_METHOD = "/tensorflow.WorkerService/GetStatus"
# The pause between two requests to a server that does not answer yet is a fraction of the time waited so far, so its
# start is noticed late by this fraction at most.
_PAUSE_S = (0.05, 1.0)
_PAUSE_PART = 0.1
_OPTIONS = (
    ("grpc.min_reconnect_backoff_ms", 1000),  # in spite of its name, the limit of a connection attempt
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

Server = frozenset[int]
"""The incarnations of a server's devices: random numbers, new at each start of its process."""


def _status_class() -> Any:
    """Build the class of TensorFlow's ``GetStatusResponse``, which its wheel lacks: field 1 is the list of devices."""
    file = descriptor_pb2.FileDescriptorProto(
        name="elastic_driver/status.proto",
        package="elastic_driver",
        syntax="proto3",
        dependency=[device_attributes_pb2.DESCRIPTOR.name],
    )
    message = file.message_type.add(name="Status")
    kinds = descriptor_pb2.FieldDescriptorProto
    message.field.add(
        name="device_attributes",
        number=1,
        label=kinds.LABEL_REPEATED,
        type=kinds.TYPE_MESSAGE,
        type_name=".tensorflow.DeviceAttributes",
    )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("elastic_driver.Status"))


_Status = _status_class()


class Probes:
    """Queries servers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._channels: dict[str, grpc.Channel] = {}

    def ask(self, addresses: Iterable[str], limit_s: float) -> Mapping[str, Server]:
        """Query servers in parallel. Blocks for at most ``limit_s``.

        Returns:
            Address -> process, for the servers that have answered.
        """
        asked = {address: self._ask(address, limit_s) for address in addresses}
        answers: dict[str, Server] = {}
        for address, future in asked.items():
            with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError, ValueError):
                answers[address] = frozenset(device.incarnation for device in future.result().device_attributes)
        return {address: server for address, server in answers.items() if server}

    def wait(self, address: str, deadline: float, stop: threading.Event) -> Server | None:
        """Query a server repeatedly until it answers.

        Args:
            address: the server's address.
            deadline: the end of the wait, on the monotonic clock.
            stop: ends the wait when set.

        Returns:
            The process that has answered; None if none has.
        """
        began = time.monotonic()
        while not stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            server = self.ask((address,), min(left, 2.0)).get(address)
            if server is not None:
                return server
            now = time.monotonic()
            pause = min(max(_PAUSE_S[0], _PAUSE_PART * (now - began)), _PAUSE_S[1])
            stop.wait(min(pause, max(0.0, deadline - now)))
        return None

    def forget(self, address: str) -> None:
        """Close the channel to a server."""
        with self._lock:
            channel = self._channels.pop(address, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Close all channels."""
        for address in tuple(self._channels):
            self.forget(address)

    def _ask(self, address: str, limit_s: float) -> Any:
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = grpc.insecure_channel(address, options=_OPTIONS)
            method = channel.unary_unary(_METHOD, request_serializer=None, response_deserializer=_Status.FromString)
            return method.future(b"", timeout=limit_s)


def sever(addresses: Iterable[str]) -> int:
    """Shut down this process's connections to some servers, so that threads that wait for their answers get an error.

    The runtime itself waits forever for the answer of a server that is stopped, or has lost its network.

    Returns:
        The number of connections.
    """

    def shut(connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_RDWR)

    return _for_connections(addresses, shut)


def bound(addresses: Iterable[str], limit_s: float) -> int:
    """Set a time limit after which the kernel ends connections to servers whose machines acknowledge nothing.

    This needs no thread of this process: the runtime may hold the GIL while it waits for a server.

    Returns:
        The number of connections.
    """
    seconds = max(1, round(limit_s / 3))
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * limit_s))),
    )

    def set_options(connection: socket.socket) -> None:
        for level, name, value in options:
            connection.setsockopt(level, name, value)

    return _for_connections(addresses, set_options)


def connections(addresses: Iterable[str]) -> frozenset[tuple[Any, Any]]:
    """Return this process's established connections to some servers, as pairs of socket addresses."""
    ends = set()

    def note(connection: socket.socket) -> None:
        ends.add((connection.getsockname(), connection.getpeername()))  # raises OSError while connecting

    _for_connections(addresses, note)
    return frozenset(ends)


def _for_connections(addresses: Iterable[str], do: Callable[[socket.socket], object]) -> int:
    """Call a function with each TCP connection of this process to these addresses, including pending ones.

    Returns:
        The number of connections.
    """
    ends = {end for address in addresses for end in _ends(address)}
    number = 0
    for listed in psutil.Process().net_connections("tcp") if ends else ():
        far: Any = listed.raddr  # empty if it is not connected
        if not far or _end(far.ip, far.port) not in ends or listed.fd < 0:
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            # The descriptor's owner may close it at any time, and its number may be reused; a copy stays valid.
            copy = os.dup(listed.fd)
            stack.callback(os.close, copy)
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                continue
            connection = socket.socket(fileno=copy)
            stack.pop_all()
            stack.enter_context(connection)
            if _far_end(connection) in (*ends, None) and connection.type == socket.SOCK_STREAM:
                do(connection)
                number += 1
    return number


def _far_end(connection: socket.socket) -> tuple[str, int] | None:
    """Return the peer's address and port; None while connecting."""
    try:
        return _end(*connection.getpeername()[:2])
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return None


def _ends(address: str) -> Iterable[tuple[str, int]]:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        return {_end(str(end[4][0]), int(port)) for end in found}
    return ()


def _end(ip: str, port: int) -> tuple[str, int]:
    return ip.removeprefix("::ffff:"), port
