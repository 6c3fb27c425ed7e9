"""How a document's page is drawn: in which size, and which part of it is kept.

Owns the scales. A region has a scale of its own, so that a part of a page is seen in more detail
than the page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from saccade.core.errors import ImageError
from saccade.core.family import FamilySpec, PixelBounds
from saccade.core.recipe import Box, PageDrawing
from saccade.core.types import Size
from saccade.media.content import Budget
from saccade.media.sources.source import ImageRegion

POINTS = 72
"""Points in an inch."""
PIXELS_PER_INCH = {"low": 108, "auto": 108, "high": 216, "original": 216}
"""How a page is drawn within the model's bounds: A4 has 1.1 Mpx, or 4.5."""
MAX_SCALE = 600 / POINTS
"""The most pixels along a side of a point, in a region."""
MAX_PIXELS = 40_000_000
"""The most pixels of a page from which a region is cut. A4 at 600 per inch fits."""


@dataclass(frozen=True, slots=True)
class PageSize:
    """The size of page `number` in points, upright."""

    number: int
    height: float
    width: float

    def draw(self, spec: FamilySpec, budget: Budget, region: ImageRegion | None) -> PageDrawing:
        """Return how the page, or its part in `region`, is drawn for the model.

        Drawings have the tower's size for one image where they can, and need no resizing then.
        Raises ImageError for a region outside the page, and a shape that the model does not take.
        """
        bounds = budget.apply(spec.pixel_bounds)
        if region is not None:
            return self._part(spec, budget, bounds, region)
        height, width = (side * self._usual(budget) for side in (self.height, self.width))
        shrunk = min(1.0, math.sqrt(bounds.max_pixels / (height * width)))
        size = max(1, round(height * shrunk)), max(1, round(width * shrunk))
        return PageDrawing(_fitted(spec, size, bounds, self._told, None))

    def _part(
        self, spec: FamilySpec, budget: Budget, bounds: PixelBounds, region: ImageRegion
    ) -> PageDrawing:
        """Return how a part is drawn. It gets the pixels that `max_pixels` allows, or without it
        those that the whole page would have.
        """
        top, left, bottom, right = self._box(region)
        height, width = bottom - top, right - left
        area = self.height * self.width
        pixels = float(bounds.max_pixels)
        if budget.max_pixels is None:
            pixels = min(pixels, self._usual(budget) ** 2 * area)
        most = min(MAX_SCALE, math.sqrt(MAX_PIXELS / area))
        scale = min(most, math.sqrt(pixels / (height * width)))
        part = max(1, round(height * scale)), max(1, round(width * scale))
        fitted = _fitted(spec, part, bounds, region.param, region.param)
        if fitted[0] <= most * height and fitted[1] <= most * width:
            part = fitted
        down, across = min(most, part[0] / height), min(most, part[1] / width)
        rows = max(part[0], round(self.height * down))
        columns = max(part[1], round(self.width * across))
        if (rows, columns) == part:
            return PageDrawing(part)
        y, x = min(round(top * down), rows - part[0]), min(round(left * across), columns - part[1])
        return PageDrawing((rows, columns), Box(y, x, y + part[0], x + part[1]))

    def _usual(self, budget: Budget) -> float:
        """Return the pixels of a point, before the model's bounds."""
        return PIXELS_PER_INCH[budget.detail] / POINTS

    def _box(self, region: ImageRegion) -> tuple[float, float, float, float]:
        """Return a region's (top, left, bottom, right) on the page. Raises ImageError beside it.

        A side that ends within a point may be named by its next whole number.
        """
        most_x, most_y = math.ceil(self.width), math.ceil(self.height)
        if 0 <= region.left < region.right <= most_x and 0 <= region.top < region.bottom <= most_y:
            right, bottom = (
                min(float(region.right), self.width),
                min(float(region.bottom), self.height),
            )
            return float(region.top), float(region.left), bottom, right
        given = [region.left, region.top, region.right, region.bottom]
        raise ImageError(
            f"{region.param}: {given} is no part of the page: {self._told}: send [x0, y0, x1, y1] "
            f"with 0 <= x0 < x1 <= {most_x} and 0 <= y0 < y1 <= {most_y}, in points",
            region.param,
            "invalid_region",
        )

    @property
    def _told(self) -> str:
        return f"page {self.number} of the PDF is {self.width:g} x {self.height:g} points"


def _fitted(
    spec: FamilySpec, size: Size, bounds: PixelBounds, told: str, param: str | None
) -> Size:
    """Return the size in which the model sees an image of `size`, if that is all it does."""
    try:
        recipe = spec.recipe(*size, bounds)
    except ImageError as error:
        raise ImageError(f"{told}: {error.message}", param, error.code) from error
    return recipe.canvas if recipe.plain else size
