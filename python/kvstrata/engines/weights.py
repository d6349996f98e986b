"""What tells weights of one name from others."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .. import InvalidError

__all__ = ["weights_of"]

_COMMIT_LENGTH = 40
_SAMPLE_BYTES, _SAMPLES = 64 << 10, 32


def weights_of(given: object, model: str | None, revision: str | None, engine: str) -> str:
    """What a person has `given`, the commit that is loaded, or a digest of a directory's files.

    Raises `InvalidError` where there is none of them, in the words of an adapter of `engine`.
    """
    if given is not None:
        if not isinstance(given, str) or not given:
            raise InvalidError(f"weights: {given!r} given, a text allowed")
        return given
    directory = Path(model) if model else None
    if directory is not None and directory.is_dir():
        return _sampled(directory)
    if revision is not None and len(revision) == _COMMIT_LENGTH:
        return revision
    raise InvalidError(
        f"weights: {engine} does not say which revision of {model!r} it loads (it says "
        f"{revision!r}); set 'weights' to a text that is another one whenever the weights are"
    )


def _sampled(directory: Path) -> str:
    """Two training runs differ in every tensor, so that samples tell their files apart."""
    summed = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".bin", ".pt", ".gguf"):
            continue
        length = path.stat().st_size
        summed.update(f"{len(path.name)}:{path.name}:{length};".encode())
        step = max(length // _SAMPLES, _SAMPLE_BYTES)
        with path.open("rb") as file:
            for start in range(0, length, step):
                file.seek(start)
                summed.update(file.read(_SAMPLE_BYTES))
    return summed.hexdigest()[:32]
