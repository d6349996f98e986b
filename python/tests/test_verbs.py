"""Every verb once, against a real server."""

from __future__ import annotations

import time

import pytest
from conftest import BLOCK_BYTES, Server, hashes, open_namespace, store, value

import kvstrata


def test_what_is_put_is_found_and_comes_back(namespace: kvstrata.Namespace) -> None:
    """The whole way of a block."""
    put = namespace.put(hashes(4), [value(number) for number in range(4)])
    assert put.outcomes == ["stored"] * 4
    assert (put.sent_bytes, put.retry_after) == (4 * BLOCK_BYTES, None)
    found = namespace.lookup(hashes(6))
    assert (found.prefix_blocks, found.dram, found.miss) == (4, 4, 2)
    assert [(run.start, run.end, run.tier, run.local) for run in found.runs] == [
        (0, 4, "dram", True)
    ]
    assert found.runs[0].est_load > 0
    assert namespace.get(hashes(6)) == [value(number) for number in range(4)] + [None, None]
    assert namespace.get(hashes(6)[::-1], stop_at_miss=True) == [None] * 6
    again = namespace.put(hashes(1), [value(9)])
    assert again.outcomes == ["duplicate_differs"]


def test_hashes_may_be_packed(namespace: kvstrata.Namespace) -> None:
    """One buffer of them is the same as a list."""
    store(namespace, 2)
    packed = b"".join(hashes(3))
    for given in (packed, bytearray(packed), memoryview(packed), iter(hashes(3))):
        assert namespace.exists(given) == [True, True, False]


def test_exists_sees_behind_gaps(namespace: kvstrata.Namespace) -> None:
    """Unlike a prefix."""
    namespace.put(hashes(1), [value(0)])
    namespace.put(hashes(1, 2), [value(2)])
    assert namespace.exists(hashes(4)) == [True, False, True, False]
    found = namespace.lookup(hashes(4), sparse=True)
    assert [(run.start, run.end) for run in found.sparse] == [(2, 3)]


def test_small_verbs_count(namespace: kvstrata.Namespace) -> None:
    """Touch, prefetch, describe, remove."""
    store(namespace, 3)
    assert namespace.touch(hashes(5)) == 3
    assert namespace.prefetch(hashes(5)) == (3, 0)
    assert namespace.describe(hashes(3), position=0, tokens=list(range(48))) == 3
    assert namespace.remove(hashes(2)) == 2
    assert namespace.exists(hashes(3)) == [False, False, True]


def test_parts_may_be_put_and_got_one_by_one(client: kvstrata.Client) -> None:
    """As the workers of an engine do."""
    namespace = open_namespace(client, "parts", (64, 128))
    assert namespace.parts == [(0, 0, 64), (0, 1, 128)]
    assert namespace.block_bytes == 192
    first = namespace.put(hashes(2), [value(0, 64), value(1, 64)], parts=[0])
    assert first.outcomes == ["part_stored"] * 2
    second = namespace.put(hashes(2), [value(2, 128), value(3, 128)], parts=[1])
    assert second.outcomes == ["stored"] * 2
    assert namespace.get(hashes(2)) == [
        value(0, 64) + value(2, 128),
        value(1, 64) + value(3, 128),
    ]
    rooms = [bytearray(128), bytearray(128)]
    assert namespace.get_into(hashes(2), rooms, parts=[1]).found == [True, True]
    assert rooms == [value(2, 128), value(3, 128)]
    with pytest.raises(kvstrata.InvalidError, match="parts: 2 given, 0 to 1 declared"):
        namespace.get(hashes(1), parts=[2])


def test_a_lease_keeps_what_was_found(client: kvstrata.Client) -> None:
    """Until it is released, or its session ends."""
    namespace = open_namespace(client, "leased")
    values = store(namespace, 3)
    with client.session("test") as session:
        assert [session.state] == ["open"]
        found = namespace.lookup(hashes(3), lease=20.0, session=session)
        assert found.lease is not None
        with found.lease as lease:
            assert (lease.blocks, lease.bytes) == (3, 3 * BLOCK_BYTES)
            assert 0 < lease.expires_in <= 20
            lease.renew(30.0)
            assert lease.expires_in > 20
            assert client.stats()["leases"] == 1
            assert namespace.get(hashes(3), lease=lease) == values
        assert (lease.expires_in, client.stats()["leases"]) == (0, 0)
        with pytest.raises(kvstrata.LeaseExpiredError):
            lease.renew()
    assert session.state == "ended"
    with pytest.raises(kvstrata.ClosedError):
        namespace.put(hashes(1), [value(0)], session=session)


def test_a_lease_without_a_session_is_owned_by_the_client(namespace: kvstrata.Namespace) -> None:
    """As a put is."""
    store(namespace, 1)
    lease = namespace.lookup(hashes(1), lease=0.0).lease
    assert lease is not None
    lease.release()
    lease.release()


def test_values_of_any_length_under_any_key(client: kvstrata.Client) -> None:
    """An opaque namespace."""
    values = client.open_opaque("test")
    keys = [kvstrata.foreign_hash(key) for key in (b"a", b"b", b"c", b"none")]
    assert values.put(keys[:3], [b"a", b"short", b"x" * 100]).count("stored") == 3
    assert values.get(keys) == [b"a", b"short", b"x" * 100, None]
    rooms = [bytearray(8) for _ in keys]
    got = values.get_into(keys, rooms)
    assert got.found == [True, True, False, False]
    assert got.lengths[:2] == [1, 5]
    assert bytes(rooms[1][:5]) == b"short"
    assert got.misses == [(2, 3, "too_long"), (3, 4, "absent")]


