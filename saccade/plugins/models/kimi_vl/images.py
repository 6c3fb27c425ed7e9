"""The layout of a Kimi-VL image: it keeps its aspect ratio, is scaled down if it has too many
patches, and is padded to whole tokens.

Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from saccade.core.errors import CheckpointError, ImageError
from saccade.core.family import LargestImage, PixelBounds
from saccade.core.recipe import BLACK, ImageView, PreprocessParams
from saccade.core.types import Grid, Size
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import fingerprint
from saccade.families.kit.config_readers import CLIP_MEAN, CLIP_STD, read_colours
from saccade.nn.shapes import Colours
from saccade.plugins.models.kimi_vl.config import MoonConfig, read_merge

MAX_SIDE = 511
"""Maximum patches along an edge of an image, which is the size of the published encoder's rotary
tables.
"""


@dataclass(frozen=True, slots=True)
class PaddedRules:
    """Implements `ImageLayout`.

    A token is merge x merge patches of `patch` x `patch` pixels. An image with more than `most`
    patches is scaled down. Then it is padded to whole tokens at the bottom and the right.

    An image's grid is its canvas's rows and columns of patches.
    """

    patch: int
    merge: int
    most: int
    colours: Colours

    @property
    def factor(self) -> int:
        """The edge, in pixels, of the square that becomes one token."""
        return self.patch * self.merge

    @property
    def pixel_bounds(self) -> PixelBounds:
        return PixelBounds(self.factor**2, self.factor**2, self.most * self.patch**2)

    @property
    def largest_image(self) -> LargestImage:
        """Upper bounds on the pixels and tokens of an image."""
        # Partial patches at the edges do not count when the image is scaled down, but are padded.
        patches = self.most + 2 * (MAX_SIDE + 1) + 1
        edges = MAX_SIDE + 1 + patches // MAX_SIDE
        tokens = patches // self.merge**2 + edges // self.merge + 2
        return LargestImage(tokens * self.factor**2, tokens)

    @property
    def sample(self) -> PreprocessParams:
        return self._recipe((4 * self.factor, 4 * self.factor))

    @property
    def patch_unit(self) -> int:
        return self.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        size = fitted((height, width), self.patch, min(self.most, _patches(bounds, self.patch)))
        recipe = self._recipe(size)
        if max(recipe.grid) > MAX_SIDE:
            raise ImageError(
                f"the image is {width} x {height} px: its longer edge has more than "
                f"{MAX_SIDE} patches of {self.patch} pixels; crop it"
            )
        return recipe

    def _recipe(self, size: Size) -> PreprocessParams:
        factor = self.factor
        height, width = (-(-edge // factor) * factor for edge in size)
        fill = None if (height, width) == size else BLACK
        views = (ImageView(size),)
        return PreprocessParams(
            (height, width), self.grid(height, width), views, fill, "pillow_bicubic"
        )

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, self.patch, self.merge, self.colours, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of a canvas of this size in pixels."""
        assert height % self.factor == 0 and width % self.factor == 0
        return height // self.patch, width // self.patch

    def num_tokens(self, grid: Grid) -> int:
        return self.num_patches(grid) // self.merge**2

    def num_patches(self, grid: Grid) -> int:
        return math.prod(grid)


def _patches(bounds: PixelBounds, patch: int) -> int:
    return max(1, bounds.max_pixels // patch**2)


def fitted(size: Size, patch: int, most: int) -> Size:
    """Return the size to which an image is scaled down if it has more than `most` whole patches, or
    else its own size.
    """
    height, width = size
    whole = (width // patch) * (height // patch)
    if whole <= most:
        return size
    scale = math.sqrt(most / whole)
    return max(1, int(height * scale)), max(1, int(width * scale))


def read_images(processor: Section, vision: MoonConfig) -> PaddedRules:
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    known = (
        ("patch_size", processor.integer("patch_size", default=vision.patch), vision.patch),
        ("merge_kernel_size", read_merge(processor), vision.merge),
    )
    for name, value, expected in known:
        if value != expected:
            raise CheckpointError(
                f"{processor.where}: {name} is {value}, but the vision encoder requires {expected}"
            )
    if not processor.flag("pad_input"):
        raise CheckpointError(f"{processor.where}: pad_input must be true")
    most = processor.count("in_token_limit", default=4096)
    if most > MAX_SIDE**2:
        raise CheckpointError(
            f"{processor.where}: in_token_limit must be at most {MAX_SIDE**2}, not {most}"
        )
    colours = read_colours(processor, CLIP_MEAN, CLIP_STD)
    return PaddedRules(vision.patch, vision.merge, most, colours)
