"""What the native half offers. Times are in seconds, lengths in bytes.

Every call that waits takes a `timeout`; without one the deadlines of its client hold. It lets
go of the interpreter while it waits. A miss is never an error; what is raised is a
`kvstrata.Error`.
"""

from collections.abc import Iterable, Sequence
from os import PathLike
from types import GenericAlias, TracebackType
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, final

from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "Client",
    "CompletionQueue",
    "GetResult",
    "Lease",
    "Lookup",
    "Namespace",
    "PutResult",
    "Request",
    "Run",
    "Session",
    "foreign_hash",
]

_T = TypeVar("_T", bound=GetResult | PutResult | Lookup | tuple[int, int] | int)

_Hashes: TypeAlias = ReadableBuffer | Iterable[bytes]
"""Hashes of equal length in chain order: packed in one buffer, or one by one."""
_Room: TypeAlias = WriteableBuffer | _Array | _Tensor
_Value: TypeAlias = ReadableBuffer | _Array | _Tensor
_Path: TypeAlias = Literal["auto", "grpc", "bulk", "shm"]
_File: TypeAlias = str | PathLike[str]
_Tier: TypeAlias = Literal["dram", "nvme", "object"]
_Outcome: TypeAlias = Literal[
    "stored",
    "part_stored",
    "duplicate",
    "duplicate_differs",
    "pending",
    "refused",
    "corrupt",
    "not_durable",
]
_Reason: TypeAlias = Literal[
    "absent", "pending", "corrupt", "corrupt_here", "timeout", "busy", "too_long"
]

