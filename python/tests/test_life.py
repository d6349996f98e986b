"""Beginnings and ends: of servers, of clients by the thousand, of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import BLOCK_BYTES, Server, Start, hashes, open_namespace, store, value

import kvstrata

CYCLES = 1000
GROWTH_KIB_MAX = 8 << 10
"""Resident memory that so many cycles may leave: what an allocator keeps for another time."""


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def status(name: str) -> int:
    """A number from this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {name}")


def test_a_thousand_clients_leave_nothing(shared_server: Server) -> None:
    """No descriptor, no thread, and no memory beyond the bound."""

    def cycle() -> None:
        room = [bytearray(BLOCK_BYTES)]
        with kvstrata.Client(shared_server.grpc) as client:
            namespace = open_namespace(client, "cycles")
            queue = kvstrata.CompletionQueue()
            namespace.submit_get_into(hashes(1), room, queue=queue).wait(10)
            assert room == [value(0)]

    with kvstrata.Client(shared_server.grpc) as client:
        store(open_namespace(client, "cycles"), 1)
    for _ in range(50):
        cycle()
    before = descriptors(), status("Threads"), status("VmRSS")
    for _ in range(CYCLES):
        cycle()
    after = descriptors(), status("Threads"), status("VmRSS")
    assert after[:2] == before[:2]
    assert after[2] - before[2] < GROWTH_KIB_MAX, f"grew by {after[2] - before[2]} KiB"


def test_clients_that_are_not_closed_leave_nothing_either(shared_server: Server) -> None:
    """Also with requests under way: what those held is given back."""
    before = descriptors(), status("Threads")
    for _ in range(20):
        namespace = open_namespace(kvstrata.Client(shared_server.grpc), "dropped")
        rooms = [bytearray(BLOCK_BYTES) for _ in range(40)]
        for number, room in enumerate(rooms):
            namespace.submit_get_into(hashes(1, number), [room])
        del namespace
        for room in rooms:
            room.append(0)
    deadline = time.monotonic() + 10
    while (descriptors(), status("Threads")) != before:
        assert time.monotonic() < deadline, f"{before} became {descriptors(), status('Threads')}"
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["auto", "grpc", "bulk"])
def test_a_server_that_is_killed_is_a_typed_error_and_then_served_again(
    server: Server, path: str
) -> None:
    """In the middle of gets, within the deadline; no byte is wrong meanwhile."""
    with kvstrata.Client(server.grpc, path=path) as client:  # type: ignore[arg-type]
        namespace = open_namespace(client, "killed")
        values = store(namespace, 32)
        killer = threading.Timer(0.3, server.kill)
        killer.start()
        delivered = 0
        with pytest.raises((kvstrata.UnavailableError, kvstrata.DeadlineError)) as raised:
            while True:
                targets = [bytearray(BLOCK_BYTES) for _ in range(32)]
                began = time.monotonic()
                got = namespace.get_into(hashes(32), targets, timeout=5)
                delivered += got.blocks
                assert targets == values
        assert time.monotonic() - began < 6
        assert delivered > 0
        partial = raised.value.partial
        assert partial is not None
        for target, expected, found in zip(targets, values, partial.found, strict=True):
            assert not found or target == expected
        killer.join()
        began = time.monotonic()
        with pytest.raises(kvstrata.Error):
            namespace.get_into(hashes(1), [bytearray(BLOCK_BYTES)], timeout=5)
        assert time.monotonic() - began < 6
        server.start()
        again = reopened(client)
        assert again.get(hashes(1), timeout=5) == [None]
        assert store(again, 2) == again.get(hashes(2), timeout=5)


def reopened(client: kvstrata.Client) -> kvstrata.Namespace:
    """The namespace on a server that has started again."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return open_namespace(client, "killed")
        except kvstrata.UnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_restarted_server_has_forgotten_the_namespace(server: Server) -> None:
    """And says what to do."""
    with kvstrata.Client(server.grpc) as client:
        namespace = open_namespace(client, "forgotten")
        server.kill()
        server.start()
        reopened(client)
        with pytest.raises(kvstrata.UnknownNamespaceError, match="open the namespace again"):
            namespace.exists(hashes(1))


def test_nobody_there_is_said_at_once() -> None:
    """And what to do about it."""
    began = time.monotonic()
    with pytest.raises(kvstrata.UnavailableError, match="kvstrata serve") as raised:
        kvstrata.Client("127.0.0.1:1", connect_timeout=2)
    assert isinstance(raised.value, ConnectionError) and raised.value.retryable
    assert time.monotonic() - began < 3


def run(code: str, server: Server, *, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    """Runs a program with these tests' helpers at hand."""
    begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    begin += "import os, signal, threading, time, kvstrata\n"
    begin += "from conftest import *\nfrom server import freeze\n"
    begin += f"client = kvstrata.Client({server.grpc!r})\n"
    begin += "namespace = open_namespace(client, 'run')\n"
    return subprocess.run(
        [sys.executable, "-c", begin + code],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def test_a_forked_child_is_told_to_make_its_own(shared_server: Server) -> None:
    """Whatever it touches, at once; its end is like any other, and the parent goes on."""
    code = """
session, queue = client.session(), kvstrata.CompletionQueue()
lease = None
store(namespace, 1)
request = namespace.submit_get_into(hashes(1), [bytearray(BLOCK_BYTES)], queue=queue)
request.wait()
child = os.fork()
if child == 0:
    calls = [client.stats, client.session, client.close, lambda: namespace.exists(hashes(1)),
             lambda: namespace.submit_put(hashes(1), [value(0)]), lambda: session.state,
             session.close, request.poll, request.wait, request.cancel, queue.pop, queue.fileno]
    for call in calls:
        try:
            call()
        except kvstrata.ForkedError as error:
            assert "new client" in str(error)
        else:
            os._exit(3)
    with kvstrata.Client(client_endpoint) as own:
        assert open_namespace(own, "run").exists(hashes(1)) == [True]
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child failed"
assert namespace.exists(hashes(1)) == [True]
print("both went on")
""".replace("client_endpoint", repr(shared_server.grpc))
    done = run(code, shared_server)
    assert (done.returncode, done.stdout) == (0, "both went on\n"), done.stderr


def test_the_end_of_the_interpreter_waits_for_nobody(start: Start) -> None:
    """With a client that is open, requests under way, buffers held, and a thread in a call."""
    server = start()
    code = f"""
freeze({server.process.pid})
queue = kvstrata.CompletionQueue()
requests = [namespace.submit_get_into(hashes(1), [bytearray(BLOCK_BYTES)], queue=queue)
            for _ in range(20)]
namespace.submit_put(hashes(1), [value(0)])
threading.Thread(target=lambda: namespace.exists(hashes(1)), daemon=True).start()
time.sleep(0.2)
print("the end", flush=True)
"""
    began = time.monotonic()
    done = run(code, server)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    assert time.monotonic() - began < 8


def test_ctrl_c_ends_a_call(start: Start) -> None:
    """Soon, and as Python does it everywhere."""
    server = start()
    # What is started in the background of a shell inherits that it ignores the signal.
    code = f"""
signal.signal(signal.SIGINT, signal.default_int_handler)
freeze({server.process.pid})
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
for wait in (lambda: namespace.exists(hashes(1)),
             namespace.submit_get_into(hashes(1), [bytearray(BLOCK_BYTES)]).wait):
    began = time.monotonic()
    try:
        wait()
    except KeyboardInterrupt:
        print(time.monotonic() - began < 3, flush=True)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    time.sleep(2)
except KeyboardInterrupt:
    pass
os._exit(0)
"""
    done = run(code, server)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr
