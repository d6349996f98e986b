"""Every command of docs/operations.md, run as it stands there, in its order, on the three nodes of
the page and a bucket; and that what the page says comes of it does.
"""

from __future__ import annotations

import re
from pathlib import Path

from conftest import FILER, NODES, PAGE, Operator

REPOSITORY = PAGE.parents[1]
FOUND = "opened the object tier's log"


def test_the_nodes_of_the_page_start_and_take_load(operator: Operator) -> None:
    operator.does("The nodes of this page", slice(1))
    for node in NODES:
        operator.machine.until_says(f"cat node-{node}.log", FOUND)
        operator.until("three members", node, "kvstrata_cluster_members", 3)
    operator.does("The nodes of this page", slice(1, None))
    operator.replay(60, "24KiB")
    for node in NODES:
        operator.until("packs of each", node, "kvstrata_object_named_packs_total", 1)


def test_doctor_finds_no_problem(operator: Operator) -> None:
    operator.does("doctor")


def test_plan_prints_what_the_page_shows(operator: Operator) -> None:
    operator.does("How large")


def test_a_node_is_upgraded_and_has_its_blocks(operator: Operator) -> None:
    held = operator.metric(0, "kvstrata_nvme_blocks")
    assert held > 0
    operator.does("Upgrades")
    assert operator.metric(0, "kvstrata_nvme_blocks") == held


def test_a_node_is_drained(operator: Operator) -> None:
    operator.replay(12, "20KiB")
    operator.does("Drains")
    said = operator.machine.fails("curl -sf http://127.0.0.1:9401/readyz")
    assert said == ""
    leaves = "is about to leave"
    operator.machine.until(lambda: leaves in operator.problems(1), leaves)
    second = operator.machine.run("kvstrata drain --status --admin 127.0.0.1:9414")
    assert "kvstrata-1: serving" in second


def test_a_full_disk_is_said_and_got_over(operator: Operator) -> None:
    operator.lose_disk(1)
    operator.machine.fails("head -c 1G /dev/zero >/mnt/cache/1/other")
    operator.replay(20, "32KiB")
    full = 'kvstrata_nvme_state{state="full"}'
    operator.until("the tier is full", 1, full, 1)
    assert "takes no writes now" in operator.problems(1)
    quoted = "nvme is full and nothing could be reclaimed: writes stop for now"
    assert operator.machine.file("node-1.log").count(quoted) == 1
    operator.machine.run("rm /mnt/cache/1/other")
    operator.replay(12, "28KiB")
    operator.until("it goes on", 1, 'kvstrata_nvme_state{state="ready"}', 1)


def test_a_lost_disk_comes_back_empty_and_its_blocks_from_the_bucket(operator: Operator) -> None:
    packs = operator.metric(0, "kvstrata_object_named_packs_total")
    assert packs > 0
    operator.does("It fails")
    operator.machine.until_says("curl -s http://127.0.0.1:9401/readyz", "ok")
    assert operator.metric(0, "kvstrata_nvme_blocks") == 0
    operator.until("its blocks in the bucket", 0, "kvstrata_object_blocks", 1)
    operator.does("The bucket is lost", slice(1, 2))
    operator.replay(60, "24KiB")
    read = 'kvstrata_get_blocks_total{tier="object"}'
    operator.until("reads from the bucket", 0, read, 1)


def test_a_bucket_that_is_away_is_said_and_got_over(operator: Operator) -> None:
    refused = "INPUT -p tcp --dport 8333 -j REJECT --reject-with tcp-reset"
    operator.machine.run(f"iptables -A {refused}")
    blocks = iter(range(17, 60))

    def paused() -> bool:
        operator.replay(12, f"{next(blocks)}KiB")
        return operator.metric(0, "kvstrata_object_breaker_open") == 1

    operator.machine.until(paused, "requests are paused")
    operator.does("The bucket is lost", slice(1))
    assert "object store fails, pausing requests" in operator.machine.file("node-0.log")
    assert "requests to the object store failed many times" in operator.problems(0)
    operator.machine.run(f"iptables -D {refused}")
    operator.machine.until_says("cat node-0.log", "object store answers again")
    assert "requests to the object store" not in operator.problems(0)


