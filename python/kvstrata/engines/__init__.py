"""What the adapters of all engines share. They translate and never decide.

`Link` keeps a connection, `Space` is one namespace on it. Both raise nothing once they are
made: what goes wrong is a miss and a counter.
"""

from .counters import Counters
from .identity import Identity, Opaque
from .link import Done, Link, Space
from .promises import Promises
from .settings import Settings

__all__ = ["Counters", "Done", "Identity", "Link", "Opaque", "Promises", "Settings", "Space"]
