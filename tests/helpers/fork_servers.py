"""What image workers are forked from, one of each kind for all tests of a process: the one that
decodes takes seconds to load torch. Tests about its life have their own.
"""

from __future__ import annotations

import atexit
import threading
from functools import cache

from saccade.media.workers.fork_server import ForkServers


@cache
def image_fork_servers() -> ForkServers:
    """To be called first in the main thread: the processes end with the thread that began them."""
    assert threading.current_thread() is threading.main_thread()
    fork_servers = ForkServers()
    fork_servers.start()
    atexit.register(fork_servers.close)
    return fork_servers
