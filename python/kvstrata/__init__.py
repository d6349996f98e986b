"""The client of kvstrata, a cluster cache tier for the KV-cache blocks of LLM engines.

`Client` connects, `Client.open_namespace` gives the verbs, `CompletionQueue` tells which
submitted requests have ended. docs/python.md has a first example and the rules of threads,
deadlines and errors.
"""

from ._native import (
    Client,
    CompletionQueue,
    GetResult,
    Lease,
    Lookup,
    Namespace,
    PutResult,
    Request,
    Run,
    Session,
    foreign_hash,
)
from .errors import (
    CancelledError,
    ClosedError,
    CorruptError,
    DeadlineError,
    Error,
    ExhaustedError,
    ForkedError,
    InternalError,
    InvalidError,
    LayoutMismatchError,
    LeaseExpiredError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNamespaceError,
    UnsupportedError,
)

__all__ = [
    "CancelledError",
    "Client",
    "ClosedError",
    "CompletionQueue",
    "CorruptError",
    "DeadlineError",
    "Error",
    "ExhaustedError",
    "ForkedError",
    "GetResult",
    "InternalError",
    "InvalidError",
    "LayoutMismatchError",
    "Lease",
    "LeaseExpiredError",
    "Lookup",
    "Namespace",
    "PutResult",
    "Request",
    "Run",
    "Session",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownNamespaceError",
    "UnsupportedError",
    "foreign_hash",
]