class _Array(Protocol):
    """An array of numpy: it is a buffer, but its stubs do not say so before Python 3.12."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class _Tensor(Protocol):
    """A tensor of torch, contiguous and in host memory."""

    def data_ptr(self) -> int: ...

def foreign_hash(key: bytes) -> bytes:
    """The hash of a key in an opaque namespace."""

@final
class Client:
    """A connection to one server, `host:port`. Any thread may use it; a forked child may not.

    Of several endpoints of a cluster, with commas between them, the first that answers is taken.
    With an `instance`, the first namespace is opened at the home of that engine: there its blocks
    are put and looked up. What a lookup has found on other nodes is read from them.

    `path` is the way that blocks take: memory shared with a server on this host, else the bulk
    port, else gRPC, whichever can be had (`auto`), or one of them only. `name` stands in the
    server's logs. Defaults of the deadlines: 10 s for a call that moves no blocks (`timeout`), 5 s
    to connect, 30 s for the next message of a get or put (`stall_timeout`), 600 s for one as a
    whole (`transfer_timeout`).

    `token` says whose blocks are meant. `https://` before the endpoint, or any of the `tls_`
    arguments, which name PEM files, has everything encrypted: the server must show a
    certificate of `tls_ca`, or of a CA that the system trusts, for its host or `tls_server_name`;
    it is shown `tls_cert`, if it asks for one.
    """

    def __new__(
        cls,
        endpoint: str,
        *,
        path: _Path = "auto",
        token: str | None = None,
        tls_ca: _File | None = None,
        tls_cert: _File | None = None,
        tls_key: _File | None = None,
        tls_server_name: str | None = None,
        name: str = "python",
        instance: str | None = None,
        node: str | None = None,
        zone: str | None = None,
        timeout: float | None = None,
        connect_timeout: float | None = None,
        stall_timeout: float | None = None,
        transfer_timeout: float | None = None,
    ) -> Self: ...
    @property
    def endpoint(self) -> str:
        """Of the server that it is at."""

    @property
    def draining(self) -> bool:
        """Whether that server has said that it will go away; what has begun is finished."""

    @property
    def idle(self) -> bool:
        """Whether nothing is left of what it gave out: namespaces, sessions, leases, requests."""

    def open_namespace(
        self,
        *,
        model: str,
        engine: str,
        dtype: str,
        block_tokens: int,
        parts: Sequence[tuple[int, int, int]],
        hash_algorithm: str,
        hash_bytes: int = 32,
        weights: str = "",
        layout: str = "",
        split: str = "none",
        hash_root: bytes | None = None,
        lora: bytes | None = None,
        cache_salt: bytes | None = None,
        keep_tokens: bool = False,
        hash_schemes: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Namespace:
        """Declares blocks of an engine. Each part is (group, rank, bytes), ascending.

        All of it is the namespace's identity: blocks are shared only where everything is equal.
        But for the last ones: with `keep_tokens` the server keeps token ids that it is told of
        blocks, which are prompts; by the names of `hash_schemes` routers may ask for blocks, too.
        """

    def open_opaque(
        self, name: str, *, bytes_max: int = 0, timeout: float | None = None
    ) -> Namespace:
        """Declares values of any length under keys of any kind, hashed by `foreign_hash`."""

    def session(self, name: str = "python", *, timeout: float | None = None) -> Session:
        """Opens a session of its own. Calls that are given none share one that the client opens."""

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """What the server holds and has done."""

    def close(self) -> None:
        """Ends the client: calls raise `ClosedError`, requests are cancelled, leases freed."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Namespace:
    """An open namespace. A restarted server has forgotten it: open it again.

    Buffers and values are one for each (block, part), blocks outermost: whatever has a
    contiguous buffer (bytes, bytearray, memoryview, mmap, numpy) or is a contiguous tensor in
    host memory. They are not copied, and are held until the call, or the request, has ended:
    until then leave them alone. `parts` names some of the declared parts by their indices,
    ascending; without it all are meant.
    """

    @property
    def id(self) -> bytes: ...
    @property
    def hash_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block; 0 if values may have any length."""

    @property
    def parts(self) -> list[tuple[int, int, int]]: ...
    @property
    def warnings(self) -> list[str]:
        """What a person should know, such as another client's hash root."""

    def lookup(
        self,
        hashes: _Hashes,
        *,
        lease: float | None = None,
        lease_bytes: int = 0,
        session: Session | None = None,
        sparse: bool = False,
        timeout: float | None = None,
    ) -> Lookup:
        """Finds the longest present prefix.

        With `lease`, what was found in dram is kept for so long (0: as the server likes), up to
        `lease_bytes` (0: as many as the server allows).
        """

    def submit_lookup(
        self,
        hashes: _Hashes,
        *,
        lease: float | None = None,
        lease_bytes: int = 0,
        session: Session | None = None,
        sparse: bool = False,
        timeout: float | None = None,
        queue: CompletionQueue | None = None,
        tag: object = None,
    ) -> Request[Lookup]:
        """Starts a `lookup` and returns at once. It waits for no request that moves blocks."""

    def exists(self, hashes: _Hashes, *, timeout: float | None = None) -> list[bool]:
        """Which of them can be read now."""

    def get(
        self,
        hashes: _Hashes,
        *,
        parts: Sequence[int] | None = None,
        lease: Lease | None = None,
        stop_at_miss: bool = False,
        timeout: float | None = None,
    ) -> list[bytes | None]:
        """The blocks, their parts one after the other; None for a miss."""

    def get_into(
        self,
        hashes: _Hashes,
        buffers: Iterable[_Room],
        *,
        parts: Sequence[int] | None = None,
        lease: Lease | None = None,
        stop_at_miss: bool = False,
        timeout: float | None = None,
    ) -> GetResult:
        """Has blocks written into `buffers`, each of exactly its part's length.

        In an opaque namespace a buffer may be longer than its value. What is in the buffers of
        a block that is not `found` is unspecified. If it fails, `partial` of what is raised
        says what came before.
        """

    def submit_get_into(
        self,
        hashes: _Hashes,
        buffers: Iterable[_Room],
        *,
        parts: Sequence[int] | None = None,
        lease: Lease | None = None,
        stop_at_miss: bool = False,
        timeout: float | None = None,
        queue: CompletionQueue | None = None,
        tag: object = None,
    ) -> Request[GetResult]:
        """Starts a `get_into` and returns at once. Its end is told to `queue`."""

    def put(
        self,
        hashes: _Hashes,
        values: Iterable[_Value],
        *,
        parts: Sequence[int] | None = None,
        parent: bytes | None = None,
        durable: bool = False,
        session: Session | None = None,
        timeout: float | None = None,
    ) -> PutResult:
        """Offers blocks in chain order, behind `parent`, and sends what the server wants of them.

        With `durable` it is acknowledged when it is on nvme.
        """

    def submit_put(
        self,
        hashes: _Hashes,
        values: Iterable[_Value],
        *,
        parts: Sequence[int] | None = None,
        parent: bytes | None = None,
        durable: bool = False,
        session: Session | None = None,
        timeout: float | None = None,
        queue: CompletionQueue | None = None,
        tag: object = None,
    ) -> Request[PutResult]:
        """Starts a `put` and returns at once. Its end is told to `queue`."""

    def describe(
        self,
        hashes: _Hashes,
        *,
        parent: bytes | None = None,
        position: int = 0,
        tokens: Sequence[int] | None = None,
        lora_name: str = "",
        timeout: float | None = None,
    ) -> int:
        """Attaches parent, position and tokens to blocks of one chain; returns how many took it."""

    def touch(self, hashes: _Hashes, *, timeout: float | None = None) -> int:
        """Marks blocks as used now; returns how many were present."""

    def prefetch(self, hashes: _Hashes, *, timeout: float | None = None) -> tuple[int, int]:
        """Asks for blocks to be moved towards dram; returns (there already, loads started)."""

    def submit_touch(
        self,
        hashes: _Hashes,
        *,
        timeout: float | None = None,
        queue: CompletionQueue | None = None,
        tag: object = None,
    ) -> Request[int]:
        """Starts a `touch` and returns at once."""

    def submit_prefetch(
        self,
        hashes: _Hashes,
        *,
        timeout: float | None = None,
        queue: CompletionQueue | None = None,
        tag: object = None,
    ) -> Request[tuple[int, int]]:
        """Starts a `prefetch` and returns at once."""

    def remove(self, hashes: _Hashes, *, timeout: float | None = None) -> int:
        """Removes blocks from every tier; returns how many were there."""

