"""The console in a real browser: what it shows of a real server, to whom, and how it looks."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import Browser, Server, Start

import kvstrata

BLOCK_BYTES = 256 << 10
HOSTILE = '<img src=x onerror="document.title=1">\u202e"><script>alert(1)</script>'
READY = "!document.getElementById('state').hidden"
TOKENS = {"ops": "o" * 40, "red": "r" * 40, "blue": "b" * 40}


def hashes(count: int, first: int = 0) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(first, first + count)]


def values(count: int, first: int = 0) -> list[bytes]:
    made = (hashlib.shake_128(str(number).encode()) for number in range(first, first + count))
    return [one.digest(BLOCK_BYTES) for one in made]


def open_namespace(
    client: kvstrata.Client, model: str, root: bytes = b"\1" * 32
) -> kvstrata.Namespace:
    return client.open_namespace(
        model=model,
        engine="vllm",
        dtype="bf16",
        block_tokens=16,
        parts=[(0, 0, BLOCK_BYTES)],
        hash_algorithm="sha256",
        hash_root=root,
    )


def state(server: Server, token: str | None = None) -> dict:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{server.http}/console/state", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(json.loads(answer.read()))


def row(browser: Browser, table: str, having: str) -> list[str]:
    """The cells of the row that has this text."""
    find = f"[...document.querySelectorAll('#{table} tbody tr')]"
    found = browser.run(f"{find}.map(row => [...row.cells].map(cell => cell.innerText))")
    rows = [cells for cells in found if having in " ".join(cells)]
    assert len(rows) == 1, found
    return [str(cell) for cell in rows[0]]


def traffic(namespace: kvstrata.Namespace, blocks: int) -> None:
    """Puts so many blocks, finds them all and as many that nobody has put, and reads them."""
    assert namespace.put(hashes(blocks), values(blocks), durable=True).count("stored") == blocks
    assert namespace.lookup(hashes(blocks)).prefix_blocks == blocks
    assert namespace.lookup(hashes(blocks, first=10_000)).prefix_blocks == 0
    assert None not in namespace.get(hashes(blocks))


def assert_quiet(browser: Browser, server: Server) -> None:
    """It has complained of nothing, and asked nobody else for anything."""
    assert browser.errors == []
    assert browser.requests
    for url in browser.requests:
        assert url.startswith(f"http://{server.http}/") or url == "data:,", url
        assert "?" not in url


@pytest.fixture
def server(start: Start, tmp_path: Path) -> Server:
    """A node with nvme, whose cleaner keeps up with what the tests put."""
    disk = tmp_path / "disk"
    return start(
        f"nvme.path={disk}", "nvme.capacity=1GiB", "node.name=kvstrata-0", "node.zone=zone-a"
    )


def test_the_page_shows_what_the_node_holds_and_has_done(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    with kvstrata.Client(server.grpc) as client:
        traffic(open_namespace(client, "Qwen3-Coder-30B-A3B"), 100)
        open_namespace(client, "Qwen3-Coder-30B-A3B", root=b"\2" * 32)
        traffic(open_namespace(client, HOSTILE), 4)

        browser.size(1180, 900)
        browser.open(f"http://{server.http}/")
        browser.wait(READY)
        # 104 of 208 blocks asked were there.
        browser.wait("document.getElementById('hits-key').innerText.includes('dram 50.0 %')")
        assert "miss 50.0 %" in browser.text("#hits-key")
        assert "50.0 %" in browser.text("#figures") and "208" in browser.text("#figures")
        told = state(server)
        assert [tier["tier"] for tier in told["tiers"]] == ["dram", "nvme"]
        assert told["tiers"][0]["blocks"] == 104
        for tier in told["tiers"]:
            shown = browser.text(f"[data-tier={tier['tier']}]")
            assert f"{tier['blocks']} blocks" in shown
            bar = f"[data-tier={tier['tier']}] rect.{tier['tier']}"
            width = float(browser.run(f"document.querySelector('{bar}').getAttribute('width')"))
            assert width == pytest.approx(100 * tier["used_bytes"] / tier["capacity_bytes"], abs=2)
        assert "26.0 MiB" in browser.text("#bytes-key"), "104 blocks of 256 KiB were delivered"

        problem = browser.text("#problem-list .problem")
        assert "2 different hash roots" in problem and "PYTHONHASHSEED" in problem
        assert browser.text("#phase") == "1 problem"
        assert browser.text("#members .own .name") == "kvstrata-0"
        assert browser.text("#members h3") == "zone zone-a"

        cells = row(browser, "namespaces", "img")
        assert cells[0].startswith(HOSTILE), "what a client calls itself is text"
        assert browser.run("document.images.length") == 0
        assert browser.run("document.scripts.length") == 2
        assert cells[1:4] == ["vllm", "4", "1.0 MiB"]
        cells = row(browser, "namespaces", "25.0 MiB")
        assert cells[2] == "100" and cells[4].startswith("50.0 %")
    browser.picture(tmp_path / "console.png")
    assert 10_000 < (tmp_path / "console.png").stat().st_size < 300_000
    assert_quiet(browser, server)


def test_it_goes_on_by_itself_and_says_when_the_node_is_gone(
    browser: Browser, server: Server
) -> None:
    browser.size(1180, 900)
    browser.open(f"http://{server.http}/console")
    browser.wait(READY)
    assert browser.text("#problem-list") == "Nothing is wrong, as far as this node knows."
    assert "No lookups yet" in browser.text("#hits")
    with kvstrata.Client(server.grpc) as client:
        traffic(open_namespace(client, "later"), 3)
        browser.wait("document.getElementById('namespaces').innerText.includes('later')")
        browser.wait("document.getElementById('hits-key').innerText.includes('dram 50.0 %')")
    assert_quiet(browser, server)
    server.kill()
    browser.wait("document.getElementById('phase').innerText === 'no answer'")
    assert "does not answer" in browser.text("#foot")


def test_a_phone_shows_all_of_it_within_its_width(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    with kvstrata.Client(server.grpc) as client:
        traffic(open_namespace(client, "a-model-with-a-long-name" * 8), 5)
        open_namespace(client, "seeded")
        open_namespace(client, "seeded", root=b"\2" * 32)
        for dark in (False, True):
            browser.size(360, 740, phone=True, dark=dark)
            browser.open(f"http://{server.http}/console")
            browser.wait(READY)
            browser.wait("document.querySelectorAll('#namespaces tbody tr').length === 3")
            assert browser.run("document.documentElement.scrollWidth") == 360
            right = "it.getBoundingClientRect().right > 361"
            over = f"[...document.querySelectorAll('#state *')].filter(it => {right})"
            assert browser.run(f"{over}.map(it => it.outerHTML.slice(0, 80))") == []
            ground = browser.run("getComputedStyle(document.documentElement).backgroundColor")
            assert (ground == "rgb(18, 21, 27)") is dark
        # Each value says what it is: the head of the table is not seen.
        head = "getComputedStyle(document.querySelector('#namespaces td'), '::before').content"
        assert browser.run(head) == '"Model"'
    assert_quiet(browser, server)


def test_keys_reach_and_read_the_chart(browser: Browser, server: Server) -> None:
    with kvstrata.Client(server.grpc) as client:
        traffic(open_namespace(client, "m"), 3)
        browser.size(1180, 900)
        browser.open(f"http://{server.http}/console")
        browser.wait(READY)
        browser.wait("document.querySelector('#hits svg') !== null")
        browser.press("Tab")
        assert browser.run("document.activeElement.className") == "skip"
        for _ in range(8):
            browser.press("Tab")
            if browser.run("document.activeElement.closest('#hits') !== null"):
                break
        browser.press("End")
        browser.wait(
            "document.querySelector('#hits [role=status]').innerText.includes('6 blocks asked')"
        )
        label = browser.run("document.querySelector('#hits svg').getAttribute('aria-label')")
        assert "dram 50.0 %" in label and "miss 50.0 %" in label


def test_a_token_shows_its_own_part_and_stays_in_the_page(
    browser: Browser, start: Start, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    lines = [
        f"{tenant} {token}{' operator' if tenant == 'ops' else ''}"
        for tenant, token in TOKENS.items()
    ]
    tokens.write_text("\n".join(lines) + "\n")
    server = start(f"auth.tokens_file={tokens}")
    for wrong in (None, "w" * 40):
        with pytest.raises(urllib.error.HTTPError) as refused:
            state(server, wrong)
        assert refused.value.code == 401
    with (
        kvstrata.Client(server.grpc, token=TOKENS["red"]) as red,
        kvstrata.Client(server.grpc, token=TOKENS["blue"]) as blue,
    ):
        traffic_without_disk(open_namespace(red, "reds-model"), 6)
        traffic_without_disk(open_namespace(blue, "blues-model"), 2)
        browser.size(1180, 900)
        browser.open(f"http://{server.http}/console")
        browser.wait("!document.getElementById('ask').hidden")
        # What it is told without a token is nothing, and it does not ask again and again.
        refusals = server_metric(server, "kvstrata_unauthenticated_requests_total")
        for given in ("w" * 40, TOKENS["red"]):
            browser.wait("document.activeElement.id === 'token'")
            browser.type(given)
            browser.press("Enter")
            if given != TOKENS["red"]:
                browser.wait("!document.getElementById('refused').hidden")
        browser.wait(READY)
        browser.wait("document.getElementById('namespaces').innerText.includes('reds-model')")
        page = str(browser.run("document.documentElement.outerHTML"))
        assert "blues-model" not in page and TOKENS["red"] not in page
        assert browser.run("document.getElementById('tiers-card').hidden") is True
        assert "50.0 %" in browser.text("#figures")
        assert (
            browser.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        )
        assert TOKENS["red"] not in str(browser.run("location.href"))
        assert all(TOKENS["red"] not in url for url in browser.requests)
        after = server_metric(server, "kvstrata_unauthenticated_requests_total")
        assert after == refusals + 1, "the wrong one"

        told = state(server, TOKENS["red"])
        assert [of["model"] for of in told["namespaces"]] == ["reds-model"]
        assert "tiers" not in told and "history" not in told
        told = state(server, TOKENS["ops"])
        assert sorted(of["model"] for of in told["namespaces"]) == ["blues-model", "reds-model"]
        assert sum(told["lookups"]) == 16

        # A token that is taken away is asked for again.
        tokens.write_text("\n".join(lines[2:] + lines[:1]) + "\n")
        browser.wait("!document.getElementById('ask').hidden")


def traffic_without_disk(namespace: kvstrata.Namespace, blocks: int) -> None:
    namespace.put(hashes(blocks), values(blocks))
    assert namespace.lookup(hashes(blocks)).prefix_blocks == blocks
    assert namespace.lookup(hashes(blocks, first=10_000)).prefix_blocks == 0


def server_metric(server: Server, name: str) -> float:
    request = urllib.request.Request(
        f"http://{server.http}/metrics", headers={"Authorization": f"Bearer {TOKENS['ops']}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_nothing_but_its_own_parts_may_run(server: Server) -> None:
    for path in (
        "",
        "console",
        "console/page.js",
        "console/charts.js",
        "console/page.css",
        "console/state",
    ):
        with urllib.request.urlopen(f"http://{server.http}/{path}", timeout=10) as answer:
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            text = answer.read().decode()
            if path != "console/state":
                elsewhere = set(re.findall(r"https?://[^\s\"'`]*", text))
                assert elsewhere <= {"http://www.w3.org/2000/svg"}, "a name, not an address"
            assert " onclick=" not in text and "javascript:" not in text
