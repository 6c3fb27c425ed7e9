"""`saccade`, from its first moment. Ctrl-C while the commands are being loaded ends the process
with a sentence. The commands are in `commands.py`.
"""

from __future__ import annotations

import os
import signal
import sys

from saccade.ipc.memory import begin_imports, end_imports

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of what Ctrl-C ended, as shells have it."""


def leave(*_: object) -> None:
    """End at once, during any import. The kernel ends children with their parent."""
    os.write(2, b"\nstopped before it had started\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line.

    A command that starts a server keeps the handler until the server has its own. Any other command
    is interrupted as usual.
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
    if status == INTERRUPTED:  # the interpreter would take most of a second to put itself away
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
