"""Rejects images that a client wants in full resolution, if the model would downsize them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from saccade.core.errors import OversizedImages
from saccade.front.extras import find_extra
from saccade.front.prepared import Preparation
from saccade.front.step_order import StepContext
from saccade.media.opened import OpenedImage
from saccade.media.sources.source import ImageSource


@dataclass(frozen=True, slots=True)
class Undiminished:
    """The paths of images that must be rejected instead of downsized."""

    NAME: ClassVar[str] = "messages.undiminished"
    places: frozenset[str]


class RefuseOversized:
    """Checks requests with images that must not be downsized."""

    def __init__(self, context: StepContext) -> None:
        self._spec = context.spec

    async def check(self, preparation: Preparation) -> None:
        """Raise OversizedImages for the images that must not be downsized but are too large, if
        there are any.
        """
        request, places, words, side = preparation.request, list[str](), "", 0
        undiminished = find_extra(request.extras, Undiminished)
        assert undiminished is not None
        for source, image in zip(request.chat.sources, preparation.opened):
            if source.param not in undiminished.places or not isinstance(source, ImageSource):
                continue
            if not isinstance(image, OpenedImage):
                continue
            height, width = image.probe.upright
            most = source.budget.apply(self._spec.pixel_bounds).max_pixels
            if height * width <= most:
                continue
            scale = math.sqrt(most / (height * width))
            fitting = math.floor(width * scale), math.floor(height * scale)
            places.append(source.param)
            side = min(side or max(fitting), max(fitting))
            words = words or (
                f"{source.param}: the image is {width} x {height} px; the largest of its shape "
                f"that this model sees is {fitting[0]} x {fitting[1]}: scale it down, or send "
                'oversized_image "downsize"'
            )
        if places:
            raise OversizedImages(words, side, places)