def test_stats_are_those_of_the_server(client: kvstrata.Client) -> None:
    """As a dictionary."""
    client.open_opaque("for stats")
    stats = client.stats()
    assert stats["tiers"][0]["tier"] == "dram"
    assert stats["namespaces"]


def test_a_durable_put_on_a_server_without_nvme_says_so(namespace: kvstrata.Namespace) -> None:
    """By an outcome or a typed error, never by silence."""
    try:
        put = namespace.put(hashes(1), [value(0)], durable=True)
    except kvstrata.Error as error:
        assert isinstance(error, kvstrata.UnsupportedError)
    else:
        assert put.outcomes == ["not_durable"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"hash_bytes": 7}, "hash_bytes: 7 given, 8 to 32 allowed"),
        ({"parts": []}, "parts: none declared"),
        ({"hash_schemes": ["xyz"]}, 'hash_schemes: "xyz" given; vllm_u64, sglang_i64, dynamo'),
        ({"hash_schemes": ["dynamo"]}, "hash_schemes: dynamo given.*set keep_tokens"),
        ({"timeout": -1.0}, "timeout: -1 s given"),
        ({"timeout": float("nan")}, "timeout: NaN s given"),
    ],
)
def test_bad_namespaces_are_refused_by_name(
    client: kvstrata.Client, arguments: dict[str, object], named: str
) -> None:
    """With the field, the value and what is allowed."""
    good: dict[str, object] = {
        "model": "m",
        "engine": "vllm",
        "dtype": "bf16",
        "block_tokens": 16,
        "parts": [(0, 0, 64)],
        "hash_algorithm": "sha256",
    }
    with pytest.raises(kvstrata.InvalidError, match=named) as raised:
        client.open_namespace(**{**good, **arguments})  # type: ignore[arg-type]
    assert isinstance(raised.value, ValueError)


def test_a_namespace_can_wish_for_other_names(client: kvstrata.Client) -> None:
    """They are counted by the server, blocks of token schemes once they are described."""
    namespace = client.open_namespace(
        model="names",
        engine="vllm",
        dtype="bf16",
        block_tokens=16,
        parts=[(0, 0, BLOCK_BYTES)],
        hash_algorithm="test",
        keep_tokens=True,
        hash_schemes=["dynamo", "sglang_i64"],
    )
    known = [each for each in client.stats()["namespaces"] if each["model"] == "names"]
    assert [each["keep_tokens"] for each in known] == [True]
    assert known[0]["hash_schemes"] == ["dynamo", "sglang_i64"]
    store(namespace, 5)
    namespace.describe(hashes(3), tokens=list(range(48)))
    for _ in range(500):
        entries = {each["scheme"]: each["entries"] for each in client.stats()["schemes"]}
        if entries["dynamo"] >= 3 and entries["sglang_i64"] >= 5:
            break
        time.sleep(0.02)
    else:
        raise AssertionError(entries)


def test_bad_hashes_are_refused_by_name(namespace: kvstrata.Namespace) -> None:
    """Wrong lengths and wrong types."""
    with pytest.raises(kvstrata.InvalidError, match="position 1: 3 bytes given, exactly 32"):
        namespace.exists([bytes(32), b"abc"])
    with pytest.raises(kvstrata.InvalidError):
        namespace.exists(bytes(33))
    with pytest.raises(TypeError):
        namespace.exists([1, 2])  # type: ignore[list-item]
    with pytest.raises(kvstrata.InvalidError, match="parent: 3 bytes given, exactly 32 declared"):
        namespace.put(hashes(1), [value(0)], parent=b"abc")
    with pytest.raises(kvstrata.InvalidError, match="values: position 0, part 0: 3 bytes given"):
        namespace.put(hashes(1), [b"abc"])


def test_a_closed_client_says_so(shared_server: Server) -> None:
    """And closes any number of times."""
    client = kvstrata.Client(shared_server.grpc)
    namespace = open_namespace(client, "closed")
    client.close()
    client.close()
    for call in (client.stats, lambda: namespace.exists(hashes(1)), client.session):
        with pytest.raises(kvstrata.ClosedError):
            call()
    with pytest.raises(kvstrata.ClosedError):
        namespace.submit_get_into(hashes(1), [bytearray(BLOCK_BYTES)])


def test_options_are_checked(shared_server: Server) -> None:
    """Before anything is connected."""
    with pytest.raises(kvstrata.InvalidError, match="auto, grpc, bulk or shm"):
        kvstrata.Client(shared_server.grpc, path="fast")  # type: ignore[arg-type]
    with pytest.raises(kvstrata.InvalidError, match="stall_timeout"):
        kvstrata.Client(shared_server.grpc, stall_timeout=-2)
    with pytest.raises(kvstrata.InvalidError, match="token: 1 characters given"):
        kvstrata.Client(shared_server.grpc, token="t")
    with pytest.raises(kvstrata.InvalidError, match="both or neither"):
        kvstrata.Client(shared_server.grpc, tls_cert="c")
    with pytest.raises(kvstrata.InvalidError, match="/nowhere"):
        kvstrata.Client(shared_server.grpc, tls_ca="/nowhere")
    with pytest.raises(kvstrata.InvalidError, match="host:port"):
        kvstrata.Client("http://a b")
