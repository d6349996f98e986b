"""The floor of every path over a socket: one blocking process for one client, with plain memory.

    python floor.py PORT_OR_SOCKET

A request is its kind, a place and a length; a put is answered by one byte, a get by the bytes.
"""

from __future__ import annotations

import mmap
import socket
import struct
import sys

MEMORY_BYTES = 128 << 20
REQUEST = struct.Struct("<cQQ")


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fills `into`; false if the other side has ended."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:], 0, socket.MSG_WAITALL)
        if count == 0:
            return False
        at += count
    return True


def connect(address: str) -> socket.socket:
    """A connection to a port of this host, or a Unix socket."""
    if not address.isdigit():
        unix = socket.socket(socket.AF_UNIX)
        unix.connect(address)
        return unix
    tcp = socket.create_connection(("127.0.0.1", int(address)))
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return tcp


def serve(connection: socket.socket, memory: memoryview) -> None:
    """Answers one client until it ends."""
    head = memoryview(bytearray(REQUEST.size))
    while receive(connection, head):
        kind, at, size = REQUEST.unpack(head)
        place = memory[at : at + size]
        if kind == b"p":
            receive(connection, place)
            connection.sendall(b"+")
        else:
            connection.sendall(place)


def main(address: str) -> None:
    """Listens, and serves one connection after the other."""
    memory = memoryview(mmap.mmap(-1, MEMORY_BYTES))
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    listener = socket.socket(socket.AF_INET if address.isdigit() else socket.AF_UNIX)
    listener.bind(("127.0.0.1", int(address)) if address.isdigit() else address)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        if address.isdigit():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            serve(connection, memory)


if __name__ == "__main__":
    main(sys.argv[1])
