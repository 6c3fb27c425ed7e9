"""Specs of models whose rotary positions are time, row and column, as Qwen-VL has them.

Formulas follow `get_rope_index` in transformers, and are tested against it. Runs without torch.
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
    """CPU facts of a model that counts an image's tokens by time, row and column."""

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

        An image takes as many steps as its longer side has merged patches, whatever its token
        count. A video's pairs, whose `time` is set, begin at one position, apart on the time axis.
        What follows them continues behind the largest (as in transformers 4).
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
            # the last token of each has the largest index on every axis
            position = max(position, int(shown[:, -1].max()) + 1)
            done, in_video = span.end, span.time is not None
        return positions, _count_on(positions, done, len(tokens), position)


def _count_on(positions: npt.NDArray[np.int64], start: int, end: int, position: int) -> int:
    """Fill [start, end) on all three axes with `position`, `position + 1`, ...

    Returns the next position.
    """
    positions[:, start:end] = np.arange(position, position + end - start)
    return position + end - start


@dataclass(frozen=True, slots=True)
class SizeOptions(FamilyOptions):
    """size: bounds on images, a JSON object as the image processor's file has it."""

    size: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedSpec(GridSpec):
    """CPU facts of a model that enlarges images with an edge shorter than a token's."""

    images: RaisedRules

    def with_options(self, options: Mapping[str, str]) -> Self:
        given = options.get("size", "a JSON object")
        chosen = read_options(SizeOptions, self.family, options, size=(given,))
        if not chosen.size:
            return self
        size = read_size(chosen.size)
        return replace(self, images=self.images.sized(size))


def read_size(given: str) -> Section:
    """Return the bounds that a user has chosen. Raises ConfigError."""
    where = f"--family-option size={given}"
    try:
        size = json.loads(given)
    except ValueError:
        size = None
    if not isinstance(size, dict) or not size.keys() <= {"shortest_edge", "longest_edge"}:
        raise ConfigError(f"{where}: write a JSON object with shortest_edge and longest_edge")
    return Section(where, size)
