"""The language model's attention backends by name: the rows of `Ops.attention`, and PyTorch's.

To add one: a class that answers `reference.paged.AttentionBackend`, and a row in the table of a
backend's operations. `auto` takes the first row that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from saccade.core.family import BEHAVIOURS, AttentionShape
from saccade.kernels.reference.paged import AttentionBackend, PagedShape, ReferenceAttention
from saccade.kernels.reference.sdpa import SdpaAttention


@dataclass(frozen=True, slots=True)
class LanguageAttention:
    """An attention backend over pages, with the operations whose table lists it."""

    make: Callable[[PagedShape], AttentionBackend]
    # a step may be a graph, because everything that changes between steps is read on the device, in
    # `plan` as well
    captured: bool
    # True if it works on a device, for queries in a dtype
    runs: Callable[[torch.device, torch.dtype], bool] = lambda *_: True
    # rows with one token each take the same calls in every step, as far as a layer's window reaches
    steady: Callable[[PagedShape], bool] = lambda _: False
    package: str = ""  # the library's name, if it comes from another distribution
    find: Callable[[], object] | None = None  # returns whether it is installed
    install: str = ""  # the way to get it
    kept: bool = True  # the cache may have another dtype than queries
    # what layers may ask beyond causal attention, from `core.family.BEHAVIOURS`
    knows: frozenset[str] = frozenset()

    def lacks(self, shapes: Collection[AttentionShape]) -> str:
        """Return why layers with these shapes are beyond this attention; "" if it knows them."""
        asked = {each for shape in shapes for each in shape.behaviours - self.knows}
        why = next((why for each, why in BEHAVIOURS.items() if each in asked), "")
        return why and f"{why}, which this attention does not know"

    @property
    def installed(self) -> bool:
        """Return True if the library is found. Skips the import, which may take seconds."""
        return self.find is None or self.find() is not None


EVERYTHING = frozenset(BEHAVIOURS)
REFERENCE: Mapping[str, LanguageAttention] = {
    "sdpa": LanguageAttention(SdpaAttention, captured=False, knows=EVERYTHING),
    "reference": LanguageAttention(ReferenceAttention, captured=True, knows=EVERYTHING),
}


def possible(
    table: Mapping[str, LanguageAttention],
    place: torch.device,
    dtype: torch.dtype,
    *,
    graphs: bool = False,
    shapes: Collection[AttentionShape] = (),
) -> tuple[str, ...]:
    """Return which of a table run on the device, in `auto`'s order of preference.

    graphs: only those that run in graphs. shapes: only those that compute layers with all these
    shapes.
    """
    return tuple(
        name
        for name, each in table.items()
        if each.installed
        and each.runs(place, dtype)
        and (each.captured or not graphs)
        and not each.lacks(shapes)
    )
