"""The connection of an adapter: nothing here raises into an engine or waits on its scheduler.

```text
Link    one client, connected by a thread of its own, again whenever the server was lost
Space   one namespace on it: lookup, load, store, ... return at once, ends come by Link.finished
```

While the server is away, or was seen to hang, every request is a miss at once: only the link's
thread tries, with growing pauses, and the first namespace it can open makes the link ready again.
Where the endpoint names several nodes of a cluster, that may be at another one. From a node that
will go away the link moves to another one while both answer: loads under leases of the old one, and
whatever has begun there, end there.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from .. import (
    CancelledError,
    Client,
    ClosedError,
    CompletionQueue,
    DeadlineError,
    Error,
    ExhaustedError,
    GetResult,
    InvalidError,
    LayoutMismatchError,
    Lease,
    Lookup,
    Namespace,
    PutResult,
    Request,
    UnavailableError,
    UnknownNamespaceError,
    UnsupportedError,
)
from .counters import Counters
from .identity import Identity, Opaque
from .settings import Settings

__all__ = ["Done", "Link", "Space"]

log = logging.getLogger("kvstrata")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds between attempts to reach a server; they double from the first to the longest."""
_LOOK_EVERY = 0.5
"""Seconds between looks whether the server will go away: it says so seconds before."""
_MOVE_EVERY = 2.0
"""Seconds between attempts to find another node then."""
_LOST = (UnavailableError, DeadlineError, UnknownNamespaceError, CancelledError, ClosedError)
"""After these nothing is asked until the namespace could be opened again."""
_REFUSED = (InvalidError, LayoutMismatchError, UnsupportedError)
"""A namespace that was answered so is not tried again."""

_T = TypeVar("_T")
Hashes: TypeAlias = Sequence[bytes] | bytearray
"""One by one, or packed, which takes a tenth of the time."""


@dataclass(frozen=True, slots=True)
class Done:
    """A request that has ended. `result` is None if it failed, except for a load that had begun:
    what it had delivered before is whole and counts.
    """

    verb: str
    tag: Any
    result: Any
    error: Error | None


@dataclass(frozen=True, slots=True)
class _Tag:
    space: Space
    namespace: Namespace
    verb: str
    tag: Any


