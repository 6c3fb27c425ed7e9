"""Converts coordinates between a client's screen and a model's units.

A model divides an edge into `units`: thousandths, or the pixels of the image that it has seen.
Pixel `p` of `size` becomes the nearest unit to `p * units / size`. A unit becomes the nearest
pixel, in the middle of the pixels that map to this unit. If an edge has no more pixels than units,
a round trip does not change a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.plugins.computer.action import Point

THOUSANDTHS = 1000


@dataclass(frozen=True, slots=True)
class Axis:
    """Converts coordinates along one edge of a screen, which has `size` pixels, to the model's
    `units` and back. `last` is the largest unit.
    """

    size: int
    units: int
    last: int

    def to_model(self, pixel: int) -> int:
        """Return the unit nearest to a pixel."""
        return min(_nearest(pixel * self.units, self.size), self.last)

    def to_screen(self, unit: int) -> int:
        """Return the pixel nearest to a unit, clamped to the screen."""
        return max(0, min(_nearest(unit * self.size, self.units), self.size - 1))


def _nearest(dividend: int, divisor: int) -> int:
    return (2 * dividend + divisor) // (2 * divisor)


@dataclass(frozen=True, slots=True)
class Screen:
    """Converts points between a client's screen and a model's units."""

    x: Axis
    y: Axis

    @classmethod
    def in_thousandths(cls, size: Point) -> Screen:
        """Return a screen of `size` (width, height) with units from 0 to 1000."""
        x, y = (Axis(side, THOUSANDTHS, THOUSANDTHS) for side in size)
        return cls(x, y)

    @classmethod
    def in_pixels(cls, size: Point, seen: Point) -> Screen:
        """Return a screen whose units are the pixels of the model's image."""
        x, y = (Axis(side, units, units - 1) for side, units in zip(size, seen, strict=True))
        return cls(x, y)

    def holds(self, point: Point) -> bool:
        """Return True if a point is on the screen."""
        return 0 <= point[0] < self.x.size and 0 <= point[1] < self.y.size

    def to_model(self, point: Point) -> Point:
        return self.x.to_model(point[0]), self.y.to_model(point[1])

    def to_screen(self, point: Point) -> Point:
        return self.x.to_screen(point[0]), self.y.to_screen(point[1])

    @property
    def middle(self) -> Point:
        return self.x.size // 2, self.y.size // 2
