"""The operations that recipes name: functions that resize, and families' own.

Owns the table for the former. A family's own are `draw` and `warm_up` in the module that its
`Family` names. Only image workers import it, where a recipe names the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import PIL.Image

from saccade.core.recipe import OwnPixels
from saccade.kernels.backend import find_backend

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Resampler:
    """A way to resize. `resize` writes an image's pixels [height, width, 3], resized, to its first
    argument.
    """

    resize: Callable[[Pixels, Pixels], None]
    # rows are resized first, each by itself, so that an image can be read in strips
    by_strips: bool = True
    source_bytes: int = 0  # memory for each pixel of the image, added to what any resizing takes


def _antialiased(mode: str) -> Resampler:
    def resize(target: Pixels, pixels: Pixels) -> None:
        compiled = _find_compiled()
        if compiled is None or not compiled(target, pixels, mode):
            _resize_by_torch(target, pixels, mode)

    return Resampler(resize)


@cache
def _find_compiled() -> Callable[[Pixels, Pixels, str], bool] | None:
    """Return the CPU backend's resizing. Only image workers resize."""
    backend = find_backend("cpu")
    if backend is None or backend.resize is None:
        return None
    found: Callable[[Pixels, Pixels, str], bool] = resolve_name(backend.resize)
    return found


def _resize_by_torch(target: Pixels, pixels: Pixels, mode: str) -> None:
    import torch  # here, not above: most workers never need it

    image = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))[None].permute(
        0, 3, 1, 2
    )  # [1, 3, H, W] over channels-last memory
    resized = torch.nn.functional.interpolate(
        image, size=target.shape[:2], mode=mode, antialias=True, align_corners=False
    )
    target[:] = resized[0].permute(1, 2, 0).numpy()


def _by_pillow(mode: PIL.Image.Resampling) -> Resampler:
    def resize(target: Pixels, pixels: Pixels) -> None:
        height, width, _ = target.shape
        shown = PIL.Image.fromarray(np.ascontiguousarray(pixels))
        target[:] = np.asarray(shown.resize((width, height), mode))

    # Pillow begins with what leaves less. Of a pixel it keeps what it is handed, and its own form.
    return Resampler(resize, by_strips=False, source_bytes=7)


RESAMPLERS: Mapping[str, Resampler] = {
    "bicubic": _antialiased("bicubic"),
    "bilinear": _antialiased("bilinear"),
    "lanczos": _antialiased("lanczos"),
    "pillow_bicubic": _by_pillow(PIL.Image.Resampling.BICUBIC),
    "pillow_lanczos": _by_pillow(PIL.Image.Resampling.LANCZOS),
}
"""torch's with antialias, and Pillow's: their values differ by 1 here and there."""


class OwnModule(Protocol):
    """A family's module with its own operation."""

    def warm_up(self, argument: str, /) -> None:
        """Load all that `draw` needs. Workers are forked later and may open no file."""
        ...

    def draw(self, out: Pixels, argument: str, pixels: Pixels, /) -> None:
        """Write what is made of an upright image to `out`, both [height, width, 3].

        Raises ValueError for an image that it refuses.
        """
        ...


def own_module(own: OwnPixels) -> OwnModule:
    """Import the module of the family that a recipe names. Raises ImportError if it is missing."""
    from saccade.families.registry import find_family  # most families have no such module

    family = find_family(own.family)
    if family.pixels is None:
        raise ImportError(f"{own.family} has no operation of its own on images")
    return cast(OwnModule, import_module(family.pixels))