class Space:
    """One namespace. Made by `Link.open`.

    Requests return whether they were begun; if not, they are counted, nothing will end, and to the
    engine it is a miss. Buffers of a request are held until it has ended. The calls that end in
    `_now` wait for their result, for engines that call from threads of their own; None is a miss.
    """

    def __init__(self, link: Link, identity: Identity | Opaque) -> None:
        self.identity = identity
        self.refused: Error | None = None
        """Why the server will not have it, if it will not."""
        self._link = link
        self._namespace: Namespace | None = None
        self._client: Client | None = None
        """Whose the latest namespace is."""

    @property
    def ready(self) -> bool:
        """Whether requests are begun at all."""
        return self._namespace is not None

    def lookup(
        self,
        hashes: Hashes,
        *,
        tag: object,
        lease: float | None = None,
        sparse: bool = False,
    ) -> bool:
        """Begins a lookup; with `lease`, what it finds in dram is kept for so many seconds.

        With `sparse`, it also says what there is behind the first gap.
        """
        timeout = self._link.settings.timeout
        return self._begin(
            "lookup",
            tag,
            lambda namespace, queue, tag: namespace.submit_lookup(
                hashes, lease=lease, sparse=sparse, timeout=timeout, queue=queue, tag=tag
            ),
        )

    def load(
        self,
        hashes: Hashes,
        buffers: Iterable[Any],
        *,
        tag: object,
        parts: Sequence[int] | None = None,
        lease: Lease | None = None,
        stop_at_miss: bool = True,
    ) -> bool:
        """Begins a load into the engine's memory; `result.prefix_blocks` says how many it has.

        `parts` are the indices of those parts of a block that are meant, as for a store.
        """
        timeout = self._link.settings.load_timeout
        return self._begin(
            "load",
            tag,
            lambda namespace, queue, tag: namespace.submit_get_into(
                hashes,
                buffers,
                parts=parts,
                lease=lease,
                stop_at_miss=stop_at_miss,
                timeout=timeout,
                queue=queue,
                tag=tag,
            ),
        )

    def store(
        self,
        hashes: Hashes,
        values: Iterable[Any],
        *,
        tag: object,
        parts: Sequence[int] | None = None,
        parent: bytes | None = None,
    ) -> bool:
        """Begins a store of blocks in chain order, from the engine's memory."""
        timeout = self._link.settings.store_timeout
        return self._begin(
            "store",
            tag,
            lambda namespace, queue, tag: namespace.submit_put(
                hashes,
                values,
                parts=parts,
                parent=parent,
                timeout=timeout,
                queue=queue,
                tag=tag,
            ),
        )

    def prefetch(self, hashes: Hashes, *, tag: object) -> bool:
        """Begins to have blocks moved towards dram."""
        timeout = self._link.settings.timeout
        return self._begin(
            "prefetch",
            tag,
            lambda namespace, queue, tag: namespace.submit_prefetch(
                hashes, timeout=timeout, queue=queue, tag=tag
            ),
        )

    def touch(self, hashes: Hashes, *, tag: object) -> bool:
        """Begins to mark blocks as used now."""
        timeout = self._link.settings.timeout
        return self._begin(
            "touch",
            tag,
            lambda namespace, queue, tag: namespace.submit_touch(
                hashes, timeout=timeout, queue=queue, tag=tag
            ),
        )

    def wait(self, timeout: float) -> bool:
        """Waits until it is ready, unless the server is away, for so many seconds at most."""
        link = self._link
        with link.changed:
            link.changed.wait_for(
                lambda: self.ready or link.is_away or self.refused is not None, timeout
            )
        return self.ready

    def lookup_now(
        self, hashes: Hashes, *, lease: float | None = None, sparse: bool = False
    ) -> Lookup | None:
        """Looks blocks up, within `Settings.timeout`."""
        timeout = self._link.settings.timeout
        return self._await(
            "lookup",
            lambda space: space.lookup(hashes, lease=lease, sparse=sparse, timeout=timeout),
        )

    def prefetch_now(self, hashes: Hashes) -> tuple[int, int] | None:
        """Asks for blocks to be moved towards dram, within `Settings.timeout`."""
        timeout = self._link.settings.timeout
        return self._await("prefetch", lambda space: space.prefetch(hashes, timeout=timeout))

    def remove_now(self, hashes: Hashes) -> int | None:
        """Removes blocks from every tier, within `Settings.timeout`; says how many there were."""
        timeout = self._link.settings.timeout
        return self._await("remove", lambda space: space.remove(hashes, timeout=timeout))

    def load_now(
        self,
        hashes: Hashes,
        buffers: Iterable[Any],
        *,
        parts: Sequence[int] | None = None,
        lease: Lease | None = None,
        stop_at_miss: bool = True,
    ) -> GetResult | None:
        """Loads into the engine's memory, within `Settings.load_timeout`; also part of it."""
        timeout = self._link.settings.load_timeout
        return self._await(
            "load",
            lambda space: space.get_into(
                hashes,
                buffers,
                parts=parts,
                lease=lease,
                stop_at_miss=stop_at_miss,
                timeout=timeout,
            ),
        )

    def store_now(
        self,
        hashes: Hashes,
        values: Iterable[Any],
        *,
        parts: Sequence[int] | None = None,
        parent: bytes | None = None,
    ) -> PutResult | None:
        """Stores from the engine's memory, within `Settings.store_timeout`."""
        timeout = self._link.settings.store_timeout
        return self._await(
            "store",
            lambda space: space.put(hashes, values, parts=parts, parent=parent, timeout=timeout),
        )

    def _begin(
        self,
        verb: str,
        tag: object,
        submit: Callable[[Namespace, CompletionQueue, _Tag], Request[Any]],
    ) -> bool:
        namespace = self._namespace
        if namespace is None:
            self._link.counters.add(f"{verb}_not_ready")
            return False
        try:
            submit(namespace, self._link.queue, _Tag(self, namespace, verb, tag))
        except Exception as error:
            self._failed(verb, namespace, error)
            return False
        return True

    def _await(self, verb: str, call: Callable[[Namespace], _T]) -> _T | None:
        namespace = self._namespace
        if namespace is None:
            self._link.counters.add(f"{verb}_not_ready")
            return None
        try:
            return call(namespace)
        except Exception as error:
            self._failed(verb, namespace, error)
            return getattr(error, "partial", None)

    def _failed(self, verb: str, namespace: Namespace, error: Exception) -> None:
        """Counts what went wrong, and gives up the namespace if it cannot be used any more."""
        counters = self._link.counters
        if isinstance(error, ExhaustedError):
            counters.add(f"{verb}_shed")
            return
        counters.add(f"{verb}_deadline" if isinstance(error, DeadlineError) else f"{verb}_failed")
        if not isinstance(error, _LOST):
            log.warning("kvstrata: a %s failed: %s", verb, error)
        elif self._namespace is namespace:
            self._namespace = None
            self._link.lost(error)


