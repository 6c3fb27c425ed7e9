"""The layout of a Gemma 4 image: it keeps its aspect ratio and fills a budget of tokens.

Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from saccade.core.errors import CheckpointError, ImageError
from saccade.core.family import LargestImage, PixelBounds
from saccade.core.recipe import PreprocessParams, Resample, whole
from saccade.core.types import Grid
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import fingerprint
from saccade.families.kit.config_readers import read_resample, require_flags
from saccade.plugins.models.gemma4.config import EmbedderConfig, TowerConfig

BUDGETS = (70, 140, 280, 560, 1120)
"""The token budgets per image that the model was trained for."""


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """Implements `ImageLayout`.

    An image keeps its aspect ratio within `budget` tokens. A token is `unit` x `unit` pixels, or
    `merge` x `merge` patches. The grid is an image's rows and columns of tokens.
    """

    budget: int
    resample: Resample
    unit: int
    merge: int

    @property
    def pixel_bounds(self) -> PixelBounds:
        """The minimum and maximum pixels. If a request lowers the maximum, the image gets the next
        smaller budget.
        """
        token = self.unit**2
        least = token * self._budgets[0]
        return PixelBounds(least, least, token * self.budget)

    @property
    def _budgets(self) -> tuple[int, ...]:
        return (*(each for each in BUDGETS if each < self.budget), self.budget)

    @property
    def largest_image(self) -> LargestImage:
        return LargestImage(self.pixel_bounds.max_pixels, self.budget)

    @property
    def sample(self) -> PreprocessParams:
        return self._canvas(min(2, self.budget), 1)

    @property
    def patch_unit(self) -> int:
        return self.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        token = self.unit**2
        budget = max(each for each in self._budgets if each * token <= bounds.max_pixels)
        if budget * token < bounds.min_pixels:
            raise ImageError(
                f"min_pixels is {bounds.min_pixels}, but within max_pixels {bounds.max_pixels} "
                f"images of this model have at most {budget * token} pixels ({budget} tokens)"
            )
        return self._canvas(*fit(height, width, budget, self.unit))

    def _canvas(self, rows: int, columns: int) -> PreprocessParams:
        canvas = whole((rows * self.unit, columns * self.unit), (rows, columns))
        return replace(canvas, resample=self.resample)

    def settings(self, family: str, recipe: PreprocessParams) -> bytes:
        return fingerprint(family, recipe)

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of a canvas of this size in pixels."""
        assert height % self.unit == 0 and width % self.unit == 0
        return height // self.unit, width // self.unit

    def num_tokens(self, grid: Grid) -> int:
        return math.prod(grid)

    def num_patches(self, grid: Grid) -> int:
        return math.prod(grid) * self.merge**2


NO_IMAGES = BudgetRules(0, "bicubic", 0, 1)


def fit(height: int, width: int, budget: int, unit: int) -> tuple[int, int]:
    """Return the rows and columns of tokens of an image that fills a budget of tokens.

    The image is scaled to fill the budget. Then each edge is rounded down to a multiple of `unit`
    pixels, but to at least one unit. Results are bit-identical to transformers'.
    """
    factor = math.sqrt(budget * unit**2 / (height * width))
    rows, columns = int(factor * height / unit), int(factor * width / unit)
    if not rows:
        return 1, max(1, min(width // height, budget))
    if not columns:
        return max(1, min(height // width, budget)), 1
    return rows, columns


def read_images(processor: Section, vision: TowerConfig | EmbedderConfig) -> BudgetRules:
    """Read the rules for resizing images from the image processor's config. Raises
    CheckpointError.
    """
    require_flags(processor, "do_resize", "do_rescale")
    scale = processor.number("rescale_factor", default=1 / 255)
    if not math.isclose(scale, 1 / 255) or processor.flag("do_normalize"):
        raise CheckpointError(
            f"{processor.where}: only pixels from 0 to 1 are supported (rescale_factor 1/255, "
            "do_normalize false)"
        )
    patch = processor.integer("patch_size", default=16)
    pooled = processor.integer("pooling_kernel_size", default=3)
    if (patch, pooled) != (vision.patch, vision.pooled):
        raise CheckpointError(
            f"{processor.where}: {pooled} patches of {patch} pixels, but the vision encoder "
            f"requires {vision.pooled} of {vision.patch}"
        )
    budget = processor.integer("max_soft_tokens", default=280)
    if not 1 <= budget <= BUDGETS[-1]:
        raise CheckpointError(
            f"{processor.where}: max_soft_tokens must be from 1 to {BUDGETS[-1]}, not {budget}"
        )
    return BudgetRules(budget, read_resample(processor, 3), vision.unit, vision.merge)
