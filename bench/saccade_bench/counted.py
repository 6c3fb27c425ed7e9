"""Progress of a long command: a bar on a terminal, and otherwise a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
LINE_SECONDS = 5.0
"""Minimum time between two lines if the output is not a terminal."""


class Tell(Protocol):
    """Callback with the number of items done, and optionally a text to show next to it."""

    def __call__(self, done: int, beside: str = "") -> None: ...


@contextmanager
def counted(what: str, total: int, *, quiet: bool = False) -> Iterator[Tell]:
    """Show the progress of `total` items on stderr."""
    console = Console(stderr=True)
    if quiet or console.is_terminal:
        with bars(console, quiet=quiet) as bar:
            task = bar.add_task(what, total=total)

            def move(done: int, beside: str = "") -> None:
                told = f"{what}, {beside}" if beside else what
                bar.update(task, completed=done, description=told)

            yield move
        return
    said = time.monotonic()
    print(f"{what}: {total} to do", file=console.file, flush=True)

    def tell(done: int, beside: str = "") -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= LINE_SECONDS:
            said = now
            told = f"{what}: {done} of {total} done{f', {beside}' if beside else ''}"
            print(told, file=console.file, flush=True)

    yield tell


def bars(console: Console, *, quiet: bool) -> Progress:
    """Return progress bars that a thread redraws four times a second, and that disappear at the
    end.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=quiet,
    )


def each(items: Sequence[T], what: str, *, quiet: bool = False) -> Iterator[T]:
    """Iterate over `items` and show the progress as `counted` does."""
    with counted(what, len(items), quiet=quiet) as tell:
        for done, item in enumerate(items):
            tell(done)
            yield item
