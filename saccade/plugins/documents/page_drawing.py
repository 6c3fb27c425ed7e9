"""Decides how a page is drawn: at which size, and to which region it is cropped.

A region has a separate scale, so that it is drawn in more detail than the whole page.
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
"""Points per inch."""
PIXELS_PER_INCH = {"low": 108, "auto": 108, "high": 216, "original": 216}
"""Default pixels per inch by `detail`, within the model's bounds. An A4 page has 1.1 Mpx, or 4.5
Mpx with high.
"""
MAX_SCALE = 600 / POINTS
"""Maximum pixels per point in a region."""
MAX_PIXELS = 40_000_000
"""Maximum pixels of a page from which a region is cropped. A4 fits at 600 pixels per inch."""


@dataclass(frozen=True, slots=True)
class PageSize:
    """The size in points of page `number`, after rotation to upright."""

    number: int
    height: float
    width: float

    def draw(self, spec: FamilySpec, budget: Budget, region: ImageRegion | None) -> PageDrawing:
        """Return the size at which the page, or its `region`, is drawn for the model.

        If possible, this is the size at which the model encodes it, so that it is not resized.
        Raises ImageError for a region outside of the page, and for an unsupported aspect ratio.
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
        """Return how a region is drawn. It gets as many pixels as `max_pixels` allows, or by
        default as many as the whole page would have.
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
        return PIXELS_PER_INCH[budget.detail] / POINTS

    def _box(self, region: ImageRegion) -> tuple[float, float, float, float]:
        """Return a region's (top, left, bottom, right). Raises ImageError if it exceeds the page.

        An edge of the page with a fractional coordinate may be rounded up by the client.
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
            f"{region.param}: {given} is not inside the page: {self._told}: send [x0, y0, x1, y1] "
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
    """Return the size at which the model encodes an image of `size`. If the model pads or tiles it,
    return `size`.
    """
    try:
        recipe = spec.recipe(*size, bounds)
    except ImageError as error:
        raise ImageError(f"{told}: {error.message}", param, error.code) from error
    return recipe.canvas if recipe.plain else size
