"""Describes a slice of a checkpoint's tensor, which a layer requests."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of a checkpoint tensor, with the tensor's canonical name and full shape."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...] = ()  # the slice; empty: the entire tensor
    # an activation limit, which may be infinite, and not a weight; not in fingerprints
    limit: bool = field(default=False, repr=False)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The shape of the slice."""
        cut = (len(range(*index.indices(size))) for index, size in zip(self.index, self.shape))
        return (*cut, *self.shape[len(self.index) :])
