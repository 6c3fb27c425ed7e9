"""Helpers for specs beyond `FamilySpec`'s interface, for code that makes pixels without recipes.

Most specs can derive an image's grid from the size of its canvas. For others, the code that draws a
canvas registers its grid here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.families.kit.base_spec import BaseSpec
from saccade.families.qwen_vl.spec import QwenVLSpec


class Sized(Protocol):
    """An array or a tensor."""

    @property
    def shape(self) -> Any: ...


@runtime_checkable
class Gridded(Protocol):
    """A layout that can derive the grid of an image from the size of its canvas."""

    def grid(self, height: int, width: int, /) -> Grid: ...


def qwen(spec: FamilySpec) -> QwenVLSpec:
    """Return `spec` as a Qwen-VL spec, which it must be."""
    assert isinstance(spec, QwenVLSpec)
    return spec


_DRAWN: dict[bytes, Grid] = {}


def tell_grid(canvas: np.ndarray, grid: Grid) -> np.ndarray:
    """Register the grid of `canvas` for `grids`, and return the canvas."""
    _DRAWN[_name(canvas)] = grid
    return canvas


def told_grid(canvas: Sized) -> Grid:
    return _DRAWN[_name(canvas)]


def _name(canvas: Sized) -> bytes:
    pixels = np.ascontiguousarray(canvas)
    return hashlib.blake2b(pixels.tobytes() + repr(pixels.shape).encode()).digest()


def grids(spec: FamilySpec, pixels: Iterable[Sized]) -> list[Grid]:
    """Return the grids of canvases [height, width, 3], which are arrays or tensors on the host."""
    layout = spec.images if isinstance(spec, BaseSpec) else spec
    if not isinstance(layout, Gridded):
        return [told_grid(each) for each in pixels]
    return [layout.grid(each.shape[0], each.shape[1]) for each in pixels]