class Link:
    """See the module. Making one neither waits nor fails: the server may come later."""

    def __init__(self, settings: Settings, counters: Counters, name: str = "engine") -> None:
        self.settings = settings
        self.counters = counters
        self.queue = CompletionQueue()
        self._name = name
        self._spaces: list[Space] = []
        self.is_away = False
        """Whether the server was lost, or could not be reached at all, and is not back yet."""
        self.changed = threading.Condition()
        """Told whenever the server is lost or a namespace becomes ready."""
        self._left: list[tuple[float, Client]] = []
        """Clients at nodes that were left, and until when what they had begun may take."""
        self._move_at = 0.0
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="kvstrata-link", daemon=True)
        self._thread.start()

    def open(self, identity: Identity | Opaque) -> Space:
        """A namespace; it is ready as soon as the server has opened it."""
        space = Space(self, identity)
        self._spaces.append(space)
        self._wanted.set()
        return space

    def fileno(self) -> int:
        """Readable while `finished` has something to say."""
        return self.queue.fileno()

    def finished(self) -> list[Done]:
        """The requests that have ended since the last time."""
        try:
            return [_done(request) for request in self.queue.drain()]
        except Error:
            self.counters.add("failed")
            return []

    def release(self, lease: Lease | None) -> None:
        """Gives a lease up, in the background."""
        try:
            if lease is not None:
                lease.submit_release()
        except Error:
            # It ends by itself.
            self.counters.add("release_failed")

    def close(self, timeout: float = 5.0) -> None:
        """Ends what is under way and joins the thread, for at most so many seconds."""
        self._closed.set()
        self._wanted.set()
        self._thread.join(timeout)

    def lost(self, error: Exception) -> None:
        """A namespace can't be used any more: tries to open it again."""
        if not self.is_away and not self._closed.is_set():
            self.is_away = True
            self.counters.add("lost")
            log.warning("kvstrata: %s: %s; until it is back all are misses", self._where(), error)
        self._tell()
        self._wanted.set()

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _where(self) -> str:
        return f"the server at {self.settings.endpoint}"

    def _keep(self) -> None:
        """The thread: connects, opens what is wanted, and waits until something is wanted."""
        client: Client | None = None
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            wanted = self._wanted.wait(_LOOK_EVERY)
            self._wanted.clear()
            now = time.monotonic()
            self._left = [each for each in self._left if now < each[0] and not each[1].idle]
            if client is not None and client.draining:
                client = self._moved(client)
            if not wanted:
                continue
            try:
                client = client or self.settings.connect(self._name)
                self._open_all(client)
                pause = _FIRST_PAUSE
            except Exception as error:
                # Another one may be there.
                self._leave(client)
                client = None
                self.lost(error)
                # Not all at once: many engines may have lost the same server.
                self._closed.wait(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, _LONGEST_PAUSE)
        self._leave(client)
        for _, left in self._left:
            left.close()

    def _moved(self, client: Client) -> Client:
        """A client at a node that stays, if there is one: it has all namespaces; else the same."""
        if not self._spaces or time.monotonic() < self._move_at:
            return client
        self._move_at = time.monotonic() + _MOVE_EVERY
        try:
            other = self.settings.connect(self._name)
            # That tells of the node.
            self._spaces[0].identity.open(other, self.settings)
            if other.draining or other.endpoint == client.endpoint:
                other.close()
                return client
            self._open_all(other)
        except Exception as error:
            log.info("kvstrata: %s will go away, and no other is found: %s", self._where(), error)
            return client
        self._leave(client)
        self.counters.add("moved")
        log.info("kvstrata: moved from %s, which will go away", client.endpoint)
        return other

    def _leave(self, client: Client | None) -> None:
        """What has begun at a client ends by itself, and not on a thread of the engine's."""
        if client is not None:
            longest = max(self.settings.load_timeout, self.settings.store_timeout)
            self._left.append((time.monotonic() + longest, client))

    def _open_all(self, client: Client) -> None:
        for space in list(self._spaces):
            is_open = space.ready and space._client is client
            if is_open or space.refused is not None or self._closed.is_set():
                continue
            try:
                namespace = space.identity.open(client, self.settings)
            except _REFUSED as error:
                space.refused = error
                self.counters.add("refused")
                log.error("kvstrata: %s refuses the namespace for good: %s", self._where(), error)
                continue
            for warning in namespace.warnings:
                log.warning("kvstrata: %s", warning)
            space._namespace, space._client = namespace, client
            self.counters.add("opened")
        if self.is_away:
            self.is_away = False
            log.warning("kvstrata: %s is back", self._where())
        self._tell()


def _done(request: Request[Any]) -> Done:
    tag: _Tag = request.tag
    try:
        return Done(tag.verb, tag.tag, request.wait(0), None)
    except Error as error:
        tag.space._failed(tag.verb, tag.namespace, error)
        return Done(tag.verb, tag.tag, error.partial, error)
