"""Images at native resolution, as Qwen-VL has them.

An image keeps its aspect ratio, in whole tokens, within bounds on its pixels. Runs without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from saccade.core.errors import CheckpointError, ImageError
from saccade.core.family import LargestImage, PixelBounds
from saccade.core.recipe import PreprocessParams, whole
from saccade.core.types import Grid, Size
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import fingerprint
from saccade.families.kit.config_readers import (
    Colour,
    read_colours,
)

MAX_ASPECT_RATIO = 200
MAX_SIDE = 16384
"""Patches on a side of an image, at most: with aspect ratios of at most 200, more than
--max-image-pixels lets in by default.
"""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Implements `ImageLayout`.

    merge x merge patches, `patch` x `patch` pixels each, become a token. `min_pixels` and
    `max_pixels` bound height * width after resizing.

    An image's grid is the frames on its canvas (one for a still image, two for a video's pair), and
    a frame's patches along (height, width).
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: Colour
    std: Colour
    resample: str = "bicubic"
    temporal_patch: int = 2

    @property
    def factor(self) -> int:
        """Heights and widths after resizing are multiples of this many pixels."""
        return self.patch * self.merge

    @property
    def pixel_bounds(self) -> PixelBounds:
        return PixelBounds(self.factor**2, self.min_pixels, self.max_pixels, as_edges=True)

    @property
    def largest_image(self) -> LargestImage:
        return LargestImage(self.max_pixels, self.max_pixels // self.factor**2)

    @property
    def sample(self) -> PreprocessParams:
        side = 4 * self.factor
        return whole((side, side), self.grid(side, side))

    @property
    def patch_unit(self) -> int:
        return self.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        within = replace(self, min_pixels=bounds.min_pixels, max_pixels=bounds.max_pixels)
        size = smart_resize(height, width, within)
        if max(size) > MAX_SIDE * self.patch:
            raise ImageError(
                f"the image is {width} x {height} px; the limit is "
                f"{MAX_SIDE * self.patch} px on a side"
            )
        return whole(size, self.grid(*size), self.resample)

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        """Return the fingerprint.

        The bounds enter it through the size that they lead to.
        """
        unit = (family, self.patch, self.merge, self.temporal_patch, self.mean, self.std)
        return fingerprint(unit, self.resample, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid for a canvas with one frame."""
        assert height % self.factor == 0 and width % self.factor == 0
        return 1, height // self.patch, width // self.patch

    def num_tokens(self, grid: Grid) -> int:
        return self.num_patches(grid) // self.merge**2

    def num_patches(self, grid: Grid) -> int:
        return math.prod(grid[1:])


Rules = TypeVar("Rules", bound=ImageRules)
CLASS_BOUNDS = (56 * 56, 28 * 28 * 1280)
"""Pixels of an image, at least and at most, where the image processor's file has no size."""
NO_IMAGES = ImageRules(1, 1, 0, 0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""Those of a checkpoint without a vision tower."""


def smart_resize(height: int, width: int, rules: ImageRules) -> Size:
    """Return (height, width) after resizing.

    Both are multiples of the factor, with a pixel count within the rules. The aspect ratio is about
    kept.

    Python's `round` (half to even) is part of the rule: transformers uses it too. Raises ImageError
    beyond an aspect ratio of 200.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        ratio = max(height, width) / max(1, min(height, width))
        raise ImageError(
            f"the image is {width} x {height} px, an aspect ratio of {ratio:.10g}; the limit "
            f"is {MAX_ASPECT_RATIO}: crop it or cut it up"
        )
    factor = rules.factor
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor * factor > rules.max_pixels:
        beta = math.sqrt((height * width) / rules.max_pixels)
        rows = max(1, math.floor(height / beta / factor))
        columns = max(1, math.floor(width / beta / factor))
    elif rows * columns * factor * factor < rules.min_pixels:
        beta = math.sqrt(rules.min_pixels / (height * width))
        rows = math.ceil(height * beta / factor)
        columns = math.ceil(width * beta / factor)
    return rows * factor, columns * factor


@dataclass(frozen=True, slots=True)
class RaisedRules(ImageRules):
    """A layout that first enlarges an image with an edge shorter than a token's."""

    def raised(self, height: int, width: int) -> Size:
        """Return (height, width) of such an image, enlarged."""
        raise NotImplementedError

    def sized(self, size: Section) -> Self:
        """Return the rules with other bounds, as the image processor's `size` has them.

        Raises CheckpointError.
        """
        raise NotImplementedError

    def bounded(self, where: str, least: int, most: int) -> Self:
        """Return the rules with other bounds. Raises CheckpointError if none is between them."""
        if not self.factor**2 <= most or not 0 < least <= most:
            raise CheckpointError(
                f"{where}: images of {least} to {most} pixels cannot be made: a token has "
                f"{self.factor**2}"
            )
        return replace(self, min_pixels=least, max_pixels=most)

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        # It is refused by its own size.
        found = ImageRules.recipe(self, height, width, bounds)
        if min(height, width) < self.factor:
            found = ImageRules.recipe(self, *self.raised(height, width), bounds)
        return found


def read_rules(processor: Section, absent: Rules) -> Rules:
    """Return `absent` with the bounds and colours that the image processor's file names.

    Raises CheckpointError.
    """
    size = processor.section("size")
    least = size.integer("shortest_edge", "min_pixels", default=absent.min_pixels)
    most = size.integer("longest_edge", "max_pixels", default=absent.max_pixels)
    mean, std = read_colours(processor, absent.mean, absent.std)
    return replace(
        absent,
        min_pixels=processor.integer("min_pixels", default=least),
        max_pixels=processor.integer("max_pixels", default=most),
        mean=mean,
        std=std,
    )
