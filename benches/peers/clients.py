"""The clients: the same verbs for every store, each by the fastest way that it offers to Python.

A client has a source and a target of equal length, both in shared memory; block `i` of a round lies
at `i * size` in each. Nothing here checks contents, which worker.py does for all alike.
"""

# The verbs are documented once, in `Client`.
# ruff: noqa: D102

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import socket
from collections.abc import Sequence

import floor
from stores import free_port

LINE_BYTES = 4096
REDIS_BYTES = 1 << 20


class Client:
    """What every client can do; batches are loops where a store has none."""

    def __init__(
        self, address: dict[str, str], index: int, size: int, source: mmap.mmap, target: mmap.mmap
    ) -> None:
        self.address, self.index, self.size = address, index, size
        self.memories = (source, target)
        self.source, self.target = memoryview(source), memoryview(target)
        self.open()

    def open(self) -> None:
        """Connects."""
        raise NotImplementedError

    def prepare(self, keys: Sequence[str]) -> None:
        """What a caller knows before it asks: called outside of what is timed."""

    def put(self, key: str, block: int) -> None:
        """Stores one block."""
        raise NotImplementedError

    def get(self, key: str, block: int) -> None:
        """Gets one block into the target."""
        raise NotImplementedError

    def put_all(self, keys: Sequence[str]) -> None:
        """Stores many blocks, of the first bytes of the source; not timed."""
        for key in keys:
            self.put(key, 0)

    def get_batch(self, keys: Sequence[str], first: int) -> None:
        """Gets blocks into the target, beginning at block `first`."""
        raise NotImplementedError

    def exists(self, keys: Sequence[str]) -> int:
        """How many of them are there."""
        raise NotImplementedError

    def prefix(self, keys: Sequence[str]) -> int | None:
        """The longest prefix that is there, where a store has such a question."""
        return None

    def remove(self, keys: Sequence[str]) -> None:
        """Removes them, so that their memory is used again."""

    def place(self, block: int) -> slice:
        """Where a block lies in the source and in the target."""
        return slice(block * self.size, (block + 1) * self.size)


class Memcpy(Client):
    """The floor of all: memory of this process, touched before."""

    def open(self) -> None:
        self.memory = memoryview(bytearray(b"\1" * len(self.source)))

    def put(self, key: str, block: int) -> None:
        self.memory[self.place(block)] = self.source[self.place(block)]

    def get(self, key: str, block: int) -> None:
        self.target[self.place(block)] = self.memory[self.place(block)]

    def get_batch(self, keys: Sequence[str], first: int) -> None:
        for block in range(first, first + len(keys)):
            self.get("", block)


class Floor(Client):
    """A blocking pair over TCP or a Unix socket: floor.py."""

    def open(self) -> None:
        self.socket = floor.connect(self.address[str(self.index)])

    def head(self, kind: bytes, block: int) -> bytes:
        """The request for a block."""
        return floor.REQUEST.pack(kind, block * self.size, self.size)

    def put(self, key: str, block: int) -> None:
        send(self.socket, [self.head(b"p", block), self.source[self.place(block)]])
        receive(self.socket, memoryview(bytearray(1)))

    def get(self, key: str, block: int) -> None:
        self.get_batch([key], block)

    def get_batch(self, keys: Sequence[str], first: int) -> None:
        blocks = range(first, first + len(keys))
        self.socket.sendall(b"".join(self.head(b"g", block) for block in blocks))
        for block in blocks:
            receive(self.socket, self.target[self.place(block)])


