"""The entry point of `saccade`. Ctrl-C while the commands are being imported stops the process with
a message instead of a traceback. The commands are in `commands.py`.
"""

from __future__ import annotations

import os
import signal
import sys

from saccade.ipc.memory import begin_imports, end_imports

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C, as in shells."""


def leave(*_: object) -> None:
    """Exit immediately, even during an import. The kernel kills child processes with their
    parent.
    """
    os.write(2, b"\nstopped before it had started\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line.

    The handler of Ctrl-C stays in place until a server installs its own. Other commands raise
    KeyboardInterrupt as usual.
    """
    signal.signal(signal.SIGINT, leave)
    try:
        begin_imports()
        from saccade.commands import run

        end_imports()
        status = run()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        status = INTERRUPTED
    except (ImportError, AttributeError):
        from saccade.core.extras import too_new

        if not (why := too_new()):
            raise
        print(f"error: {why}", file=sys.stderr)
        status = 1
    if status == INTERRUPTED:  # skip the interpreter's shutdown, which takes most of a second
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
