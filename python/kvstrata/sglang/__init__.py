"""SGLang's HiCache on kvstrata: `--hicache-storage-backend dynamic`, see docs/engines/sglang.md.

SGLang imports this module by name and takes `KvstrataStorage` from it. It needs neither SGLang nor
torch to be imported.
"""

from .storage import KvstrataStorage

__all__ = ["KvstrataStorage"]
