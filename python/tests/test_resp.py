"""The RESP listener, by the client that LMCache uses, in both versions of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from conftest import Server, Start, value
from redis.backoff import NoBackoff
from redis.retry import Retry

LISTEN = "server.resp_listen=127.0.0.1:0"
TOKENS = {"red": "r" * 40, "blue": "b" * 40}
ONCE = Retry(NoBackoff(), 0)
"""For what does not become right by trying again."""
VALUE_BYTES = 1 << 20
"""The longest that a node with so little memory takes."""


def port(server: Server) -> int:
    """Where it listens."""
    assert server.resp is not None
    return int(server.resp.rsplit(":", 1)[1])


def connect(server: Server, **options: Any) -> Any:
    """A client of its own; `Any`, because the types of its answers depend on how it is set up."""
    return redis.Redis(host="127.0.0.1", port=port(server), socket_timeout=60, **options)


def chunk(number: int) -> str:
    """A key as LMCache makes them, without the name of its half."""
    return f"org/model@1@0@{number:064x}@bfloat16"


def store_chunk(client: Any, number: int, bytes_: int = VALUE_BYTES) -> None:
    """Stores a chunk as LMCache does."""
    assert client.set(chunk(number) + "kv_bytes", value(number, bytes_))
    assert client.set(chunk(number) + "metadata", struct.pack("<7i", bytes_, number, 0, 0, 0, 0, 0))


def load_chunk(client: Any, number: int) -> bytes | None:
    """Loads a chunk as LMCache does; what comes must be what was stored."""
    metadata = client.get(chunk(number) + "metadata")
    if metadata is None:
        return None
    length, label, *_ = struct.unpack("<7i", metadata)
    assert label == number
    loaded = client.get(chunk(number) + "kv_bytes")
    if loaded is None:
        return None
    assert loaded == value(number, length), "a wrong byte"
    assert isinstance(loaded, bytes)
    return loaded


@pytest.fixture(scope="module")
def resp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests that leave it as it is."""
    server = Server(tmp_path_factory.mktemp("resp"), LISTEN)
    yield server
    server.close()


@pytest.mark.parametrize("protocol", [2, 3])
def test_values_come_back(resp_server: Server, protocol: int) -> None:
    """Of every length, one and many at a time, and what was never there does not."""
    with connect(resp_server, protocol=protocol, client_name="test") as client:
        assert client.ping() and client.echo("x") == b"x"
        assert client.client_getname() in (b"test", "test")
        assert client.select(0) and client.client_id() > 0
        assert client.info()["redis_mode"] == "standalone"
        lengths = [1, 28, 4095, 4096, 70_001, VALUE_BYTES]
        keys = [f"{protocol}/{length}" for length in lengths]
        before = client.dbsize()
        for key, length in zip(keys, lengths, strict=True):
            assert client.get(key) is None
            assert client.set(key, value(length, length), ex=100)
            assert client.get(key) == value(length, length)
            assert client.strlen(key) == length and client.ttl(key) == -1
        assert client.dbsize() == before + len(keys)
        assert client.exists(*keys, "nothing") == len(keys)
        expected = [value(length, length) for length in lengths]
        assert client.mget([*keys, "nothing", keys[0]]) == [*expected, None, expected[0]]
        assert client.set(keys[0], b"other", nx=True) is None
        assert client.set(keys[0], b"other") and client.get(keys[0]) == expected[0]
        assert client.delete(*keys) == len(keys) and client.unlink(keys[0]) == 0
        assert client.mget(keys) == [None] * len(keys) and client.exists(*keys) == 0
        assert client.ttl(keys[0]) == -2


@pytest.mark.parametrize("protocol", [2, 3])
def test_commands_in_one_go_are_answered_in_turn(resp_server: Server, protocol: int) -> None:
    """Also when they and their answers are larger than what the network holds."""
    with connect(resp_server, protocol=protocol) as client:
        pipeline = client.pipeline(transaction=False)
        for number in range(8):
            pipeline.set(f"p{number}", value(number, 300_000))
        for number in range(8):
            pipeline.get(f"p{number}").exists(f"p{number}", "nothing")
        answers = pipeline.execute()
        gets = [each for number in range(8) for each in (value(number, 300_000), 1)]
        assert answers == [True] * 8 + gets
        with pytest.raises(redis.ResponseError, match="unknown command"):
            client.flushall()
        assert client.delete(*(f"p{number}" for number in range(8))) == 8


