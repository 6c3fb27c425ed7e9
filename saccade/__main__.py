"""The entry point of the `saccade` command. `commands.py` has the subcommands.

Ctrl-C while modules are still being imported prints one line instead of a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

from saccade.ipc.memory import begin_imports, end_imports

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C, which is the same as in shells."""


def leave(*_: object) -> None:
    """Exit at once, even during an import. The kernel then kills the child processes."""
    os.write(2, b"\nstopped before it had started\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line and exit with its status.

    A command that starts a server keeps the SIGINT handler `leave` until the server installs its
    own. All other commands use Python's default handler.
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
    if status == INTERRUPTED:  # the interpreter's shutdown would take most of a second
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
