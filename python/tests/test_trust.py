"""Tokens and TLS: who may come in, over each path."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import Start, hashes, open_namespace, store, value

import kvstrata

TOKENS = {"red": "r" * 40, "blue": "b" * 40}


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """The setting with a file of two tenants."""
    path = tmp_path / "tokens"
    path.write_text("".join(f"{tenant} {token}\n" for tenant, token in TOKENS.items()))
    return f"auth.tokens_file={path}"


@pytest.mark.parametrize("way", ["grpc", "bulk"])
def test_tenants_do_not_see_each_other(start: Start, tokens: str, way: str) -> None:
    """And nobody comes in without a token, or with a wrong one."""
    server = start(tokens)
    for wrong in (None, "w" * 40):
        with (
            pytest.raises(kvstrata.UnauthenticatedError) as raised,
            kvstrata.Client(server.grpc, token=wrong) as nobody,
        ):
            open_namespace(nobody, "shared")
        assert isinstance(raised.value, PermissionError)
        assert "w" * 40 not in str(raised.value)
    path = {"path": way}
    with (
        kvstrata.Client(server.grpc, token=TOKENS["red"], **path) as red,  # type: ignore[arg-type]
        kvstrata.Client(server.grpc, token=TOKENS["blue"], **path) as blue,  # type: ignore[arg-type]
    ):
        ours, theirs = open_namespace(red, "shared"), open_namespace(blue, "shared")
        store(ours, 2)
        assert ours.get(hashes(2)) == [value(0), value(1)]
        assert theirs.get(hashes(2)) == [None, None]
        assert theirs.remove(hashes(2)) == 0
        assert ours.exists(hashes(2)) == [True, True]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this host that is its own CA, and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    names = ["-subj", "/CN=kvstrata", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    names += ["-addext", "basicConstraints=critical,CA:FALSE"]
    made = ["-nodes", "-days", "2", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*request, *names, *made], check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize("way", ["grpc", "bulk"])
def test_blocks_go_over_tls(start: Start, certificate: tuple[Path, Path], way: str) -> None:
    """And a client that trusts another CA, or speaks no TLS, is told so."""
    cert, key = certificate
    server = start(f"tls.cert_file={cert}", f"tls.key_file={key}")
    path = {"path": way}
    with kvstrata.Client(server.grpc, tls_ca=cert, **path) as client:  # type: ignore[arg-type]
        namespace = open_namespace(client, "tls")
        values = store(namespace, 8)
        rooms = [bytearray(len(each)) for each in values]
        assert namespace.get_into(hashes(8), rooms).blocks == 8
        assert rooms == values
    with pytest.raises(kvstrata.UnauthenticatedError):
        kvstrata.Client(f"https://{server.grpc}")
    with pytest.raises(kvstrata.Error):
        kvstrata.Client(server.grpc, connect_timeout=3).stats(timeout=3)
