"""The layout of a Gemma 3 image: one square with a fixed number of tokens, for any aspect ratio.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from saccade.core.errors import CheckpointError
from saccade.core.family import LargestImage, PixelBounds
from saccade.core.recipe import PreprocessParams, Resample, whole
from saccade.core.types import Grid
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import fingerprint
from saccade.families.kit.config_readers import HALF, read_colours, read_resample
from saccade.nn.shapes import Colours, SiglipConfig

ONE: Grid = (0, 0)
"""The grid of every image: a single tile, in the convention of `plugins/models/kit/siglip.py`."""


@dataclass(frozen=True, slots=True)
class SquareRules:
    """Implements `ImageLayout`.

    An image is `side` x `side` pixels. The vision encoder maps its `patch_unit` patches to `tokens`
    tokens.
    """

    side: int
    tokens: int
    patch_unit: int
    colours: Colours
    resample: Resample

    @property
    def pixel_bounds(self) -> PixelBounds:
        return PixelBounds(self.side**2, self.side**2, self.side**2)

    @property
    def largest_image(self) -> LargestImage:
        return LargestImage(self.side**2, self.tokens)

    @property
    def sample(self) -> PreprocessParams:
        return replace(whole((self.side, self.side), ONE), resample=self.resample)

    def recipe(self, _height: int, _width: int, _bounds: PixelBounds) -> PreprocessParams:
        return self.sample

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, self.colours, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of a canvas of this size in pixels."""
        assert height == width == self.side
        return ONE

    def num_tokens(self, _grid: Grid) -> int:
        return self.tokens

    def num_patches(self, _grid: Grid) -> int:
        return self.patch_unit


NO_IMAGES = SquareRules(0, 0, 0, (HALF, HALF), "bilinear")


def read_images(processor: Section, vision: SiglipConfig) -> SquareRules:
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    if processor.flag("do_pan_and_scan", default=False):
        raise CheckpointError(
            f"{processor.where}: do_pan_and_scan true is not supported: an image would become "
            "several images in the prompt; set it to false, as in Google's checkpoints"
        )
    size = processor.section("size")
    found = size.integer("height", default=224), size.integer("width", default=224)
    if found != (vision.side, vision.side):
        raise CheckpointError(
            f"{size.where}: {found[0]} x {found[1]}, but the vision encoder requires "
            f"{vision.side} x {vision.side}"
        )
    length = processor.integer("image_seq_length", default=vision.tokens)
    if length != vision.tokens:
        raise CheckpointError(
            f"{processor.where}: image_seq_length is {length}, but the vision encoder returns "
            f"{vision.tokens} tokens per image"
        )
    colours, resample = read_colours(processor, HALF, HALF), read_resample(processor, 2)
    return SquareRules(vision.side, vision.tokens, vision.patches, colours, resample)
