"""LMCache's multiprocess server on kvstrata: an L2 adapter, see docs/engines/lmcache.md.

LMCache imports this module by name and takes `KvstrataConnector` from it. It needs neither
LMCache nor torch.
"""

from .connector import KvstrataConnector

__all__ = ["KvstrataConnector"]
