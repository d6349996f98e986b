"""What can go wrong. The class says what to do; a miss is never an error.

Where Python has a class of that meaning, ours is one of it too, so that code that knows nothing of
kvstrata handles it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._native import GetResult

__all__ = [
    "CancelledError",
    "ClosedError",
    "CorruptError",
    "DeadlineError",
    "Error",
    "ExhaustedError",
    "ForkedError",
    "InternalError",
    "InvalidError",
    "LayoutMismatchError",
    "LeaseExpiredError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownNamespaceError",
    "UnsupportedError",
]


class Error(Exception):
    """Any failure of this package."""

    retryable: bool = False
    """Whether the same request may succeed later."""
    partial: GetResult | None = None
    """What a `get_into` had delivered before it failed: those blocks are whole and verified."""


class InvalidError(Error, ValueError):
    """The request can never work as written: correct it."""


class UnauthenticatedError(Error, PermissionError):
    """One side could not show who it is: give a token or certificate that is valid."""


class UnknownNamespaceError(Error, LookupError):
    """The server does not know the namespace, for example since a restart: open it again."""


class LayoutMismatchError(Error):
    """The bytes do not fit the namespace: open the right one."""


class LeaseExpiredError(Error):
    """The lease has ended: do the lookup again."""


class ExhaustedError(Error):
    """Over a limit: try again after `retry_after` seconds."""

    retryable = True
    retry_after: float = 0.1


class UnavailableError(Error, ConnectionError):
    """The server is away, starting or draining: back off and try again."""

    retryable = True


class DeadlineError(Error, TimeoutError):
    """The deadline passed and the outcome is unknown. Trying again is safe."""

    retryable = True


class CancelledError(Error):
    """The request was cancelled, by its caller or by the end of its client."""


class CorruptError(Error):
    """Stored bytes failed verification."""


class UnsupportedError(Error, NotImplementedError):
    """Not built in or not switched on."""


class InternalError(Error):
    """A defect of kvstrata."""


class ClosedError(Error):
    """The client, session or queue was closed."""


class ForkedError(Error):
    """The object was made before a fork and is used after it: make a client in the child."""