@final
class Session:
    """Owns leases and puts; its end, however it comes, frees them."""

    @property
    def state(self) -> Literal["open", "draining", "ended"]:
        """`draining`: the node will go away, do not begin anything on it."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Lease:
    """A promise that what a lookup found stays readable. Leaving its `with` block releases it."""

    @property
    def blocks(self) -> int:
        """The first so many positions of the lookup are covered."""

    @property
    def bytes(self) -> int: ...
    @property
    def expires_in(self) -> float: ...
    def renew(self, ttl: float = 0.0, *, timeout: float | None = None) -> None:
        """Moves the end to `ttl` from now (0: as the server likes)."""

    def release(self, *, timeout: float | None = None) -> None: ...
    def submit_release(self) -> None:
        """Releases it in the background; if that cannot be told, it ends by its deadline."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Request(Generic[_T]):
    """A request that runs by itself. It goes on if this is dropped, and its buffers are held."""

    def __class_getitem__(cls, key: Any) -> GenericAlias: ...
    @property
    def tag(self) -> Any:
        """What it was submitted with."""

    def poll(self) -> bool:
        """Whether it has ended."""

    def wait(self, timeout: float | None = None) -> _T:
        """Its result, or what it failed with. A `timeout` of the wait does not end the request."""

    def cancel(self) -> None:
        """Asks it to end now; it has ended when `poll` or the queue says so."""

@final
class CompletionQueue:
    """Requests that have ended, in that order.

    `select` may wait for it: it is readable while there are any.
    """

    def __new__(cls) -> Self: ...
    def fileno(self) -> int:
        """Only to be waited for; it is open as long as the queue is."""

    def pop(self) -> Request[Any] | None:
        """The next request that has ended, if there is one."""

    def drain(self) -> list[Request[Any]]:
        """All that have ended."""

    def __len__(self) -> int:
        """Requests that were not popped, ended or not."""

@final
class Lookup:
    """The answer to a lookup. The five counts sum to the number of hashes."""

    prefix_blocks: Final[int]
    runs: Final[list[Run]]
    sparse: Final[list[Run]]
    dram: Final[int]
    nvme: Final[int]
    object: Final[int]
    pending: Final[int]
    miss: Final[int]
    lease: Final[Lease | None]
    partial: Final[bool]

@final
class Run:
    """Positions `start` to before `end` are on one tier of one node.

    `est_load` is for all of them.
    """

    start: Final[int]
    end: Final[int]
    tier: Final[_Tier]
    holder: Final[int]
    local: Final[bool]
    est_load: Final[float]
    pending: Final[bool]

@final
class GetResult:
    """What a get delivered: `found` for each block, `lengths` for each buffer.

    `misses` are (first, one past the last, reason). `dram`, `nvme` and `object` are blocks, by
    where they came from; `remote` of them from other nodes than the client is at; `corrupt_here`
    are those that were damaged on the way. These counts and `bytes` are 0 if the get failed.
    """

    found: Final[list[bool]]
    lengths: Final[list[int]]
    misses: Final[list[tuple[int, int, _Reason]]]
    dram: Final[int]
    nvme: Final[int]
    object: Final[int]
    bytes: Final[int]
    corrupt_here: Final[int]
    remote: Final[int]
    @property
    def blocks(self) -> int: ...
    @property
    def prefix_blocks(self) -> int:
        """Blocks before the first that is missing."""

@final
class PutResult:
    """What became of a put: one outcome for each block."""

    @property
    def outcomes(self) -> list[_Outcome]: ...
    @property
    def sent_bytes(self) -> int:
        """Bytes that were sent, because the server wanted them."""

    @property
    def retry_after(self) -> float | None:
        """How long to wait before offering refused blocks again."""

    def count(self, outcome: _Outcome) -> int: ...
