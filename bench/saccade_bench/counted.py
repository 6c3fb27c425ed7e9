"""Progress of a long command: a bar in a terminal, elsewhere a line every few seconds. Knows
nothing of the counted things.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
LINE_SECONDS = 5.0
"""Where lines stay, they are so far apart at least."""


class Tell(Protocol):
    """Hears the number of things done, at any rate, perhaps with words about them."""

    def __call__(self, done: int, beside: str = "") -> None: ...


@contextmanager
def counted(what: str, total: int, *, quiet: bool = False) -> Iterator[Tell]:
    """Tells of `total` things, on stderr."""
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
    """Bars, redrawn four times a second by a thread of their own, and erased at the end."""
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
    """`items`, told one by one as `counted` tells."""
    with counted(what, len(items), quiet=quiet) as tell:
        for done, item in enumerate(items):
            tell(done)
            yield item
