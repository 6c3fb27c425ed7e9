"""The command `saccade demo`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

app = App(name="demo")


@app.default
def demo(
    *,
    port: int = 8000,
    exit: bool = False,
    ends_with: Annotated[int | None, Parameter(show=False)] = None,
) -> int:
    """Serve the demo model and ask it about three images. Show the answers and what was cached.

    Parameters
    ----------
    port:
        Port to serve on. If it is in use, the demo takes another.
    exit:
        End after the questions instead of serving on. The status is 0 only if every answer was
        right.
    ends_with:
        The id of a process, such as `make`. The demo ends when that process ends.
    """
    from saccade.demo.run import run

    return run(port=port, exit_after=exit, starter=ends_with)
