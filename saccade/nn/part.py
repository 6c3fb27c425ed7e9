"""A checkpoint's tensor, or a slice of it, as layers ask for it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor: its canonical name, its whole shape, and the slice that is wanted.

    The slice is the whole unless given. limit: a number that may be infinite, and is no weight.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...] = ()
    limit: bool = field(default=False, repr=False)  # not in fingerprints

    @property
    def wanted(self) -> tuple[int, ...]:
        """Return the slice's shape."""
        cut = (len(range(*index.indices(size))) for index, size in zip(self.index, self.shape))
        return (*cut, *self.shape[len(self.index) :])
