"""Where cached tokens came from."""

from enum import StrEnum


class CacheHitSource(StrEnum):
    """The sources."""

    HOST = "host"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"
