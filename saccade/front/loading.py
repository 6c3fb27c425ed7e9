"""Shows the progress of start-up. In a terminal, it is one line that is updated. Otherwise a line
is printed for each stage and every few seconds.
"""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from saccade.ipc.messages import Loading

LINE_SECONDS = 2.0
"""Minimum interval between printed lines within a stage."""


class LoadingView:
    """A context manager that shows the progress of loading. In a terminal, the progress line is
    removed at the end.

    lines: if the output is not a terminal, print a line per stage and every `LINE_SECONDS`. If
    False, print nothing.
    """

    def __init__(self, console: Console, *, lines: bool = True) -> None:
        self._console = console
        self._lines = lines
        self._said = ""
        self._next = 0.0
        self._bar = Progress(
            *(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("loading", total=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the progress line from the terminal."""
        self._bar.stop()

    def show(self, loading: Loading) -> None:
        """Show the progress of start-up."""
        description = describe(loading)
        if self._console.is_terminal:
            self._bar.start()
            total = loading.total or None
            self._bar.update(
                self._task, description=description, total=total, completed=loading.done
            )
        elif self._lines:
            now = time.monotonic()
            if loading.stage != self._said or now >= self._next:
                self._said, self._next = loading.stage, now + LINE_SECONDS
                print(f"  {description}", file=self._console.file, flush=True)


def describe(loading: Loading) -> str:
    """Return a description of the stage of start-up, with its progress if known."""
    if not loading.total:
        return loading.stage
    unit, name = (1e9, "GB") if loading.total >= 1e9 else (1e6, "MB")
    return f"{loading.stage}: {loading.done / unit:.1f} of {loading.total / unit:.1f} {name}"