def test_packs_of_a_node_that_is_gone_are_adopted(operator: Operator) -> None:
    operator.end(2)
    epochs = operator.epochs(2)
    # The others look once a minute, and when they start.
    (adopt,) = operator.page["The bucket is lost"].commands[2:]
    operator.machine.run(f"({adopt.script}; echo adopted) >adopt.log 2>&1 &")
    operator.machine.until(lambda: operator.epochs(2) > epochs, "the ordinal is released")
    for node in (0, 1):
        operator.end(node)
        operator.start(node)
    operator.machine.until_says("cat adopt.log", "adopted")
    adopted = [operator.metric(node, "kvstrata_object_adopted_ordinals") for node in (0, 1)]
    assert sum(adopted) == 1, adopted


def test_an_emptied_bucket_costs_what_was_in_it(operator: Operator) -> None:
    operator.lose_disk(0)
    operator.until("its blocks in the bucket", 0, "kvstrata_object_blocks", 1)
    operator.machine.run(f"curl -sf -X DELETE '{FILER}blocks/v1?recursive=true'")
    operator.replay(84, "24KiB")
    operator.until("lost packs", 0, "kvstrata_object_lost_packs_total", 1)
    made = operator.metric(0, "kvstrata_object_packs_made_total")
    operator.replay(60, "36KiB")
    operator.until("new packs", 0, "kvstrata_object_packs_made_total", made + 1)


def certificate(operator: Operator, name: str, days: int) -> None:
    """Makes `key.NAME` and `cert.NAME` for this machine, of the CA of `ca.pem`."""
    machine = operator.machine
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    if not (machine.home / "ca.pem").exists():
        machine.run(f"openssl req -x509 {curve} -days 9 -keyout ca.key -out ca.pem -subj /CN=ca")
    (machine.home / "extensions").write_text(
        "subjectAltName=IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\n"
    )
    machine.run(f"openssl req {curve} -keyout key.{name} -out request -subj /CN=kvstrata")
    machine.run(
        f"openssl x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -days {days} "
        f"-extfile extensions -out cert.{name}"
    )


def test_tokens_and_certificates_change_while_nodes_run(operator: Operator) -> None:
    machine = operator.machine
    section = operator.page["Tokens and certificates"]
    certificate(operator, "pem", days=2)
    old = machine.run("openssl rand -hex 32").strip()
    machine.environment["OLD"] = old
    machine.run('echo "ops $OLD operator" >tokens')
    for node in (0, 1):
        operator.configure(node, section.files[0])
        operator.end(node)
        operator.start(node)
    ask = "KVSTRATA_TLS_CA=ca.pem KVSTRATA_TOKEN="
    machine.until_says(f'{ask}"$OLD" kvstrata stats || true', "kvstrata-0: kvstrata")
    operator.does("Tokens and certificates", slice(1))
    machine.until_says(f'{ask}"$OLD" kvstrata stats 2>&1 || true', "token")

    before = machine.run(section.commands[1].script.splitlines()[-1])
    certificate(operator, "new", days=5)
    operator.does("Tokens and certificates", slice(1, None))
    shown = section.commands[1].script.splitlines()[-1]
    machine.until(lambda: machine.run(shown) != before, "the new certificate")
    machine.run("echo broken >tokens")
    machine.until_says("cat node-0.log", "cannot be used")


def test_what_the_page_quotes_is_what_the_program_says() -> None:
    """Log lines and metrics that it names, wherever they were not provoked above."""
    page = PAGE.read_text(encoding="utf-8")
    metrics = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(kvstrata_\w+)", page):
        assert f"`{name}`" in metrics or f"`{name.removesuffix('_total')}`" in metrics, name
    sources = [*(REPOSITORY / "src").rglob("*.rs"), *(REPOSITORY / "tiers/src").rglob("*.rs")]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    quoted = re.findall(r"`((?:nvme|object) [a-z][^`_]{12,})`", page)
    assert len(quoted) >= 4, quoted
    for line in quoted:
        assert line in text, line


def test_every_command_of_the_page_was_run(operator: Operator) -> None:
    """A new section needs a test of its own."""
    tests = Path(__file__).read_text(encoding="utf-8")
    for heading, section in operator.page.items():
        assert not section.commands or f'"{heading}"' in tests, heading
