"""Where cached tokens came from."""

from enum import StrEnum


class CacheHitSource(StrEnum):
    """The sources."""

    EXTERNAL_UNSPECIFIED = "external_unspecified"
