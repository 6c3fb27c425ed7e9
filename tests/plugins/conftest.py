"""A server's fixtures, for tests of what clients see."""

from tests.helpers.served import (
    caller,
    claude,
    module_router,
    module_server,
    served,
    thinker,
    way,
)

__all__ = ["caller", "claude", "module_router", "module_server", "served", "thinker", "way"]
