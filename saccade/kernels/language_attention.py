"""The language model's attention backends by name: the backends of `Ops.attention`, and PyTorch's.

To add one, implement `reference.paged.AttentionBackend`, and add a row to the table of a backend's
`Ops`. `auto` selects the first row that is supported.
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
    """How to create an attention backend for a paged KV cache, and which features it supports."""

    make: Callable[[PagedShape], AttentionBackend]
    # steps can be captured as CUDA graphs, because everything that changes between steps is read on
    # the device, also in `plan`
    captured: bool
    # True if it supports a device, with queries of a dtype
    runs: Callable[[torch.device, torch.dtype], bool] = lambda *_: True
    # True if a decode-only batch makes the same calls in every step, up to the layer's window
    steady: Callable[[PagedShape], bool] = lambda _: False
    package: str = ""  # the library's name, if it is a separate package
    find: Callable[[], object] | None = None  # returns None if the library is not installed
    install: str = ""  # how to install it
    kept: bool = True  # the cache may have another dtype than the queries
    # supported features beyond causal attention, from `core.family.BEHAVIOURS`
    knows: frozenset[str] = frozenset()

    def lacks(self, shapes: Collection[AttentionShape]) -> str:
        """Return why layers with these shapes are not supported, or "" if they are."""
        asked = {each for shape in shapes for each in shape.behaviours - self.knows}
        why = next((why for each, why in BEHAVIOURS.items() if each in asked), "")
        return why and f"{why}, which this attention does not know"

    @property
    def installed(self) -> bool:
        """True if the backend's library is found. It is not imported, because that may take
        seconds.
        """
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
    """Return the names in `table` that support the device, in the order in which `auto` prefers
    them.

    graphs: True to only return those that can be captured as CUDA graphs.
    shapes: only return those that support layers with all of these shapes.
    """
    return tuple(
        name
        for name, each in table.items()
        if each.installed
        and each.runs(place, dtype)
        and (each.captured or not graphs)
        and not each.lacks(shapes)
    )
