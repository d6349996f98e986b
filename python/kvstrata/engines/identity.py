"""What may share bytes: everything that shapes them, as an adapter found it out.

An engine's own keys leave some of it out (weights, dtype, layout, parallel sizes, salts), so an
adapter builds this from the engine's settings and trusts no name of the engine's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from .. import Client, InvalidError, Namespace
from .settings import Settings

__all__ = ["Identity", "Opaque", "digest"]


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of `Client.open_namespace`. Each part is (group, rank, bytes), ascending."""

    model: str
    engine: str
    dtype: str
    block_tokens: int
    parts: tuple[tuple[int, int, int], ...]
    hash_algorithm: str
    hash_bytes: int = 32
    weights: str = ""
    layout: str = ""
    split: str = "none"
    hash_root: bytes | None = None
    lora: bytes | None = None
    cache_salt: bytes | None = None

    def open(self, client: Client, settings: Settings | None = None) -> Namespace:
        """Declares it to the server, with what `settings` wish. Raises a `kvstrata.Error`."""
        settings = settings or Settings()
        return client.open_namespace(
            model=self.model,
            engine=self.engine,
            dtype=self.dtype,
            block_tokens=self.block_tokens,
            parts=self.parts,
            hash_algorithm=self.hash_algorithm,
            hash_bytes=self.hash_bytes,
            weights=self.weights,
            layout=self.layout,
            split=self.split,
            hash_root=self.hash_root,
            lora=self.lora,
            cache_salt=self.cache_salt,
            keep_tokens=settings.keep_tokens,
            hash_schemes=settings.hash_schemes,
        )


@dataclass(frozen=True, slots=True)
class Opaque:
    """Values of any length up to `bytes_max` (0: as long as the server takes).

    `name` holds everything that shapes the bytes and is not in their keys.
    """

    name: str
    bytes_max: int = 0

    def open(self, client: Client, settings: Settings | None = None) -> Namespace:
        """Declares it to the server. Raises a `kvstrata.Error`."""
        settings = settings or Settings()
        if settings.keep_tokens:
            raise InvalidError("keep_tokens: given, but nobody tells the tokens of these keys")
        if settings.hash_schemes:
            given = ", ".join(settings.hash_schemes)
            raise InvalidError(f"hash_schemes: {given} given, but these keys have no other names")
        return client.open_opaque(self.name, bytes_max=self.bytes_max)


def digest(fields: Mapping[str, object]) -> str:
    """32 hexadecimal digits that differ wherever a field differs; the order does not count.

    For `layout` and `weights`, where an engine has more to say than one word. Values are told
    apart by `repr`, so they must be plain: strings, numbers, tuples of them.
    """
    text = "".join(f"{len(name)}:{name}={fields[name]!r};" for name in sorted(fields))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
