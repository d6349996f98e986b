"""Requests that run by themselves, the completion queue, and threads."""

from __future__ import annotations

import select
import threading
import time

import pytest
from conftest import BLOCK_BYTES, Start, hashes, open_namespace, store, value

import kvstrata


def rooms(count: int) -> list[bytearray]:
    """Buffers for so many blocks."""
    return [bytearray(BLOCK_BYTES) for _ in range(count)]


def test_requests_end_and_are_told_by_their_tags(namespace: kvstrata.Namespace) -> None:
    """Through a descriptor that is readable exactly while there is one."""
    queue = kvstrata.CompletionQueue()
    assert select.select([queue], [], [], 0) == ([], [], [])
    values = [value(number) for number in range(8)]
    put = namespace.submit_put(hashes(8), values, queue=queue, tag="put")
    assert select.select([queue], [], [], 10)[0] == [queue]
    assert queue.drain() == [put]
    assert put.tag == "put"
    assert put.wait().count("stored") == 8
    assert select.select([queue], [], [], 0) == ([], [], [])
    targets = {number: rooms(1) for number in range(8)}
    for number in range(8):
        namespace.submit_get_into(hashes(1, number), targets[number], queue=queue, tag=number)
    assert len(queue) == 8
    seen: list[int] = []
    while len(seen) < 8:
        assert select.select([queue], [], [], 10)[0], f"only {seen} have ended"
        request = queue.pop()
        assert request is not None and request.poll()
        assert request.wait().found == [True]
        seen.append(request.tag)
        assert targets[request.tag] == [values[request.tag]]
    assert sorted(seen) == list(range(8))
    assert queue.pop() is None
    assert select.select([queue], [], [], 0) == ([], [], [])


def test_a_request_can_be_waited_for_and_asked_again(namespace: kvstrata.Namespace) -> None:
    """Its result does not go away."""
    store(namespace, 1)
    request = namespace.submit_get_into(hashes(2), rooms(2))
    assert request.wait(10).found == [True, False]
    assert request.poll()
    assert request.wait(0).found == [True, False]


def test_many_requests_at_a_time(namespace: kvstrata.Namespace) -> None:
    """More than move at once."""
    values = store(namespace, 100)
    targets = rooms(100)
    requests = [
        namespace.submit_get_into(hashes(1, number), targets[number : number + 1])
        for number in range(100)
    ]
    assert all(request.wait(20).found == [True] for request in requests)
    assert targets == values


def test_too_many_requests_are_refused_and_the_others_end(start: Start) -> None:
    """With a delay after which to try again."""
    server = start()
    with kvstrata.Client(server.grpc) as client:
        namespace = open_namespace(client, "many", (64,))
        server.pause()
        queue = kvstrata.CompletionQueue()
        for _ in range(4096):
            namespace.submit_get_into(hashes(1), [bytearray(64)], queue=queue)
        one_more = bytearray(64)
        with pytest.raises(kvstrata.ExhaustedError, match="4096 allowed") as raised:
            namespace.submit_get_into(hashes(1), [one_more], queue=queue)
        one_more.append(0)
        assert raised.value.retry_after > 0 and len(queue) == 4096
    assert len(queue.drain()) == 4096


def test_deadlines_hold_while_the_server_stands_still(start: Start) -> None:
    """In calls, requests and waits, and cancelling is at once."""
    server = start()
    with kvstrata.Client(server.grpc) as client:
        namespace = open_namespace(client, "still")
        store(namespace, 1)
        server.pause()
        queue = kvstrata.CompletionQueue()
        began = time.monotonic()
        with pytest.raises(kvstrata.DeadlineError, match=r"timeout of 0.2 s") as raised:
            namespace.get_into(hashes(1), rooms(1), timeout=0.2)
        assert isinstance(raised.value, TimeoutError) and raised.value.retryable
        assert raised.value.partial is not None and raised.value.partial.found == [False]
        with pytest.raises(kvstrata.DeadlineError):
            namespace.exists(hashes(1), timeout=0.2)
        late = namespace.submit_get_into(hashes(1), rooms(1), timeout=0.3, queue=queue)
        with pytest.raises(kvstrata.DeadlineError, match="goes on"):
            late.wait(0.05)
        assert not late.poll()
        assert select.select([queue], [], [], 5)[0]
        with pytest.raises(kvstrata.DeadlineError, match=r"timeout of 0.3 s"):
            late.wait()
        cancelled = namespace.submit_put(hashes(1, 5), [value(5)])
        cancelled.cancel()
        with pytest.raises(kvstrata.CancelledError):
            cancelled.wait(5)
        assert time.monotonic() - began < 4


def test_closing_ends_what_is_under_way(start: Start) -> None:
    """Requests, and calls of other threads."""
    server = start()
    client = kvstrata.Client(server.grpc)
    namespace = open_namespace(client, "closing")
    server.pause()
    queue = kvstrata.CompletionQueue()
    request = namespace.submit_get_into(hashes(1), rooms(1), queue=queue)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            namespace.exists(hashes(1))
        except kvstrata.Error as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    began = time.monotonic()
    client.close()
    thread.join(5)
    assert isinstance(raised[0], kvstrata.ClosedError)
    assert select.select([queue], [], [], 5)[0] and queue.pop() is request
    with pytest.raises(kvstrata.CancelledError, match="client was closed"):
        request.wait(0)
    assert time.monotonic() - began < 4


def test_other_threads_run_while_a_call_waits(start: Start) -> None:
    """The interpreter is let go of."""
    server = start()
    with kvstrata.Client(server.grpc) as client:
        namespace = open_namespace(client, "threads")
        server.pause()
        turns = 0
        stop = threading.Event()

        def count() -> None:
            nonlocal turns
            while not stop.is_set():
                turns += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        with pytest.raises(kvstrata.DeadlineError):
            namespace.get_into(hashes(1), rooms(1), timeout=0.5)
        during = turns
        stop.set()
        thread.join()
        assert during > 50


def test_one_namespace_serves_many_threads(namespace: kvstrata.Namespace) -> None:
    """Without wrong bytes."""
    values = store(namespace, 16)
    failed: list[str] = []

    def work(first: int) -> None:
        for turn in range(20):
            number = (first + turn) % 16
            target = rooms(1)
            found = namespace.get_into(hashes(1, number), target).found
            if found != [True] or target != [values[number]]:
                failed.append(f"block {number}: {found}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