@pytest.mark.parametrize("protocol", [2, 3])
def test_many_connections_of_an_asynchronous_client(resp_server: Server, protocol: int) -> None:
    """Chunks by a pool, as LMCache's connector does it."""

    async def talk() -> None:
        url = f"redis://127.0.0.1:{port(resp_server)}"
        pool: Any = redis.asyncio.ConnectionPool.from_url(
            url, max_connections=20, protocol=protocol
        )
        client: Any = redis.asyncio.Redis.from_pool(pool)
        places = asyncio.Semaphore(20)

        async def one(number: int) -> None:
            key, expected = chunk(number), value(number, 100_000)
            async with places:
                await client.set(key + "kv_bytes", expected)
                assert not await client.exists(key + "metadata")
                await client.set(key + "metadata", b"m" * 28)
                assert await client.exists(key + "metadata")
                assert await client.get(key + "kv_bytes") == expected
                assert await client.delete(key + "metadata", key + "kv_bytes") == 2

        await asyncio.gather(*(one(number) for number in range(200)))
        await client.aclose()

    before = resp_server.metric("kvstrata_resp_dropped_values_total" + '{reason="torn"}')
    asyncio.run(talk())
    after = resp_server.metric("kvstrata_resp_dropped_values_total" + '{reason="torn"}')
    assert after == before


def test_one_half_of_a_chunk_is_nothing(resp_server: Server) -> None:
    """Whichever half has gone; and what is stored then is of one making."""
    with connect(resp_server) as client:
        store_chunk(client, 1)
        assert load_chunk(client, 1) is not None
        for gone, stays in [("metadata", "kv_bytes"), ("kv_bytes", "metadata")]:
            assert client.delete(chunk(1) + gone) == 1
            assert client.get(chunk(1) + stays) is None
            assert client.exists(chunk(1) + stays, chunk(1) + gone) == 0
            assert load_chunk(client, 1) is None
            store_chunk(client, 1)
            assert load_chunk(client, 1) == value(1, VALUE_BYTES)
    assert resp_server.metric("kvstrata_resp_torn_reads_total") >= 4


def test_values_too_long_are_dropped_and_the_connection_stays_in_step(start: Start) -> None:
    """The longest one that there is room for is not."""
    server = start(LISTEN)
    with connect(server) as client:
        longest = 1 << 20
        assert client.set("long", b"x" * (longest + 1)) and client.get("long") is None
        assert client.set("k" * 2000, b"x") and client.get("k" * 2000) is None
        assert client.set("fits", b"y" * longest) and client.strlen("fits") == longest
        assert client.set("empty", b"") and client.get("empty") is None
        assert client.get("fits") == b"y" * longest
    series = 'kvstrata_resp_dropped_values_total{reason="%s"}'
    assert server.metric(series % "length") == 2 and server.metric(series % "key") == 1


def test_more_than_there_is_room_for_evicts_and_never_fails(start: Start) -> None:
    """What was stored last is there, and all that comes is right."""
    server = start(LISTEN, "memory.limit=512MiB")
    with connect(server) as client:
        for number in range(300):
            store_chunk(client, number, 1 << 20)
        found = [number for number in range(300) if load_chunk(client, number) is not None]
        assert 299 in found and 50 <= len(found) < 300, len(found)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """The setting with a file of two tenants."""
    path = tmp_path / "tokens"
    path.write_text("".join(f"{tenant} {token}\n" for tenant, token in TOKENS.items()))
    return f"auth.tokens_file={path}"


@pytest.mark.parametrize("protocol", [2, 3])
def test_tenants_do_not_see_each_other(start: Start, tokens: str, protocol: int) -> None:
    """And nobody comes in without a token, or with a wrong one."""
    server = start(LISTEN, tokens)
    for wrong in (None, "w" * 40):
        with (
            connect(server, protocol=protocol, password=wrong, retry=ONCE) as nobody,
            pytest.raises(redis.RedisError) as raised,
        ):
            nobody.get("k")
        assert isinstance(raised.value, redis.AuthenticationError), raised.value
    with (
        connect(server, protocol=protocol, password=TOKENS["red"]) as red,
        connect(server, protocol=protocol, username="any", password=TOKENS["blue"]) as blue,
    ):
        store_chunk(red, 1)
        assert load_chunk(red, 1) is not None
        assert load_chunk(blue, 1) is None and blue.dbsize() == 0
        assert blue.delete(chunk(1) + "metadata", chunk(1) + "kv_bytes") == 0
        assert load_chunk(red, 1) is not None and red.dbsize() == 2


def test_values_go_over_tls(start: Start, tmp_path: Path) -> None:
    """And a client that speaks none is told so."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    names = ["-subj", "/CN=kvstrata", "-addext", "subjectAltName=IP:127.0.0.1"]
    names += ["-addext", "basicConstraints=critical,CA:FALSE"]
    made = ["-nodes", "-days", "2", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*request, *names, *made], check=True, capture_output=True)
    server = start(LISTEN, f"tls.cert_file={cert}", f"tls.key_file={key}")
    with connect(server, ssl=True, ssl_ca_certs=str(cert)) as client:
        store_chunk(client, 1)
        assert load_chunk(client, 1) is not None
    with connect(server, ssl=True) as stranger, pytest.raises(redis.ConnectionError):
        stranger.ping()
    with connect(server) as plain, pytest.raises(redis.RedisError):
        plain.ping()


def flood(server: Server, stop: threading.Event) -> None:
    """What is no client: bytes of all kinds, lengths without bytes, connections without a word."""
    choose = random.Random(7)
    silent: list[socket.socket] = []
    beginnings: list[Callable[[], bytes]] = [
        lambda: choose.randbytes(choose.randrange(1, 4000)),
        lambda: b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$500000000\r\n" + b"x" * 10_000,
        lambda: b"*513\r\n$4\r\nMGET\r\n" + b"$1000\r\n" + b"k" * 1000 + b"\r\n",
        lambda: b"*1\r\n$999999999999999999999\r\n",
        lambda: b"GET /" + b"a" * 10_000,
        lambda: b"",
    ]
    while not stop.is_set():
        peer = socket.create_connection(("127.0.0.1", port(server)))
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.send(choose.choice(beginnings)())
        silent.append(peer)
        if len(silent) > 500:
            silent.pop(choose.randrange(len(silent))).close()
    for peer in silent:
        peer.close()


def test_hostile_peers_cost_little_and_keep_nobody_out(start: Start) -> None:
    """Memory is bounded by what came, not by what was announced."""
    server = start(LISTEN)
    with connect(server) as client:
        for number in range(8):
            store_chunk(client, number, 1 << 20)
        before = server.resident_kib()
        stop = threading.Event()
        flooding = [threading.Thread(target=flood, args=(server, stop)) for _ in range(2)]
        for thread in flooding:
            thread.start()
        start_at = time.monotonic()
        rounds = 0
        while time.monotonic() - start_at < 5 or rounds < 3:
            for number in range(8):
                assert load_chunk(client, number) is not None
            rounds += 1
        grown = server.resident_kib() - before
        stop.set()
        for thread in flooding:
            thread.join()
    assert grown < 64 << 10, f"grew by {grown} KiB"
    assert server.metric("kvstrata_resp_protocol_errors_total") > 10


def test_what_was_stored_is_there_after_a_kill(start: Start, tmp_path: Path) -> None:
    """From nvme, to the last chunk that it has; and a client comes back by itself."""
    server = start(LISTEN, f"nvme.path={tmp_path}", "nvme.capacity=128MiB")
    chunks = 20
    with connect(server) as client:
        for number in range(chunks):
            store_chunk(client, number, 1 << 20)
        deadline = time.monotonic() + 60
        while server.metric("kvstrata_nvme_blocks") < 2 * chunks:
            assert time.monotonic() < deadline, "not copied to nvme"
            time.sleep(0.05)
        server.settings = (f"server.resp_listen={server.resp}", *server.settings[1:])
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get(chunk(0) + "metadata")
        server.start()
        found = [number for number in range(chunks) if load_chunk(client, number) is not None]
        assert found == list(range(chunks))
        store_chunk(client, 100)
        assert load_chunk(client, 100) is not None


def test_killed_at_any_moment_it_gives_no_wrong_byte(start: Start, tmp_path: Path) -> None:
    """And keeps what nvme had before: writers go on through ten kills."""
    server = start(LISTEN, f"nvme.path={tmp_path}", "nvme.capacity=256MiB")
    server.settings = (f"server.resp_listen={server.resp}", *server.settings[1:])
    choose = random.Random(11)
    kept = 10
    with connect(server) as client:
        for number in range(kept):
            store_chunk(client, number, 1 << 20)
        while server.metric("kvstrata_nvme_blocks") < 2 * kept:
            time.sleep(0.05)
    stop = threading.Event()
    stored: list[int] = []
    wrong: list[AssertionError] = []

    def write(first: int) -> None:
        number = first
        while not stop.is_set():
            with connect(server) as client:
                try:
                    while not stop.is_set():
                        number += 1
                        store_chunk(client, number, 200_000)
                        load_chunk(client, number - choose.randrange(20))
                        stored.append(number)
                except redis.RedisError:
                    time.sleep(0.01)
                except AssertionError as error:
                    wrong.append(error)

    writers = [threading.Thread(target=write, args=(first,)) for first in (10**4, 10**6)]
    for writer in writers:
        writer.start()
    for _ in range(10):
        time.sleep(choose.uniform(0.05, 0.4))
        server.kill()
        server.start()
    stop.set()
    for writer in writers:
        writer.join()
    assert not wrong, wrong[0]
    assert len(stored) > 20, len(stored)
    with connect(server) as client:
        found = [number for number in range(kept) if load_chunk(client, number) is not None]
        assert found == list(range(kept))
        later = [number for number in stored if load_chunk(client, number) is not None]
        assert len(later) >= 5, f"{len(later)} of {len(stored)}"
