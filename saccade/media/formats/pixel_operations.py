"""The operations on pixels that preprocessing parameters refer to by name.

These are the functions in `RESAMPLERS`, which resize, and the operations of model families. A
family's operation is a module with `warm_up` and `draw`, which its `Family` names. Only image
workers import that module, and only if the preprocessing parameters refer to it.
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
    """A function that resizes, and whether it can work in strips."""

    # `resize(target, pixels)` resizes `pixels` to the size of `target`, both [height, width, 3].
    resize: Callable[[Pixels, Pixels], None]
    # Whether each row is resized independently first, so that an image can be resized in strips.
    by_strips: bool = True


def _antialiased(mode: str) -> Resampler:
    def resize(target: Pixels, pixels: Pixels) -> None:
        compiled = _find_compiled()
        if compiled is None or not compiled(target, pixels, mode):
            _resize_by_torch(target, pixels, mode)

    return Resampler(resize)


@cache
def _find_compiled() -> Callable[[Pixels, Pixels, str], bool] | None:
    backend = find_backend("cpu")
    if backend is None or backend.resize is None:
        return None
    found: Callable[[Pixels, Pixels, str], bool] = resolve_name(backend.resize)
    return found


def _resize_by_torch(target: Pixels, pixels: Pixels, mode: str) -> None:
    import torch  # imported here because most workers never need it

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

    # Pillow resizes the axis first that leaves fewer pixels, so an image cannot be read in strips.
    return Resampler(resize, by_strips=False)


RESAMPLERS: Mapping[str, Resampler] = {
    "bicubic": _antialiased("bicubic"),
    "bilinear": _antialiased("bilinear"),
    "lanczos": _antialiased("lanczos"),
    "pillow_bicubic": _by_pillow(PIL.Image.Resampling.BICUBIC),
    "pillow_lanczos": _by_pillow(PIL.Image.Resampling.LANCZOS),
}
"""Resizing as in torch with antialiasing, and as in Pillow. Some of their values differ by 1."""


class OwnModule(Protocol):
    """The interface of a model family's module with a preprocessing operation."""

    def warm_up(self, argument: str, /) -> None:
        """Load everything that `draw` needs.

        Call this before workers are forked, because they cannot open files.
        """
        ...

    def draw(self, out: Pixels, argument: str, pixels: Pixels, /) -> None:
        """Process the upright image `pixels`, and write the result to `out`. Both are [height,
        width, 3].

        Raises ValueError if the operation rejects the image.
        """
        ...


def own_module(own: OwnPixels) -> OwnModule:
    """Import and return the module of a family's operation. Raises ImportError if it is missing."""
    from saccade.families.registry import find_family  # imported here: most families need none

    family = find_family(own.family)
    if family.pixels is None:
        raise ImportError(f"{own.family} has no operation of its own on images")
    return cast(OwnModule, import_module(family.pixels))
