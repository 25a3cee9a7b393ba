"""OBCache: rows stay without which the outputs of attention would change most."""

from kvpolicy_plugins.obcache.history import OBCacheHistory
from kvpolicy_plugins.obcache.policy import OBCache

__all__ = ["OBCache", "OBCacheHistory"]