class Kvstrata(Client):
    """The Python package. It verifies what it gets; the server verifies what it takes and gives."""

    path = "bulk"

    def open(self) -> None:
        import kvstrata

        self.client = kvstrata.Client(self.address["endpoint"], path=self.path)  # type: ignore[arg-type]
        self.namespace = self.client.open_namespace(
            model=f"peers-{self.size}",
            engine="bench",
            dtype="bytes",
            block_tokens=16,
            parts=[(0, 0, self.size)],
            hash_algorithm="blake2s",
        )
        self.hashes: dict[str, bytes] = {}

    def prepare(self, keys: Sequence[str]) -> None:
        self.hashes = {key: hashlib.blake2s(key.encode()).digest() for key in keys}
        self.packed = b"".join(self.hashes.values())
        self.first = {key: at * 32 for at, key in enumerate(keys)}

    def pack(self, keys: Sequence[str]) -> bytes:
        """The hashes of keys that stand side by side in what was prepared."""
        at = self.first[keys[0]]
        return self.packed[at : at + 32 * len(keys)]

    def put(self, key: str, block: int) -> None:
        stored = self.namespace.put(self.hashes[key], [self.source[self.place(block)]])
        if stored.outcomes != ["stored"]:
            raise RuntimeError(f"put: {stored.outcomes}")

    def put_all(self, keys: Sequence[str]) -> None:
        self.prepare(keys)
        step = max(1, min(1024, (32 << 20) // self.size))
        for at in range(0, len(keys), step):
            part = keys[at : at + step]
            self.namespace.put(self.pack(part), [self.source[: self.size]] * len(part))

    def get(self, key: str, block: int) -> None:
        got = self.namespace.get_into(self.hashes[key], [self.target[self.place(block)]])
        if got.misses:
            raise RuntimeError(f"get: {got.misses}")

    def get_batch(self, keys: Sequence[str], first: int) -> None:
        places = [self.target[self.place(first + at)] for at in range(len(keys))]
        got = self.namespace.get_into(self.pack(keys), places)
        if got.misses:
            raise RuntimeError(f"get: {got.misses}")

    def exists(self, keys: Sequence[str]) -> int:
        return sum(self.namespace.exists(self.pack(keys)))

    def prefix(self, keys: Sequence[str]) -> int | None:
        return self.namespace.lookup(self.pack(keys)).prefix_blocks

    def remove(self, keys: Sequence[str]) -> None:
        self.namespace.remove(self.pack(keys))


class KvstrataGrpc(Kvstrata):
    """The same over gRPC."""

    path = "grpc"


class KvstrataShared(Kvstrata):
    """The same by memory that it shares with its server."""

    path = "shm"


class Lines:
    """A socket of a protocol of lines with payload between them."""

    def __init__(self, port: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = memoryview(bytearray(LINE_BYTES))
        self.at = self.end = 0

    def line(self) -> bytes:
        """The next line, without its end."""
        while (found := bytes(self.buffer[self.at : self.end]).find(b"\r\n")) < 0:
            left = bytes(self.buffer[self.at : self.end])
            self.buffer[: len(left)] = left
            count = self.socket.recv_into(self.buffer[len(left) :])
            if count == 0:
                raise EOFError("the server has closed")
            self.at, self.end = 0, len(left) + count
        line = bytes(self.buffer[self.at : self.at + found])
        self.at += found + 2
        return line

    def payload(self, into: memoryview) -> None:
        """The next bytes, straight into `into`, and the end of their line."""
        have = min(len(into), self.end - self.at)
        into[:have] = self.buffer[self.at : self.at + have]
        self.at += have
        receive(self.socket, into[have:])
        if self.line() != b"":
            raise ValueError("more bytes than announced")

    def expect(self, wanted: bytes) -> None:
        """The next line must be this."""
        if (line := self.line()) != wanted:
            raise RuntimeError(f"{line!r} instead of {wanted!r}")


class Redis(Client):
    """Its protocol on a plain socket: no client library copies as little."""

    def open(self) -> None:
        self.lines = Lines(self.address["port"])

    def ask(self, *words: bytes) -> bytes:
        """One request."""
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)

    def put(self, key: str, block: int) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key.encode(), self.size)
        send(self.lines.socket, [head, self.source[self.place(block)], b"\r\n"])
        self.lines.expect(b"+OK")

    def get(self, key: str, block: int) -> None:
        self.get_batch([key], block)

    def get_batch(self, keys: Sequence[str], first: int) -> None:
        # It builds answers in memory as fast as they are asked for, of MGET all at once, and gets
        # slower by it: what has been asked for and has not come is kept below REDIS_BYTES.
        step = max(1, REDIS_BYTES // self.size)
        for at in range(0, len(keys), step):
            part = keys[at : at + step]
            self.lines.socket.sendall(b"".join(self.ask(b"GET", key.encode()) for key in part))
            for block in range(first + at, first + at + len(part)):
                self.lines.expect(b"$%d" % self.size)
                self.lines.payload(self.target[self.place(block)])

    def exists(self, keys: Sequence[str]) -> int:
        self.lines.socket.sendall(self.ask(b"EXISTS", *(key.encode() for key in keys)))
        return int(self.lines.line()[1:])

    def remove(self, keys: Sequence[str]) -> None:
        self.lines.socket.sendall(self.ask(b"DEL", *(key.encode() for key in keys)))
        self.lines.line()


class Memcached(Client):
    """Its text protocol on a plain socket."""

    def open(self) -> None:
        self.lines = Lines(self.address["port"])

    def put(self, key: str, block: int) -> None:
        head = b"set %s 0 0 %d\r\n" % (key.encode(), self.size)
        send(self.lines.socket, [head, self.source[self.place(block)], b"\r\n"])
        self.lines.expect(b"STORED")

    def get(self, key: str, block: int) -> None:
        self.get_batch([key], block)

    def get_batch(self, keys: Sequence[str], first: int) -> None:
        self.lines.socket.sendall(b"get " + " ".join(keys).encode() + b"\r\n")
        for at, key in enumerate(keys):
            self.lines.expect(b"VALUE %s 0 %d" % (key.encode(), self.size))
            self.lines.payload(self.target[self.place(first + at)])
        self.lines.expect(b"END")

    def questions(self, verb: bytes, keys: Sequence[str]) -> list[bytes]:
        """One line of answer for each key; not more at once than the sockets hold."""
        answers = []
        for at in range(0, len(keys), 1000):
            part = keys[at : at + 1000]
            asked = b"".join(b"%s %s\r\n" % (verb, key.encode()) for key in part)
            self.lines.socket.sendall(asked)
            answers += [self.lines.line() for _ in part]
        return answers

    def exists(self, keys: Sequence[str]) -> int:
        return sum(answer.startswith(b"HD") for answer in self.questions(b"mg", keys))

    def remove(self, keys: Sequence[str]) -> None:
        self.questions(b"md", keys)


class Mooncake(Client):
    """Its own client, from and into registered memory."""

    def open(self) -> None:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        self.store = MooncakeDistributedStore()
        own, master = f"127.0.0.1:{free_port()}", self.address["master"]
        code = self.store.setup(own, "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
        self.from_, self.into = (address_of(memory) for memory in self.memories)
        for memory, view in ((self.from_, self.source), (self.into, self.target)):
            code = code or self.store.register_buffer(memory, len(view))
        if code != 0:
            raise RuntimeError(f"setup: {code}")

    def put(self, key: str, block: int) -> None:
        code = self.store.put_from(key, self.from_ + block * self.size, self.size)
        if code != 0:
            raise RuntimeError(f"put: {code}")

    def get(self, key: str, block: int) -> None:
        count = self.store.get_into(key, self.into + block * self.size, self.size)
        if count != self.size:
            raise RuntimeError(f"get: {count}")

    def get_batch(self, keys: Sequence[str], first: int) -> None:
        places = [self.into + (first + at) * self.size for at in range(len(keys))]
        counts = self.store.batch_get_into(list(keys), places, [self.size] * len(keys))
        if any(count != self.size for count in counts):
            raise RuntimeError(f"get: {counts}")

    def exists(self, keys: Sequence[str]) -> int:
        return sum(answer == 1 for answer in self.store.batch_is_exist(list(keys)))

    def remove(self, keys: Sequence[str]) -> None:
        if self.index == 0:
            self.store.remove_all(True)


class OpenLake(Client):
    """Its own client, from and into registered memory. Keys have 54 bytes, no more and no less."""

    def open(self) -> None:
        from openlake_client import Client as Native  # type: ignore[import-not-found]

        self.native = Native("local", 2048 + self.index)
        self.from_, self.into = (address_of(memory) for memory in self.memories)
        self.native.register_memory(self.from_, len(self.source))
        self.native.register_memory(self.into, len(self.target))
        self.native.attach(self.address["agent"], 0, self.size + 64)

    @staticmethod
    def key(key: str) -> bytes:
        """Padded: a shorter key can be put and is never found."""
        return key.encode().ljust(54, b"_")

    def put(self, key: str, block: int) -> None:
        place = self.from_ + block * self.size
        codes = self.native.put_batch([self.key(key)], [[place]], [[self.size]])
        if codes[0] not in (0, self.size):
            raise RuntimeError(f"put: {codes}")

    def get(self, key: str, block: int) -> None:
        self.get_batch([key], block)

    def get_batch(self, keys: Sequence[str], first: int) -> None:
        places = [[self.into + (first + at) * self.size] for at in range(len(keys))]
        names = [self.key(key) for key in keys]
        codes = self.native.get_batch(names, places, [[self.size]] * len(keys))
        if any(code < 0 for code in codes):
            raise RuntimeError(f"get: {codes}")

    def exists(self, keys: Sequence[str]) -> int:
        return sum(a == 1 for a in self.native.batch_is_exist([self.key(key) for key in keys]))


class Dynamo(Client):
    """The radix tree of its router, in this process: it knows blocks and has none."""

    def open(self) -> None:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found]

        self.tree = RadixTree()

    def put_all(self, keys: Sequence[str]) -> None:
        self.ids = {key: at + 1 for at, key in enumerate(keys)}
        blocks = [{"block_hash": at, "tokens_hash": at} for at in self.ids.values()]
        stored = {"parent_hash": None, "blocks": blocks}
        event = {"event_id": 1, "data": {"stored": stored}, "dp_rank": 0}
        self.tree.apply_event(1, json.dumps(event).encode())

    def prepare(self, keys: Sequence[str]) -> None:
        self.sequence = [self.ids[key] for key in keys]

    def prefix(self, keys: Sequence[str]) -> int | None:
        return max(self.tree.find_matches(self.sequence[: len(keys)]).scores.values(), default=0)


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def send(connection: socket.socket, parts: list[bytes | memoryview]) -> None:
    """All parts, in one call where the socket takes them."""
    sent = connection.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            connection.sendall(memoryview(part)[sent:])
        sent = max(0, sent - len(part))


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fills `into`."""
    if not floor.receive(connection, into):
        raise EOFError("the server has closed")
