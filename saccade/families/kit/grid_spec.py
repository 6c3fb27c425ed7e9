"""Specs of models with multimodal rotary positions (time, row and column), as in Qwen-VL.

The formulas are from `get_rope_index` in transformers, and are tested against it. Runs without
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError
from saccade.core.types import Grid, Span
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import DecoderSpec, FamilyOptions, read_options
from saccade.families.kit.native_images import ImageRules, RaisedRules


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec(DecoderSpec):
    """Base class of specs in which image tokens have positions by time, row and column."""

    images: ImageRules

    position_axes = 3

    @property
    def image_token_id(self) -> int:
        return self.placeholder.marks[0]

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        h, w = grid[1] // self.images.merge, grid[2] // self.images.merge
        return np.indices((1, h, w)).reshape(3, -1)

    def positions(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        blocks: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return the mRoPE positions [3, T], and the next position.

        After an image, positions continue from the maximum over its axes, so an image advances them
        by the number of merged patches on its longer side. The frame pairs of a video, whose `time`
        is set, all start at the same position and differ on the time axis. After a video, positions
        continue from the maximum over all pairs, as in transformers 4.
        """
        positions = np.empty((3, len(tokens)), dtype=np.int64)
        done = position = begin = 0
        in_video = False
        for span in spans:
            block = blocks[span.image]
            assert span.offset == 0 and span.length == block.shape[1], (
                "the tokens of a Qwen-VL image are contiguous"
            )
            if not (in_video and span.time is not None and span.start == done):
                begin = position = _count_on(positions, done, span.start, position)
            shown = positions[:, span.start : span.end]
            np.add(block, begin, out=shown)
            shown[0] += span.time or 0
            # The last token of an image has the maximum position on each axis.
            position = max(position, int(shown[:, -1].max()) + 1)
            done, in_video = span.end, span.time is not None
        return positions, _count_on(positions, done, len(tokens), position)


def _count_on(positions: npt.NDArray[np.int64], start: int, end: int, position: int) -> int:
    """Set the positions of text tokens in [start, end), and return the next position.

    They count up from `position` on all axes.
    """
    positions[:, start:end] = np.arange(position, position + end - start)
    return position + end - start


@dataclass(frozen=True, slots=True)
class SizeOptions(FamilyOptions):
    """The options of families that enlarge small images (`RaisedRules`)."""

    size: str = ""  # image bounds, as a JSON object like `size` in the image processor's file


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedSpec(GridSpec):
    """Base class of specs whose images are enlarged if a side is shorter than a token
    (`RaisedRules`).
    """

    images: RaisedRules

    def with_options(self, options: Mapping[str, str]) -> Self:
        given = options.get("size", "a JSON object")
        chosen = read_options(SizeOptions, self.family, options, size=(given,))
        if not chosen.size:
            return self
        size = read_size(chosen.size)
        return replace(self, images=self.images.sized(size))


def read_size(given: str) -> Section:
    """Return the JSON object in the option `size`. Raises ConfigError.

    given: the value of the option.
    """
    where = f"--family-option size={given}"
    try:
        size = json.loads(given)
    except ValueError:
        size = None
    if not isinstance(size, dict) or not size.keys() <= {"shortest_edge", "longest_edge"}:
        raise ConfigError(f"{where}: write a JSON object with shortest_edge and longest_edge")
    return Section(where, size)
