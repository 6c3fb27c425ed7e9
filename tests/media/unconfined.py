"""Image workers on a machine whose system calls nobody has written down, for `test_sandbox.py`."""

from __future__ import annotations

import platform
import sys

from saccade.media.workers import supervisor

if __name__ == "__main__":
    platform.machine = lambda: "abacus"
    sys.exit(supervisor.main())
