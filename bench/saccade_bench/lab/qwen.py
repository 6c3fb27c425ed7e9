"""Answers of specs beyond `FamilySpec`, for makers of pixels without recipes: all specs have the
grid of a canvas, Qwen-VL's more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.families.qwen_vl.spec import QwenVLSpec


class Sized(Protocol):
    """An array or a tensor."""

    @property
    def shape(self) -> Any: ...


@runtime_checkable
class Gridded(Protocol):
    """A spec that knows the grid of an image from its canvas alone."""

    def grid(self, height: int, width: int, /) -> Grid: ...


def qwen(spec: FamilySpec) -> QwenVLSpec:
    """`spec`, known to be a Qwen-VL model's."""
    assert isinstance(spec, QwenVLSpec)
    return spec


def grids(spec: FamilySpec, pixels: Iterable[Sized]) -> list[Grid]:
    """Of canvases [height, width, 3], arrays or tensors."""
    assert isinstance(spec, Gridded)
    return [spec.grid(each.shape[0], each.shape[1]) for each in pixels]
